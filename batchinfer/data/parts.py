"""Output parts: input columns and results joined in row order, as Parquet with a footer that says what made it.

Writing streams in bounded memory. A part's footer has one JSON object under the key `batchinfer`, with hashes of the
values, so that a part can be proved without its input. Not here: which columns (`layout`), publishing under the
final name (`fs`), and when (`batchinfer.job.commit`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.data.dataset import InputDataset
from batchinfer.data.fs import retrying
from batchinfer.data.layout import ERROR_TYPE, OutputLayout
from batchinfer.data.rows import RowBatch
from batchinfer.data.schema import conform
from batchinfer.data.segments import RESULT_SCHEMA
from batchinfer.data.values import ValueHasher, total_digest
from batchinfer.errors import BatchinferError, InputError

FOOTER_KEY = b"batchinfer"
ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 65_536
PAGE_BYTES = 1 << 20


class BrokenPart(BatchinferError):
    """A file that is no complete part of ours; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """What a part holds; kept in its footer. Token counts are over completed rows.

    input_hash    of the input columns that the caller named (`hash_columns`), in the input's own values
    carried_hash, result_hash   of the part's own columns
    """

    source_file: str
    start: int
    stop: int
    num_rows: int
    failed: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    input_hash: str
    carried_hash: str
    result_hash: str


def write_part(
    tmp: Path,
    *,
    dataset: InputDataset,
    file: int,
    start: int,
    stop: int,
    results: pa.Table,
    layout: OutputLayout,
    footer: Mapping[str, Any],
    hash_columns: Sequence[str] = (),
) -> PartSummary:
    """Write the complete part for rows [start, stop) of an input file to `tmp` (publishing it is the caller's).

    results       RESULT_SCHEMA, one for each row, sorted by row
    footer        JSON values; the summary's are added to them
    hash_columns  columns whose values `input_hash` covers, in any order

    Raises BatchinferError that names the rows without a result, InputError when the input changed.
    """
    _check_complete(results, start, stop, dataset.files[file].name)
    carried = frozenset(layout.input_columns)
    needed = list(layout.input_columns) + [name for name in hash_columns if name not in carried]
    kinds = {field.name: field.type for field in dataset.schema}
    stored = zip(layout.input_columns, layout.schema.types, strict=False)
    changed = [column for column, kind in stored if kind != kinds[column]]
    hashes = _PartHashes(needed, changed, layout.result_names)
    name = dataset.files[file].name
    pending: list[pa.RecordBatch] = []
    widths = _DictionaryWidths(layout.schema)
    size, rows = 0, 0
    writer: pq.ParquetWriter | None = None
    try:
        for batch in dataset.read(file, start, stop, needed):
            out = _join(batch, name, results.slice(batch.start - start, batch.table.num_rows), layout)
            hashes.update(batch.table, out)
            if writer is None:
                writer = _open_writer(tmp, layout.schema, out)
            if pending and (
                size + out.nbytes > ROW_GROUP_BYTES or rows + out.num_rows > ROW_GROUP_ROWS or not widths.fits(out)
            ):
                writer.write_table(pa.Table.from_batches(pending), row_group_size=ROW_GROUP_ROWS)
                pending, size, rows = [], 0, 0
                widths.clear()
            widths.add(out)
            pending.append(out)
            size += out.nbytes
            rows += out.num_rows
        if writer is None:
            writer = _open_writer(tmp, layout.schema, None)
        if pending:
            writer.write_table(pa.Table.from_batches(pending), row_group_size=ROW_GROUP_ROWS)
        summary = _summary(
            results,
            source_file=name,
            start=start,
            stop=stop,
            num_rows=stop - start,
            input_hash=hashes.of_input(hash_columns),
            carried_hash=hashes.of_carried(layout.input_columns),
            result_hash=hashes.results.hexdigest(),
        )
        text = json.dumps({**footer, **asdict(summary), "prefix": layout.prefix, "lists": layout.lists})
        writer.add_key_value_metadata({FOOTER_KEY: text.encode()})
        writer.close()
        writer = None
    finally:
        if writer is not None:
            writer.close()
    return summary


def _open_writer(tmp: Path, schema: pa.Schema, first: pa.RecordBatch | None) -> pq.ParquetWriter:
    # Pages are cut only every write_batch_size values: with rows of megabytes that must be few.
    row_bytes = 1 if first is None or not first.num_rows else max(1, first.nbytes // first.num_rows)
    return pq.ParquetWriter(
        tmp, schema, compression="zstd", write_batch_size=max(1, min(1024, PAGE_BYTES // row_bytes))
    )


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


class _PartHashes:
    """Each input column is hashed once; once more as written if its type changes on the way."""

    def __init__(self, read: Sequence[str], changed: Sequence[str], results: Sequence[str]) -> None:
        self._read, self._written, self.results = ValueHasher(read), ValueHasher(changed), ValueHasher(results)

    def update(self, read: pa.RecordBatch, out: pa.RecordBatch) -> None:
        self._read.update(read)
        self._written.update(out)
        self.results.update(out)

    def of_input(self, columns: Sequence[str]) -> str:
        digests = self._read.digests()
        return total_digest(self._read.num_rows, {name: digests[name] for name in columns if name in digests})

    def of_carried(self, columns: Sequence[str]) -> str:
        digests = self._read.digests() | self._written.digests()
        return total_digest(self._read.num_rows, {name: digests[name] for name in columns if name in digests})


def _summary(results: pa.Table, **known: Any) -> PartSummary:
    good = results.filter(pc.is_null(results["error_class"]))
    classes = Counter(results["error_class"].drop_null().to_pylist())
    return PartSummary(
        failed=dict(sorted(classes.items())),
        prompt_tokens=_sum(good["prompt_tokens"]),
        cached_tokens=_sum(good["cached_tokens"]),
        completion_tokens=sum(_sum(chunk.flatten()) for chunk in good["completion_tokens"].chunks),
        **known,
    )


def _sum(values: pa.ChunkedArray | pa.Array) -> int:
    return pc.sum(values.cast(pa.int64())).as_py() or 0


class _DictionaryWidths:
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


def _join(batch: RowBatch, name: str, results: pa.Table, layout: OutputLayout) -> pa.RecordBatch:
    """One output batch: carried columns (the batch's first, in order), then result columns."""
    carried = zip(layout.input_columns, batch.table.columns, layout.schema.types, strict=False)
    arrays = [_store(array, stored, column) for column, array, stored in carried]
    n = batch.table.num_rows
    flat = pa.RecordBatch.from_arrays([_one(results[c]) for c in RESULT_SCHEMA.names], schema=RESULT_SCHEMA)
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


def _one(column: pa.ChunkedArray) -> pa.Array:
    # A batch is at most 8,192 rows, so its results fit 32-bit offsets.
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _store(array: pa.Array, stored: pa.DataType, column: str) -> pa.Array:
    if array.type.equals(stored):
        return array
    if pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    try:
        return conform(array, stored)
    except pa.ArrowInvalid as error:
        raise InputError(f"column {column!r} can't be written as {stored}: {error}") from None


def _first_sample(samples: pa.Array) -> pa.Array:
    """The only sample of each row, null where there is none."""
    lengths = pc.fill_null(pc.list_value_length(samples), 0).to_numpy()
    starts = samples.offsets.to_numpy()[:-1]
    return samples.values.take(pa.array(starts, mask=lengths == 0))


def _mask_errors(samples: pa.Array, flat: pa.RecordBatch) -> pa.Array:
    failed = flat.column("error_class").is_valid()
    return pc.if_else(failed, pa.scalar(None, samples.type), samples)


def read_footer(path: Path) -> dict[str, Any]:
    """The JSON object in a part's footer. BrokenPart when the file is torn, foreign or gone, saying why."""
    try:
        metadata = retrying(lambda: pq.read_metadata(path))
    except FileNotFoundError:
        raise BrokenPart(f"{path.name} is not there") from None
    except (pa.ArrowException, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise BrokenPart(f"{path.name} is no complete Parquet file ({size} bytes): {error}") from None
    try:
        found = json.loads((metadata.metadata or {})[FOOTER_KEY])
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
    except KeyError:
        raise BrokenPart(f"{path.name} is a Parquet file, but not one that batchinfer wrote") from None
    except ValueError as error:
        raise BrokenPart(f"{path.name} has a broken batchinfer footer: {error}") from None
    if metadata.num_rows != found.get("num_rows"):
        raise BrokenPart(f"{path.name} holds {metadata.num_rows} rows, its footer says {found.get('num_rows')}")
    return found


def _iter_part(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path, buffer_size=PAGE_BYTES, pre_buffer=False) as part:
        for group in range(part.num_row_groups):
            metadata = part.metadata.row_group(group)
            rows = max(1, min(8_192, ROW_GROUP_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)))
            yield from part.iter_batches(
                rows, row_groups=[group], columns=None if columns is None else list(columns), use_threads=False
            )


def verify_part(path: Path) -> list[str]:
    """What is wrong with a part, by reading all of it: rows out of place, values that no longer match the hashes."""
    try:
        footer = read_footer(path)
        prefix = footer["prefix"]
        problems = []
        carried, result, row = None, None, footer["start"]
        for batch in _iter_part(path):
            names = batch.schema.names
            if carried is None or result is None:
                cut = names.index(prefix + "source_file")
                carried, result = ValueHasher(names[:cut]), ValueHasher(names[cut:])
            carried.update(batch)
            result.update(batch)
            places = batch.column(prefix + "source_row").to_numpy()
            if not np.array_equal(places, np.arange(row, row + len(places))):
                problems.append(f"{path.name}: rows from {row} on are out of place")
            if pc.unique(batch.column(prefix + "source_file")).to_pylist() != [footer["source_file"]]:
                problems.append(f"{path.name}: rows from {row} on name another source file")
            row += batch.num_rows
        if row != footer["stop"]:
            problems.append(f"{path.name}: ends at row {row}, not {footer['stop']}")
        if carried is not None and carried.hexdigest() != footer["carried_hash"]:
            problems.append(f"{path.name}: the carried input columns do not match their checksum")
        if result is not None and result.hexdigest() != footer["result_hash"]:
            problems.append(f"{path.name}: the result columns do not match their checksum")
        return problems
    except BrokenPart as error:
        return [str(error)]
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        return [f"{path.name} can't be read: {type(error).__name__}: {error}"]


def failed_rows(path: Path) -> list[tuple[int, str]]:
    """(row, error class) of each failed row of a part."""
    prefix = read_footer(path)["prefix"]
    found = []
    for batch in _iter_part(path, [prefix + "source_row", prefix + "error"]):
        failed = batch.filter(pc.is_valid(batch.column(prefix + "error")))
        classes = failed.column(prefix + "error").field("class")
        found += list(zip(failed.column(prefix + "source_row").to_pylist(), classes.to_pylist(), strict=True))
    return found


def read_part_results(path: Path, chunk: int) -> pa.Table:
    """A part's results back as RESULT_SCHEMA, so that a retry can merge new ones over them.

    Columns that the part does not have (token_ids, logprobs) are null; cached_tokens is 0.
    """
    footer = read_footer(path)
    prefix, lists = footer["prefix"], footer["lists"]
    batches = []
    wanted = {prefix + n for n in (*RESULT_SCHEMA.names, "source_row", "error")}
    with pq.ParquetFile(path) as part:
        columns = [n for n in part.schema_arrow.names if n in wanted]
    for batch in _iter_part(path, columns):
        n = batch.num_rows
        error = batch.column(prefix + "error")
        arrays = []
        for field in RESULT_SCHEMA:
            if field.name == "chunk":
                arrays.append(pa.repeat(pa.scalar(chunk, pa.int32()), n))
            elif field.name == "row":
                arrays.append(batch.column(prefix + "source_row"))
            elif field.name == "cached_tokens":
                arrays.append(pa.repeat(pa.scalar(0, pa.int32()), n))
            elif field.name in ("error_class", "error_message"):
                arrays.append(pc.struct_field(error, field.name.removeprefix("error_")))
            elif prefix + field.name not in batch.schema.names:
                arrays.append(pa.nulls(n, field.type))
            elif field.name == "prompt_tokens":
                arrays.append(batch.column(prefix + field.name))
            else:
                values = conform(batch.column(prefix + field.name), field.type if lists else field.type.value_type)
                arrays.append(values if lists else _as_samples(values, error))
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=RESULT_SCHEMA))
    return pa.Table.from_batches(batches, schema=RESULT_SCHEMA)


def _as_samples(values: pa.Array, error: pa.Array) -> pa.Array:
    """A list of one sample a row, an empty list in rows with an error."""
    good = error.is_null()
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(good.to_numpy(zero_copy_only=False), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values.filter(good))
