"""Readers of input files that stay open between slices, a few per process.

The next slice of a file then goes on where the last one ended, without a seek: a row group of a million rows is
decoded once and not once a slice, a .gz is unpacked once. Not here: how a file is read (see `dataset`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator

from batchinfer.data.rows import RowBatch

MAX_CURSORS = 4


class Cursor:
    """An open reader at some row. `key` says of what: only equal keys may share it."""

    def __init__(self, key: Hashable, row: int, batches: Iterator[RowBatch]) -> None:
        self.key = key
        self.row = row
        self._rest: RowBatch | None = None
        self._batches = batches

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
    """A kept cursor at `row`, or the nearest one before it that is not more than `farthest_back` rows away (the
    caller skips); it belongs to the caller now."""
    with _lock:
        fitting = [
            (cursor.row, n)
            for n, cursor in _cursors.items()
            if cursor.key == key and row - farthest_back <= cursor.row <= row
        ]
        return _cursors.pop(max(fitting)[1]) if fitting else None


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
