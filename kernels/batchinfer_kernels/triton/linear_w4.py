"""Products with weights of 4 bits in groups; `w4` is the format and the specification.

Weights become 16-bit numbers in registers. Therefore the problem is turned, y^T = W x^T: the warpgroup instructions
take their first operand from registers, the second only from shared memory. The BLOCK_M rows of x are the columns of
that product, so that few rows cost little.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.triton.linear import SIGNATURE, UNALIGNED, finish, multiplied, tile
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import Config, config
from batchinfer_kernels.w4 import Packed, half

DEFAULTS: dict[int, Config] = {
    80: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    90: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    100: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
}


@triton.jit
def _weights(codes, scales, zeros):
    """(codes - zeros) * scales: uint8 [BLOCK_N, H] below 16, scales [BLOCK_N], zeros uint8 [BLOCK_N].

    Codes become numbers by their bits: those of a power of two whose last place is 1, or the code.
    """
    if scales.dtype == tl.float32:
        wide = codes.to(tl.float32)
        base = 0.0
    elif scales.dtype == tl.bfloat16:
        wide = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        base = 128.0
    else:
        wide = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        base = 1024.0
    return (wide - (zeros.to(tl.float32) + base).to(scales.dtype)[:, None]) * scales[:, None]


@triton.jit
def _of_group(scale_ptr, zero_ptr, columns, HAS_ZEROS: tl.constexpr):
    """(scales, zeros) of a group."""
    scales = tl.load(scale_ptr + columns)
    if HAS_ZEROS:
        zeros = tl.load(zero_ptr + columns)
    else:
        zeros = tl.full(columns.shape, 8, tl.uint8)
    return scales, zeros


@triton.jit
def multiply_w4(
    x_ptr,  # [_, K]
    rows,  # [BLOCK_M]
    codes_ptr,  # uint8 [Kp / 2H, N, H]
    scale_ptr,  # [G, N], of x's type
    zero_ptr,  # uint8 [G, N], or nothing
    columns,  # [BLOCK_N]
    num_columns,  # N
    depth,  # K
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,  # 0: all inputs
    HALF: tl.constexpr,
    EVEN: tl.constexpr,  # whether K is a multiple of 2 H
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N] of x W^T."""
    at = tl.arange(0, HALF)
    stride = tl.cast(num_columns, tl.int64)  # a size of 1 is a constant to Triton
    codes_at = codes_ptr + (columns[:, None] * HALF + at[None, :])
    x_at = x_ptr + rows.to(tl.int64)[None, :] * depth + at[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        scales, zeros = _of_group(scale_ptr, zero_ptr, columns, HAS_ZEROS)
    for k in range(0, depth, 2 * HALF):
        if EVEN:
            low = tl.load(x_at)
            high = tl.load(x_at + HALF)
        else:
            low = tl.load(x_at, mask=(at < depth - k)[:, None], other=0.0)
            high = tl.load(x_at + HALF, mask=(at < depth - k - HALF)[:, None], other=0.0)
        codes = tl.load(codes_at)
        if GROUP > 0:
            start = k // GROUP * stride
            scales, zeros = _of_group(scale_ptr + start, zero_ptr + start, columns, HAS_ZEROS)
        total = tl.dot(_weights(codes & 15, scales, zeros), low, total, input_precision="ieee")
        if GROUP > 0 and GROUP < 2 * HALF:
            start = (k + HALF) // GROUP * stride
            scales, zeros = _of_group(scale_ptr + start, zero_ptr + start, columns, HAS_ZEROS)
        total = tl.dot(_weights(codes >> 4, scales, zeros), high, total, input_precision="ieee")
        codes_at += stride * HALF
        x_at += 2 * HALF
    return tl.trans(total)


@triton.jit(do_not_specialize=["num_rows"])  # one compiled kernel for any number of them
def _linear_w4(
    x_ptr,  # [T, K]
    codes_ptr,  # uint8 [Kp / 2H, N, H]
    scale_ptr,  # [G, N]
    zero_ptr,  # uint8 [G, N], or nothing
    bias_ptr,  # [N], or nothing
    out_ptr,  # [T, N]
    num_rows,
    num_columns,
    depth,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    m, n = tile(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    y = multiply_w4(
        x_ptr,
        tl.minimum(rows, num_rows - 1),
        codes_ptr,
        scale_ptr,
        zero_ptr,
        tl.minimum(columns, num_columns - 1),
        num_columns,
        depth,
        HAS_ZEROS,
        GROUP,
        HALF,
        EVEN,
        BLOCK_M,
        BLOCK_N,
    )
    finish(y, rows, rows < num_rows, columns, num_columns, bias_ptr, out_ptr, HAS_BIAS, ADD)


def linear_w4(x: Tensor, packed: Packed, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """`w4.linear` of x [T, K], contiguous, and weights with scales of x's type; y overwrites the residual [T, N]."""
    check_packed(x, packed)
    num_columns, half_size = packed.codes.shape[1:]
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    return multiplied(
        _linear_w4,
        config("linear_w4", DEFAULTS, x.device),
        x,
        (num_columns, packed.depth),
        (packed.codes, packed.scales, packed.codes if packed.zeros is None else packed.zeros),
        bias,
        residual,
        dtype=x.dtype,
        together=2 * half_size,
        HAS_ZEROS=packed.zeros is not None,
        GROUP=packed.group,
        HALF=half_size,
    )


def check_packed(x: Tensor, packed: Packed) -> None:
    """Asserts that weights are as `w4.pack` makes them, for x [.., K] and with scales of its type."""
    assert x.shape[-1] == packed.depth, (x.shape, packed.depth)
    assert packed.codes.is_contiguous() and packed.codes.shape[-1] == half(packed.group)
    assert packed.scales.is_contiguous() and packed.scales.dtype == x.dtype
    assert packed.zeros is None or (packed.zeros.is_contiguous() and packed.zeros.shape == packed.scales.shape)


def variants() -> Iterator[Variant]:
    pointers = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scale_ptr": "*bf16", "zero_ptr": "*u8"}
    for group, has_zeros, extras, even in (
        (128, True, True, True),
        (128, False, False, True),
        (64, True, False, True),
        (32, True, False, True),
        (0, False, False, True),
        (32, True, True, False),
    ):
        yield Variant(
            name=f"linear_w4.{group}" + ".zeros" * has_zeros + ".bias.residual" * extras + ".ragged" * (not even),
            kernel=_linear_w4,
            signature={**pointers, **SIGNATURE},
            constants={
                "HAS_ZEROS": has_zeros,
                "HAS_BIAS": extras,
                "ADD": extras,
                "GROUP": group,
                "HALF": half(group),
                "EVEN": even,
            },
            configs=DEFAULTS,
            unaligned=UNALIGNED,
            is_default=group == 128 and extras,
            is_product=True,
        )
