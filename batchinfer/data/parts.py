"""Output parts: input columns and results in row order, as Parquet with a footer that says what made it.

Writing streams in bounded memory. A part's footer has one JSON object under the key `batchinfer`, with hashes of the
values, so that a part can be proved without its input. Not here: which columns (`layout`), joining (`joining`),
publishing under the final name (`fs`), and when (`batchinfer.job.commit`).
"""

from __future__ import annotations

import json
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
from batchinfer.data.joining import DictionaryWidths, RowResults, join_rows
from batchinfer.data.layout import OutputLayout
from batchinfer.data.schema import conform
from batchinfer.data.segments import RESULT_SCHEMA, ChunkResults
from batchinfer.data.values import ValueHasher, total_digest
from batchinfer.errors import BatchinferError

FOOTER_KEY = b"batchinfer"
ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 65_536
PAGE_BYTES = 1 << 20


class BrokenPart(BatchinferError):
    """A file that is no complete part of ours; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """What a part holds; kept in its footer. Token counts are over completed rows.

    finish_reasons   completions by how they ended
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
    finish_reasons: Mapping[str, int]
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
    results: pa.Table | ChunkResults,
    layout: OutputLayout,
    footer: Mapping[str, Any],
    hash_columns: Sequence[str] = (),
) -> PartSummary:
    """Write the complete part for rows [start, stop) of an input file to `tmp` (publishing it is the caller's).

    results       RESULT_SCHEMA, one for each row, sorted by row; or where to read them, a few thousand rows at a time
    footer        JSON values; the summary's are added to them
    hash_columns  columns whose values `input_hash` covers, in any order

    Raises BatchinferError that names the rows without a result, InputError when the input changed.
    """
    name = dataset.files[file].name
    found = RowResults(results, start, stop, name)
    carried = frozenset(layout.input_columns)
    needed = list(layout.input_columns) + [name for name in hash_columns if name not in carried]
    kinds = {field.name: field.type for field in dataset.schema}
    stored = zip(layout.input_columns, layout.schema.types, strict=False)
    changed = [column for column, kind in stored if kind != kinds[column]]
    hashes = _PartHashes(needed, changed, layout.result_names)
    pending: list[pa.RecordBatch] = []
    widths = DictionaryWidths(layout.schema)
    size, rows = 0, 0
    writer: pq.ParquetWriter | None = None
    try:
        for batch, own in found.beside(dataset.read(file, start, stop, needed)):
            out = join_rows(batch, name, own, layout)
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
        summary = PartSummary(
            source_file=name,
            start=start,
            stop=stop,
            num_rows=stop - start,
            failed=dict(sorted(found.failed.items())),
            prompt_tokens=found.tokens["prompt_tokens"],
            cached_tokens=found.tokens["cached_tokens"],
            completion_tokens=found.tokens["completion_tokens"],
            finish_reasons=dict(sorted(found.finish_reasons.items())),
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
