"""Result segments: immutable Arrow files of finished rows, their merging, and compacted unit files.

A segment is published whole or not at all; a torn one (a copy, a full disk) is noticed by its missing footer, logged
and skipped. Of two results for a row a completion beats an error, then the lower epoch, lease and number. A compacted
file is sorted by (chunk, row) and a record batch holds rows of one chunk, so a commit reads only its chunk's. Not
here: when a segment is due (`batchinfer.engine`, `batchinfer.cluster`), which files belong to a chunk
(`batchinfer.job`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # not pyarrow.compute, which engines would import as they start

from batchinfer.data.fs import publish_file, replace_file, retrying, temp_for, when_visible
from batchinfer.data.prepared import Int32, Int64
from batchinfer.errors import BatchinferError
from batchinfer.types.request import CompletionOutput, RequestOutput
from batchinfer.types.rows import RowError

log = logging.getLogger("batchinfer.data")

TOP_TYPE = pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())]))
LOGPROB_TYPE = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("rank", pa.int32()), ("top", TOP_TYPE)])
# One list entry a sample in the list columns; empty lists in rows with an error.
RESULT_SCHEMA = pa.schema(
    [
        pa.field("chunk", pa.int32(), False),
        pa.field("row", pa.int64(), False),
        pa.field("completion", pa.list_(pa.string())),
        pa.field("finish_reason", pa.list_(pa.string())),
        pa.field("token_ids", pa.list_(pa.list_(pa.int32()))),
        pa.field("completion_tokens", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.list_(LOGPROB_TYPE))),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("cached_tokens", pa.int32()),
        pa.field("error_class", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)
TAKE_BYTES = 256 << 20
BATCH_BYTES = 16 << 20
_INDEX_KEY = b"batchinfer.chunks"
_SEGMENT_NAME = re.compile(r"u(\d+)-e(\d+)-l(\d+)-(\d+)\.arrow")
_EPOCH_IN_NAME = re.compile(r"-e(\d+)(?:[-.]|$)")


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """`u00012-e000001-l000003-0001.arrow`: unit, driver's epoch, lease, number in the lease."""

    unit: int
    epoch: int
    lease: int
    number: int

    def __str__(self) -> str:
        return f"u{self.unit:05d}-e{self.epoch:06d}-l{self.lease:06d}-{self.number:04d}.arrow"

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        found = _SEGMENT_NAME.fullmatch(name)
        return None if found is None else cls(*map(int, found.groups()))


def unit_file_name(unit: int) -> str:
    """Name of a unit's compacted file."""
    return f"u{unit:05d}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """How a row ended: `error`, or one output a sample. prompt_tokens is None where it was never tokenized."""

    chunk: int
    row: int
    outputs: Sequence[CompletionOutput] = ()
    error: RowError | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0

    @classmethod
    def of(cls, chunk: int, row: int, output: RequestOutput) -> ResultRow:
        return cls(
            chunk=chunk,
            row=row,
            outputs=output.outputs,
            error=output.error,
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
        )


def results_table(rows: Sequence[ResultRow]) -> pa.Table:
    """Rows as columns (RESULT_SCHEMA), in the given order. Logprobs are null where no sample has any."""
    samples = [output for r in rows for output in (() if r.error is not None else r.outputs)]
    counts = np.fromiter((0 if r.error is not None else len(r.outputs) for r in rows), np.int32, len(rows))
    offsets = pa.array(_offsets(counts))
    lengths = np.fromiter((len(o.token_ids) for o in samples), np.int32, len(samples))
    flat = np.fromiter((t for o in samples for t in o.token_ids), np.int32, int(lengths.sum()))
    token_ids = pa.ListArray.from_arrays(pa.array(_offsets(lengths)), pa.array(flat))
    if any(o.logprobs is not None for o in samples):
        logprobs = pa.array(
            [None if r.error is not None else [_logprobs(o) for o in r.outputs] for r in rows],
            RESULT_SCHEMA.field("logprobs").type,
        )
    else:
        logprobs = pa.nulls(len(rows), RESULT_SCHEMA.field("logprobs").type)
    errors = [r.error for r in rows]
    columns = [
        pa.array([r.chunk for r in rows], pa.int32()),
        pa.array([r.row for r in rows], pa.int64()),
        pa.ListArray.from_arrays(offsets, _strings([o.text for o in samples])),
        pa.ListArray.from_arrays(offsets, pa.array([o.finish_reason for o in samples], pa.string())),
        pa.ListArray.from_arrays(offsets, token_ids),
        pa.ListArray.from_arrays(offsets, pa.array(lengths)),
        logprobs,
        pa.array([r.prompt_tokens for r in rows], pa.int32()),
        pa.array([r.cached_tokens for r in rows], pa.int32()),
        pa.array([None if e is None else str(e.error_class) for e in errors], pa.string()),
        _strings([None if e is None else e.message for e in errors]),
    ]
    return pa.Table.from_arrays(columns, schema=RESULT_SCHEMA)


def _offsets(counts: Int32) -> Int32:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _strings(values: list[str | None] | list[str]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:  # lone surrogates can't be stored; see `jsonl`
        clean = [None if v is None else v.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for v in values]
        return pa.array(clean, pa.string())


def _logprobs(output: CompletionOutput) -> list[tuple[object, ...]] | None:
    if output.logprobs is None:
        return None
    return [(p.token_id, p.logprob, p.rank, list(p.top)) for p in output.logprobs]


def write_segment(path: Path, results: pa.Table | Sequence[ResultRow], *, replace: bool = False) -> bool:
    """Publish a segment, durably, if `path` is not there yet; False when it is. `replace` overwrites atomically."""
    table = results if isinstance(results, pa.Table) else results_table(results)
    return _write(path, table.schema, table.to_batches(max_chunksize=65_536), replace)


def _write(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], replace: bool) -> bool:
    with temp_for(path) as tmp:
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with pa.OSFile(str(tmp), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        if replace:
            replace_file(tmp, path)
            return True
        return publish_file(tmp, path)


def read_segment(path: Path, columns: Sequence[str] | None = None) -> pa.Table | None:
    """A segment's rows as written, or None (and a line in the log) when it is torn or gone.

    columns: only these, in the schema's order; the others are not read.
    """
    try:
        with retrying(lambda: pa.OSFile(str(path))) as source:
            options = None
            if columns is not None:
                options = pa.ipc.IpcReadOptions(
                    included_fields=[RESULT_SCHEMA.get_field_index(name) for name in columns]
                )
            with pa.ipc.open_file(source, options=options) as reader:
                return reader.read_all().replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as error:
        log.warning("result segment %s is broken and ignored, its rows will run again: %s", path.name, error)
        return None


def done_rows(paths: Iterable[Path]) -> tuple[Int32, Int64]:
    """(chunk, row) of each result in the segments: what a new lease skips. Reads no completions."""
    chunks, rows = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    for path in paths:
        table = read_segment(path, ["chunk", "row"])
        if table is not None:
            chunks.append(table["chunk"].to_numpy())
            rows.append(table["row"].to_numpy())
    return np.concatenate(chunks), np.concatenate(rows)


def merge_tables(tables: Sequence[tuple[SegmentName | None, pa.Table]]) -> pa.Table:
    """One result a row, sorted by (chunk, row). Tables of None count as epoch 0, in the order given."""
    kept = [(name, table) for name, table in tables if table.num_rows]
    if not kept:
        return RESULT_SCHEMA.empty_table()
    age = sorted(range(len(kept)), key=lambda i: (_age(kept[i][0]), i))
    ranks = np.concatenate([np.full(kept[i][1].num_rows, rank, np.int32) for rank, i in enumerate(age)])
    table = pa.concat_tables([kept[i][1] for i in age])
    chunks, rows = table["chunk"].to_numpy(), table["row"].to_numpy()
    failed = table["error_class"].is_valid().to_numpy()
    order = np.lexsort((ranks, failed, rows, chunks))
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(chunks[order]) != 0) | (np.diff(rows[order]) != 0)
    order = order[first]
    if len(order) == table.num_rows and np.array_equal(order, np.arange(len(order))):
        return table
    return _take(table, order)


def _age(name: SegmentName | None) -> tuple[int, int, int]:
    return (0, 0, 0) if name is None else (name.epoch, name.lease, name.number)


def _take(table: pa.Table, order: npt.NDArray[np.int64]) -> pa.Table:
    """Like table.take, in pieces whose strings stay far below Arrow's 32-bit offsets."""
    pieces = max(1, -(-table.nbytes // TAKE_BYTES))
    if pieces == 1:
        return table.take(pa.array(order))
    return pa.concat_tables([table.take(pa.array(part)) for part in np.array_split(order, pieces)])


def _rank_of(path: Path) -> SegmentName | None:
    name = SegmentName.parse(path.name)
    if name is None and (found := _EPOCH_IN_NAME.search(path.name)):
        return SegmentName(0, int(found.group(1)), 0, 0)
    return name


def merge_segments(paths: Iterable[Path]) -> pa.Table:
    """The results of several segments, one a row, sorted by (chunk, row). Torn files are skipped (and logged)."""
    tables = []
    for path in sorted(paths):
        table = read_segment(path)
        if table is not None:
            tables.append((_rank_of(path), table))
    return merge_tables(tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactSummary:
    """What a compacted unit holds."""

    num_rows: int
    num_failed: int
    chunks: tuple[int, ...]
    num_bytes: int


def write_compacted(path: Path, results: pa.Table, *, replace: bool = False) -> CompactSummary:
    """Publish `results` (one a row, sorted by chunk and row) as a compacted file; an existing one is left alone."""
    numbers, rows = results["chunk"].to_numpy(), results["row"].to_numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    stops = np.append(starts[1:], len(numbers)) if len(starts) else starts
    cuts: list[tuple[int, int]] = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        size = results.slice(start, stop - start).nbytes
        step = max(1, int((stop - start) * BATCH_BYTES / max(1, size)))
        cuts += [(first, min(first + step, stop)) for first in range(start, stop, step)]
    index = [[int(numbers[first]), int(rows[first]), int(rows[last - 1])] for first, last in cuts]
    schema = RESULT_SCHEMA.with_metadata({_INDEX_KEY: json.dumps(index).encode()})

    def batches() -> Iterable[pa.RecordBatch]:
        for first, last in cuts:
            part = results.slice(first, last - first).combine_chunks()
            yield pa.RecordBatch.from_arrays([c.chunk(0) for c in part.columns], schema=schema)

    _write(path, schema, batches(), replace)
    failed = len(results) - results["error_class"].null_count
    return CompactSummary(
        num_rows=len(results),
        num_failed=failed,
        chunks=tuple(numbers[starts].tolist()),
        num_bytes=path.stat().st_size,
    )


def compact_unit(paths: Iterable[Path], target: Path, *, replace: bool = False) -> CompactSummary:
    """Merge a unit's segments into its compacted file. Running it twice is harmless; the segments stay."""
    return write_compacted(target, merge_segments(paths), replace=replace)


def read_chunk_results(paths: Iterable[Path], chunk: int, start: int = 0, stop: int | None = None) -> pa.Table:
    """A chunk's results out of compacted files and plain segments, one a row, sorted by row.

    start, stop: only rows of this range. Of a compacted file only the record batches that can hold them are read.
    Raises BatchinferError on a broken compacted file: its segments may be gone, so skipping it would lose rows without
    a word.
    """
    tables = []
    for path in sorted(paths):
        try:
            with when_visible(lambda path=path: pa.OSFile(str(path))) as source, pa.ipc.open_file(source) as reader:  # type: ignore[misc]
                table = _read_range(reader, chunk, start, stop)
        except (pa.ArrowException, OSError) as error:
            raise BatchinferError(f"results {path} can't be read: {error}") from error
        if table.num_rows:
            tables.append((_rank_of(path), table.replace_schema_metadata(None)))
    return merge_tables(tables)


def _read_range(reader: pa.ipc.RecordBatchFileReader, chunk: int, start: int, stop: int | None) -> pa.Table:
    index = (reader.schema.metadata or {}).get(_INDEX_KEY)
    if index is None:
        table = reader.read_all()
        table = table.filter(pa.array(table["chunk"].to_numpy() == chunk))
    else:
        wanted = [
            i
            for i, (number, first, last) in enumerate(json.loads(index))
            if number == chunk and last >= start and (stop is None or first < stop)
        ]
        table = pa.Table.from_batches([reader.get_batch(i) for i in wanted], schema=reader.schema)
    if start > 0 or stop is not None:
        rows = table["row"].to_numpy()
        table = table.filter(pa.array((rows >= start) & (rows < (np.iinfo(np.int64).max if stop is None else stop))))
    return table


@dataclass(frozen=True, slots=True)
class ChunkResults:
    """A chunk's results, still in their files: `parts.write_part` reads them range by range, so that long results
    (log-probabilities of many samples) need no more memory than short ones."""

    paths: tuple[Path, ...]
    chunk: int

    def read(self, start: int, stop: int) -> pa.Table:
        return read_chunk_results(self.paths, self.chunk, start, stop)
