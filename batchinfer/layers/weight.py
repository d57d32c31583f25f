"""A layer that owns one tensor called `weight`, stored as it is kept."""

from __future__ import annotations

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor, nn

from batchinfer.weights import Part


class WeightLayer(nn.Module):
    """Fulfils `weights.Loadable` for its subclasses."""

    def __init__(self, shape: tuple[int, ...], *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def parts(self) -> dict[Part, tuple[int, ...]]:
        return {("weight", ""): tuple(self.weight.shape)}

    def target(self, part: Part) -> Tensor:
        return self.weight.data

    def loaded(self) -> None:
        pass
