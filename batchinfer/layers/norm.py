"""RMS normalization (Zhang, Sennrich 2019), with the residual's addition fused in where there is one."""

from __future__ import annotations

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.layers.weight import WeightLayer


class RMSNorm(WeightLayer):
    def __init__(self, size: int, eps: float, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__((size,), ops=ops, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Over the last dimension of x [..., size]."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x); `residual` may be overwritten."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
