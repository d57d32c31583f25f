"""RMS normalization (Zhang, Sennrich 2019), with the residual's addition fused in where there is one."""

from __future__ import annotations

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor, nn

from batchinfer.weights import Part


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops, self.eps = ops, eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dimension of x [..., size]."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x); `residual` may be overwritten."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def parts(self) -> dict[Part, tuple[int, ...]]:
        return {("weight", ""): tuple(self.weight.shape)}

    def target(self, part: Part) -> Tensor:
        return self.weight.data

    def loaded(self) -> None:
        pass
