"""The rows of one lease inside the engine process: which are to be run, begun, durable. No engine, no threads.

Positions count from the start of the unit's prepared file. Rows that hold a result already (from before a crash, or
from another lease of the same piece) are never begun; those that an earlier engine had in flight go on from there. Rows
are begun in order; they become durable in any order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from batchinfer.cluster.trace import trace_lease, tracing
from batchinfer.data.partials import PartialKey, prompt_key, read_partials
from batchinfer.data.prepared import Int64, PreparedRows, read_prepared
from batchinfer.data.segments import done_rows
from batchinfer.job.layout import JobLayout
from batchinfer.types.request import PartialOutput

MAX_CUT_REACH = 32  # rows: how far from where it should be a lease may be cut, to keep a prefix together


class LeasedRows:
    def __init__(
        self, *, lease: int, window: int, unit: int, start: int, stop: int, rows: PreparedRows, todo: Int64
    ) -> None:
        """`rows`: those of the piece, `rows[0]` at position `start`. `todo`: positions to run, ascending.

        `partials`: what rows to be run had generated when an earlier engine was stopped, by position."""
        self.lease = lease
        self.window = window
        self.unit = unit
        self.start = start
        self.stop = stop
        self.rows = rows
        self.num_begun = 0  # of `todo`
        self.num_ended = 0  # begun rows whose outcome is known, durable or not
        self.num_segments = 0
        self.closed = False  # its last results are on their way to disk
        self.partials: dict[int, tuple[PartialOutput, ...]] = {}
        self._todo = todo
        self._durable = bytearray(b"\1") * (stop - start)
        for position in todo.tolist():
            self._durable[position - start] = 0
        self._settled = 0

    @property
    def num_left(self) -> int:
        """Rows not begun."""
        return len(self._todo) - self.num_begun

    @property
    def ended(self) -> bool:
        """Every row to be run has an outcome."""
        return self.num_ended == len(self._todo)

    def begin(self, count: int) -> Int64:
        """Positions of the next rows, at most `count`; they are begun now."""
        positions = self._todo[self.num_begun : self.num_begun + count]
        self.num_begun += len(positions)
        return positions

    def begun_range(self, count: int) -> tuple[int, int]:
        """A range that holds every row in flight once `count` more are begun."""
        while self._settled < len(self._durable) and self._durable[self._settled]:
            self._settled += 1
        last = min(self.num_begun + count, len(self._todo))
        stop = int(self._todo[last - 1]) + 1 if last else self.start
        return self.start + self._settled, max(stop, self.start + self._settled)

    def made_durable(self, positions: Iterable[int]) -> None:
        for position in positions:
            self._durable[position - self.start] = 1

    def give_back(self, *, half: bool) -> int:
        """Ends the lease before rows that are not begun (about all, or about the second half of them), where a new
        prefix begins, so that few rows share one across the cut; returns the new end."""
        keep = self.num_begun + (self.num_left + 1) // 2 if half else self.num_begun
        keep = self._end_of_prefix(keep)
        if keep < len(self._todo):
            self.stop = int(self._todo[keep])
            self._todo = self._todo[:keep]
        return self.stop

    def _end_of_prefix(self, keep: int) -> int:
        """Near `keep` (an index of `todo`), not before what is begun: where rows share fewest tokens."""
        reach = min(MAX_CUT_REACH, self.num_left // 4)
        places = range(max(self.num_begun, keep - reach), min(keep + reach, len(self._todo) - 1) + 1)
        return min(places, key=lambda at: (self._shared_with_previous(at), abs(at - keep)), default=keep)

    def _shared_with_previous(self, at: int) -> int:
        if not at:
            return 0  # where the lease itself was cut
        before, row = (self.rows.token_ids(int(self._todo[at - k]) - self.start) for k in (1, 0))
        size = min(len(before), len(row))
        differ = np.flatnonzero(before[:size] != row[:size])
        return int(differ[0]) if len(differ) else size


def open_lease(
    layout: JobLayout, *, lease: int, window: int, unit: int, epoch: int, start: int, stop: int, fingerprint: str
) -> LeasedRows:
    """Reads a piece from its unit's prepared file. `epoch`: of the driver that wrote it. `fingerprint`: the job's."""
    now = time.time()
    rows = read_prepared(layout.prepared_unit(window, epoch, unit)).slice(start, stop)
    todo = missing_rows(rows, unit_segments(layout.segments(window), unit))
    if tracing():
        trace_lease(window, zip(rows.chunks[todo].tolist(), rows.rows[todo].tolist(), strict=True), now)
    opened = LeasedRows(lease=lease, window=window, unit=unit, start=start, stop=stop, rows=rows, todo=todo + start)
    if partials := read_partials(layout.segments(window), unit, fingerprint=fingerprint):
        opened.partials = {place + start: found for place, found in _partials_of(rows, todo, partials)}
    return opened


def _partials_of(
    rows: PreparedRows, todo: Int64, partials: Mapping[PartialKey, tuple[PartialOutput, ...]]
) -> Iterator[tuple[int, tuple[PartialOutput, ...]]]:
    """(place, what it has) of those rows to be run that have something."""
    known = np.array([chunk << 40 | row for chunk, row, _ in partials], np.int64)
    for place in todo[np.isin(_identities(rows)[todo], known)].tolist():
        prompt = prompt_key(rows.token_ids(place), rows.params_of(place))
        found = partials.get((int(rows.chunks[place]), int(rows.rows[place]), prompt))
        if found is not None:
            yield place, found


def unit_segments(folder: Path, unit: int) -> list[Path]:
    """The result segments of a unit, from every lease and driver."""
    return sorted(folder.glob(f"u{unit:05d}-*.arrow"))


def missing_rows(rows: PreparedRows, segments: Iterable[Path]) -> Int64:
    """Indices of rows without a result."""
    done_chunks, done = done_rows(segments)
    if not len(done):
        return np.arange(len(rows), dtype=np.int64)
    have = (done_chunks.astype(np.int64) << 40) | done
    return np.flatnonzero(~np.isin(_identities(rows), have)).astype(np.int64)


def _identities(rows: PreparedRows) -> Int64:
    """One number a row, of chunk and row."""
    return (rows.chunks.astype(np.int64) << 40) | rows.rows
