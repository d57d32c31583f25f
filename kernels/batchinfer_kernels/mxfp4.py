"""MXFP4 weights (OCP Microscaling Formats 1.0): e2m1 numbers of 4 bits, with one power of two (e8m0) for each GROUP
inputs: a layout, the way into it from a checkpoint, and the specification of products with them, in torch.

The layout is that of `w4`, with H = GROUP.

Legend: K inputs, a multiple of GROUP, Kp = K padded to whole blocks of 2 GROUP, N output features, G = Kp / GROUP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels import w4

GROUP = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are the same, negative
_BIAS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Weights W [N, K], or of experts with a dimension E before all of these.

    codes   uint8 [Kp / 2 GROUP, N, GROUP]
    scales  uint8 [G, N]: 2 ** (scale - 127), NaN for 255
    depth   K
    """

    codes: Tensor
    scales: Tensor
    depth: int


def pack(blocks: Tensor, scales: Tensor) -> Packed:
    """Weights as gpt-oss stores them: blocks uint8 [.., N, K / GROUP, GROUP / 2], two inputs in a byte, the first in
    the low bits; scales uint8 [.., N, K / GROUP]. Raises ValueError where these do not fit together."""
    if blocks.shape[-1] != GROUP // 2 or blocks.shape[:-1] != scales.shape:
        raise ValueError(f"MXFP4: blocks of shape {tuple(blocks.shape)} and scales of shape {tuple(scales.shape)}")
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)
    depth = codes.shape[-1]
    padding = -depth % (2 * GROUP)
    return Packed(
        codes=w4.planes(F.pad(codes, (0, padding)), GROUP),
        scales=F.pad(scales, (0, padding // GROUP)).transpose(-1, -2).contiguous(),
        depth=depth,
    )


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """W [.., N, K]: the number times its scale, both rounded to `dtype`, then the product."""
    codes = w4.from_planes(packed.codes)[..., : packed.depth]
    table = torch.tensor(_VALUES, dtype=dtype, device=codes.device)
    values = torch.cat((table, -table))[codes.int()]
    exponents = packed.scales.to(torch.float64) - _BIAS
    scales = torch.exp2(exponents).masked_fill(packed.scales == 255, torch.nan).to(dtype)
    return values * scales.transpose(-1, -2).repeat_interleave(GROUP, dim=-1)[..., : packed.depth]


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """y [T, N] = x [T, K] W^T + bias [N] + residual [T, N], of x's type."""
    y = F.linear(x, dequantize(packed, x.dtype), bias)
    return y if residual is None else residual + y
