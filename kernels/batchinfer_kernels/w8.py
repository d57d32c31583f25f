"""Products of int8 weights and int8 activations as GPUs do them: the format, and its specification in torch.

Weights have one scale for each output feature, activations one for each token, both as `activation_formats.quantize`
makes them, so that a product is an exact sum of integers, scaled once at its end. The format of the CPU (`int8`)
differs from it in three ways: there both are turned first, activations have a scale for each group of inputs and are
stored from ZERO on, and what is sensitive is fine, or in bfloat16. Weights of one are no weights of the other.

Legend: T tokens, K inputs, N output features.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    # float64 holds these sums exactly; torch has no products of integers on GPUs.
    y = (x.double() @ weight.double().T).to(scales.dtype) * (x_scales[:, None] * scales)
    for more in (bias, residual):
        y = y if more is None else y + more.to(y.dtype)
    return y.to(dtype)
