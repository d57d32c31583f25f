"""Weights in the model's own floating-point type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.quant.shape import LinearShape

if TYPE_CHECKING:
    from batchinfer.quant.scheme import LinearWeights


class Unquantized:
    name = "none"
    stored_types: frozenset[str] = frozenset()

    def weights(
        self,
        shape: LinearShape,
        *,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        shared: Tensor | None = None,
    ) -> PlainWeights:
        if shared is None:
            shared = torch.empty(shape.out_features, shape.in_features, dtype=dtype, device=device)
        return PlainWeights(ops, shared)


class PlainWeights:
    """One weight [N, K]; products take tensors."""

    def __init__(self, ops: Ops, weight: Tensor) -> None:
        self.params = {"weight": weight}
        self._ops, self._weight = ops, weight.data

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (features, self._weight.shape[1])}

    def target(self, kind: str, part: str, span: slice) -> Tensor:
        return self._weight[span]

    def finish(self) -> None:
        pass

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.rms_norm(x, weight, eps)

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._ops.linear(x, self._weight, bias, residual)

    def logits(self, x: Tensor) -> Tensor:
        return self._ops.logits(x, self._weight)

    def gated(self, x: Tensor, bias: Tensor | None, feeds: LinearWeights) -> Any:
        return feeds.activated(self.linear(x, bias, None))

    def activated(self, gate_up: Tensor) -> Tensor:
        return self._ops.silu_and_mul(gate_up)

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.linear_argmax(x, self._weight)

    def in_c(self) -> None:
        return None
