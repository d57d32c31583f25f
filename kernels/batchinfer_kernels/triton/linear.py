"""Products with weights in the activations' own type; `reference.linear` is the specification.

Also what the other products (`linear_int8`, `linear_w4`, `linear_fp8`, `linear_mxfp4`, `experts`) share: the order of
programs, the K loop of operands that are multiplied as they are stored, the end of a product, and their launch.

Every output is summed by one program, over blocks of BLOCK_K inputs in ascending order. With `deterministic` there is
one configuration for any number of rows; without, small numbers of rows have configurations of their own (BY_ROWS).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import Config, config

DEFAULTS: dict[int, Config] = {
    80: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    90: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    100: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
}
# Without `deterministic`: most rows, and the configurations for up to so many; a table of a device names them
# "linear.16" and "linear.128". More rows take the defaults.
BY_ROWS: tuple[tuple[int, dict[int, Config]], ...] = (
    (
        16,
        {
            80: {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 4},
            90: {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 5},
            100: {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 5},
        },
    ),
    (
        128,
        {
            80: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 2, "num_warps": 4, "num_stages": 4},
            90: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 2, "num_warps": 4, "num_stages": 5},
            100: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 2, "num_warps": 4, "num_stages": 5},
        },
    ),
)


@triton.jit
def tile(program, num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(block of rows, block of columns) of a program. GROUP_M blocks of rows go through the columns together, so that
    what one has read of the weights is still in the L2 cache for the others."""
    row_blocks = tl.cdiv(num_rows, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(num_columns, BLOCK_N)
    first = program // in_group * GROUP_M
    height = tl.minimum(row_blocks - first, GROUP_M)
    within = program % in_group
    return first + within % height, within // height


@triton.jit
def multiply(
    x_ptr,  # [_, K]
    rows,  # [BLOCK_M]: which of x
    weight_ptr,  # [_, K], of x's type
    columns,  # [BLOCK_N]: which of the weight
    depth,  # K
    EVEN: tl.constexpr,  # whether K is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] of x W^T: int32 of int8, else float32."""
    at = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * depth + at[None, :]
    weight_at = weight_ptr + columns.to(tl.int64)[None, :] * depth + at[:, None]
    if x_ptr.dtype.element_ty == tl.int8:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        if EVEN:
            x = tl.load(x_at)
            weight = tl.load(weight_at)
        else:
            there = at < depth - k
            x = tl.load(x_at, mask=there[None, :], other=0)
            weight = tl.load(weight_at, mask=there[:, None], other=0)
        total = tl.dot(x, weight, total, input_precision="ieee", out_dtype=total.dtype)
        x_at += BLOCK_K
        weight_at += BLOCK_K
    return total


@triton.jit
def finish(
    y,  # float32 [BLOCK_M, BLOCK_N]
    rows,  # [BLOCK_M]: which of the output
    rows_there,  # [BLOCK_M]: which of those exist
    columns,  # [BLOCK_N]
    num_columns,  # N
    bias_ptr,  # [N], or nothing
    out_ptr,  # [_, N]: becomes y + bias, or what it was + y + bias
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    columns_there = columns < num_columns
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=columns_there, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    there = rows_there[:, None] & columns_there[None, :]
    if ADD:
        y += tl.load(out_at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_rows"])  # one compiled kernel for any number of them
def _linear(
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
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
    # Rows and columns that are not there are read as the last one, and not stored: the loop needs no masks for them.
    y = multiply(
        x_ptr,
        tl.minimum(rows, num_rows - 1),
        weight_ptr,
        tl.minimum(columns, num_columns - 1),
        depth,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    finish(y, rows, rows < num_rows, columns, num_columns, bias_ptr, out_ptr, HAS_BIAS, ADD)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    deterministic: bool = True,
) -> Tensor:
    """y [T, N] = x [T, K] weight [N, K]^T + bias [N]; with a residual [T, N] that + y, which overwrites it.

    All of one floating-point type and contiguous. Sums are float32, rounded once, behind bias and residual.
    """
    assert weight.dtype == x.dtype and weight.is_contiguous()
    launch = _configuration(len(x), deterministic, x.device)
    return multiplied(
        _linear, launch, x, weight.shape, (weight,), bias, residual, dtype=x.dtype, together=launch["BLOCK_K"]
    )


def multiplied(
    kernel: Any,
    launch: Config,
    x: Tensor,
    shape: Sequence[int],
    operands: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    dtype: torch.dtype,
    together: int,
    **constants: Any,
) -> Tensor:
    """y [T, N] of `dtype`, or the residual that became it: by a kernel that takes x [T, K], `operands`, bias, y, T, N
    and K, then by name HAS_BIAS, ADD, EVEN, `constants` and what is in `launch`.

    shape     (N, K), of the weight
    together  inputs that the kernel's loop takes at a time; EVEN says that K is a multiple of it
    """
    num_columns, depth = shape
    assert x.ndim == 2 and x.is_contiguous() and x.shape[1] == depth, (x.shape, shape)
    check_bias(bias, (num_columns,), dtype)
    if residual is None:
        out = torch.empty(len(x), num_columns, dtype=dtype, device=x.device)
    else:
        assert residual.shape == (len(x), num_columns) and residual.dtype == dtype and residual.is_contiguous()
        out = residual
    if out.numel():
        row_blocks, column_blocks = triton.cdiv(len(x), launch["BLOCK_M"]), triton.cdiv(num_columns, launch["BLOCK_N"])
        kernel[(row_blocks * column_blocks,)](
            x,
            *operands,
            out if bias is None else bias,
            out,
            len(x),
            num_columns,
            depth,
            HAS_BIAS=bias is not None,
            ADD=residual is not None,
            EVEN=depth % together == 0,
            **constants,
            **launch,
        )
    return out


def check_bias(bias: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Asserts that there is none, or one of that shape and dtype, contiguous."""
    assert bias is None or (bias.shape == shape and bias.dtype == dtype and bias.is_contiguous())


def _configuration(num_rows: int, deterministic: bool, device: torch.device) -> Config:
    if not deterministic:
        for most, defaults in BY_ROWS:
            if num_rows <= most:
                return config(f"linear.{most}", defaults, device)
    return config("linear", DEFAULTS, device)


# For the variants of all products: what they take beside their operands, and what of it is no multiple of 16.
SIGNATURE = {
    **dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("num_rows", "num_columns", "depth"), "i32"),
}
UNALIGNED = frozenset({"num_rows"})


def variants() -> Iterator[Variant]:
    tables = {"linear": DEFAULTS, **{f"linear.{most}": configs for most, configs in BY_ROWS}}
    for name, configs in tables.items():
        for extras, even in ((False, True), (True, True), (True, False)):
            yield Variant(
                name=name + ".bias.residual" * extras + ".ragged" * (not even),
                kernel=_linear,
                signature={"x_ptr": "*bf16", "weight_ptr": "*bf16", **SIGNATURE},
                constants={"HAS_BIAS": extras, "ADD": extras, "EVEN": even},
                configs=configs,
                unaligned=UNALIGNED,
                is_default=configs is DEFAULTS and extras and even,
                is_product=True,
            )
