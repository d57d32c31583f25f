"""RMS normalization (Zhang, Sennrich 2019)."""

from __future__ import annotations

from typing import Any

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.layers.linear import Linear
from batchinfer.layers.weight import WeightLayer


class RMSNorm(WeightLayer):
    """Over the last dimension of x [..., size]. `feeds`: the one layer that takes what comes out, in its form."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        feeds: Linear | None = None,
    ) -> None:
        super().__init__((size,), ops=ops, dtype=dtype, device=device)
        self.eps = eps
        self._norm = ops.rms_norm if feeds is None else feeds.normed

    def forward(self, x: Tensor) -> Any:
        return self._norm(x, self.weight, self.eps)
