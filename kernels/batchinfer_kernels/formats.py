"""Operations of layers whose weights are in GPUs' formats (`w8`, `fp8`, `w4`), with activations as their products take
them (`activation_formats`): what the kernel table has of them, and their specification in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchinfer_kernels import activation_formats, fp8, reference, w4, w8
from batchinfer_kernels.w4 import Packed

Quantized = tuple[Tensor, Tensor]  # codes and scales, of a format


class EightBitLinear(Protocol):
    def __call__(
        self,
        x: Tensor,
        x_scales: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        dtype: torch.dtype,
    ) -> Tensor: ...


class Fp8Linear(Protocol):
    def __call__(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        dtype: torch.dtype,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOps:
    """One implementation. A `residual` may be overwritten by what is returned.

    quantize         of x [T, H] to a format, by its name: `activation_formats.quantize`
    rms_norm         of (x, weight, eps), quantized
    silu_and_mul     of gate_up [T, 2 I], quantized
    linear_int8      `w8.linear`
    linear_fp8       `fp8.linear`
    linear_w4        `w4.linear`
    fp8_activations  whether there are products of two factors in e4m3; where not, activations have 16 or more bits
    """

    quantize: Callable[[Tensor, str], Quantized]
    rms_norm: Callable[[Tensor, Tensor, float, str], Quantized]
    silu_and_mul: Callable[[Tensor, str], Quantized]
    linear_int8: EightBitLinear
    linear_fp8: Fp8Linear
    linear_w4: Callable[[Tensor, Packed, Tensor | None, Tensor | None], Tensor]
    fp8_activations: bool = True


def _rms_norm(x: Tensor, weight: Tensor, eps: float, name: str) -> Quantized:
    return activation_formats.quantize(reference.rms_norm(x, weight, eps), name)


def _silu_and_mul(gate_up: Tensor, name: str) -> Quantized:
    return activation_formats.quantize(reference.silu_and_mul(gate_up), name)


REFERENCE = FormatOps(
    quantize=activation_formats.quantize,
    rms_norm=_rms_norm,
    silu_and_mul=_silu_and_mul,
    linear_int8=w8.linear,
    linear_fp8=fp8.linear,
    linear_w4=w4.linear,
)
