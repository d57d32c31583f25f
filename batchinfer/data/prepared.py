"""Prepared rows: prompts as token ids, in columns, and the Arrow files they lie in between plan and run.

All in numpy arrays, since a window holds hundreds of thousands of rows. What rows go into which file, and in what
order, is decided in `batchinfer.job`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.data.fs import publish_file, retrying, temp_for, when_visible
from batchinfer.errors import BatchinferError

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]

PREPARED_SCHEMA = pa.schema(
    [
        pa.field("chunk", pa.int32(), False),
        pa.field("row", pa.int64(), False),
        pa.field("token_ids", pa.list_(pa.int32()), False),
        pa.field("params", pa.string()),
    ]
)
MAX_BATCH_ROWS = 65_536
MAX_BATCH_TOKENS = 1 << 26


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRows:
    """Rows in columns. Row i has the tokens `tokens[offsets[i]:offsets[i + 1]]`.

    chunks   int32[n]: number of the row's chunk in the job
    rows     int64[n]: row index in the chunk's input file
    offsets  int64[n + 1], the first is 0
    tokens   int32[offsets[n]]
    params   string[n] or None: JSON of the row's own sampling settings, null where it has none
    """

    chunks: Int32
    rows: Int64
    offsets: Int64
    tokens: Int32
    params: pa.Array | None = None

    @classmethod
    def from_lists(
        cls,
        chunks: Sequence[int] | Int32 | int,
        rows: Sequence[int] | Int64,
        token_ids: Sequence[Sequence[int]],
        params: Sequence[str | None] | None = None,
    ) -> PreparedRows:
        """From one list of token ids a row; `chunks` may be one number for all."""
        n = len(token_ids)
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(np.fromiter(map(len, token_ids), np.int64, n), out=offsets[1:])
        tokens = np.empty(int(offsets[-1]), np.int32)
        for start, ids in zip(offsets[:-1].tolist(), token_ids, strict=True):
            tokens[start : start + len(ids)] = ids
        numbers = np.full(n, chunks, np.int32) if isinstance(chunks, int) else np.asarray(chunks, np.int32)
        own = None if params is None or not any(params) else pa.array(params, pa.string())
        return cls(chunks=numbers, rows=np.asarray(rows, np.int64), offsets=offsets, tokens=tokens, params=own)

    @classmethod
    def empty(cls) -> PreparedRows:
        return cls.from_lists([], [], [])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Int64:
        """Tokens of each row, int64[n]."""
        return np.diff(self.offsets)

    def token_ids(self, i: int) -> Int32:
        """The tokens of row i, a view."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def params_of(self, i: int) -> str | None:
        return None if self.params is None else self.params[i].as_py()

    def params_list(self) -> list[str | None]:
        return [None] * len(self) if self.params is None else self.params.to_pylist()

    def slice(self, start: int, stop: int) -> PreparedRows:
        """Rows [start, stop), without copying tokens."""
        offsets = self.offsets[start : stop + 1]
        return PreparedRows(
            chunks=self.chunks[start:stop],
            rows=self.rows[start:stop],
            offsets=offsets - offsets[0],
            tokens=self.tokens[offsets[0] : offsets[-1]],
            params=None if self.params is None else self.params.slice(start, stop - start),
        )

    def take(self, order: Int64 | Sequence[int]) -> PreparedRows:
        """The rows numbered by `order`, in that order."""
        order = np.asarray(order, np.int64)
        lengths = self.lengths[order]
        offsets = np.zeros(len(order) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Where each token comes from: its place in the new array, shifted by how far its row moved.
        shift = np.repeat(self.offsets[:-1][order] - offsets[:-1], lengths)
        source = np.arange(len(shift), dtype=np.int64)
        source += shift
        return PreparedRows(
            chunks=self.chunks[order],
            rows=self.rows[order],
            offsets=offsets,
            tokens=self.tokens[source],
            params=None if self.params is None else self.params.take(pa.array(order)),
        )

    @staticmethod
    def concat(pieces: Sequence[PreparedRows]) -> PreparedRows:
        pieces = [piece for piece in pieces if len(piece)]
        if not pieces:
            return PreparedRows.empty()
        if len(pieces) == 1:
            return pieces[0]
        params = None
        if any(piece.params is not None for piece in pieces):
            params = pa.concat_arrays(
                [p.params if p.params is not None else pa.nulls(len(p), pa.string()) for p in pieces]
            )
        offsets = np.zeros(sum(map(len, pieces)) + 1, np.int64)
        np.cumsum(np.concatenate([piece.lengths for piece in pieces]), out=offsets[1:])
        return PreparedRows(
            chunks=np.concatenate([piece.chunks for piece in pieces]),
            rows=np.concatenate([piece.rows for piece in pieces]),
            offsets=offsets,
            tokens=np.concatenate([piece.tokens for piece in pieces]),
            params=params,
        )

    def _batches(self) -> Iterator[pa.RecordBatch]:
        start = 0
        while start < len(self):
            # At most MAX_BATCH_TOKENS tokens a batch, so that Arrow's 32-bit offsets hold.
            fits = int(np.searchsorted(self.offsets, self.offsets[start] + MAX_BATCH_TOKENS, side="right")) - 1
            stop = min(max(fits, start + 1), start + MAX_BATCH_ROWS, len(self))
            part = self.slice(start, stop)
            token_ids = pa.ListArray.from_arrays(pa.array(part.offsets.astype(np.int32)), pa.array(part.tokens))
            params = part.params if part.params is not None else pa.nulls(len(part), pa.string())
            yield pa.RecordBatch.from_arrays(
                [pa.array(part.chunks), pa.array(part.rows), token_ids, params], schema=PREPARED_SCHEMA
            )
            start = stop


def write_prepared(path: Path, rows: PreparedRows | Iterable[PreparedRows]) -> bool:
    """Publish a prepared file, durably, if `path` is not there yet; False when it is (nothing changes)."""
    pieces = [rows] if isinstance(rows, PreparedRows) else rows
    with temp_for(path) as tmp:
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        with pa.OSFile(str(tmp), "wb") as sink, pa.ipc.new_file(sink, PREPARED_SCHEMA, options=options) as writer:
            for piece in pieces:
                for batch in piece._batches():
                    writer.write_batch(batch)
        return publish_file(tmp, path)


def iter_prepared(path: Path) -> Iterator[PreparedRows]:
    """The file's rows in batches of at most 65,536. BatchinferError when it is broken or stays invisible."""
    try:
        with when_visible(lambda: pa.OSFile(str(path))) as source, pa.ipc.open_file(source) as reader:
            for i in range(reader.num_record_batches):
                yield _from_batch(reader.get_batch(i))
    except (pa.ArrowInvalid, OSError) as error:
        raise BatchinferError(f"prepared rows {path} can't be read: {error}") from error


def is_whole_arrow_file(path: Path) -> bool:
    """Whether an Arrow file is there with its footer: one that was cut short has none. Its rows are not read."""
    try:
        with retrying(lambda: pa.OSFile(str(path))) as source, pa.ipc.open_file(source):
            return True
    except (pa.ArrowInvalid, OSError):
        return False


def row_identities(path: Path) -> tuple[Int32, Int64]:
    """(chunk, row) of each row of the file, in its order; tokens are not read. Raises like `iter_prepared`."""
    fields = [PREPARED_SCHEMA.get_field_index(name) for name in ("chunk", "row")]
    try:
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        with (
            when_visible(lambda: pa.OSFile(str(path))) as source,
            pa.ipc.open_file(source, options=options) as reader,
        ):
            table = reader.read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise BatchinferError(f"prepared rows {path} can't be read: {error}") from error
    return table["chunk"].to_numpy(), table["row"].to_numpy()


def read_prepared(path: Path) -> PreparedRows:
    """All rows of the file."""
    return PreparedRows.concat(list(iter_prepared(path)))


def _from_batch(batch: pa.RecordBatch) -> PreparedRows:
    token_ids, params = batch.column(2), batch.column(3)
    offsets = token_ids.offsets.to_numpy().astype(np.int64)
    return PreparedRows(
        chunks=batch.column(0).to_numpy(),
        rows=batch.column(1).to_numpy(),
        offsets=offsets - offsets[0],
        tokens=token_ids.values.to_numpy()[offsets[0] : offsets[-1]],
        params=None if params.null_count == len(params) else params,
    )
