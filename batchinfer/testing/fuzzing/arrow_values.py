"""Arrow types of every kind, nested at will, and arrays of them with the values that break things."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa

from batchinfer.testing.fuzzing.case import NASTY_TEXTS

_UNITS = ("s", "ms", "us", "ns")
_ZONES = (None, "UTC", "+05:30", "Europe/Berlin", "America/New_York")
_NAMES = ("", "a", "b", "a.b", "item", "element", "key", "value", "A", "list", "\u00e9", "x" * 200)
_BITS = {8: "int8", 16: "int16", 32: "int32", 64: "int64"}


class Marked(pa.ExtensionType):  # type: ignore[misc]
    """An extension type that this process does not register: readers see its storage."""

    def __init__(self, storage: pa.DataType) -> None:
        super().__init__(storage, "batchinfer.testing.marked")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Marked:
        return cls(storage)


def plain_type(rng: Random) -> pa.DataType:
    """Any type without children."""
    makers: tuple[Callable[[], pa.DataType], ...] = (
        pa.null,
        pa.bool_,
        lambda: rng.choice((pa.int8, pa.int16, pa.int32, pa.int64))(),
        lambda: rng.choice((pa.uint8, pa.uint16, pa.uint32, pa.uint64))(),
        lambda: rng.choice((pa.float16, pa.float32, pa.float64))(),
        lambda: rng.choice((pa.string, pa.large_string, pa.string_view))(),
        lambda: rng.choice((pa.binary, pa.large_binary, pa.binary_view))(),
        lambda: pa.binary(rng.choice((1, 7, 16))),
        lambda: pa.timestamp(rng.choice(_UNITS), rng.choice(_ZONES)),
        lambda: rng.choice((pa.date32, pa.date64))(),
        lambda: rng.choice((pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))),
        lambda: pa.duration(rng.choice(_UNITS)),
        pa.month_day_nano_interval,
        lambda: rng.choice((pa.decimal32(9, 2), pa.decimal64(18, 0), pa.decimal128(38, 10), pa.decimal256(76, 38))),
        lambda: pa.decimal128(rng.randint(1, 38), rng.choice((0, 1))),
        lambda: pa.uuid() if rng.random() < 0.5 else pa.json_(),
    )
    return rng.choice(makers)()


def any_type(rng: Random, depth: int = 0) -> pa.DataType:
    """Any type; nested ones up to four levels."""
    if depth >= 4 or rng.random() < 0.55:
        return plain_type(rng)

    def inner() -> pa.DataType:
        return any_type(rng, depth + 1)

    match rng.randrange(10):
        case 0:
            return pa.list_(_field(rng, inner()))
        case 1:
            return pa.large_list(inner())
        case 2:
            return pa.list_(inner(), rng.choice((0, 1, 3)))
        case 3:
            return rng.choice((pa.list_view, pa.large_list_view))(inner())
        case 4:
            return pa.map_(rng.choice((pa.string(), pa.int32(), pa.date32())), inner())
        case 5:
            value = rng.choice((pa.string(), pa.large_string(), pa.binary(), pa.int64(), pa.float32(), pa.date32()))
            return pa.dictionary(rng.choice((pa.int8(), pa.int16(), pa.int32(), pa.uint8())), value, rng.random() < 0.2)
        case 6:
            return pa.run_end_encoded(rng.choice((pa.int16(), pa.int32())), plain_type(rng))
        case 7:
            return Marked(rng.choice((pa.string(), pa.int64(), pa.list_(pa.int8()))))
        case 8 if depth == 0 and rng.random() < 0.3:
            return pa.sparse_union([pa.field("a", pa.int64()), pa.field("b", pa.string())])
        case _:
            return pa.struct([_field(rng, inner()) for _ in range(rng.choice((0, 1, 2, 3)))])


def _field(rng: Random, kind: pa.DataType) -> pa.Field:
    return pa.field(rng.choice(_NAMES), kind, pa.types.is_null(kind) or rng.random() < 0.8)


def array_of(rng: Random, kind: pa.DataType, size: int, nulls: bool = True) -> pa.Array:
    """`size` values of the type, extreme ones among them. Raises ArrowException or another error of pyarrow's where
    it can't make such an array."""
    t = pa.types
    if isinstance(kind, (Marked, pa.BaseExtensionType)):
        return pa.ExtensionArray.from_storage(kind, _storage(rng, kind, size))
    if t.is_dictionary(kind):
        values = array_of(rng, kind.value_type, rng.choice((1, 3, 100)), nulls=False)
        most = min(len(values), 1 << (kind.index_type.bit_width - 1))
        places = [None if nulls and rng.random() < 0.2 else rng.randrange(most) for _ in range(size)]
        return pa.DictionaryArray.from_arrays(pa.array(places, kind.index_type), values, ordered=kind.ordered)
    if t.is_run_end_encoded(kind):
        ends = sorted(set(rng.choices(range(1, size + 1), k=3)) | {size}) if size else []
        return pa.RunEndEncodedArray.from_arrays(
            pa.array(ends, kind.run_end_type), array_of(rng, kind.value_type, len(ends))
        )
    if t.is_union(kind):
        children = [array_of(rng, field.type, size) for field in kind]
        return pa.UnionArray.from_sparse(
            pa.array([rng.randrange(2) for _ in range(size)], pa.int8()), children, ["a", "b"]
        )
    if t.is_struct(kind):
        if not kind.num_fields:
            return pa.array([{} for _ in range(size)], kind)
        children = [array_of(rng, field.type, size, nulls=field.nullable) for field in kind]
        mask = pa.array([nulls and rng.random() < 0.2 for _ in range(size)])
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if t.is_map(kind):
        offsets = _offsets(rng, size, nulls=False)
        count = offsets[-1] or 0
        keys = array_of(rng, kind.key_type, count, nulls=False)
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, array_of(rng, kind.item_type, count))
    if t.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(array_of(rng, kind.value_type, size * kind.list_size), kind.list_size)
    if t.is_list(kind) or t.is_large_list(kind):
        large = t.is_large_list(kind)
        offsets = _offsets(rng, size, nulls)
        last = next((offset for offset in reversed(offsets) if offset is not None), 0)
        values = array_of(rng, kind.value_type, last, nulls=kind.value_field.nullable)
        maker = pa.LargeListArray if large else pa.ListArray
        return maker.from_arrays(pa.array(offsets, pa.int64() if large else pa.int32()), values, type=kind)
    if t.is_list_view(kind) or t.is_large_list_view(kind):
        large = t.is_large_list_view(kind)
        integer = pa.int64() if large else pa.int32()
        values = array_of(rng, kind.value_type, 6)
        starts = [rng.randrange(6) for _ in range(size)]
        sizes = [rng.randint(0, 6 - start) for start in starts]
        maker = pa.LargeListViewArray if large else pa.ListViewArray
        return maker.from_arrays(pa.array(starts, integer), pa.array(sizes, integer), values, type=kind)
    return _plain_array(rng, kind, size, nulls)


def _storage(rng: Random, kind: Any, size: int) -> pa.Array:
    if str(kind).startswith("extension<arrow.json"):
        return pa.array([rng.choice((None, "{}", "[1]", "not json")) for _ in range(size)], kind.storage_type)
    return array_of(rng, kind.storage_type, size)


def _offsets(rng: Random, size: int, nulls: bool) -> list[int | None]:
    offsets: list[int | None] = [0]
    last = 0
    for _ in range(size):
        last += rng.choice((0, 0, 1, 2))
        offsets.append(last)
    if nulls and size > 1 and rng.random() < 0.4:
        offsets[rng.randrange(size)] = None
    return offsets


def _plain_array(rng: Random, kind: pa.DataType, size: int, nulls: bool) -> pa.Array:
    t = pa.types
    if t.is_null(kind):
        return pa.nulls(size)
    values = [None if nulls and rng.random() < 0.15 else _value(rng, kind) for _ in range(size)]
    if t.is_string(kind) and rng.random() < 0.1:
        raw = [
            None if value is None else rng.choice((value.encode(), b"\xff\xfe", b"\xed\xa0\x80")) for value in values
        ]
        return pa.array(raw, pa.binary()).view(kind)
    if t.is_temporal(kind) and not t.is_interval(kind):
        bits = kind.bit_width
        return pa.array(values, getattr(pa, _BITS[bits])()).view(kind)
    return pa.array(values, kind)


def _value(rng: Random, kind: pa.DataType) -> Any:
    t = pa.types
    if t.is_boolean(kind):
        return rng.random() < 0.5
    if t.is_interval(kind):
        return pa.MonthDayNano([rng.choice((0, 1, -(1 << 31))), rng.randrange(40), rng.choice((0, (1 << 63) - 1))])
    if t.is_integer(kind):
        high = (1 << (kind.bit_width - t.is_signed_integer(kind))) - 1
        low = -high - 1 if t.is_signed_integer(kind) else 0
        return rng.choice((0, 1, low, high, rng.randint(low, high)))
    if t.is_temporal(kind):
        # As integers: seconds beyond milliseconds' range, times of day beyond a day, days beyond Python's years.
        high = (1 << (kind.bit_width - 1)) - 1
        return rng.choice((0, 1, -1, 86_399, 86_400, 1_700_000_000, high, -high, -62_135_596_800 % high))
    if t.is_floating(kind):
        return rng.choice((0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 65504.0, 6e-8))
    if t.is_decimal(kind):
        digits = "9" * kind.precision
        whole = rng.choice((digits, f"-{digits}", "0", "1"))
        return decimal.Context(prec=90).create_decimal(whole).scaleb(-kind.scale, decimal.Context(prec=90))
    if t.is_fixed_size_binary(kind):
        return rng.randbytes(kind.byte_width)
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind):
        return rng.choice((b"", b"\0", b"\xff\xfe", rng.randbytes(40)))
    return rng.choice(NASTY_TEXTS)
