"""Products of int8 weights and uint8 activations: types, the table's functions, and their specification in torch.

Both are turned before they are quantized: each block of TURNED inputs goes through the same orthogonal (Walsh-Hadamard)
transform, which leaves products as they are and spreads over the block what a few inputs have too much of (QuaRot,
arXiv:2404.00456, does so over whole rows). Then both are symmetric: weights with one scale for each output feature,
activations with one for each token and group of blocks (`group_of`). Within a group a product is an exact integer, so
that a row's bytes do not depend on the rows beside it, nor on the machine.

The last output features of a layer may be "fine", for parts whose errors count for more: what rounding left of their
weights and of the activations is kept as well, in units of a step / FINER, and a product is that of the bytes, exact,
and those of the one's bytes with what is left of the other, exact again. (Left of both is next to nothing.) Or they may
be kept in bfloat16 ("plain"), as a language model's head is: these take the activations rounded to bfloat16, and
neither is turned.

Legend: T tokens, K inputs, Kp = K padded with zeros to whole blocks, G groups of Kp inputs, N8 output features in int8,
Nf fine ones, N16 in bfloat16, N = N8 + Nf + N16, I inner features of a gated layer. `native` has the same in C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels import cpu, reference
from batchinfer_kernels.probe import RowRule

TURNED = 64
MOST_BLOCKS = 5  # of a group: with more of them errors grow, with fewer scaling takes longer
FINER = 254  # what rounding leaves is at most half a step: a byte
MOST = 127
ZERO = 128  # what stands for 0 among the bytes of activations
LEAST = 1e-30


class QuantizedRows(Protocol):
    """Activations, turned: (values - ZERO) * scales, by group.

    values  uint8 [T, Kp]
    scales  float32 [T, G]; NaN where the group held a value that is not finite
    fine    uint8 [T, Kp], where a layer has fine features: (values - ZERO + (fine - ZERO) / FINER) * scales is nearer
    plain   bfloat16 [T, Kp], not turned, where a layer has plain features; then the others may be of width 0
    """

    @property
    def values(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    @property
    def fine(self) -> Tensor | None: ...

    @property
    def plain(self) -> Tensor | None: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """`QuantizedRows` as they are described."""

    values: Tensor
    scales: Tensor
    fine: Tensor | None
    plain: Tensor | None

    def __len__(self) -> int:
        return self.values.shape[0]


class Int8Ops(Protocol):
    """`Ops.int8`. A packed layer is a dict of tensors that only the implementation that made it knows."""

    def quantize_weight(self, rows: Tensor, values: Tensor, scales: Tensor, fine: Tensor | None = None) -> None:
        """Rows float32 [n, K], which may be overwritten, to values int8 [n, Kp] and scales float32 [n], and to fine,
        int8 [n, Kp], where that is given; all on the CPU and contiguous. Several threads may do this."""
        ...

    def pack(
        self, values: Tensor | None, scales: Tensor | None, plain: Tensor | None, fine: Tensor | None = None
    ) -> dict[str, Tensor]:
        """values int8 [N8 + Nf, Kp] with scales float32 [N8 + Nf] and, of the last of them, fine int8 [Nf, Kp], or
        None; then plain bfloat16 [N16, K]. Either values or plain may be None."""
        ...

    def pack_gated(
        self, gate_values: Tensor, gate_scales: Tensor, up_values: Tensor, up_scales: Tensor
    ) -> dict[str, Tensor]:
        """A layer for `gated`: int8 [I, Kp] and float32 [I], twice."""
        ...

    def quantize(self, x: Tensor, *, values: bool = True, fine: bool = False, plain: bool = False) -> QuantizedRows:
        """Rows of x float32 [T, K]. `values`, `fine`, not without these, and `plain`: what the layer that takes them
        needs."""
        ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        values: bool = True,
        fine: bool = False,
        plain: bool = False,
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

    def quantize_weight(self, rows: Tensor, values: Tensor, scales: Tensor, fine: Tensor | None = None) -> None:
        """Turned; then scale = max |w| / 127, value = round(w * 127 / max |w|), to nearest even, and fine = round((w *
        127 / max |w| - value) * FINER). A row whose scale is no normal number has zeros and the scale 0, one with a
        weight that is not finite zeros and the scale NaN."""
        # In numpy: on many small pieces, in threads of the loader's own, which torch would multiply.
        blocks = _blocks(rows.numpy())
        turn_blocks(blocks)
        turned = blocks.reshape(len(rows), -1)
        most = np.abs(turned).max(-1)
        sick = ~np.isfinite(most)
        step = np.where(sick, np.float32(np.nan), most / np.float32(MOST))
        step[step < np.finfo(np.float32).tiny] = 0
        scales.numpy()[:] = step
        turned[sick] = 0
        factor = np.float32(MOST) / np.where(sick | (step == 0), np.float32(np.inf), most)
        scaled = turned * factor[:, None]
        values.numpy()[:] = np.rint(scaled)
        if fine is not None:
            fine.numpy()[:] = np.rint((scaled - np.rint(scaled)) * np.float32(FINER))

    def pack(
        self, values: Tensor | None, scales: Tensor | None, plain: Tensor | None, fine: Tensor | None = None
    ) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}
        if values is not None and scales is not None:
            packed |= {"values": values, "scales": scales}
            if fine is not None:
                packed["fine"] = fine
        if plain is not None:
            packed["plain"] = _padded(plain)
        return packed

    def pack_gated(
        self, gate_values: Tensor, gate_scales: Tensor, up_values: Tensor, up_scales: Tensor
    ) -> dict[str, Tensor]:
        return self.pack(torch.cat((gate_values, up_values)), torch.cat((gate_scales, up_scales)), None)

    def quantize(self, x: Tensor, *, values: bool = True, fine: bool = False, plain: bool = False) -> QuantizedRows:
        """Turned; then by group: scale = max |x| / 127, value = round(x * 127 / max |x|) + ZERO, to nearest even, and
        fine = round((x * 127 / max |x| - (value - ZERO)) * FINER) + ZERO. Values are ZERO and the scale 0 where max |x|
        is below LEAST."""
        x = _padded(x)
        rounded = x.to(torch.bfloat16) if plain else None
        if not values:
            none = x.new_empty(x.shape[0], 0)
            return ReferenceRows(none.to(torch.uint8), none, None, rounded)
        group = group_of(x.shape[1])
        groups = F.pad(turn(x), (0, -x.shape[1] % group)).view(x.shape[0], -1, group)
        most = groups.abs().amax(-1)  # NaN or infinite if a value is
        # Divided as it is written: of a number and a tensor torch multiplies by the reciprocal, rounded twice.
        factors = torch.where((most >= LEAST) & most.isfinite(), torch.full_like(most, MOST) / most, 0)
        scaled = (groups * factors[..., None]).nan_to_num(0, 0, 0)
        codes = scaled.round()
        scales = torch.where(most >= LEAST, most / MOST, 0).where(most.isfinite(), torch.nan)

        def as_bytes(whole: Tensor) -> Tensor:
            return (whole + ZERO).to(torch.uint8).view(x.shape[0], -1)[:, : x.shape[1]].contiguous()

        left = as_bytes(((scaled - codes) * FINER).round()) if fine else None
        return ReferenceRows(as_bytes(codes), scales, left, rounded)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        values: bool = True,
        fine: bool = False,
        plain: bool = False,
    ) -> QuantizedRows:
        return self.quantize(reference.rms_norm(x, weight, eps), values=values, fine=fine, plain=plain)

    def linear(
        self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        parts = []
        if "values" in packed:
            parts.append(_int8_product(x, packed["values"], packed["scales"], packed.get("fine")))
        if "plain" in packed:
            assert x.plain is not None
            parts.append(self._product(x.plain.float(), packed["plain"].float()))
        y = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if bias is not None:
            y += bias
        return y if residual is None else residual.add_(y)

    def gated(self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None) -> QuantizedRows:
        return self.quantize(cpu.silu_and_mul(self.linear(x, packed, bias, None)))

    def argmax(self, x: QuantizedRows, packed: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        y = self.linear(x, packed, None, None)
        return y.argmax(-1), y.isfinite().all(-1)


def group_of(width: int) -> int:
    """The width of a group of a row's inputs: as few groups as can be, as even as can be. The last may be shorter."""
    blocks = -(-width // TURNED)
    return -(-blocks // -(-blocks // MOST_BLOCKS)) * TURNED


def turn(x: Tensor) -> Tensor:
    """x float32 [T, Kp], turned."""
    turned = x.cpu().contiguous().clone().view(-1, TURNED)
    turn_blocks(turned.numpy())
    return turned.view(x.shape).to(x.device)


def turn_blocks(x: npt.NDArray[np.float32]) -> None:
    """Walsh-Hadamard transform of x [blocks, TURNED], in place: orthogonal, with sums of neighbours first."""
    width = 1
    with np.errstate(over="ignore", invalid="ignore"):  # sums of what is huge, or infinite already
        while width < TURNED:
            pairs = x.reshape(len(x), -1, 2, width)
            first, second = pairs[:, :, 0].copy(), pairs[:, :, 1]
            pairs[:, :, 0] += second
            np.subtract(first, second, out=second)
            width *= 2
    x *= np.float32(TURNED**-0.5)  # a power of two: exact


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % TURNED))


def _blocks(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rows [n, K] as [n * Kp / TURNED, TURNED]."""
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % TURNED))).reshape(-1, TURNED)


def _int8_product(x: QuantizedRows, values: Tensor, scales: Tensor, fine: Tensor | None) -> Tensor:
    """y[t, n] = scales[n] * (sum over groups, in order, of x.scales[t] * P[t, n]), each step of the sum a fused
    multiply-add in float32, where P = float(I) = sum over k of (x.values[t, k] - ZERO) * values[n, k] is exact. For
    fine features P = float(L) / FINER + float(I), fused as well: L, which is exact, are the products of one's bytes
    with what is left of the other."""
    y = torch.zeros(len(x), values.shape[0], device=values.device)
    group, of_fine = group_of(values.shape[1]), slice(values.shape[0] - (0 if fine is None else len(fine)), None)
    for g in range(x.scales.shape[1]):
        span = slice(g * group, (g + 1) * group)
        codes, weights = x.values[:, span].double() - ZERO, values[:, span].double()
        exact = (codes @ weights.T).float()  # no more than 2^24: exact in float32 too
        if fine is not None:
            assert x.fine is not None
            left = codes @ fine[:, span].double().T + (x.fine[:, span].double() - ZERO) @ weights[of_fine].T
            exact[:, of_fine] = _fused(left.float(), torch.tensor(1 / FINER), exact[:, of_fine])
        y = _fused(x.scales[:, g, None], exact, y)
    return y * scales


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 numbers, rounded once: their product is exact in float64. (The sum is rounded to that first,
    which hardly ever makes a difference.)"""
    return (a.double() * b.double() + c.double()).float()
