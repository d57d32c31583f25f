"""Partial results: immutable Arrow files of what rows in flight had generated when their engine was stopped.

A saving only: whatever is wrong with a file, its rows begin anew and come out the same. So everything that decides
their tokens is compared before they are believed: the checksum in the file's name, the job's fingerprint, each row's
identity and prompt. Of several files' tokens for a sample the longest count. Files are never changed and go with their
window's segments, beside which they lie; a later run writes files of its own. Not here: when one is due
(`cluster.row_feed`), how a row goes on (`engine`).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from batchinfer.data.fs import LocalStore, read_bytes
from batchinfer.data.prepared import Int32
from batchinfer.types.request import PartialOutput, TokenLogprobs

log = logging.getLogger("batchinfer.data")

MAX_VALUES = 1 << 21
"""Numbers (token ids, log-probabilities) that an engine keeps at a stop, those of the longest rows: it has a few
seconds, and these take about half of one."""

_TOP = pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float64())]))
# As the engine has them: what segments round, a sum over a sample must not.
_LOGPROB = pa.struct([("token_id", pa.int32()), ("logprob", pa.float64()), ("rank", pa.int32()), ("top", _TOP)])
PARTIAL_SCHEMA = pa.schema(
    [
        pa.field("chunk", pa.int32(), False),
        pa.field("row", pa.int64(), False),
        pa.field("prompt", pa.binary(16), False),
        pa.field("sample", pa.int32(), False),
        pa.field("token_ids", pa.list_(pa.int32()), False),
        pa.field("logprobs", pa.list_(_LOGPROB)),
    ]
)
_FINGERPRINT_KEY = b"batchinfer.fingerprint"
_CHECKSUM_DIGITS = 16
PartialKey: TypeAlias = tuple[int, int, bytes]
"""(chunk, row, `prompt_key`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialRow:
    """What a row has so far: one output a sample. `prompt`: its `prompt_key`."""

    chunk: int
    row: int
    prompt: bytes
    outputs: Sequence[PartialOutput]

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def num_values(self) -> int:
        entries = itertools.chain.from_iterable(output.logprobs or () for output in self.outputs)
        return self.num_tokens + sum(3 + 2 * len(entry.top) for entry in entries)


def prompt_key(token_ids: Int32, params: str | None) -> bytes:
    """16 bytes that stand for a prepared row's prompt and its own settings."""
    return hashlib.blake2b(token_ids.tobytes() + (params or "").encode(), digest_size=16).digest()


def longest_rows(rows: Iterable[PartialRow], max_values: int = MAX_VALUES) -> list[PartialRow]:
    """Those that are worth most, as far as they fit; without rows of which nothing is there yet."""
    kept = []
    for row in sorted((row for row in rows if row.num_tokens), key=lambda row: -row.num_tokens):
        if row.num_tokens <= max_values and (values := row.num_values) <= max_values:
            max_values -= values
            kept.append(row)
    return kept


def write_partials(
    folder: Path, unit: int, epoch: int, lease: int, rows: Sequence[PartialRow], *, fingerprint: str
) -> Path:
    """Publishes `partial-u00012-e000001-l000003-<checksum>.arrow`, durably; returns its path."""
    samples = [(row, place, output) for row in rows for place, output in enumerate(row.outputs)]
    schema = PARTIAL_SCHEMA.with_metadata({_FINGERPRINT_KEY: fingerprint.encode()})
    columns = [
        pa.array([row.chunk for row, _, _ in samples], pa.int32()),
        pa.array([row.row for row, _, _ in samples], pa.int64()),
        pa.array([row.prompt for row, _, _ in samples], pa.binary(16)),
        pa.array([place for _, place, _ in samples], pa.int32()),
        _lists([output.token_ids for _, _, output in samples]),
        _logprobs([output.logprobs for _, _, output in samples]),
    ]
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    data = sink.getvalue().to_pybytes()
    name = f"partial-u{unit:05d}-e{epoch:06d}-l{lease:06d}-{_checksum(data)}.arrow"
    LocalStore(folder).put_if_absent(name, data)
    return folder / name


def read_partials(folder: Path, unit: int, *, fingerprint: str) -> dict[PartialKey, tuple[PartialOutput, ...]]:
    """What earlier leases of a unit had, by sample. A file that can't be believed is told in the log and left out."""
    samples: dict[PartialKey, dict[int, PartialOutput]] = {}
    for path in sorted(folder.glob(f"partial-u{unit:05d}-e*.arrow")):
        try:
            for key, place, output in _read(path, fingerprint):
                outputs = samples.setdefault(key, {})
                if place not in outputs or len(output.token_ids) > len(outputs[place].token_ids):
                    outputs[place] = output
        except (pa.ArrowException, OSError, ValueError) as error:
            log.warning("partial results %s are ignored, their rows begin anew: %s", path.name, error)
    return {key: tuple(outputs[place] for place in sorted(outputs)) for key, outputs in samples.items()}


def _read(path: Path, fingerprint: str) -> Iterator[tuple[PartialKey, int, PartialOutput]]:
    """Raises ValueError (as ArrowInvalid is one) for what can't be believed, before anything is given."""
    data = read_bytes(path)
    if _checksum(data) != path.stem.rpartition("-")[2]:
        raise ValueError("the file is damaged")
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        if reader.schema != PARTIAL_SCHEMA:
            raise ValueError("another version of batchinfer wrote them")
        if (reader.schema.metadata or {}).get(_FINGERPRINT_KEY) != fingerprint.encode():
            raise ValueError("they are of another job, or of other settings")
        table = reader.read_all()
    keys = zip(table["chunk"].to_pylist(), table["row"].to_pylist(), table["prompt"].to_pylist(), strict=True)
    found: list[tuple[PartialKey, int, PartialOutput]] = []
    places: dict[PartialKey, int] = {}
    for key, place, tokens, entries in zip(
        keys, table["sample"].to_pylist(), _lists_of(table["token_ids"]), _entries_of(table["logprobs"]), strict=True
    ):
        if place != places.get(key, 0) or (entries is not None and len(entries) != len(tokens)):
            raise ValueError("they do not fit together")
        places[key] = place + 1
        found.append((key, place, PartialOutput(tokens, entries)))
    yield from found


def _lists_of(column: pa.ChunkedArray) -> list[tuple[int, ...]]:
    lists = column.combine_chunks()
    offsets, values = lists.offsets.to_pylist(), lists.values.to_numpy().tolist()
    return [tuple(values[start:stop]) for start, stop in itertools.pairwise(offsets)]


def _entries_of(column: pa.ChunkedArray) -> Iterable[tuple[TokenLogprobs, ...] | None]:
    if column.null_count == len(column):
        return [None] * len(column)
    lists = column.combine_chunks()
    entries = lists.values
    tops, pairs = entries.field("top"), entries.field("top").values
    top = list(zip(pairs.field("token_id").to_pylist(), pairs.field("logprob").to_pylist(), strict=True))
    values = [
        TokenLogprobs(token, logprob, rank, tuple(top[start:stop]))
        for token, logprob, rank, (start, stop) in zip(
            *(entries.field(name).to_pylist() for name in ("token_id", "logprob", "rank")),
            itertools.pairwise(tops.offsets.to_pylist()),
            strict=True,
        )
    ]
    return [
        tuple(values[start:stop]) if valid else None
        for valid, (start, stop) in zip(
            lists.is_valid().to_pylist(), itertools.pairwise(lists.offsets.to_pylist()), strict=True
        )
    ]


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()[:_CHECKSUM_DIGITS]


def _offsets(lists: Sequence[Sequence[object]]) -> Int32:
    return np.cumsum([0, *map(len, lists)], dtype=np.int32)


def _lists(lists: Sequence[Sequence[int]]) -> pa.Array:
    offsets = _offsets(lists)
    flat = np.fromiter(itertools.chain.from_iterable(lists), np.int32, int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _logprobs(lists: Sequence[Sequence[TokenLogprobs] | None]) -> pa.Array:
    """Column by column: a tuple for each entry would take several times as long."""
    if all(entries is None for entries in lists):
        return pa.nulls(len(lists), PARTIAL_SCHEMA.field("logprobs").type)
    entries = [entry for known in lists for entry in known or ()]
    tops = [pair for entry in entries for pair in entry.top]
    top = pa.StructArray.from_arrays(
        [pa.array([token for token, _ in tops], pa.int32()), pa.array([value for _, value in tops], pa.float64())],
        fields=list(_TOP.value_type),
    )
    values = pa.StructArray.from_arrays(
        [
            pa.array([entry.token_id for entry in entries], pa.int32()),
            pa.array([entry.logprob for entry in entries], pa.float64()),
            pa.array([entry.rank for entry in entries], pa.int32()),
            pa.ListArray.from_arrays(pa.array(_offsets([entry.top for entry in entries])), top, type=_TOP),
        ],
        fields=list(_LOGPROB),
    )
    missing = pa.array([entries is None for entries in lists])
    return pa.ListArray.from_arrays(
        pa.array(_offsets([known or () for known in lists])), values, type=pa.list_(_LOGPROB), mask=missing
    )
