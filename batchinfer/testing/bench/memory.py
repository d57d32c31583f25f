"""Peak memory of a process and everything it started, sampled from /proc while it runs (Linux; else nothing)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

_PROC = Path("/proc")
_PAGE = 4096
RSS_EVERY_S = 1.0
PSS_EVERY_S = 3.0  # the kernel walks all page tables for it


class MemoryWatch:
    """Use as a context while the process runs. Peaks are of sums over processes, in bytes; None where unknown.

    peak_rss   resident pages, those that processes share counted in each
    peak_pss   shared pages counted once in all
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.peak_rss: int | None = None
        self.peak_pss: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        next_pss = time.monotonic() + PSS_EVERY_S
        while True:
            pids = family(self.pid)
            self.peak_rss = _larger(self.peak_rss, [_rss(pid) for pid in pids])
            if time.monotonic() >= next_pss:
                self.peak_pss = _larger(self.peak_pss, [_pss(pid) for pid in pids])
                next_pss = time.monotonic() + PSS_EVERY_S
            if self._over.wait(RSS_EVERY_S):
                return


def family(pid: int) -> list[int]:
    """The process and its descendants that are there now."""
    parents: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def _larger(peak: int | None, sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return max(peak or 0, sum(known)) if known else peak


def _rss(pid: int) -> int | None:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return None


def _pss(pid: int) -> int | None:
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
