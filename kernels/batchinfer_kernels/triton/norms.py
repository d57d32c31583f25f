"""RMS norm, alone and behind the addition of a residual; `reference.rms_norm` is the specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES, config

DEFAULTS = {capability: {"num_warps": 8, "num_stages": 1} for capability in CAPABILITIES}


@triton.jit
def _rms_norm(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]: becomes residual + x, which is normed; or nothing
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(x_ptr + start + at, mask=there, other=0.0)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_ptr + start + at, mask=there, other=0.0)
        tl.store(residual_ptr + start + at, x, mask=there)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / width + eps)
    weight = tl.load(weight_ptr + at, mask=there, other=0.0)
    tl.store(out_ptr + start + at, (wide * scale).to(x.dtype) * weight, mask=there)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """`reference.rms_norm` of x [..., H], contiguous; with a residual of that shape and dtype, of residual + x, which
    overwrites it."""
    assert x.is_contiguous() and weight.dtype == x.dtype
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    if rows:
        launch: dict[str, Any] = dict(config("rms_norm", DEFAULTS, x.device))
        block = triton.next_power_of_2(width)
        _rms_norm[(rows,)](
            x, x if residual is None else residual, weight, out, width, eps, residual is not None, block, **launch
        )
    return out


def variants() -> Iterator[Variant]:
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16")
    for has_residual in (False, True):
        for block in (1024, 8192):
            yield Variant(
                name=f"rms_norm.{block}" + ".residual" * has_residual,
                kernel=_rms_norm,
                signature={**pointers, "width": "i32", "eps": "fp32"},
                constants={"HAS_RESIDUAL": has_residual, "BLOCK": block},
                configs=DEFAULTS,
                is_default=block == 8192 and has_residual,
            )
