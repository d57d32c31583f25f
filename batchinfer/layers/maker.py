"""Makes the layers of one model: what all of them share (operations, scheme, dtype, device) is said once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from batchinfer_kernels.table import Ops

from batchinfer.layers.embedding import Embedding, LMHead
from batchinfer.layers.latent import LatentUp
from batchinfer.layers.linear import Linear
from batchinfer.layers.norm import RMSNorm
from batchinfer.modelfiles import StoredTensor
from batchinfer.quant import LinearScheme, Stack
from batchinfer.weights import Part


class _Shared(TypedDict):
    scheme: LinearScheme
    ops: Ops
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMaker:
    """dtype    of hidden states, and of the parameters that the scheme has no say in
    stored   of a checkpoint that is stored quantized: the tensors of each linear layer's parts (`weights.stored_parts`)
    """

    ops: Ops
    scheme: LinearScheme
    dtype: torch.dtype
    device: torch.device
    stored: Mapping[Part, Mapping[str, StoredTensor]] = field(default_factory=dict)

    def linear(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        sensitive: tuple[str, ...] = (),
        gated: bool = False,
        place: tuple[Stack, int] | None = None,
        name: str = "",
    ) -> Linear:
        """See `Linear`; `name`: its name in the model."""
        stored = self._stored(name, parts)
        # GPTQ checkpoints may have biases, of zeros, for layers that have none.
        bias = bias or any({"qweight", "bias"} <= kinds.keys() for kinds in stored.values())
        return Linear(
            in_features,
            parts,
            bias=bias,
            sensitive=sensitive,
            gated=gated,
            place=place,
            name=name,
            stored=stored,
            **self._shared,
        )

    def latent_up(self, rank: int, num_heads: int, plain_dim: int, value_dim: int, *, name: str) -> LatentUp:
        """See `LatentUp`."""
        stored = self._stored(name, ("",))
        return LatentUp(rank, num_heads, plain_dim, value_dim, name=name, stored=stored, **self._shared)

    def norm(self, size: int, eps: float, *, feeds: Linear | None = None) -> RMSNorm:
        return RMSNorm(size, eps, feeds=feeds, ops=self.ops, dtype=self.dtype, device=self.device)

    def embedding(self, vocab_size: int, hidden_size: int) -> Embedding:
        return Embedding((vocab_size, hidden_size), ops=self.ops, dtype=self.dtype, device=self.device)

    def head(self, vocab_size: int, hidden_size: int, *, tied_to: Embedding | None, name: str = "") -> LMHead:
        stored = self._stored(name, ("",))
        return LMHead(vocab_size, hidden_size, tied_to=tied_to, name=name, stored=stored, **self._shared)

    def _stored(self, name: str, parts: Iterable[str]) -> Mapping[str, Mapping[str, StoredTensor]]:
        return {part: self.stored.get((name, part), {}) for part in parts} if self.stored else {}

    @property
    def _shared(self) -> _Shared:
        return {"scheme": self.scheme, "ops": self.ops, "dtype": self.dtype, "device": self.device}
