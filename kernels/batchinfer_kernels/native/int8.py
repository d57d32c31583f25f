"""`Int8Ops` in C: linear layers with int8 weights over activations in bytes (`batchinfer_kernels.int8` says what).

Weights are packed once, after loading, into panels of PANEL output features; `panels.h` says how a panel lies in
memory. `pack` returns, as tensors: "bytes", the features that are kept as such, with what
belongs to them, "plain", those in bfloat16, and "sizes", how many of each there are, and their padded width. A layer
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

from batchinfer_kernels.int8 import GROUP, TURNED, QuantizedRows
from batchinfer_kernels.native import library

PANEL = 32
HALF = PANEL // 2


class _Rows(ctypes.Structure):
    """`struct quantized`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("values", "scales", "plain")]


class PackedStruct(ctypes.Structure):
    """`struct packed`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bytes", "plain")),
        *((name, ctypes.c_long) for name in ("width", "num_values", "num_plain")),
    ]


class PackedLayer(dict[str, Tensor]):
    """A layer's tensors by name, and what the C code is told of them."""

    __slots__ = ("struct",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        num_values, num_plain, width = self["sizes"].tolist()
        self.struct = PackedStruct(address(self.get("bytes")), address(self.get("plain")), width, num_values, num_plain)


class NativeRows:
    """`QuantizedRows` in one piece of memory; tensors are made of it for who asks."""

    __slots__ = ("_at", "_memory", "_num_rows", "_width", "struct")

    def __init__(self, num_rows: int, width: int, values: bool, plain: bool) -> None:
        """Not initialised; `width` is K."""
        width = -(-width // TURNED) * TURNED
        of_values = num_rows * width if values else 0
        of_plain = 2 * num_rows * width if plain else 0
        of_scales = 4 * num_rows * -(-width // GROUP) if values else 0
        self._num_rows, self._width = num_rows, width
        self._memory = torch.empty(of_values + of_plain + of_scales, dtype=torch.uint8)
        scales_at = of_values + of_plain
        self._at = (0, of_values, scales_at)
        begin = self._memory.data_ptr()
        plain_address = begin + of_values if plain else None
        if values:
            self.struct = _Rows(begin, begin + scales_at, plain_address)
        else:
            self.struct = _Rows(None, None, plain_address)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def values(self) -> Tensor:
        return self._memory[: self._at[1]].view(self._num_rows, -1)

    @property
    def scales(self) -> Tensor:
        return self._memory[self._at[2] :].view(torch.float32).view(self._num_rows, -1)

    @property
    def plain(self) -> Tensor | None:
        if self._at[1] == self._at[2]:
            return None
        return self._memory[self._at[1] : self._at[2]].view(torch.bfloat16).view(self._num_rows, self._width)


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

    def quantize_weight(self, rows: Tensor, values: Tensor, scales: Tensor) -> None:
        assert rows.is_contiguous() and values.is_contiguous() and scales.is_contiguous()
        scratch = torch.empty(values.shape[1])
        addresses = (x.data_ptr() for x in (values, scales, scratch))
        self._quantize_weight(rows.data_ptr(), *rows.shape, *addresses)

    def pack(self, values: Tensor | None, scales: Tensor | None, plain: Tensor | None) -> PackedLayer:
        packed: dict[str, Tensor] = {}
        width = 0
        features = [0 if x is None else x.shape[0] for x in (values, plain)]
        if values is not None and scales is not None:
            values, scales = _whole(values, PANEL), _whole(scales, PANEL)
            width = values.shape[1]
            packed |= _pack_bytes((values, scales), (values[HALF:], scales[HALF:]), step=PANEL)
        if plain is not None:
            wide = _whole(plain.to(torch.bfloat16), PANEL, TURNED)
            width = wide.shape[1]
            packed["plain"] = _panels(wide, 2)
            if values is None:
                packed |= _pack_shortlist(wide)
        return PackedLayer(packed | {"sizes": torch.tensor([*features, width])})

    def pack_gated(self, gate_values: Tensor, gate_scales: Tensor, up_values: Tensor, up_scales: Tensor) -> PackedLayer:
        gate, up = (
            (_whole(values, TURNED), _whole(scales, TURNED))
            for values, scales in ((gate_values, gate_scales), (up_values, up_scales))
        )
        sizes = torch.tensor([2 * gate[0].shape[0], 0, gate[0].shape[1]])
        return PackedLayer(_pack_bytes(gate, up, step=HALF) | {"sizes": sizes})

    def quantize(self, x: Tensor, *, values: bool = True, plain: bool = False) -> NativeRows:
        num_rows, width = x.shape
        rows = NativeRows(num_rows, width, values, plain)
        x = x.contiguous()
        self._quantize(x.data_ptr(), num_rows, width, rows.struct, torch.get_num_threads())
        return rows

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, values: bool = True, plain: bool = False
    ) -> NativeRows:
        num_rows, width = x.shape
        rows = NativeRows(num_rows, width, values, plain)
        x = x.contiguous()
        self._rms_norm_quantize(
            x.data_ptr(), weight.data_ptr(), eps, num_rows, width, rows.struct, torch.get_num_threads()
        )
        return rows

    def linear(
        self, x: QuantizedRows, packed: Mapping[str, Tensor], bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        structure, num_rows = packed_struct(packed), len(x)
        y = residual
        if y is None:
            y = torch.empty(num_rows, structure.num_values + structure.num_plain)
        assert y.is_contiguous()
        self._linear(
            _rows(x),
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
        rows = NativeRows(num_rows, structure.num_values // 2, True, False)
        bias = None if bias is None else gated_bias(bias)
        self._gated(_rows(x), num_rows, structure, address(bias), rows.struct, torch.get_num_threads())
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


def _byte_panels(panels: int, width: int) -> Tensor:
    """Not initialised: for each of PANEL features a scale, a number for each group, and the bytes."""
    return torch.empty(panels, (4 + 4 * -(-width // GROUP) + width) * PANEL, dtype=torch.int8)


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
    return _Rows(*(address(part) for part in (x.values, x.scales, x.plain)))


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
        "batchinfer_int8_gated": [rows, number, packed, pointer, rows, ctypes.c_int],
        "batchinfer_quantize_weight": [pointer, number, number, *[pointer] * 3],
        "batchinfer_pack_panels": [*[pointer] * 4, *[number] * 3, pointer],
        "batchinfer_pack_shortlist": [pointer, number, number, *[pointer] * 4, ctypes.c_int],
        "batchinfer_largest": [rows, number, packed, *[pointer] * 5, ctypes.c_int],
    }.items():
        getattr(found, name).argtypes = types
        getattr(found, name).restype = None
    found.batchinfer_largest_scratch_bytes.argtypes = [number, packed, ctypes.c_int]
    found.batchinfer_largest_scratch_bytes.restype = number
    return found
