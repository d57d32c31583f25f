"""Batches of input rows, and row-level trouble: values that do not fit the united schema, text that is no UTF-8.

Such a value becomes null (or is repaired) and its row gets a `RowError`; the other rows are as good as before. Not
here: where batches come from (see `dataset`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchinfer.data.schema import conform
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
    except (ValueError, OverflowError):  # times finer or farther than Python's: as ISO text
        return [_scalar_to_python(value) for value in array]


def _scalar_to_python(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return str(value)


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
            arrays.append(pa.nulls(batch.table.num_rows, target.type))
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
            pieces.append(pa.nulls(1, target.type))
            message = f"column {target.name!r} can't be kept as {target.type}: {error}"
            errors.setdefault(start + i, RowError(ErrorClass.INVALID_ROW, message))
    return pa.concat_arrays(pieces)


def check_text(start: int, table: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, RowError]]:
    """Text columns may hold bytes that are no UTF-8 (written unchecked): such a value is repaired with U+FFFD, or
    null where it is nested, and its row gets an error. Otherwise it would fail much later, when the part is written
    or read."""
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
            array = _repair(column, array, start, errors)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema), errors


def _repair(column: pa.Field, array: pa.Array, start: int, errors: dict[int, RowError]) -> pa.Array:
    pieces = []
    for i in range(len(array)):
        piece = array.take(pa.array([i]))  # a copy: validating a slice looks at all nested values
        try:
            piece.validate(full=True)
            if pa.types.is_dictionary(column.type):
                piece = piece.dictionary_decode()
                piece.validate(full=True)
        except pa.ArrowInvalid:
            errors[start + i] = RowError(ErrorClass.INVALID_ROW, f"column {column.name!r} holds text that is not UTF-8")
            if pa.types.is_string(piece.type) or pa.types.is_large_string(piece.type):
                raw = piece.cast(pa.large_binary())[0].as_py()
                piece = pa.array([raw.decode("utf-8", "replace")], piece.type)
            else:
                piece = pa.nulls(1, piece.type)
        pieces.append(piece)
    repaired = pa.concat_arrays(pieces)
    return repaired.dictionary_encode().cast(column.type) if pa.types.is_dictionary(column.type) else repaired
