"""Activations in eight bits, as the norms and gated activations of GPUs write them and products read them; and weights,
whose output features are then what is called tokens here.

Each format is symmetric, with scales float32 beside the codes; what a code stands for is code * scale:

    int8         int8 codes, one scale for each token; scale = max |x| / 127
    fp8          float8_e4m3fn codes, one scale for each token; scale = max |x| / 448
    fp8_groups   the same with one scale for each token and GROUP inputs; the last group may be shorter

Codes are x * (127 or 448) / max |x|, to nearest even. Where max |x| is below LEAST, codes and scale are 0; where a
value is not finite the scale is NaN, so that the token's products are NaN and nobody else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128
LEAST = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """dtype: of codes. most: the largest code. group: inputs that share a scale; None: all of a token's."""

    dtype: torch.dtype
    most: int
    group: int | None = None

    def num_scales(self, width: int) -> int:
        """Of a token of so many inputs."""
        return 1 if self.group is None else -(-width // self.group)


FORMATS: Mapping[str, Format] = {
    "int8": Format(dtype=torch.int8, most=127),
    "fp8": Format(dtype=torch.float8_e4m3fn, most=448),
    "fp8_groups": Format(dtype=torch.float8_e4m3fn, most=448, group=GROUP),
}


def quantize(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(codes [T, H], scales [T] or, in fp8_groups, [T, ceil(H / GROUP)]) of x [T, H]; scales are float64 where x is."""
    form = FORMATS[name]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    group = form.group or x.shape[-1]
    groups = F.pad(wide, (0, -x.shape[-1] % group)).reshape(*x.shape[:-1], -1, group)
    most = groups.abs().amax(-1)
    # No number over a tensor, nor, on GPUs, a tensor over one: torch multiplies by the reciprocal then.
    factors = torch.where((most >= LEAST) & most.isfinite(), torch.full_like(most, form.most) / most, 0)
    scaled = (groups * factors[..., None]).nan_to_num(0, 0, 0).clamp(-form.most, form.most)
    codes = (scaled.round() if form.dtype == torch.int8 else scaled).to(form.dtype)
    scales = torch.where(most >= LEAST, most / torch.full_like(most, form.most), 0).where(most.isfinite(), torch.nan)
    codes = codes.flatten(-2)[..., : x.shape[-1]].contiguous()
    return codes, scales if form.group else scales[..., 0]


def dequantize(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """What (codes, scales) of `quantize` stand for, [T, H] of the scales' dtype."""
    wide = codes.to(scales.dtype)
    group = FORMATS[name].group
    if group is None:
        return wide * scales[..., None]
    return wide * scales.repeat_interleave(group, dim=-1)[..., : codes.shape[-1]]
