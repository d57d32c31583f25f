"""Products of int8 weights and int8 activations; `w8` is the format and the specification.

Sums are exact, in int32, so that their order is of no consequence; scales are applied once, at the end. This is not
the format of the CPU's int8: `w8` says how they differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.triton.linear import SIGNATURE, UNALIGNED, finish, multiplied, multiply, tile
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import Config, config

DEFAULTS: dict[int, Config] = {
    80: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    90: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    100: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
}


@triton.jit
def multiply_int8(
    x_ptr,  # int8 [_, K]
    x_scale_ptr,  # float32 [_]
    rows,  # [BLOCK_M]
    weight_ptr,  # int8 [_, K]
    scale_ptr,  # float32 [_]
    columns,  # [BLOCK_N]
    depth,  # K
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N] of x W^T."""
    total = multiply(x_ptr, rows, weight_ptr, columns, depth, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
    return total.to(tl.float32) * (tl.load(x_scale_ptr + rows)[:, None] * tl.load(scale_ptr + columns)[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # one compiled kernel for any number of them
def _linear_int8(
    x_ptr,  # int8 [T, K]
    x_scale_ptr,  # float32 [T]
    weight_ptr,  # int8 [N, K]
    scale_ptr,  # float32 [N]
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
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    m, n = tile(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M)
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    y = multiply_int8(
        x_ptr,
        x_scale_ptr,
        tl.minimum(rows, num_rows - 1),
        weight_ptr,
        scale_ptr,
        tl.minimum(columns, num_columns - 1),
        depth,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    finish(y, rows, rows < num_rows, columns, num_columns, bias_ptr, out_ptr, HAS_BIAS, ADD)


def linear_int8(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`w8.linear` of contiguous tensors: x int8 [T, K], x_scales float32 [T], weight int8 [N, K], scales float32 [N],
    bias [N] and residual [T, N] of `dtype`; y [T, N] overwrites the residual."""
    check_scales(x, x_scales, weight, scales)
    launch = config("linear_int8", DEFAULTS, x.device)
    operands = (x_scales, weight, scales)
    return multiplied(
        _linear_int8, launch, x, weight.shape, operands, bias, residual, dtype=dtype, together=launch["BLOCK_K"]
    )


def check_scales(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> None:
    """Asserts that x [T, K] and weight [.., N, K] are int8, scales [T] and [.., N] float32; all but x contiguous."""
    assert x.dtype == weight.dtype == torch.int8 and weight.is_contiguous()
    assert x_scales.shape == x.shape[:1] and scales.shape == weight.shape[:-1]
    assert x_scales.dtype == scales.dtype == torch.float32 and x_scales.is_contiguous() and scales.is_contiguous()


def variants() -> Iterator[Variant]:
    operands = {"x_ptr": "*i8", "x_scale_ptr": "*fp32", "weight_ptr": "*i8", "scale_ptr": "*fp32"}
    for extras, even in ((False, True), (True, True), (True, False)):
        yield Variant(
            name="linear_int8" + ".bias.residual" * extras + ".ragged" * (not even),
            kernel=_linear_int8,
            signature={**operands, **SIGNATURE},
            constants={"HAS_BIAS": extras, "ADD": extras, "EVEN": even},
            configs=DEFAULTS,
            unaligned=UNALIGNED,
            is_default=extras and even,
            is_product=True,
        )
