"""Weights in the model's own floating-point type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor


class Unquantized:
    """One weight [out, in]; parts are ranges of its rows."""

    name = "none"

    def params(
        self, in_features: int, part_features: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        return {"weight": torch.empty(sum(part_features), in_features, dtype=dtype, device=device)}

    def target(self, params: dict[str, Tensor], start: int, stop: int) -> Tensor:
        return params["weight"][start:stop]

    def finish(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        return params

    def linear(self, ops: Ops, x: Tensor, params: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        return ops.linear(x, params["weight"], bias)
