"""A trace of which rows engines begin and make durable, for tests: JSON lines in the file that BATCHINFER_TRACE names.

    {"event": "lease", "window": 0, "rows": [[chunk, row], ...], "leased_at": seconds}    rows that will be run
    {"event": "published", "window": 0, "rows": [[chunk, row], ...], "time": seconds}     rows that are durable

Off without the variable. Times are of the host's clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

VARIABLE = "BATCHINFER_TRACE"


def tracing() -> bool:
    return VARIABLE in os.environ


def trace(event: str, window: int, rows: Iterable[tuple[int, int]], **times: float) -> None:
    line = json.dumps({"event": event, "window": window, "rows": [list(row) for row in rows], **times}) + "\n"
    descriptor = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
    finally:
        os.close(descriptor)


def trace_lease(window: int, rows: Iterable[tuple[int, int]], leased_at: float) -> None:
    trace("lease", window, rows, leased_at=leased_at)


def trace_published(window: int, rows: Iterable[tuple[int, int]]) -> None:
    trace("published", window, rows, time=time.time())
