"""Activations to eight bits, alone and as the end of other kernels; `activation_formats` is the specification.

float8_e4m3fn needs compute capability 8.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.activation_formats import FORMATS
from batchinfer_kernels.activation_formats import GROUP as _GROUP
from batchinfer_kernels.activation_formats import LEAST as _LEAST
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.triton_outlook import unfit_width
from batchinfer_kernels.tuning import CAPABILITIES, Config, config

GROUP = tl.constexpr(_GROUP)
LEAST = tl.constexpr(_LEAST)
DEFAULTS = {capability: {"num_warps": 8, "num_stages": 1} for capability in CAPABILITIES}
# Of rows whose block is larger than what 8 warps hold in registers.
WIDE_DEFAULTS = {capability: {"num_warps": 16, "num_stages": 1} for capability in CAPABILITIES}
WIDE_BLOCK = 16_384


@triton.jit
def magnitude(wide):
    """|x|, with infinity for what is not a number: a maximum passes over NaN."""
    size = tl.abs(wide)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def scale_and_factor(most, MOST: tl.constexpr):
    """(what a code of 1 stands for, what values are multiplied with) for the largest magnitude."""
    finite = most < float("inf")
    usable = (most >= LEAST) & finite
    factor = tl.where(usable, tl.div_rn(MOST * 1.0, tl.where(usable, most, 1.0)), 0.0)
    scale = tl.where(usable, tl.div_rn(most, MOST * 1.0), 0.0)
    return tl.where(finite, scale, float("nan")), factor


@triton.jit
def encode(wide, factor, FORMAT: tl.constexpr):
    """Codes of values float32. Limits stand between the product and the rounding, which must not fuse."""
    finite = tl.abs(wide) < float("inf")
    scaled = tl.where(finite, wide, 0.0) * factor
    if FORMAT == "int8":
        limited = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        codes = ((limited + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: to nearest even
    else:
        codes = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)
    return codes


@triton.jit
def store_row(wide, at, there, codes_ptr, scales_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """A whole row of values float32 [BLOCK], 0 where not `there`; pointers are to the row's own codes and scales."""
    if FORMAT == "fp8_groups":
        store_groups(wide, at, there, codes_ptr, scales_ptr, BLOCK)
    else:
        scale, factor = scale_and_factor(tl.max(magnitude(wide), 0), 127 if FORMAT == "int8" else 448)
        tl.store(codes_ptr + at, encode(wide, factor, FORMAT), mask=there)
        tl.store(scales_ptr, scale)


@triton.jit
def store_groups(wide, at, there, codes_ptr, scales_ptr, BLOCK: tl.constexpr):
    """Values float32 [BLOCK] of a row, from a group's border on; `at` counts from the row's start."""
    grouped = tl.reshape(wide, (BLOCK // GROUP, GROUP))
    scale, factor = scale_and_factor(tl.max(magnitude(grouped), 1), 448)
    codes = encode(grouped, factor[:, None], "fp8")
    first = tl.min(tl.reshape(at, (BLOCK // GROUP, GROUP)), 1)
    begins = tl.max(tl.reshape(there.to(tl.int32), (BLOCK // GROUP, GROUP)), 1) > 0
    tl.store(codes_ptr + at, tl.reshape(codes, (BLOCK,)), mask=there)
    tl.store(scales_ptr + first // GROUP, scale, mask=begins)


@triton.jit
def _quantize(
    x_ptr,  # [T, H]
    codes_ptr,  # [T, H]
    scales_ptr,  # float32 [T, num_scales]
    width,
    num_scales,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < width
    wide = tl.load(x_ptr + row * width + at, mask=there, other=0.0).to(tl.float32)
    store_row(wide, at, there, codes_ptr + row * width, scales_ptr + row * num_scales, FORMAT, BLOCK)


def quantize(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """`activation_formats.quantize` of x [..., H], contiguous, H up to `triton_outlook.MOST_WIDTH`."""
    assert x.is_contiguous()
    codes, scales = new_quantized(x.shape, name, x.device)
    width = x.shape[-1]
    rows = x.numel() // width
    if rows:
        block, launch = row_block("quantize", width, x.device)
        _quantize[(rows,)](x, codes, scales, width, FORMATS[name].num_scales(width), name, block, **launch)
    return codes, scales


def new_quantized(shape: torch.Size, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where a kernel puts rows [..., H]."""
    form = FORMATS[name]
    scales = shape[:-1] if form.group is None else (*shape[:-1], form.num_scales(shape[-1]))
    return torch.empty(shape, dtype=form.dtype, device=device), torch.empty(scales, device=device)


def row_block(kernel: str, width: int, device: torch.device) -> tuple[int, Config]:
    """(the block that holds a whole row, launch configuration). It follows from the width alone."""
    assert unfit_width(width) is None
    block = max(triton.next_power_of_2(width), _GROUP)
    wide = block >= WIDE_BLOCK
    return block, config(f"{kernel}.wide" if wide else kernel, WIDE_DEFAULTS if wide else DEFAULTS, device)


def block_configs(block: int, name: str | None) -> dict[int, dict[str, Any]]:
    """Of variants with that block; float8 does not exist before sm_89."""
    defaults = WIDE_DEFAULTS if block >= WIDE_BLOCK else DEFAULTS
    capabilities = CAPABILITIES if name in (None, "int8") else CAPABILITIES[1:]
    return {capability: defaults[capability] for capability in capabilities}


CODES = {"int8": "*i8", "fp8": "*fp8e4nv", "fp8_groups": "*fp8e4nv"}


def variants() -> Iterator[Variant]:
    for name in FORMATS:
        for block in (1024, 8192, 16_384):
            yield Variant(
                name=f"quantize.{name}.{block}",
                kernel=_quantize,
                signature={
                    "x_ptr": "*bf16",
                    "codes_ptr": CODES[name],
                    "scales_ptr": "*fp32",
                    "width": "i32",
                    "num_scales": "i32",
                },
                constants={"FORMAT": name, "BLOCK": block},
                configs=block_configs(block, name),
                unaligned=frozenset(["num_scales"]),
                is_default=block == 16_384 and name == "fp8_groups",
            )
