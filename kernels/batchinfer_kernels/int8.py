"""Products of int8 weights and uint8 activations: types, the table's functions, and their specification in torch.

Weights are symmetric: one scale for each output feature and group of GROUP inputs. Activations are asymmetric: one
scale and one zero point for each token and group. Within a group a product is an exact integer, so that a row's bytes
do not depend on the rows beside it, nor on the machine. The last output features of a layer may be kept in bfloat16
instead ("plain"), for parts whose errors count for more; they take the activations rounded to bfloat16.

Legend: T tokens, K inputs, Kp = K padded with zeros to whole groups, G = Kp / GROUP, N8 output features in int8, N16
in bfloat16, N = N8 + N16, I inner features of a gated layer. `native` has the same in C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels import cpu, reference
from batchinfer_kernels.probe import RowRule

GROUP = 64
LEAST_RANGE = 1e-30


class QuantizedRows(Protocol):
    """Activations: (values - zeros) * scales, by group.

    values  uint8 [T, Kp]
    scales  float32 [T, G]; NaN where the group held a value that is not finite
    zeros   int32 [T, G]
    plain   bfloat16 [T, Kp], where a layer has plain features; then the others may be of width 0
    """

    @property
    def values(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    @property
    def zeros(self) -> Tensor: ...

    @property
    def plain(self) -> Tensor | None: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """`QuantizedRows` as they are described."""

    values: Tensor
    scales: Tensor
    zeros: Tensor
    plain: Tensor | None

    def __len__(self) -> int:
        return self.values.shape[0]


class Int8Ops(Protocol):
    """`Ops.int8`. A packed layer is a dict of tensors that only the implementation that made it knows."""

    def quantize_weight(self, rows: Tensor, values: Tensor, scales: Tensor) -> None:
        """Rows float32 [n, K], which may be overwritten, to values int8 [n, K] and scales float32 [n, G]; all on the
        CPU and contiguous. Several threads may do this."""
        ...

    def pack(self, values: Tensor | None, scales: Tensor | None, plain: Tensor | None) -> dict[str, Tensor]:
        """values int8 [N8, K] with scales float32 [N8, G], then plain bfloat16 [N16, K]; one of them may be None."""
        ...

    def pack_gated(
        self, gate_values: Tensor, gate_scales: Tensor, up_values: Tensor, up_scales: Tensor
    ) -> dict[str, Tensor]:
        """A layer for `gated`: int8 [I, K] and float32 [I, G], twice."""
        ...

    def quantize(self, x: Tensor, *, values: bool = True, plain: bool = False) -> QuantizedRows:
        """Rows of x float32 [T, K]. `values` and `plain`: what the layer that takes them needs."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, values: bool = True, plain: bool = False
    ) -> QuantizedRows:
        """`reference.rms_norm`, quantized."""
        ...

    def linear(
        self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """y float32 [T, N] = x W^T + bias[N]; added to residual float32 [T, N], in place, where there is one."""
        ...

    def gated(self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None) -> QuantizedRows:
        """silu(gate) * up, quantized, for [gate | up] = x W^T + bias[2 I]."""
        ...

    def argmax(self, x: QuantizedRows, packed: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(int64 [T]: the largest output's index, of equal ones the lowest; bool [T]: whether all are finite)."""
        ...


class ReferenceInt8:
    """The specification, on any device. `rows` keeps the bfloat16 products independent of their number of rows."""

    def __init__(self, rows: RowRule) -> None:
        self._product = cpu.make_linear(rows)

    def quantize_weight(self, rows: Tensor, values: Tensor, scales: Tensor) -> None:
        """By group: scale = max |w| / 127, value = round(w / scale), to nearest even. A group whose scale is no
        normal number has zeros and the scale 0, one with a weight that is not finite zeros and the scale NaN."""
        # In numpy: on many small pieces, in threads of the loader's own, which torch would multiply.
        for start, stop in _spans(rows.shape[1]):
            groups = rows.numpy()[:, start:stop].reshape(len(rows), -1, min(GROUP, stop - start))
            step = np.maximum(groups.max(-1), -groups.min(-1))
            sick = ~np.isfinite(step)
            step[sick] = np.nan
            step /= np.float32(127)
            step[step < np.finfo(np.float32).tiny] = 0
            scales.numpy()[:, start // GROUP : -(-stop // GROUP)] = step
            groups[sick] = 0
            step[sick | (step == 0)] = np.inf
            groups /= step[..., None]
            values.numpy()[:, start:stop] = np.rint(groups, out=groups).reshape(len(rows), -1)

    def pack(self, values: Tensor | None, scales: Tensor | None, plain: Tensor | None) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}
        if values is not None and scales is not None:
            packed |= {"values": _padded(values), "scales": scales}
        if plain is not None:
            packed["plain"] = _padded(plain)
        return packed

    def pack_gated(
        self, gate_values: Tensor, gate_scales: Tensor, up_values: Tensor, up_scales: Tensor
    ) -> dict[str, Tensor]:
        return self.pack(torch.cat((gate_values, up_values)), torch.cat((gate_scales, up_scales)), None)

    def quantize(self, x: Tensor, *, values: bool = True, plain: bool = False) -> QuantizedRows:
        """By group: low = min(x, 0), high = max(x, 0), scale = (high - low) / 255, steps = 255 / (high - low),
        zero = round(-low * steps), value = clamp(round(x * steps) + zero, 0, 255); to nearest even. All are zero
        where high - low is below LEAST_RANGE."""
        x = _padded(x)
        rounded = x.to(torch.bfloat16) if plain else None
        if not values:
            none = x.new_empty(x.shape[0], 0)
            return ReferenceRows(none.to(torch.uint8), none, none.to(torch.int32), rounded)
        groups = x.view(x.shape[0], -1, GROUP)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        width = high - low  # NaN or infinite if a value is; infinite, too, where it overflows
        steps = torch.where((width >= LEAST_RANGE) & width.isfinite(), 255 / width, 0)
        zeros = (-low * steps).nan_to_num(0).round()
        codes = ((groups * steps[..., None]).nan_to_num(0).round() + zeros[..., None]).clamp(0, 255)
        scales = torch.where(width >= LEAST_RANGE, width / 255, 0).where(width.isfinite(), torch.nan)
        return ReferenceRows(codes.to(torch.uint8).view(x.shape), scales, zeros.to(torch.int32), rounded)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, values: bool = True, plain: bool = False
    ) -> QuantizedRows:
        return self.quantize(reference.rms_norm(x, weight, eps), values=values, plain=plain)

    def linear(
        self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        parts = []
        if "values" in packed:
            parts.append(_int8_product(x, packed["values"], packed["scales"]))
        if "plain" in packed:
            assert x.plain is not None
            parts.append(self._product(x.plain.float(), packed["plain"].float()))
        y = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if bias is not None:
            y += bias
        return y if residual is None else residual.add_(y)

    def gated(self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None) -> QuantizedRows:
        return self.quantize(reference.silu_and_mul(self.linear(x, packed, bias, None)))

    def argmax(self, x: QuantizedRows, packed: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        y = self.linear(x, packed, None, None)
        return y.argmax(-1), y.isfinite().all(-1)


def _spans(width: int) -> list[tuple[int, int]]:
    """K inputs as whole groups, and what is left."""
    whole = width // GROUP * GROUP
    return [(start, stop) for start, stop in ((0, whole), (whole, width)) if start < stop]


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % GROUP))


def _int8_product(x: QuantizedRows, values: Tensor, scales: Tensor) -> Tensor:
    """y[t, n] = sum over groups, in order, of x.scales[t] * (scales[n] * float(I[t, n])), each step a fused
    multiply-add in float32, where I = sum over k of (x.values[t, k] - x.zeros[t]) * values[n, k] is exact."""
    y = torch.zeros(len(x), values.shape[0], device=values.device)
    for g in range(scales.shape[1]):
        span = slice(g * GROUP, (g + 1) * GROUP)
        # Sums of up to 64 * 255 * 127 are exact in float32, in any order.
        exact = x.values[:, span].float() @ values[:, span].float().T
        exact -= x.zeros[:, g, None].float() * values[:, span].float().sum(-1)
        # A product of float32 numbers is exact in float64: this rounds as a fused multiply-add does.
        y = (y.double() + x.scales[:, g, None].double() * (scales[:, g] * exact).double()).float()
    return y
