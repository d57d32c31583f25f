"""What a process did while a run started, and when: spans that travel to the driver, which adds them up (`timings`).

Times are of the host's clock (seconds since 1970), so that those of several processes can stand side by side.
Standard library only: used before anything else is imported.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Span = dict[str, Any]  # name, begin and end (seconds since 1970), cpu_s (of the whole process, meanwhile)


class Phases:
    """The spans of this process, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin, cpu_s = time.time(), time.process_time()
        try:
            yield
        finally:
            self.add(name, begin, time.process_time() - cpu_s)

    def add(self, name: str, begin: float, cpu_s: float = 0.0) -> None:
        """A span that ends now."""
        self.spans.append({"name": name, "begin": begin, "end": time.time(), "cpu_s": cpu_s})

    def take(self) -> list[Span]:
        """Those that were not taken before."""
        taken, self.spans = self.spans, []
        return taken


phases = Phases()


def process_start() -> float:
    """When this process began (seconds since 1970, to a hundredth); now, where the system does not tell."""
    now = time.time()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return now - max(0.0, uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return now
