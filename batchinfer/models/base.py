"""What every model is to the runner: facts, attention of each layer, forward, logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchinfer.attention.context import ForwardContext
from batchinfer.attention.spec import AttentionSpec
from batchinfer.layers import LayerMaker
from batchinfer.weights import Ignore, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a runner sizes its memory by. `dtype_source` says who chose the dtype, for reports."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    dtype_source: str
    quantization: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What a family's `build` is given beside the files: resolved, not as the user wrote it."""

    max_model_len: int
    dtype_source: str
    layers: LayerMaker


class CausalLM(Protocol):
    """A model as the runner calls it."""

    facts: ModelFacts
    attention_specs: tuple[AttentionSpec, ...]  # one per layer

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states, before the final norm, of int64 token_ids [T] at positions [T]: [W, H], of the tokens that
        `ctx.wanted` names, or [T, H]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, V] of hidden [S, H]: the runner picks the rows that are sampled."""
        ...

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `compute_logits` would say, without holding it: (int64 [S], the token with the largest logit, of equal
        ones the lowest; bool [S], whether all logits of the row are finite)."""
        ...

    def num_parameter_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        ...

    def weight_rules(self, kind: str) -> tuple[tuple[Rule, ...], tuple[Ignore, ...]]:
        """Which stored tensor goes where, for a kind of file ("hf" or "gguf")."""
        ...
