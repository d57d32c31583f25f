"""Batches of input rows, and row-level trouble: values that do not fit the united schema, text that is no UTF-8.

Such a value becomes null (or is repaired) and its row gets a `RowError`; the other rows are as good as before. Not
here: where batches come from (see `dataset`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.data.schema import conform, nulls
from batchinfer.types.rows import ErrorClass, RowError


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows of one file, in the united schema (or the columns asked for, in the order asked for).

    errors: by row index in the file. Values that such a row lost are null.
    """

    start: int
    table: pa.RecordBatch
    errors: Mapping[int, RowError] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + int(self.table.num_rows)

    def slice(self, start: int, stop: int) -> RowBatch:
        """Rows [start, stop) of the file, which must lie in this batch."""
        errors = {row: error for row, error in self.errors.items() if start <= row < stop}
        return RowBatch(start=start, table=self.table.slice(start - self.start, stop - start), errors=errors)

    def to_rows(self) -> list[dict[str, Any]]:
        """Native Python values, one dict a row: lists stay lists, null is None, nothing goes through pandas."""
        columns = [_to_python(self.table.column(i)) for i in range(self.table.num_columns)]
        names = self.table.schema.names
        if not columns:
            return [{} for _ in range(self.table.num_rows)]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _to_python(array: pa.Array) -> list[Any]:
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):  # times finer or farther than Python's: as text
        return [_scalar_to_python(value) for value in array]


def _scalar_to_python(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        pass
    for kind in (pa.string(), pa.int64(), pa.int32()):  # ISO text, else the number that it is stored as
        try:
            text = str(value.cast(kind).as_py())
        except (pa.ArrowException, ValueError, OverflowError):
            continue
        if not text.startswith("<"):  # "<value out of range: ...>"
            return text
    return None


def in_schema(batch: RowBatch, schema: pa.Schema) -> RowBatch:
    """The batch in the united schema."""
    errors = dict(batch.errors)
    places = {name: i for i, name in enumerate(batch.table.schema.names)}
    arrays = []
    for target in schema:
        if target.name in places:
            array = batch.table.column(places[target.name])
            arrays.append(_conform_column(array, target, batch.start, errors))
        else:
            arrays.append(nulls(batch.table.num_rows, target.type))
    if not arrays:
        table = batch.table.select([])
    else:
        table = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return RowBatch(start=batch.start, table=table, errors=errors)


def _conform_column(array: pa.Array, target: pa.Field, start: int, errors: dict[int, RowError]) -> pa.Array:
    try:
        return conform(array, target.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    pieces = []
    for i in range(len(array)):
        try:
            pieces.append(conform(array.slice(i, 1), target.type))
        except pa.ArrowInvalid as error:
            pieces.append(nulls(1, target.type))
            message = f"column {target.name!r} can't be kept as {target.type}: {error}"
            errors.setdefault(start + i, RowError(ErrorClass.INVALID_ROW, message))
    return pa.concat_arrays(pieces)


def check_text(start: int, table: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, RowError]]:
    """Text columns may hold bytes that are no UTF-8 (written unchecked): such a value is repaired with U+FFFD, or
    null where it is nested, and its row gets an error. So is a time of day beyond a day. Otherwise it would fail much
    later, when the part is written or read. Raises ArrowInvalid where more than values is broken: a column whose
    offsets lead nowhere must not be touched."""
    try:
        table.validate(full=True)
        return table, {}
    except pa.ArrowInvalid:
        pass
    errors: dict[int, RowError] = {}
    arrays = []
    for column, array in zip(table.schema, table.columns, strict=True):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            _check_all_but_values(array)
            try:
                array = _repair(column, array, start, errors)
            except pa.ArrowNotImplementedError:  # of extension types within runs (26.0)
                raise pa.ArrowInvalid(
                    f"column {column.name!r} holds text that is not UTF-8 or other values that are none, and Arrow "
                    f"can't take apart values of type {column.type}; leave it out (output.columns), or write the file "
                    "again"
                ) from None
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema), errors


# What Arrow says about values, and not about how they lie in memory.
_WRONG_VALUES = (
    "UTF8",
    "within the acceptable range",
    "a whole number of days",
    "does not fit in precision",
    "Dictionary indices invalid",  # as Arrow itself makes them under null structs
)


def _check_all_but_values(array: pa.Array) -> None:
    """Raises ArrowInvalid unless wrong values are all that is wrong, at any depth."""
    try:
        array.validate(full=True)
        return
    except pa.ArrowInvalid as error:
        if not any(words in str(error) for words in _WRONG_VALUES):
            raise
    _check_places(array)
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        inner = [array.storage]
    elif pa.types.is_dictionary(kind):
        inner = [array.indices, array.dictionary]
    elif pa.types.is_struct(kind):
        inner = [array.field(i) for i in range(kind.num_fields)]
    elif pa.types.is_map(kind):
        inner = [array.keys, array.items]
    else:
        inner = [array.values] if hasattr(array, "values") else []
    for child in inner:  # the first fault found hides those of the others
        _check_all_but_values(child)


def _check_places(array: pa.Array) -> None:
    """Raises ArrowInvalid unless children hold all that the array says they do, wherever the array lies in them: Arrow
    looks at children's values first, and tells of the first fault alone."""
    t, kind, missing = pa.types, array.type, False
    if t.is_list_view(kind) or t.is_large_list_view(kind):
        starts, sizes = (x.to_numpy().astype(np.int64) for x in (array.offsets, array.sizes))
        missing = _are_outside(starts, sizes, len(array.values))
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_map(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        count = min(len(array.keys), len(array.items)) if t.is_map(kind) else len(array.values)
        missing = _are_outside(offsets[:-1], np.diff(offsets), count)
    elif t.is_struct(kind):
        missing = any(len(array.field(i)) < len(array) for i in range(kind.num_fields))
    elif t.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy().astype(np.int64)
        rises = (np.diff(ends, prepend=0) > 0).all()
        missing = not rises or len(array.values) < len(ends) or ends[-1:].sum() < array.offset + len(array)
    elif t.is_union(kind):
        missing = True  # these are nowhere repaired
    if missing:
        raise pa.ArrowInvalid(f"{kind}: not all values that it speaks of are there")


def _are_outside(starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], count: int) -> bool:
    # `count - starts` can't overflow where `starts + sizes` might.
    return bool(((starts < 0) | (sizes < 0) | (sizes > count - starts)).any())


def _copy(value: pa.Array) -> pa.Array:
    try:
        return value.take(pa.array([0]))
    except pa.ArrowNotImplementedError:  # of views, extension types and others
        return pa.concat_arrays([value, value.slice(1)])


def _valid(value: pa.Array) -> pa.Array:
    """The value, if need be without what lies under its null structs. Raises ArrowInvalid."""
    try:
        value.validate(full=True)
        return value
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            raise
    with contextlib.suppress(pa.ArrowNotImplementedError):
        value = _nulls_pushed_down(value)
    value.validate(full=True)
    return value


def _nulls_pushed_down(array: pa.Array) -> pa.Array:
    """The array, which is no slice, with null fields in null structs."""
    t, kind = pa.types, array.type
    mask = array.is_null() if array.null_count else None
    if t.is_struct(kind) and kind.num_fields:
        inner = [_nulls_pushed_down(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=mask)
    if t.is_map(kind):
        return pa.MapArray.from_arrays(array.offsets, array.keys, _nulls_pushed_down(array.items), type=kind, mask=mask)
    if t.is_list(kind) or t.is_large_list(kind):
        maker = pa.LargeListArray if t.is_large_list(kind) else pa.ListArray
        return maker.from_arrays(array.offsets, _nulls_pushed_down(array.values), type=kind, mask=mask)
    if t.is_list_view(kind) or t.is_large_list_view(kind):
        maker = pa.LargeListViewArray if t.is_large_list_view(kind) else pa.ListViewArray
        return maker.from_arrays(array.offsets, array.sizes, _nulls_pushed_down(array.values), type=kind, mask=mask)
    if t.is_fixed_size_list(kind):
        items = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        if mask is not None and kind.value_field.nullable:  # null lists have slots, too
            hidden = np.repeat(mask.to_numpy(zero_copy_only=False), kind.list_size)
            items = items.take(pa.array(np.arange(len(items)), mask=hidden))
        return pa.FixedSizeListArray.from_arrays(_nulls_pushed_down(items), type=kind, mask=mask)
    return array


def _repair(column: pa.Field, array: pa.Array, start: int, errors: dict[int, RowError]) -> pa.Array:
    pieces = []
    for i in range(len(array)):
        piece = _copy(array.slice(i, 1))  # validating a slice looks at all nested values
        try:
            piece = _valid(piece)
            if pa.types.is_dictionary(column.type):
                piece = piece.dictionary_decode()
                piece.validate(full=True)
        except pa.ArrowInvalid as error:
            what = "text that is not UTF-8" if "UTF8" in str(error) else f"a value that is none: {error}"
            errors[start + i] = RowError(ErrorClass.INVALID_ROW, f"column {column.name!r} holds {what}")
            if pa.types.is_string(piece.type) or pa.types.is_large_string(piece.type):
                raw = piece.cast(pa.large_binary())[0].as_py()
                piece = pa.array([raw.decode("utf-8", "replace")], piece.type)
            else:
                piece = nulls(1, piece.type)
        pieces.append(piece)
    repaired = pa.concat_arrays(pieces)
    return repaired.dictionary_encode().cast(column.type) if pa.types.is_dictionary(column.type) else repaired
