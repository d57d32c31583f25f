"""Joins input rows with their results, a bounded range at a time.

Responsible for: one result for each row, token counts, the output's columns from both sides. Not here: files and
footers (see `parts`), the columns' names and types (see `layout`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.data.layout import ERROR_TYPE, OutputLayout
from batchinfer.data.rows import RowBatch
from batchinfer.data.schema import conform, nulls
from batchinfer.data.segments import RESULT_SCHEMA, ChunkResults
from batchinfer.errors import BatchinferError

log = logging.getLogger("batchinfer.data")

FIRST_SPAN_ROWS = 1_024
MAX_SPAN_ROWS = 65_536
SPAN_BYTES = 32 << 20


class RowResults:
    """The chunk's results in ranges of bounded size, checked to be complete, and counted."""

    def __init__(self, results: pa.Table | ChunkResults, start: int, stop: int, name: str) -> None:
        self._results, self._start, self._stop, self._name = results, start, stop, name
        self._rows = FIRST_SPAN_ROWS
        self.failed: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        if not isinstance(results, ChunkResults):
            _check_complete(results, start, stop, name)

    def beside(self, batches: Iterable[RowBatch]) -> Iterator[tuple[RowBatch, pa.Table]]:
        """(rows, their results), cut where either side ends."""
        table, first, last = RESULT_SCHEMA.empty_table(), 0, 0
        for batch in batches:
            at = batch.start
            while at < batch.stop:
                if at >= last:
                    first, last = at, min(at + self._rows, self._stop)
                    table = self._load(first, last)
                end = min(batch.stop, last)
                yield batch.slice(at, end), table.slice(at - first, end - at)
                at = end

    def _load(self, start: int, stop: int) -> pa.Table:
        if isinstance(self._results, ChunkResults):
            table = self._results.read(start, stop)
            _check_complete(table, start, stop, self._name)
        else:
            table = self._results.slice(start - self._start, stop - start)
        row_bytes = max(1, table.nbytes // max(1, table.num_rows))
        self._rows = max(1, min(MAX_SPAN_ROWS, SPAN_BYTES // row_bytes))
        good = table.filter(pc.is_null(table["error_class"]))
        self.failed.update(table["error_class"].drop_null().to_pylist())
        for column in ("prompt_tokens", "cached_tokens"):
            self.tokens[column] += _sum(good[column])
        self.tokens["completion_tokens"] += sum(_sum(c.flatten()) for c in good["completion_tokens"].chunks)
        for reasons in good["finish_reason"].chunks:
            for found in pc.value_counts(reasons.flatten()).to_pylist():
                self.finish_reasons[found["values"]] += found["counts"]
        return table


def _check_complete(results: pa.Table, start: int, stop: int, name: str) -> None:
    rows = results["row"].to_numpy()
    if len(rows) == stop - start and np.array_equal(rows, np.arange(start, stop)):
        return
    missing = np.setdiff1d(np.arange(start, stop), rows)
    strange = np.setdiff1d(rows, np.arange(start, stop))
    if len(missing):
        raise BatchinferError(
            f"{len(missing)} of the rows {start} to {stop - 1} of {name} have no result, the first are "
            f"{', '.join(map(str, missing[:5].tolist()))}; the part is not written, the rows must run again"
        )
    raise BatchinferError(
        f"results for rows {start} to {stop - 1} of {name} are out of order, doubled or foreign "
        f"({len(rows)} results; not in the range: {strange[:5].tolist()})"
    )


def _sum(values: pa.ChunkedArray | pa.Array) -> int:
    return pc.sum(values.cast(pa.int64())).as_py() or 0


class DictionaryWidths:
    """Watches dictionary columns with 8 or 16 bit indices: a row group with more values could not be read back."""

    def __init__(self, schema: pa.Schema) -> None:
        self._room = {
            i: 1 << (field.type.index_type.bit_width - pa.types.is_signed_integer(field.type.index_type))
            for i, field in enumerate(schema)
            if pa.types.is_dictionary(field.type) and field.type.index_type.bit_width <= 16
        }
        self._seen: dict[int, set[Any]] = {i: set() for i in self._room}

    def fits(self, batch: pa.RecordBatch) -> bool:
        return all(
            len(self._seen[i] | set(batch.column(i).dictionary.to_pylist())) <= room for i, room in self._room.items()
        )

    def add(self, batch: pa.RecordBatch) -> None:
        for i in self._room:
            self._seen[i] |= set(batch.column(i).dictionary.to_pylist())

    def clear(self) -> None:
        self._seen = {i: set() for i in self._room}


def join_rows(batch: RowBatch, name: str, results: pa.Table, layout: OutputLayout) -> pa.RecordBatch:
    """One output batch: carried columns (the batch's first, in order), then result columns."""
    carried = zip(layout.input_columns, batch.table.columns, layout.schema.types, strict=False)
    arrays = [_store(array, stored, column) for column, array, stored in carried]
    n = batch.table.num_rows
    flat = pa.RecordBatch.from_arrays([_one(results[c]) for c in RESULT_SCHEMA.names], schema=RESULT_SCHEMA)
    _tell_of_lost_values(batch, name, flat)
    for plain, _ in layout.result_columns:
        if plain == "source_file":
            arrays.append(pa.repeat(pa.scalar(name, pa.string()), n))
        elif plain == "source_row":
            arrays.append(pa.array(np.arange(batch.start, batch.stop, dtype=np.int64)))
        elif plain == "prompt_tokens":
            arrays.append(flat.column("prompt_tokens"))
        elif plain == "error":
            classes = flat.column("error_class")
            mask = classes.is_null()
            arrays.append(
                pa.StructArray.from_arrays([classes, flat.column("error_message")], fields=list(ERROR_TYPE), mask=mask)
            )
        else:
            samples = flat.column(plain)
            arrays.append(_mask_errors(samples, flat) if layout.lists else _first_sample(samples))
    return pa.RecordBatch.from_arrays(arrays, schema=layout.schema)


def _tell_of_lost_values(batch: RowBatch, name: str, flat: pa.RecordBatch) -> None:
    """Rows that were answered though a column that is only carried holds what the output's type can't: that is null."""
    answered = flat.column("error_class").is_null().to_pylist() if batch.errors else []
    lost = [error.message for row, error in sorted(batch.errors.items()) if answered[row - batch.start]]
    if lost:
        log.warning("%s: %d rows from row %d on lose a value: %s", name, len(lost), batch.start, lost[0])


def _one(column: pa.ChunkedArray) -> pa.Array:
    # A batch is at most 8,192 rows, so its results fit 32-bit offsets.
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _store(array: pa.Array, stored: pa.DataType, column: str) -> pa.Array:
    if array.type.equals(stored):
        return array
    try:
        return conform(array, stored)
    except pa.ArrowInvalid as error:
        # Such a time is no time that anybody meant, and no reason to lose what has been computed.
        log.warning("column %r: values that can't be written as %s are null: %s", column, stored, error)
    return pa.concat_arrays([_stored_or_null(array.slice(i, 1), stored) for i in range(len(array))])


def _stored_or_null(value: pa.Array, stored: pa.DataType) -> pa.Array:
    try:
        return conform(value, stored)
    except pa.ArrowInvalid:
        return nulls(1, stored)


def _first_sample(samples: pa.Array) -> pa.Array:
    """The only sample of each row, null where there is none."""
    lengths = pc.fill_null(pc.list_value_length(samples), 0).to_numpy()
    starts = samples.offsets.to_numpy()[:-1]
    return samples.values.take(pa.array(starts, mask=lengths == 0))


def _mask_errors(samples: pa.Array, flat: pa.RecordBatch) -> pa.Array:
    failed = flat.column("error_class").is_valid()
    return pc.if_else(failed, pa.scalar(None, samples.type), samples)
