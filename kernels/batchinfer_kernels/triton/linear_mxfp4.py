"""Products with MXFP4 weights; `mxfp4` is the format and the specification.

Weights become 16-bit numbers in registers, and the problem is turned, for the reason that `linear_w4` gives.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels import mxfp4
from batchinfer_kernels.triton.linear import SIGNATURE, UNALIGNED, finish, multiplied, tile
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import Config, config

DEFAULTS: dict[int, Config] = {
    80: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    90: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    100: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
}


@triton.jit
def _scales(bytes, dtype: tl.constexpr):
    """2 ** (byte - 127), NaN for 255."""
    bits = bytes.to(tl.int32)
    bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _weights(codes, scales):
    """e2m1 in the low bits of uint8 [BLOCK_N, GROUP], times scales [BLOCK_N]. Exponent and mantissa at their places in
    the scales' type are a number that is too small by a power of two; so is the subnormal one."""
    sign = (codes & 8).to(tl.uint16) << 12
    rest = (codes & 7).to(tl.uint16)
    if scales.dtype == tl.bfloat16:
        wide = (sign | (rest << 6)).to(tl.bfloat16, bitcast=True) * 8.507059173023462e37  # 2 ** 126
    elif scales.dtype == tl.float16:
        wide = (sign | (rest << 9)).to(tl.float16, bitcast=True) * 16384.0
    else:
        bits = (sign.to(tl.uint32) << 16) | (rest.to(tl.uint32) << 22)
        wide = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    return wide.to(scales.dtype) * scales[:, None]


@triton.jit
def multiply_mxfp4(
    x_ptr,  # [_, K]
    rows,  # [BLOCK_M]
    codes_ptr,  # uint8 [Kp / 64, N, 32]
    scale_ptr,  # uint8 [Kp / 32, N]
    columns,  # [BLOCK_N]
    num_columns,  # N
    depth,  # K
    EVEN: tl.constexpr,  # whether K is a multiple of 64
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N] of x W^T."""
    HALF: tl.constexpr = 32
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    at = tl.arange(0, HALF)
    stride = tl.cast(num_columns, tl.int64)  # a size of 1 is a constant to Triton
    codes_at = codes_ptr + (columns[:, None] * HALF + at[None, :])
    scale_at = scale_ptr + columns
    x_at = x_ptr + rows.to(tl.int64)[None, :] * depth + at[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, depth, 2 * HALF):
        low = tl.load(x_at)
        if EVEN:
            high = tl.load(x_at + HALF)
        else:
            high = tl.load(x_at + HALF, mask=(at < depth - k - HALF)[:, None], other=0.0)
        codes = tl.load(codes_at)
        scales = _scales(tl.load(scale_at), dtype)
        total = tl.dot(_weights(codes, scales), low, total, input_precision="ieee")
        scales = _scales(tl.load(scale_at + num_columns), dtype)
        total = tl.dot(_weights(codes >> 4, scales), high, total, input_precision="ieee")
        codes_at += stride * HALF
        scale_at += stride * 2
        x_at += 2 * HALF
    return tl.trans(total)


@triton.jit(do_not_specialize=["num_rows"])  # one compiled kernel for any number of them
def _linear_mxfp4(
    x_ptr,  # [T, K]
    codes_ptr,  # uint8 [Kp / 64, N, 32]
    scale_ptr,  # uint8 [Kp / 32, N]
    bias_ptr,  # [N], or nothing
    out_ptr,  # [T, N]
    num_rows,
    num_columns,
    depth,
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
    y = multiply_mxfp4(
        x_ptr,
        tl.minimum(rows, num_rows - 1),
        codes_ptr,
        scale_ptr,
        tl.minimum(columns, num_columns - 1),
        num_columns,
        depth,
        EVEN,
        BLOCK_M,
        BLOCK_N,
    )
    finish(y, rows, rows < num_rows, columns, num_columns, bias_ptr, out_ptr, HAS_BIAS, ADD)


def linear_mxfp4(x: Tensor, packed: mxfp4.Packed, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """`mxfp4.linear` of x [T, K], contiguous; y overwrites the residual [T, N]."""
    check_packed(x, packed)
    return multiplied(
        _linear_mxfp4,
        config("linear_mxfp4", DEFAULTS, x.device),
        x,
        (packed.codes.shape[-2], packed.depth),
        (packed.codes, packed.scales),
        bias,
        residual,
        dtype=x.dtype,
        together=2 * mxfp4.GROUP,
    )


def check_packed(x: Tensor, packed: mxfp4.Packed) -> None:
    """Asserts that weights are as `mxfp4.pack` makes them, and x of 16 or more bits."""
    assert x.is_floating_point() and x.element_size() > 1
    assert packed.codes.is_contiguous() and packed.codes.shape[-1] == mxfp4.GROUP and packed.scales.is_contiguous()


def variants() -> Iterator[Variant]:
    for extras, even in ((False, True), (True, True), (True, False)):
        yield Variant(
            name="linear_mxfp4" + ".bias.residual" * extras + ".ragged" * (not even),
            kernel=_linear_mxfp4,
            signature={"x_ptr": "*bf16", "codes_ptr": "*u8", "scale_ptr": "*u8", **SIGNATURE},
            constants={"HAS_BIAS": extras, "ADD": extras, "EVEN": even},
            configs=DEFAULTS,
            unaligned=UNALIGNED,
            is_default=extras and even,
            is_product=True,
        )
