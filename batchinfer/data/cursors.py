"""Readers of input files that stay open between slices, a few per process.

The next slice of a file then goes on where the last one ended, without a seek: a row group of a million rows is
decoded once and not once a slice, a .gz is unpacked once. Not here: how a file is read (see `dataset`).
"""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from batchinfer.data.rows import RowBatch

MAX_CURSORS = 3  # each may hold a batch


@dataclass(slots=True)
class Target:
    """The first row that a reader shall give next. It may be moved forward between two batches, so that rows on the
    way are skipped as cheaply as the format allows."""

    row: int


class Cursor:
    """An open reader at some row. `key` says of what: only equal keys may share it."""

    def __init__(self, key: Hashable, target: Target, batches: Iterator[RowBatch]) -> None:
        self.key = key
        self.row = target.row
        self._target = target
        self._rest: RowBatch | None = None
        self._batches = batches

    def skip_to(self, row: int) -> None:
        """Go on from `row`, which lies ahead."""
        if self._rest is not None:
            self._rest = self._rest.slice(row, self._rest.stop) if row < self._rest.stop else None
        self._target.row = max(self._target.row, row)
        self.row = row

    def next(self, stop: int) -> RowBatch | None:
        """The next rows before `stop`, or None at the end of the file."""
        batch = self._rest if self._rest is not None else next(self._batches, None)
        if batch is None:
            return None
        self._rest = None
        if batch.stop > stop:
            self._rest = batch.slice(stop, batch.stop)
            batch = batch.slice(batch.start, stop)
        self.row = batch.stop
        return batch


_cursors: OrderedDict[int, Cursor] = OrderedDict()
_lock = threading.Lock()


def take_cursor(key: Hashable, row: int, *, farthest_back: int = 0) -> Cursor | None:
    """A kept cursor brought to `row`: one that is there, or the nearest before it that is not more than
    `farthest_back` rows away. It belongs to the caller now."""
    with _lock:
        fitting = [
            (cursor.row, n)
            for n, cursor in _cursors.items()
            if cursor.key == key and row - farthest_back <= cursor.row <= row
        ]
        found = _cursors.pop(max(fitting)[1]) if fitting else None
    if found is not None:
        found.skip_to(row)
    return found


def keep_cursor(cursor: Cursor) -> None:
    """Keep it for the next slice; the one unused for longest is closed."""
    with _lock:
        _cursors[id(cursor)] = cursor
        while len(_cursors) > MAX_CURSORS:
            _cursors.popitem(last=False)


def close_cursors() -> None:
    """Close all files that are kept open."""
    with _lock:
        _cursors.clear()


# Readers are generators: left to the end of the interpreter they would be closed when modules are half gone.
atexit.register(close_cursors)
