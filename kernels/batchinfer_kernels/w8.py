"""Products of int8 weights and int8 activations as GPUs do them: the format, and its specification in torch.

Weights are symmetric with one scale for each output feature, activations symmetric with one scale for each token, so
that a product is an exact sum of integers, scaled once at its end. The format of the CPU (`int8`) differs from it in
three ways: there both are turned first, activations have a scale for each group of inputs and are stored from ZERO on,
and what is sensitive stays in bfloat16. Weights of one are no weights of the other.

Legend: T tokens, K inputs, N output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 127


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values int8 [.., K], scales [..]) of x [.., K]: weights by output feature, activations by token.

    scale = max |x| / 127, float32 (float64 for such x); value = x / scale, to nearest even, 0 where the scale is 0.
    A row with a value that is not finite has zeros and the scale NaN.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    most = wide.abs().amax(-1)
    scales = torch.where(most.isfinite(), most / MOST, torch.nan)
    values = (wide / scales[..., None]).round().nan_to_num(0, 0, 0).clamp(-MOST, MOST)
    return values.to(torch.int8), scales


def linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """y [T, N] of `dtype`: x int8 [T, K] weight int8 [N, K]^T, by x_scales [T] and scales [N], + bias [N] + residual.

    Computed in the scales' type and rounded once.
    """
    y = (x.to(torch.int32) @ weight.to(torch.int32).T).to(scales.dtype) * (x_scales[:, None] * scales)
    for more in (bias, residual):
        y = y if more is None else y + more.to(y.dtype)
    return y.to(dtype)
