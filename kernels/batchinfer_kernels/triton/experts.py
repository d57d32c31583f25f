"""Products of tokens with their experts' weights, in every format, and their sum; `experts` is the specification,
`routing` says who goes where.

One kernel: a block of rows has one expert, whose weights it takes with the K loop of the plain product (`linear`,
`linear_int8`, `linear_w4`, `linear_fp8`, `linear_mxfp4`). Rows come and go by assignment, so that nothing is sorted
but their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels import fp8, mxfp4, w4
from batchinfer_kernels.experts import Aligned
from batchinfer_kernels.triton import linear_fp8, linear_int8, linear_mxfp4, linear_w4
from batchinfer_kernels.triton.linear import check_bias, finish, multiply, tile
from batchinfer_kernels.triton.linear_fp8 import multiply_fp8
from batchinfer_kernels.triton.linear_int8 import multiply_int8
from batchinfer_kernels.triton.linear_mxfp4 import multiply_mxfp4
from batchinfer_kernels.triton.linear_w4 import multiply_w4
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES, Config, config

# By format. BLOCK_K counts for the first two, the others have their own.
DEFAULTS: dict[str, dict[int, Config]] = {
    "plain": {
        80: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
        90: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
        100: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
    },
    "int8": {
        80: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
        90: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
        100: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    },
    "w4": {
        80: {"BLOCK_M": 32, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
        90: {"BLOCK_M": 32, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
        100: {"BLOCK_M": 32, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    },
    "fp8": {
        80: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 3},
        90: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
        100: {"BLOCK_M": 64, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
    },
    "mxfp4": {
        80: {"BLOCK_M": 32, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
        90: {"BLOCK_M": 32, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
        100: {"BLOCK_M": 32, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4},
    },
}
COMBINE_DEFAULTS = {capability: {"BLOCK": 1024, "num_warps": 4, "num_stages": 1} for capability in CAPABILITIES}


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])  # one compiled kernel for any number of them
def _experts(
    x_ptr,  # [A / share, K]
    x_scale_ptr,  # of the format, or nothing
    weight_ptr,  # of the format, for each expert
    scale_ptr,  # of the format, for each expert, or nothing
    zero_ptr,  # of the format, for each expert, or nothing
    bias_ptr,  # [E, N], or nothing
    slot_ptr,  # int32 [blocks * BLOCK_M]
    expert_ptr,  # int32 [blocks]
    out_ptr,  # [A, N]
    num_slots,  # A
    share,  # assignments for each row of x
    num_blocks,
    num_columns,  # N
    depth,  # K
    weight_stride,  # from one expert to the next
    scale_stride,  # likewise, also of zeros
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_ZEROS: tl.constexpr,  # of w4, as the next two
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCKS: tl.constexpr,  # of fp8, as the next
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    m, n = tile(tl.program_id(0), num_blocks * BLOCK_M, num_columns, BLOCK_M, BLOCK_N, GROUP_M)
    expert = tl.load(expert_ptr + m).to(tl.int64)
    if expert < 0:
        return
    slots = tl.load(slot_ptr + m * BLOCK_M + tl.arange(0, BLOCK_M))
    # What is not there is read as the last one and not stored, as in `linear`.
    rows = tl.minimum(slots, num_slots - 1) // share
    all_columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.minimum(all_columns, num_columns - 1)
    weight_ptr += expert * weight_stride
    scale_ptr += expert * scale_stride
    zero_ptr += expert * scale_stride
    if FORMAT == "plain":
        y = multiply(x_ptr, rows, weight_ptr, columns, depth, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
    elif FORMAT == "int8":
        y = multiply_int8(
            x_ptr, x_scale_ptr, rows, weight_ptr, scale_ptr, columns, depth, EVEN, BLOCK_M, BLOCK_N, BLOCK_K
        )
    elif FORMAT == "w4":
        y = multiply_w4(
            x_ptr,
            rows,
            weight_ptr,
            scale_ptr,
            zero_ptr,
            columns,
            num_columns,
            depth,
            HAS_ZEROS,
            GROUP,
            HALF,
            EVEN,
            BLOCK_M,
            BLOCK_N,
        )
    elif FORMAT == "fp8":
        y = multiply_fp8(
            x_ptr,
            x_scale_ptr,
            rows,
            weight_ptr,
            scale_ptr,
            columns,
            n * BLOCK_N,
            depth,
            BLOCKS,
            WIDE,
            EVEN,
            BLOCK_M,
            BLOCK_N,
        )
    else:
        y = multiply_mxfp4(x_ptr, rows, weight_ptr, scale_ptr, columns, num_columns, depth, EVEN, BLOCK_M, BLOCK_N)
    bias_ptr += expert * num_columns
    finish(y, slots, slots < num_slots, all_columns, num_columns, bias_ptr, out_ptr, HAS_BIAS, False)


@triton.jit
def _combine(
    y_ptr,  # [A, H]
    weight_ptr,  # float32 [T, k]
    id_ptr,  # int32 [T, k]
    residual_ptr,  # [T, H], or nothing
    out_ptr,  # [T, H]
    width,  # H
    TOP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP):
        slot = row * TOP + j
        has_expert = tl.load(id_ptr + slot) >= 0
        y = tl.load(y_ptr + slot * width + at, mask=at < tl.where(has_expert, width, 0), other=0.0).to(tl.float32)
        total += y * tl.where(has_expert, tl.load(weight_ptr + slot), 0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * width + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, total.to(out_ptr.dtype.element_ty), mask=there)


def block_size(form: str, device: torch.device) -> int:
    """Rows in a block, to `routing.align` with. form: "plain", "int8", "w4", "fp8" or "mxfp4"."""
    return config(f"experts.{form}", DEFAULTS[form], device)["BLOCK_M"]


def experts_linear(x: Tensor, weight: Tensor, aligned: Aligned, bias: Tensor | None = None) -> Tensor:
    """y [A, N]: `experts.linear` with weight [E, N, K] of x's type and bias [E, N]. x [T, K] or [A, K]; all contiguous.

    Rows of assignments without an expert are left as they were allocated: anything. So it is in all of these.
    """
    assert weight.dtype == x.dtype and weight.is_contiguous()
    return _launch("plain", x, weight, None, aligned, bias, weight.shape, x.dtype)


def experts_linear_int8(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    aligned: Aligned,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`w8.linear` of each assignment: weight int8 [E, N, K], scales float32 [E, N]; y [A, N] of `dtype`."""
    linear_int8.check_scales(x, x_scales, weight, scales)
    return _launch("int8", x, weight, scales, aligned, bias, weight.shape, dtype, x_scales=x_scales)


def experts_linear_w4(x: Tensor, packed: w4.Packed, aligned: Aligned, bias: Tensor | None = None) -> Tensor:
    """`w4.linear` of each assignment, with weights from `w4.stack`; y [A, N] of x's type."""
    linear_w4.check_packed(x, packed)
    assert packed.order is None
    num_experts, _, num_columns, half = packed.codes.shape
    return _launch(
        "w4",
        x,
        packed.codes,
        packed.scales,
        aligned,
        bias,
        (num_experts, num_columns, packed.depth),
        x.dtype,
        together=2 * half,
        zeros=packed.zeros,
        constants={"HAS_ZEROS": packed.zeros is not None, "GROUP": packed.group, "HALF": half},
    )


def experts_linear_fp8(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    aligned: Aligned,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`fp8.linear` of each assignment: weight e4m3 [E, N, K], scales float32 [E, N] or [E, Nb, Kb]; y [A, N] of
    `dtype`."""
    linear_fp8.check_scales(x, x_scales, weight, scales)
    return _launch(
        "fp8",
        x,
        weight.view(torch.uint8) if x_scales is None else weight,
        scales,
        aligned,
        bias,
        weight.shape,
        dtype,
        together=fp8.BLOCK,
        x_scales=x_scales,
        constants={"BLOCKS": scales.ndim == 3, "WIDE": x_scales is None},
    )


def experts_linear_mxfp4(x: Tensor, packed: mxfp4.Packed, aligned: Aligned, bias: Tensor | None = None) -> Tensor:
    """`mxfp4.linear` of each assignment, with weights that were packed for all experts; y [A, N] of x's type."""
    linear_mxfp4.check_packed(x, packed)
    num_experts, _, num_columns, _ = packed.codes.shape
    shape = (num_experts, num_columns, packed.depth)
    return _launch("mxfp4", x, packed.codes, packed.scales, aligned, bias, shape, x.dtype, together=2 * mxfp4.GROUP)


_NO_CONSTANTS = {"HAS_ZEROS": False, "GROUP": 0, "HALF": 0, "BLOCKS": False, "WIDE": False}


def _launch(
    form: str,
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    aligned: Aligned,
    bias: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    together: int | None = None,
    x_scales: Tensor | None = None,
    zeros: Tensor | None = None,
    constants: dict[str, Any] | None = None,
) -> Tensor:
    """shape: (E, N, K). together: inputs that the format's loop takes at a time; None: BLOCK_K."""
    num_experts, num_columns, depth = shape
    assert x.ndim == 2 and x.is_contiguous() and x.shape[1] == depth, (x.shape, shape)
    check_bias(bias, (num_experts, num_columns), dtype)
    out = torch.empty(aligned.num_slots, num_columns, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    share, left = divmod(aligned.num_slots, len(x))
    assert share and not left, "x has one row for each token, or for each assignment"
    launch = {"BLOCK_K": 0, **config(f"experts.{form}", DEFAULTS[form], x.device)}
    assert aligned.size == launch["BLOCK_M"], "aligned for another format: see block_size"
    num_blocks = len(aligned.experts)
    _experts[(num_blocks * triton.cdiv(num_columns, launch["BLOCK_N"]),)](
        x,
        out if x_scales is None else x_scales,
        weight,
        out if scales is None else scales,
        weight if zeros is None else zeros,
        out if bias is None else bias,
        aligned.slots,
        aligned.experts,
        out,
        aligned.num_slots,
        share,
        num_blocks,
        num_columns,
        depth,
        weight.stride(0),
        0 if scales is None else scales.stride(0),
        FORMAT=form,
        HAS_BIAS=bias is not None,
        EVEN=depth % (together or launch["BLOCK_K"]) == 0,
        **{**_NO_CONSTANTS, **(constants or {})},
        **launch,
    )
    return out


def combine(y: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None = None) -> Tensor:
    """`experts.combine` of contiguous tensors: y [A, H], weights float32 [T, k], ids int32 [T, k], residual [T, H] of
    y's type, which the result overwrites."""
    num_rows, top = ids.shape
    width = y.shape[1]
    assert y.is_contiguous() and len(y) == num_rows * top and weights.shape == ids.shape
    assert weights.is_contiguous() and weights.dtype == torch.float32 and ids.is_contiguous()
    if residual is not None:
        assert residual.shape == (num_rows, width) and residual.dtype == y.dtype and residual.is_contiguous()
    out = torch.empty(num_rows, width, dtype=y.dtype, device=y.device) if residual is None else residual
    if out.numel():
        launch = config("combine", COMBINE_DEFAULTS, y.device)
        _combine[(num_rows, triton.cdiv(width, launch["BLOCK"]))](
            y, weights, ids, out, out, width, top, residual is not None, **launch
        )
    return out


_OPERANDS = {
    "plain": ("*bf16", "*bf16", "*bf16", "*bf16", "*bf16"),
    "int8": ("*i8", "*fp32", "*i8", "*fp32", "*i8"),
    "w4": ("*bf16", "*bf16", "*u8", "*bf16", "*u8"),
    "fp8": ("*fp8e4nv", "*fp32", "*fp8e4nv", "*fp32", "*fp8e4nv"),
    "fp8.wide": ("*bf16", "*bf16", "*u8", "*fp32", "*u8"),
    "mxfp4": ("*bf16", "*bf16", "*u8", "*u8", "*u8"),
}


def variants() -> Iterator[Variant]:
    names = ("x_ptr", "x_scale_ptr", "weight_ptr", "scale_ptr", "zero_ptr")
    others = {"bias_ptr": "*bf16", "slot_ptr": "*i32", "expert_ptr": "*i32", "out_ptr": "*bf16"}
    sizes = dict.fromkeys(
        ("num_slots", "share", "num_blocks", "num_columns", "depth", "weight_stride", "scale_stride"), "i32"
    )
    for name, operands in _OPERANDS.items():
        form = name.split(".")[0]
        constants = dict(_NO_CONSTANTS)
        configs = DEFAULTS[form]
        if form == "w4":
            constants.update(HAS_ZEROS=True, GROUP=128, HALF=w4.half(128))
        if form == "fp8":
            wide = name == "fp8.wide"
            constants.update(BLOCKS=True, WIDE=wide)
            configs = {capability: configs[capability] for capability in ((80,) if wide else (90, 100))}
        for has_bias, even in ((True, True), (False, True), (False, False)):
            block_k = {} if "BLOCK_K" in configs[max(configs)] else {"BLOCK_K": 0}
            yield Variant(
                name=f"experts.{name}" + ".bias" * has_bias + ".ragged" * (not even),
                kernel=_experts,
                signature={**dict(zip(names, operands, strict=True)), **others, **sizes},
                constants={"FORMAT": form, "HAS_BIAS": has_bias, "EVEN": even, **constants, **block_k},
                configs=configs,
                unaligned=frozenset({"num_slots", "share", "num_blocks", "scale_stride"}),
                is_default=name == "plain" and not has_bias and even,  # the other K loops are checked as plain products
                is_product=True,
            )
    for has_residual in (False, True):
        yield Variant(
            name="combine" + ".residual" * has_residual,
            kernel=_combine,
            signature={
                **dict.fromkeys(("y_ptr", "residual_ptr", "out_ptr"), "*bf16"),
                "weight_ptr": "*fp32",
                "id_ptr": "*i32",
                "width": "i32",
            },
            constants={"TOP": 8, "HAS_RESIDUAL": has_residual},
            configs=COMBINE_DEFAULTS,
            is_default=has_residual,
        )
