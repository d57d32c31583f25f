"""FP8 (e4m3, without infinities: arXiv:2209.05433): weights and activations of 8 bits, and products of them, in torch.

Two kinds of scales:
- "channel": one for each output feature and one for each token; checkpoints with one for a whole tensor have the same
  one everywhere.
- "block": one for each BLOCK x BLOCK weights, and one for each token and BLOCK inputs (DeepSeek-V3, arXiv:2412.19437,
  section 3.3). Each block of inputs is summed, scaled and added to the others.
Activations, and weights by channel, are made by `activation_formats.quantize` ("fp8" and "fp8_groups").
A GPU without FP8 products takes activations as they are, in 16 bits, with weights that are widened (scaled alike).

Legend: T tokens, K inputs, N output features, Kb = K / BLOCK and Nb = N / BLOCK, rounded up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.activation_formats import quantize

BLOCK = 128
TYPE = torch.float8_e4m3fn


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values e4m3 [.., N, K], scales [.., Nb, Kb]) of weights: `activation_formats.quantize` by BLOCK x BLOCK."""
    features, depth = weight.shape[-2:]
    padded = torch.unflatten(_padded(weight, BLOCK, BLOCK), -1, (-1, BLOCK))
    padded = torch.unflatten(padded, -3, (-1, BLOCK))  # [.., Nb, BLOCK, Kb, BLOCK]
    values, scales = quantize(padded.transpose(-3, -2).flatten(-2), "fp8")
    values = torch.unflatten(values, -1, (BLOCK, BLOCK)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return values[..., :features, :depth].contiguous(), scales


def check_weight(values: Tensor) -> None:
    """Raises ValueError for weights e4m3 with a NaN, which widening does not know."""
    if bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise ValueError("FP8: a weight is NaN")


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Weights [.., N, K] of the scales' type. scales [.., N] or [.., Nb, Kb]."""
    if scales.ndim < values.ndim:
        return values.to(scales.dtype) * scales[..., None]
    features, depth = values.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, dim=-2)[..., :features, :]
    return values.to(scales.dtype) * wide.repeat_interleave(BLOCK, dim=-1)[..., :depth]


def linear(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """y [T, N] of `dtype` = x [T, K] weight [N, K]^T + bias [N] + residual [T, N], computed in the scales' type.

    weight e4m3 with scales [N] or [Nb, Kb]. x e4m3 with x_scales [T] or [T, Kb], or x of 16 or more bits with None.
    """
    y = _inputs(x, x_scales, scales.dtype) @ dequantize(weight, scales).T
    for more in (bias, residual):
        y = y if more is None else y + more.to(y.dtype)
    return y.to(dtype)


def _inputs(x: Tensor, x_scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    wide = x.to(dtype)
    if x_scales is None:
        return wide
    if x_scales.ndim < x.ndim:
        return wide * x_scales[..., None]
    return wide * x_scales.repeat_interleave(BLOCK, dim=-1)[..., : x.shape[-1]]


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """x [.., A, B] with zeros to multiples of both."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
