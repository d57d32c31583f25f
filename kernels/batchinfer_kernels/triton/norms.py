"""RMS norm, alone, behind the addition of a residual, and with its result in eight bits.

`reference.rms_norm` is the specification, of the last `activation_formats.quantize` of it: the fused kernel gives the
codes that the two operations one after the other would give.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.activation_formats import FORMATS
from batchinfer_kernels.triton.quantize import CODES, block_configs, new_quantized, row_block, store_row
from batchinfer_kernels.triton.variants import Variant


@triton.jit
def _rms_norm(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]: becomes residual + x, which is normed; or nothing
    weight_ptr,  # [H]
    out_ptr,  # [T, H], of x's dtype or codes
    scales_ptr,  # float32 [T, num_scales], or nothing
    width,
    num_scales,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    FORMAT: tl.constexpr,  # of the result; None: x's dtype
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = row * width
    at = tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(x_ptr + start + at, mask=there, other=0.0)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_ptr + start + at, mask=there, other=0.0)
        tl.store(residual_ptr + start + at, x, mask=there)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / width + eps)
    weight = tl.load(weight_ptr + at, mask=there, other=0.0)
    normed = (wide * scale).to(x.dtype) * weight
    if FORMAT is None:
        tl.store(out_ptr + start + at, normed, mask=there)
    else:
        store_row(normed.to(tl.float32), at, there, out_ptr + start, scales_ptr + row * num_scales, FORMAT, BLOCK)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`reference.rms_norm` of x [..., H], contiguous, H up to `triton_outlook.MOST_WIDTH`; with a residual of that
    shape and dtype, of residual + x, which overwrites it."""
    out = torch.empty_like(x)
    _launch(x, weight, eps, residual, out, out, None)
    return out


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, name: str, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`activation_formats.quantize` of what `rms_norm` gives, in the format `name`: (codes, scales)."""
    codes, scales = new_quantized(x.shape, name, x.device)
    _launch(x, weight, eps, residual, codes, scales, name)
    return codes, scales


def _launch(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor, scales: Tensor, name: str | None
) -> None:
    width = x.shape[-1]
    assert x.is_contiguous() and weight.dtype == x.dtype and weight.shape == (width,)
    if residual is None:
        residual, has_residual = x, False
    else:
        assert residual.is_contiguous() and residual.shape == x.shape and residual.dtype == x.dtype
        has_residual = True
    rows = x.numel() // width
    if rows:
        block, launch = row_block("rms_norm", width, x.device)
        num_scales = 0 if name is None else FORMATS[name].num_scales(width)
        _rms_norm[(rows,)](
            x, residual, weight, out, scales, width, num_scales, eps, has_residual, name, block, **launch
        )


def variants() -> Iterator[Variant]:
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr"), "*bf16")
    for name in (None, *FORMATS):
        for has_residual in (False, True):
            for block in (1024, 8192, 16_384):
                yield Variant(
                    name="rms_norm" + (f".{name}" if name else "") + f".{block}" + ".residual" * has_residual,
                    kernel=_rms_norm,
                    signature={
                        **pointers,
                        "out_ptr": CODES[name] if name else "*bf16",
                        "scales_ptr": "*fp32" if name else "*bf16",
                        "width": "i32",
                        "num_scales": "i32",
                        "eps": "fp32",
                    },
                    constants={"HAS_RESIDUAL": has_residual, "FORMAT": name, "BLOCK": block},
                    configs=block_configs(block, name),
                    unaligned=frozenset(["num_scales"]),
                    is_default=has_residual and block == (16_384 if name == "int8" else 8192) and name != "fp8",
                )
