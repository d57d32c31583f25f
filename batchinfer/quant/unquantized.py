"""Weights in the model's own floating-point type."""

from __future__ import annotations

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.quant.products import Products
from batchinfer.quant.shape import Basis, LinearShape


class Unquantized:
    name = "none"
    stored_types: frozenset[str] = frozenset()

    def weights(self, shape: LinearShape, basis: Basis, shared: Tensor | None = None) -> PlainWeights:
        if shared is None:
            shared = torch.empty(shape.out_features, shape.in_features, dtype=basis.dtype, device=basis.device)
        return PlainWeights(basis.ops, shared)


class PlainWeights(Products):
    """One weight [N, K]; products take tensors."""

    def __init__(self, ops: Ops, weight: Tensor) -> None:
        super().__init__(ops)
        self.params = {"weight": weight}
        self._weight = weight.data

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (features, self._weight.shape[1])}

    def target(self, kind: str, part: str, span: slice) -> Tensor:
        return self._weight[span]

    def finish(self) -> None:
        pass

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._ops.linear(x, self._weight, bias, residual)

    def logits(self, x: Tensor) -> Tensor:
        return self._ops.logits(x, self._weight)

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._ops.linear_argmax(x, self._weight)
