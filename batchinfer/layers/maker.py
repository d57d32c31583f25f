"""Makes the layers of one model: what all of them share (operations, scheme, dtype, device) is said once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from batchinfer_kernels.table import Ops

from batchinfer.layers.embedding import Embedding, LMHead
from batchinfer.layers.linear import Linear
from batchinfer.layers.norm import RMSNorm
from batchinfer.quant import LinearScheme


class _Shared(TypedDict):
    scheme: LinearScheme
    ops: Ops
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMaker:
    """dtype: of hidden states, and of the parameters that the scheme has no say in."""

    ops: Ops
    scheme: LinearScheme
    dtype: torch.dtype
    device: torch.device

    def linear(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        sensitive: tuple[str, ...] = (),
        gated: bool = False,
    ) -> Linear:
        """See `Linear`."""
        return Linear(in_features, parts, bias=bias, sensitive=sensitive, gated=gated, **self._shared)

    def norm(self, size: int, eps: float, *, feeds: Linear | None = None) -> RMSNorm:
        return RMSNorm(size, eps, feeds=feeds, ops=self.ops, dtype=self.dtype, device=self.device)

    def embedding(self, vocab_size: int, hidden_size: int) -> Embedding:
        return Embedding((vocab_size, hidden_size), ops=self.ops, dtype=self.dtype, device=self.device)

    def head(self, vocab_size: int, hidden_size: int, *, tied_to: Embedding | None) -> LMHead:
        return LMHead(vocab_size, hidden_size, tied_to=tied_to, **self._shared)

    @property
    def _shared(self) -> _Shared:
        return {"scheme": self.scheme, "ops": self.ops, "dtype": self.dtype, "device": self.device}
