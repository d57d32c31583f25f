"""Logging of the driver: everything to the job's log file, what matters to the terminal when it can't show a bar.

Rooms log through `logging.getLogger("batchinfer...")` and print nothing. Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ROOT = logging.getLogger("batchinfer")


class _LogFile(logging.FileHandler):
    """A line that can't be written (the disk is full) is lost without a word: where rows are at stake, it is said."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Appends the package's messages, and warnings of others, to a file for as long as the context lasts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path)
    handler.setFormatter(logging.Formatter(FORMAT))
    everybody = logging.getLogger()
    others = _LogFile(path)
    others.setFormatter(logging.Formatter(FORMAT))
    others.setLevel(logging.WARNING)
    others.addFilter(lambda record: not record.name.startswith("batchinfer"))
    old_level = _ROOT.level
    _ROOT.addHandler(handler)
    _ROOT.setLevel(logging.INFO)
    everybody.addHandler(others)
    try:
        yield
    finally:
        _ROOT.removeHandler(handler)
        everybody.removeHandler(others)
        _ROOT.setLevel(old_level)
        handler.close()
        others.close()


@contextlib.contextmanager
def log_to_terminal(level: int = logging.WARNING) -> Iterator[None]:
    """Warnings of the package as plain lines on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.setLevel(level)
    _ROOT.addHandler(handler)
    try:
        yield
    finally:
        _ROOT.removeHandler(handler)
