"""`Int8Ops` in C: linear layers with int8 weights over activations in bytes (`batchinfer_kernels.int8` says what).

Weights are packed once, after loading, into panels of PANEL output features; `panels.h` says how a panel lies in
memory. `pack` returns, as tensors: "bytes", the features that are kept as such, with what belongs to them, "fine", fine
ones, "plain", those in bfloat16, and "sizes", how many of each there are, and their padded width. A layer
that is all bfloat16, a language model's head, gets bytes as well, with "lengths" and "errors", for `argmax` (see
`shortlist.c`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels.int8 import TURNED, QuantizedRows, group_of
from batchinfer_kernels.native import library

PANEL = 32
HALF = PANEL // 2


class _Rows(ctypes.Structure):
    """`struct quantized`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "scales", "fine", "plain")]


class PackedStruct(ctypes.Structure):
    """`struct packed`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bytes", "fine", "plain")),
        *((name, ctypes.c_long) for name in ("width", "num_values", "num_fine", "num_plain")),
    ]


class PackedLayer(dict[str, Tensor]):
    """A layer's tensors by name, and what the C code is told of them."""

    __slots__ = ("struct",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        addresses = (address(self.get(name)) for name in ("bytes", "fine", "plain"))
        *features, width = self["sizes"].tolist()
        self.struct = PackedStruct(*addresses, width, *features)


class NativeRows:
    """`QuantizedRows` in one piece of memory; tensors are made of it for who asks."""

    __slots__ = ("_at", "_memory", "_num_rows", "struct")

    def __init__(self, num_rows: int, width: int, *, values: bool, fine: bool, plain: bool) -> None:
        """Not initialised; `width` is K."""
        assert values or not fine
        width = -(-width // TURNED) * TURNED
        sizes = {
            "scales": 4 * num_rows * -(-width // group_of(width)) if values else 0,
            "values": num_rows * width if values else 0,
            "fine": num_rows * width if fine else 0,
            "plain": 2 * num_rows * width if plain else 0,
        }
        self._num_rows = num_rows
        self._memory = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        self._at, start = {}, 0
        for name, size in sizes.items():
            self._at[name] = slice(start, start + size)
            start += size
        begin = self._memory.data_ptr()
        there = {"values": values, "scales": values, "fine": fine, "plain": plain}
        self.struct = _Rows(*(begin + self._at[name].start if has else None for name, has in there.items()))

    def __len__(self) -> int:
        return self._num_rows

    @property
    def values(self) -> Tensor:
        return self._part("values")

    @property
    def scales(self) -> Tensor:
        return self._part("scales", torch.float32)

    @property
    def fine(self) -> Tensor | None:
        return self._part("fine") if self.struct.fine else None

    @property
    def plain(self) -> Tensor | None:
        return self._part("plain", torch.bfloat16) if self.struct.plain else None

    def _part(self, name: str, dtype: torch.dtype = torch.uint8) -> Tensor:
        return self._memory[self._at[name]].view(dtype).view(self._num_rows, -1)


class NativeInt8:
    """All of `Int8Ops`. Tensors must be contiguous and on the CPU. Not thread-safe."""

    def __init__(self) -> None:
        functions = _functions()
        self._quantize = functions.batchinfer_quantize
        self._rms_norm_quantize = functions.batchinfer_rms_norm_quantize
        self._linear, self._gated = functions.batchinfer_int8_linear, functions.batchinfer_int8_gated
        self._largest = functions.batchinfer_largest
        self._scratch_bytes = functions.batchinfer_largest_scratch_bytes
        self._quantize_weight = functions.batchinfer_quantize_weight
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def quantize_weight(self, rows: Tensor, values: Tensor, scales: Tensor, fine: Tensor | None = None) -> None:
        assert rows.is_contiguous() and values.is_contiguous() and scales.is_contiguous()
        assert fine is None or fine.is_contiguous()
        scratch = torch.empty(values.shape[1])
        addresses = (address(x) for x in (values, fine, scales, scratch))
        self._quantize_weight(rows.data_ptr(), *rows.shape, *addresses)

    def pack(
        self, values: Tensor | None, scales: Tensor | None, plain: Tensor | None, fine: Tensor | None = None
    ) -> PackedLayer:
        packed: dict[str, Tensor] = {}
        num_fine = 0 if fine is None else len(fine)
        num_values = 0 if values is None else len(values) - num_fine
        width = 0
        if values is not None and scales is not None:
            width = values.shape[1]
            if fine is not None:
                packed["fine"] = _pack_fine(values[num_values:], fine, scales[num_values:])
            values, scales = _whole(values[:num_values], PANEL), _whole(scales[:num_values], PANEL)
            packed |= _pack_bytes((values, scales), (values[HALF:], scales[HALF:]), step=PANEL)
        if plain is not None:
            wide = _whole(plain.to(torch.bfloat16), PANEL, TURNED)
            width = wide.shape[1]
            packed["plain"] = _panels(wide, 2)
            if values is None:
                packed |= _pack_shortlist(wide)
        sizes = (num_values, num_fine, 0 if plain is None else len(plain), width)
        return PackedLayer(packed | {"sizes": torch.tensor(sizes)})

    def pack_gated(self, gate_values: Tensor, gate_scales: Tensor, up_values: Tensor, up_scales: Tensor) -> PackedLayer:
        gate, up = (
            (_whole(values, TURNED), _whole(scales, TURNED))
            for values, scales in ((gate_values, gate_scales), (up_values, up_scales))
        )
        sizes = torch.tensor([2 * gate[0].shape[0], 0, 0, gate[0].shape[1]])
        return PackedLayer(_pack_bytes(gate, up, step=HALF) | {"sizes": sizes})

    def quantize(self, x: Tensor, *, values: bool = True, fine: bool = False, plain: bool = False) -> NativeRows:
        num_rows, width = x.shape
        rows = NativeRows(num_rows, width, values=values, fine=fine, plain=plain)
        x = x.contiguous()
        self._quantize(x.data_ptr(), num_rows, width, rows.struct, torch.get_num_threads())
        return rows

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        values: bool = True,
        fine: bool = False,
        plain: bool = False,
    ) -> NativeRows:
        num_rows, width = x.shape
        rows = NativeRows(num_rows, width, values=values, fine=fine, plain=plain)
        x = x.contiguous()
        self._rms_norm_quantize(
            x.data_ptr(), weight.data_ptr(), eps, num_rows, width, rows.struct, torch.get_num_threads()
        )
        return rows

    def linear(
        self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        structure, num_rows, rows = packed_struct(packed), len(x), _rows(x)
        assert (rows.fine or not structure.num_fine) and (rows.plain or not structure.num_plain)
        y = residual
        if y is None:
            y = torch.empty(num_rows, structure.num_values + structure.num_fine + structure.num_plain)
        assert y.is_contiguous()
        self._linear(
            rows,
            num_rows,
            structure,
            address(bias),
            y.data_ptr(),
            residual is not None,
            torch.get_num_threads(),
        )
        return y

    def gated(self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None) -> NativeRows:
        structure, num_rows = packed_struct(packed), len(x)
        width = structure.num_values // 2
        rows = NativeRows(num_rows, width, values=True, fine=False, plain=False)
        inner = torch.empty(num_rows, _gated_stride(width))
        bias = None if bias is None else gated_bias(bias)
        threads = torch.get_num_threads()
        self._gated(_rows(x), num_rows, structure, address(bias), inner.data_ptr(), rows.struct, threads)
        return rows

    def argmax(self, x: QuantizedRows, packed: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        if "lengths" not in packed:
            y = self.linear(x, packed, None, None)
            return y.argmax(-1), y.isfinite().all(-1)
        plain = x.plain
        assert plain is not None
        if not x.values.numel():
            x = self.quantize(plain.float(), plain=True)  # a bfloat16 number is rounded to itself
        threads = torch.get_num_threads()
        size = self._scratch_bytes(len(x), packed_struct(packed), threads)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        index = torch.empty(len(x), dtype=torch.int64)
        finite = torch.empty(len(x), dtype=torch.bool)
        self._largest(
            _rows(x),
            len(x),
            packed_struct(packed),
            packed["lengths"].data_ptr(),
            packed["errors"].data_ptr(),
            index.data_ptr(),
            finite.data_ptr(),
            self._scratch.data_ptr(),
            threads,
        )
        return index, finite


def _gated_stride(width: int) -> int:
    """`gated_stride` of layers.h."""
    return (width // HALF | 1) * HALF


def gated_bias(bias: Tensor) -> Tensor:
    """[gate | up] in the order of the panels of `pack_gated`."""
    return _interleave(*(_whole(part, TURNED) for part in bias.chunk(2))).contiguous()


def _pack_shortlist(plain: Tensor) -> dict[str, Tensor]:
    """plain bfloat16 [N, K], whole panels and blocks. Nothing where a weight is not finite: no output is then, and only
    all outputs show it."""
    features, width = plain.shape
    packed = {
        "bytes": _byte_panels(features // PANEL, width),
        "lengths": torch.empty(features),
        "errors": torch.empty(features),
    }
    threads = torch.get_num_threads()
    scratch = torch.empty(threads * width * 5, dtype=torch.int8)
    addresses = (x.data_ptr() for x in (*packed.values(), scratch))
    _functions().batchinfer_pack_shortlist(plain.data_ptr(), features, width, *addresses, threads)
    return packed if packed["lengths"].isfinite().all() and packed["errors"].isfinite().all() else {}


def _pack_bytes(low: tuple[Tensor, Tensor], high: tuple[Tensor, Tensor], *, step: int) -> dict[str, Tensor]:
    """Values int8 [N, Kp] and scales float32 [N] to panels: HALF rows of `low` and HALF of `high` each, those of the
    next panel `step` rows further on. Whole panels."""
    num_rows, width = low[0].shape
    panels = _byte_panels(num_rows // step, width)
    assert all(x.is_contiguous() for x in (*low, *high))
    _functions().batchinfer_pack_panels(
        *(x.data_ptr() for x in (*low, *high)), step, num_rows // step, width, panels.data_ptr()
    )
    return {"bytes": panels}


def _pack_fine(values: Tensor, fine: Tensor, scales: Tensor) -> Tensor:
    """Values and what is finer int8 [N, Kp] and scales float32 [N] to panels."""
    values, fine, scales = (_whole(x, PANEL).contiguous() for x in (values, fine, scales))
    panels, width = len(values) // PANEL, values.shape[1]
    numbers = 4 + 2 * (4 * -(-width // group_of(width)) + width)
    packed = torch.empty(panels, numbers * PANEL, dtype=torch.int8)
    addresses = (x.data_ptr() for x in (values, fine, scales))
    _functions().batchinfer_pack_fine_panels(*addresses, panels, width, packed.data_ptr())
    return packed


def _byte_panels(panels: int, width: int) -> Tensor:
    """Not initialised: for each of PANEL features a scale, a number for each group, and the bytes."""
    return torch.empty(panels, (4 + 4 * -(-width // group_of(width)) + width) * PANEL, dtype=torch.int8)


def _panels(rows: Tensor, together: int) -> Tensor:
    """[N, K] to [N / PANEL, K / together, 2, HALF, together]. `together` numbers are four bytes: moved as one."""
    moved = rows.view(torch.int32).view(-1, PANEL, rows.shape[1] // together).transpose(1, 2).contiguous()
    return moved.view(rows.dtype).view(*moved.shape[:2], 2, HALF, together)


def _whole(x: Tensor, features: int, width: int = 1) -> Tensor:
    """x [N, K] or [N] with zeros up to multiples of these."""
    rows = (0, -x.shape[0] % features)
    missing = rows if x.dim() == 1 else (0, -x.shape[1] % width, *rows)
    return F.pad(x, missing) if any(missing) else x  # a copy of all weights was a tenth of loading them


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Numbers in turn: HALF of gate, HALF of up."""
    return torch.stack((gate.view(-1, HALF), up.view(-1, HALF)), 1).flatten()


def _rows(x: QuantizedRows) -> _Rows:
    if isinstance(x, NativeRows):
        return x.struct
    return _Rows(*(address(part) for part in (x.values, x.scales, x.fine, x.plain)))


def packed_struct(packed: Mapping[str, Tensor]) -> PackedStruct:
    assert isinstance(packed, PackedLayer)
    return packed.struct


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@cache
def _functions() -> Any:
    """The library, its functions' types declared."""
    found = library.load()
    rows, packed, pointer, number = ctypes.POINTER(_Rows), ctypes.POINTER(PackedStruct), ctypes.c_void_p, ctypes.c_long
    for name, types in {
        "batchinfer_quantize": [pointer, number, number, rows, ctypes.c_int],
        "batchinfer_rms_norm_quantize": [pointer, pointer, ctypes.c_float, number, number, rows, ctypes.c_int],
        "batchinfer_int8_linear": [rows, number, packed, pointer, pointer, ctypes.c_int, ctypes.c_int],
        "batchinfer_int8_gated": [rows, number, packed, pointer, pointer, rows, ctypes.c_int],
        "batchinfer_quantize_weight": [pointer, number, number, *[pointer] * 4],
        "batchinfer_pack_panels": [*[pointer] * 4, *[number] * 3, pointer],
        "batchinfer_pack_fine_panels": [*[pointer] * 3, number, number, pointer],
        "batchinfer_pack_shortlist": [pointer, number, number, *[pointer] * 4, ctypes.c_int],
        "batchinfer_largest": [rows, number, packed, *[pointer] * 5, ctypes.c_int],
    }.items():
        getattr(found, name).argtypes = types
        getattr(found, name).restype = None
    found.batchinfer_largest_scratch_bytes.argtypes = [number, packed, ctypes.c_int]
    found.batchinfer_largest_scratch_bytes.restype = number
    return found
