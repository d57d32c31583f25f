"""FP8 products; `fp8` is the format and the specification.

With activations in e4m3 (sm_89 and later) both operands are multiplied as they are; with 16-bit activations weights
are widened in registers, which is exact (sm_80 has no such products, nor Triton the type there: weights are bytes).

Sums of BLOCK_K = 128 inputs are added in float32: the FP8 instructions of sm_90 keep fewer bits in theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels import fp8
from batchinfer_kernels.triton.linear import SIGNATURE, UNALIGNED, finish, multiplied, tile
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import Config, config

# BLOCK_N divides the weights' blocks, so that a program has one scale for each block of inputs.
DEFAULTS: dict[int, Config] = {
    80: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 3},
    90: {"BLOCK_M": 128, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    100: {"BLOCK_M": 128, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
}


@triton.jit
def _widened(bytes, like):
    """e4m3 as numbers of the type of `like`: its exponent and mantissa at their places there are a number that is too
    small by a power of two; so are subnormal ones."""
    sign = (bytes & 0x80).to(tl.uint16) << 8
    rest = (bytes & 0x7F).to(tl.uint16)
    if like.dtype == tl.bfloat16:
        wide = (sign | (rest << 4)).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    elif like.dtype == tl.float16:
        wide = (sign | (rest << 7)).to(tl.float16, bitcast=True) * 256.0
    else:
        bits = (sign.to(tl.uint32) << 16) | (rest.to(tl.uint32) << 20)
        wide = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return wide.to(like.dtype)


@triton.jit
def multiply_fp8(
    x_ptr,  # [_, K]: e4m3, or of 16 or more bits
    x_scale_ptr,  # float32 [_], or [_, Kb] with BLOCKS, or nothing with WIDE
    rows,  # [BLOCK_M]
    weight_ptr,  # [_, K]: e4m3, bytes with WIDE
    scale_ptr,  # float32 [_], or [_, Kb] with BLOCKS
    columns,  # [BLOCK_N]
    first_column,  # of the block: which of the weights' blocks it is in
    depth,  # K
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,  # whether K is a multiple of 128
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N] of x W^T."""
    BLOCK_K: tl.constexpr = 128
    tl.static_assert(not BLOCKS or BLOCK_K % BLOCK_N == 0, "a program's columns must have one scale")
    at = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * depth + at[None, :]
    weight_at = weight_ptr + columns.to(tl.int64)[None, :] * depth + at[:, None]
    num_blocks = tl.cdiv(depth, BLOCK_K)
    scale_at = scale_ptr + (first_column // BLOCK_K) * num_blocks
    x_scale_at = x_scale_ptr + rows * num_blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_blocks):
        if EVEN:
            x = tl.load(x_at)
            weight = tl.load(weight_at)
        else:
            there = at < depth - block * BLOCK_K
            x = tl.load(x_at, mask=there[None, :], other=0.0)
            weight = tl.load(weight_at, mask=there[:, None], other=0.0)
        if WIDE:
            weight = _widened(weight, x)
        if BLOCKS:
            scale = tl.load(scale_at + block)
            if WIDE:
                total += tl.dot(x, weight, input_precision="ieee") * scale
            else:
                total += tl.dot(x, weight) * (tl.load(x_scale_at + block) * scale)[:, None]
        elif WIDE:
            total = tl.dot(x, weight, total, input_precision="ieee")
        else:
            total = tl.dot(x, weight, total, max_num_imprecise_acc=BLOCK_K)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if not BLOCKS:
        total *= tl.load(scale_ptr + columns)[None, :]
        if not WIDE:
            total *= tl.load(x_scale_ptr + rows)[:, None]
    return total


@triton.jit(do_not_specialize=["num_rows"])  # one compiled kernel for any number of them
def _linear_fp8(
    x_ptr,  # [T, K]
    x_scale_ptr,  # float32 [T] or [T, Kb], or nothing
    weight_ptr,  # [N, K]
    scale_ptr,  # float32 [N] or [Nb, Kb]
    bias_ptr,  # [N], or nothing
    out_ptr,  # [T, N]
    num_rows,
    num_columns,
    depth,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    m, n = tile(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    y = multiply_fp8(
        x_ptr,
        x_scale_ptr,
        tl.minimum(rows, num_rows - 1),
        weight_ptr,
        scale_ptr,
        tl.minimum(columns, num_columns - 1),
        n * BLOCK_N,
        depth,
        BLOCKS,
        WIDE,
        EVEN,
        BLOCK_M,
        BLOCK_N,
    )
    finish(y, rows, rows < num_rows, columns, num_columns, bias_ptr, out_ptr, HAS_BIAS, ADD)


def linear_fp8(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`fp8.linear` of contiguous tensors, scales float32, bias and residual of `dtype`; y overwrites the residual.

    Weights have no NaN (`fp8.check_weight`). Activations in e4m3 need sm_89.
    """
    check_scales(x, x_scales, weight, scales)
    is_wide = x_scales is None
    return multiplied(
        _linear_fp8,
        config("linear_fp8", DEFAULTS, x.device),
        x,
        weight.shape,
        (scales if x_scales is None else x_scales, weight.view(torch.uint8) if is_wide else weight, scales),
        bias,
        residual,
        dtype=dtype,
        together=fp8.BLOCK,
        BLOCKS=scales.ndim == 2,
        WIDE=is_wide,
    )


def check_scales(x: Tensor, x_scales: Tensor | None, weight: Tensor, scales: Tensor) -> None:
    """Asserts that those of x [T, K] and weight [.., N, K] are what `fp8` says."""
    features, depth = weight.shape[-2:]
    num_blocks = triton.cdiv(depth, fp8.BLOCK)
    in_blocks = scales.ndim == weight.ndim
    assert weight.dtype == fp8.TYPE and weight.is_contiguous()
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    of_weight = (triton.cdiv(features, fp8.BLOCK), num_blocks) if in_blocks else (features,)
    assert scales.shape == (*weight.shape[:-2], *of_weight)
    if x_scales is None:
        assert x.is_floating_point() and x.element_size() > 1
    else:
        assert x.dtype == fp8.TYPE and x_scales.dtype == torch.float32 and x_scales.is_contiguous()
        assert x_scales.shape == ((len(x), num_blocks) if in_blocks else (len(x),))


def variants() -> Iterator[Variant]:
    scales = {"x_scale_ptr": "*fp32", "scale_ptr": "*fp32"}
    for wide in (False, True):
        for blocks, extras, even in ((False, False, True), (True, True, True), (True, True, False)):
            yield Variant(
                name=f"linear_fp8.{'block' if blocks else 'channel'}"
                + ".wide" * wide
                + ".bias.residual" * extras
                + ".ragged" * (not even),
                kernel=_linear_fp8,
                signature={
                    "x_ptr": "*bf16" if wide else "*fp8e4nv",
                    "weight_ptr": "*u8" if wide else "*fp8e4nv",
                    **scales,
                    **SIGNATURE,
                },
                constants={"BLOCKS": blocks, "WIDE": wide, "HAS_BIAS": extras, "ADD": extras, "EVEN": even},
                # Without FP8 products only: wherever they are, activations are of 8 bits.
                configs={80: DEFAULTS[80]} if wide else {90: DEFAULTS[90], 100: DEFAULTS[100]},
                unaligned=UNALIGNED,
                is_default=blocks and even,
                is_product=True,
            )
