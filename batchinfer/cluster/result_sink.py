"""Finished rows on their way to disk: gathered by lease, written as segments by a thread of their own.

The first results are written at once, later ones every few seconds or when many have gathered. What is written is
told (`told`) only after it is durable. Used by the engine process alone.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchinfer.cluster.leased_rows import LeasedRows
from batchinfer.cluster.lifecycle import in_thread
from batchinfer.cluster.trace import trace_published, tracing
from batchinfer.data.segments import ResultRow, SegmentName, write_segment

FLUSH_EVERY_S = 3.0
FLUSH_ROWS = 16_384
MAX_WAITING_WRITES = 8


@dataclass(slots=True, eq=False)
class _Gathered:
    rows: list[ResultRow] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class ResultSink:
    """Owned by the engine loop; `segment_path(lease)` and `told(message)` are called from the writing thread."""

    def __init__(
        self,
        *,
        epoch: int,
        folder: Callable[[int], Path],
        told: Callable[[dict[str, Any]], None],
        flush_every_s: float = FLUSH_EVERY_S,
    ) -> None:
        self._epoch = epoch
        self._folder = folder
        self._told = told
        self._flush_every_s = flush_every_s
        self._gathered: dict[LeasedRows, _Gathered] = {}
        self._num_gathered = 0
        self._last_flush: float | None = None
        self._queue: queue.Queue[tuple[LeasedRows, _Gathered, bool] | None] = queue.Queue(MAX_WAITING_WRITES)
        self.error: BaseException | None = None
        self._thread = in_thread("result-writer", self._write_all)

    def add(self, lease: LeasedRows, position: int, row: ResultRow) -> None:
        gathered = self._gathered.get(lease)
        if gathered is None:
            gathered = self._gathered[lease] = _Gathered()
        gathered.rows.append(row)
        gathered.positions.append(position)
        self._num_gathered += 1

    def flush_if_due(self) -> None:
        """Raises what went wrong with an earlier write: an engine that has nothing left to run must hear of it here."""
        if self.error is not None:
            raise self.error
        if not self._num_gathered:
            return
        now = time.monotonic()
        first = self._last_flush is None
        if first or now - (self._last_flush or 0.0) >= self._flush_every_s or self._num_gathered >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        self._last_flush = time.monotonic()
        for lease in list(self._gathered):
            self._put(lease, last=False)

    def close_lease(self, lease: LeasedRows) -> None:
        """Its last rows have ended: write what is left, then tell that it is done."""
        lease.closed = True
        if self._last_flush is None:
            self._last_flush = time.monotonic()
        self._put(lease, last=True)

    def close(self) -> None:
        """Returns when everything is on disk and told."""
        self.flush()
        self._queue.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _put(self, lease: LeasedRows, *, last: bool) -> None:
        gathered = self._gathered.pop(lease, None) or _Gathered()
        self._num_gathered -= len(gathered.rows)
        if self.error is not None:
            raise self.error
        self._queue.put((lease, gathered, last))

    def _write_all(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._write(*item)
        except BaseException as error:
            self.error = error
            while self._queue.get() is not None:  # let the loop come by and see the error
                pass

    def _write(self, lease: LeasedRows, gathered: _Gathered, last: bool) -> None:
        if gathered.rows:
            name = SegmentName(lease.unit, self._epoch, lease.lease, lease.num_segments)
            lease.num_segments += 1
            write_segment(self._folder(lease.window) / str(name), gathered.rows)
            if tracing():
                trace_published(lease.window, ((row.chunk, row.row) for row in gathered.rows))
            lease.made_durable(gathered.positions)
            self._told({"t": "progress", "lease": lease.lease, **_counts(gathered.rows)})
        if last:
            self._told({"t": "done", "lease": lease.lease})


def _counts(rows: list[ResultRow]) -> dict[str, int]:
    prompt = completion = cached = failed = 0
    for row in rows:
        if row.error is not None:
            failed += 1
            continue
        prompt += row.prompt_tokens or 0
        cached += row.cached_tokens
        for output in row.outputs:
            completion += len(output.token_ids)
    return {
        "rows": len(rows),
        "failed": failed,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": cached,
    }
