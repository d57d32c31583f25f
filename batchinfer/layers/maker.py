"""Makes the layers of one model: what all of them share (operations, scheme, dtype, device) is said once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from batchinfer_kernels.table import Ops

from batchinfer.layers.embedding import Embedding, LMHead
from batchinfer.layers.linear import Linear
from batchinfer.layers.norm import RMSNorm
from batchinfer.quant import LinearScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMaker:
    ops: Ops
    scheme: LinearScheme
    dtype: torch.dtype
    device: torch.device

    def linear(self, in_features: int, parts: Mapping[str, int], *, bias: bool) -> Linear:
        return Linear(
            in_features,
            parts,
            bias=bias,
            scheme=self.scheme,
            ops=self.ops,
            dtype=self.dtype,
            device=self.device,
        )

    def norm(self, size: int, eps: float) -> RMSNorm:
        return RMSNorm(size, eps, ops=self.ops, dtype=self.dtype, device=self.device)

    def embedding(self, vocab_size: int, hidden_size: int) -> Embedding:
        return Embedding((vocab_size, hidden_size), ops=self.ops, dtype=self.dtype, device=self.device)

    def head(self, vocab_size: int, hidden_size: int, *, tied_to: Embedding | None) -> LMHead:
        return LMHead(
            (vocab_size, hidden_size), ops=self.ops, dtype=self.dtype, device=self.device, shared_with=tied_to
        )
