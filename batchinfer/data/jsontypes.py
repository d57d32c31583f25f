"""Arrow types for JSON values: inferred over all rows, and values brought to them.

One kind of value everywhere gives its exact type: integers stay integers (int64, else uint64, else decimal), numeric
text stays text, dates stay text. A column with several kinds becomes text when text is among them (unless another
kind makes up nine tenths), so that nothing of a carried column is lost; a column that is used as something (`Kind`) is
of that kind, so that one wrong row spoils none of the others. A row whose value is not of the column's kind is reported
by `to_array`. Not here: lines and files (see `jsonl`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

MAX_EXACT_FLOAT = 1 << 53
MAX_WHOLE = 10**76 - 1  # of decimal256
DOMINANT = 0.9
Kind = Literal["text", "number", "object", "numbers", "objects"]  # the last two are lists
_KINDS: dict[Kind, tuple[type, ...]] = {
    "text": (str,),
    "number": (int, float),
    "object": (dict,),
    "numbers": (list,),
    "objects": (list,),
}
_ITEMS: dict[Kind, Kind] = {"numbers": "number", "objects": "object"}
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_NAMES = {
    "str": "text",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
}


_ARROW_KINDS = (
    (str, pa.types.is_string),
    (int, pa.types.is_integer),
    (float, pa.types.is_floating),
    (bool, pa.types.is_boolean),
    (list, pa.types.is_list),
    (dict, pa.types.is_struct),
)


class Shape:
    """What values have been seen at one place: counts by kind, range of integers (and how many are beyond all types,
    which are in no range), list items, fields."""

    __slots__ = ("counts", "fields", "high", "item", "low", "num_beyond")

    def __init__(self) -> None:
        self.counts: dict[type, int] = {}
        self.num_beyond = 0
        self.low = 0
        self.high = 0
        self.item: Shape | None = None
        self.fields: dict[str, Shape] = {}

    def add(self, value: Any) -> None:
        if value is None:
            return
        kind = type(value)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if kind is int:
            if not -MAX_WHOLE <= value <= MAX_WHOLE:
                self.num_beyond += 1
            elif value < self.low:
                self.low = value
            elif value > self.high:
                self.high = value
        elif kind is list:
            item = self.item
            if item is None:
                item = self.item = Shape()
            for entry in value:
                item.add(entry)
        elif kind is dict:
            self.add_fields(value)

    def add_records(self, records: Sequence[dict[str, Any]]) -> None:
        """Many objects at once, through Arrow's own inference where they all agree."""
        try:
            array = pa.array(records)
        except (pa.ArrowException, OverflowError):
            for record in records:
                self.add_fields(record)
        else:
            if pa.types.is_struct(array.type):
                self._add_array(array)

    def _add_array(self, array: pa.Array) -> None:
        kind = array.type
        count = len(array) - array.null_count
        if not count or pa.types.is_null(kind):
            return
        own = next(python for python, test in _ARROW_KINDS if test(kind))
        self.counts[own] = self.counts.get(own, 0) + count
        if own is int:
            seen = pc.min_max(array)
            self.low, self.high = min(self.low, seen["min"].as_py()), max(self.high, seen["max"].as_py())
        elif own is list:
            self.item = self.item or Shape()
            self.item._add_array(array.flatten())
        elif own is dict:
            for i, child in enumerate(array.flatten()):
                self.fields.setdefault(kind.field(i).name, Shape())._add_array(child)

    def add_fields(self, record: dict[str, Any]) -> None:
        fields = self.fields
        for name, entry in record.items():
            if entry is None and name in fields:
                continue
            shape = fields.get(name)
            if shape is None:
                shape = fields[name] = Shape()
            shape.add(entry)

    def column(self, used_as: Kind | None = None) -> tuple[pa.DataType, bool]:
        """(type, whether some values are not of it) of a column; `used_as`: what it must hold to be of use."""
        if used_as is not None:
            wanted = {kind: count for kind, count in self.counts.items() if kind in _KINDS[used_as]}
            if wanted:
                if used_as in _ITEMS and self.item is not None:
                    item, mixed = self.item.column(_ITEMS[used_as])
                    own = pa.list_(item)
                else:
                    own, mixed = self._of_kind(float if len(wanted) > 1 else next(iter(wanted)))
                return own, mixed or len(wanted) < len(self.counts)
        return self.arrow(top=True)

    def arrow(self, top: bool = False) -> tuple[pa.DataType, bool]:
        """(type, whether some values are not of it). `top`: a column, where a dominant kind can win over text."""
        counts = dict(self.counts)
        if int in counts and float in counts:  # JSON has one kind of number
            counts[float] += counts.pop(int)
        if not counts:
            return pa.null(), False
        total = sum(counts.values())
        kind = max(counts, key=lambda k: counts[k])
        if len(counts) > 1 and not (top and counts[kind] >= DOMINANT * total):
            kind = str
        own, mixed = self._of_kind(kind)
        return own, mixed or len(counts) > 1

    def _of_kind(self, kind: type) -> tuple[pa.DataType, bool]:
        if kind is str:
            return pa.string(), False
        if kind is bool:
            return pa.bool_(), False
        if kind is float:
            return pa.float64(), self.num_beyond > 0 or max(self.high, -self.low) > MAX_EXACT_FLOAT
        if kind is int:
            if self.num_beyond == self.counts[int]:
                return pa.string(), True
            return _integer_type(self.low, self.high), self.num_beyond > 0
        if kind is list:
            item, mixed = self.item.arrow() if self.item is not None else (pa.null(), False)
            return pa.list_(item), mixed
        if not self.fields:
            return pa.null(), True  # only `{}`: Parquet has no struct without fields
        inner = {name: shape.arrow() for name, shape in self.fields.items()}
        return pa.struct([(name, own) for name, (own, _) in inner.items()]), any(m for _, m in inner.values())


def _integer_type(low: int, high: int) -> pa.DataType:
    if low >= -(1 << 63) and high < 1 << 63:
        return pa.int64()
    if low >= 0 and high < 1 << 64:
        return pa.uint64()
    return pa.decimal128(38, 0) if max(high, -low) < 10**38 else pa.decimal256(76, 0)


def clean_surrogates(value: Any) -> Any:
    """The value with lone surrogates, which no encoding has, replaced by U+FFFD."""
    if isinstance(value, str):
        return _LONE_SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [clean_surrogates(entry) for entry in value]
    if isinstance(value, dict):
        return {clean_surrogates(name): clean_surrogates(entry) for name, entry in value.items()}
    return value


def to_array(values: Sequence[Any], kind: pa.DataType, mixed: bool) -> tuple[pa.Array, dict[int, str]]:
    """Values as an array of `kind`, and for each place whose value is not of that kind what is wrong there."""
    if not mixed:
        try:
            return pa.array(values, kind), {}
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            pass
    problems: dict[int, str] = {}
    kept = []
    for i, value in enumerate(values):
        found: list[str] = []
        kept.append(_coerce(value, kind, "", found))
        if found:
            problems[i] = found[0]
    return pa.array(kept, kind), problems


def _coerce(value: Any, kind: pa.DataType, path: str, found: list[str]) -> Any:
    """`value` as `kind`. Of the wrong kind: text keeps its JSON, others become null; `found` gets the reason."""
    t = pa.types
    if value is None or (t.is_null(kind) and value == {}):
        return None
    if t.is_string(kind) or t.is_large_string(kind):
        if isinstance(value, str):
            return value
        found.append(_wrong(value, kind, path))
        return json.dumps(value, ensure_ascii=False)
    if (t.is_list(kind) or t.is_large_list(kind)) and isinstance(value, list):
        return [_coerce(entry, kind.value_type, path + "[]", found) for entry in value]
    if t.is_struct(kind) and isinstance(value, dict):
        return {f.name: _coerce(value.get(f.name), f.type, f"{path}.{f.name}", found) for f in kind}
    if _is_plain_number(value, kind):
        try:
            pa.scalar(value, kind)
            return value
        except (pa.ArrowException, OverflowError, ValueError):
            pass
    found.append(_wrong(value, kind, path))
    return None


def _wrong(value: Any, kind: pa.DataType, path: str) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    shown = shown if len(shown) <= 40 else shown[:40] + "…"
    where = f" at {path.lstrip('.')}" if path else ""
    return f"{_NAMES[type(value).__name__]}{where} ({shown}) where other rows make the type {kind}"


def _is_plain_number(value: Any, kind: pa.DataType) -> bool:
    """A number or boolean that Python and Arrow agree about: no bool as number, no integer that a float would round."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) != pa.types.is_boolean(kind):
        return False
    rounded = pa.types.is_floating(kind) and isinstance(value, int) and abs(value) > MAX_EXACT_FLOAT
    return not rounded
