"""Gated activations of [gate | up], alone and with their result in eight bits.

`reference.silu_and_mul`, `gelu_tanh_and_mul` and `clamped_swiglu` are the specification, with one rounding at the end;
with a format, `activation_formats.quantize` of that: the codes that the two operations one after the other would give.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.activation_formats import FORMATS
from batchinfer_kernels.triton.quantize import (
    CODES,
    encode,
    magnitude,
    new_quantized,
    scale_and_factor,
    store_groups,
)
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES, config

KINDS = ("silu", "gelu_tanh", "clamped_swiglu")
DEFAULTS = {capability: {"BLOCK": 1024, "num_warps": 4, "num_stages": 1} for capability in CAPABILITIES}
# One scale for a whole row: a program has all of it, block by block.
ROW_DEFAULTS = {capability: {"BLOCK": 4096, "num_warps": 8, "num_stages": 2} for capability in CAPABILITIES}


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _gated(gate_up_ptr, at, there, inner, KIND: tl.constexpr):
    """Of a row of [gate | up] the results `at` float32, rounded to the row's dtype; 0 where not `there`."""
    gate_in = tl.load(gate_up_ptr + at, mask=there, other=0.0)
    gate = gate_in.to(tl.float32)
    up = tl.load(gate_up_ptr + inner + at, mask=there, other=0.0).to(tl.float32)
    if KIND == "silu":
        result = gate * _sigmoid(gate) * up
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        result = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        # Comparisons with what is not a number are false: it passes.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        result = gate * _sigmoid(1.702 * gate) * (up + 1.0)
    return result.to(gate_in.dtype).to(tl.float32)


@triton.jit
def _activation(
    gate_up_ptr,  # [T, 2 I]
    out_ptr,  # [T, I], of gate_up's dtype or codes
    scales_ptr,  # float32 [T, num_scales], or nothing
    inner,
    num_scales,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,  # None or fp8_groups
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < inner
    result = _gated(gate_up_ptr + row * 2 * inner, at, there, inner, KIND)
    if FORMAT is None:
        tl.store(out_ptr + row * inner + at, result.to(out_ptr.dtype.element_ty), mask=there)
    else:
        store_groups(result, at, there, out_ptr + row * inner, scales_ptr + row * num_scales, BLOCK)


@triton.jit
def _activation_row(
    gate_up_ptr,  # [T, 2 I]
    codes_ptr,  # [T, I]
    scales_ptr,  # float32 [T]
    inner,
    KIND: tl.constexpr,
    FORMAT: tl.constexpr,  # int8 or fp8
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gate_up_ptr += row * 2 * inner
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, inner, BLOCK):
        at = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, magnitude(_gated(gate_up_ptr, at, at < inner, inner, KIND)))
    scale, factor = scale_and_factor(tl.max(most, 0), 127 if FORMAT == "int8" else 448)
    tl.store(scales_ptr + row, scale)
    for start in range(0, inner, BLOCK):
        at = start + tl.arange(0, BLOCK)
        result = _gated(gate_up_ptr, at, at < inner, inner, KIND)
        tl.store(codes_ptr + row * inner + at, encode(result, factor, FORMAT), mask=at < inner)


def activation(gate_up: Tensor, kind: str) -> Tensor:
    """[..., I] of gate_up [..., 2 I] = [gate | up], contiguous; `kind` is one of KINDS."""
    out = torch.empty_like(gate_up[..., : gate_up.shape[-1] // 2], memory_format=torch.contiguous_format)
    _launch(gate_up, out, out, kind, None)
    return out


def activation_quantized(gate_up: Tensor, kind: str, name: str) -> tuple[Tensor, Tensor]:
    """`activation_formats.quantize` of what `activation` gives, in the format `name`: (codes, scales)."""
    shape = torch.Size((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    codes, scales = new_quantized(shape, name, gate_up.device)
    if FORMATS[name].group is not None:
        _launch(gate_up, codes, scales, kind, name)
        return codes, scales
    _check(gate_up, kind)
    inner = shape[-1]
    rows = codes.numel() // inner
    if rows:
        launch = config("activation_row", ROW_DEFAULTS, gate_up.device)
        _activation_row[(rows,)](gate_up, codes, scales, inner, kind, name, **launch)
    return codes, scales


def _launch(gate_up: Tensor, out: Tensor, scales: Tensor, kind: str, name: str | None) -> None:
    _check(gate_up, kind)
    inner = out.shape[-1]
    rows = out.numel() // inner
    if rows:
        launch = config("activation", DEFAULTS, gate_up.device)
        num_scales = 0 if name is None else FORMATS[name].num_scales(inner)
        grid = (rows, triton.cdiv(inner, launch["BLOCK"]))
        _activation[grid](gate_up, out, scales, inner, num_scales, kind, name, **launch)


def _check(gate_up: Tensor, kind: str) -> None:
    assert gate_up.is_contiguous() and gate_up.shape[-1] % 2 == 0 and kind in KINDS


def variants() -> Iterator[Variant]:
    for kind in KINDS:
        for name in (None, *FORMATS):
            whole_row = name in ("int8", "fp8")
            signature = {
                "gate_up_ptr": "*bf16",
                "codes_ptr" if whole_row else "out_ptr": CODES[name] if name else "*bf16",
                "scales_ptr": "*fp32" if name else "*bf16",
                "inner": "i32",
            }
            defaults = ROW_DEFAULTS if whole_row else DEFAULTS
            capabilities = CAPABILITIES if name in (None, "int8") else CAPABILITIES[1:]
            yield Variant(
                name=f"{kind}_and_mul" + (f".{name}" if name else ""),
                kernel=_activation_row if whole_row else _activation,
                signature=signature if whole_row else signature | {"num_scales": "i32"},
                constants={"KIND": kind, "FORMAT": name},
                configs={capability: defaults[capability] for capability in capabilities},
                unaligned=frozenset(["num_scales"]),
                is_default=kind == "silu" and name != "fp8",
            )
