"""A layer that owns one tensor called `weight`, stored as it is kept."""

from __future__ import annotations

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor, nn

from batchinfer.weights import Part


class WeightLayer(nn.Module):
    """Fulfils `weights.Loadable` for its subclasses. `shared_with`: another layer's weight, which that one loads."""

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        shared_with: WeightLayer | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.owns_weight = shared_with is None
        if shared_with is None:
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        else:
            self.weight = shared_with.weight

    def parts(self) -> dict[Part, tuple[int, ...]]:
        return {("weight", ""): tuple(self.weight.shape)} if self.owns_weight else {}

    def target(self, part: Part) -> Tensor:
        return self.weight.data

    def loaded(self) -> None:
        pass
