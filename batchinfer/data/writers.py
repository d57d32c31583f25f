"""Which process writes a temporary file, as its name tells it, and whether that process is dead.

A mark is `scope~pid~start`: the set of process ids that the pid belongs to (machine, boot, pid namespace), hashed; the
pid; when it started, which tells it from a later one with the same pid.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from functools import cache
from pathlib import Path

FOREIGN_AGE_S = 24 * 3600.0
"""A temporary file of a process that can't be looked for from here is left over when it has lain for so long."""

_MARK = re.compile(r"(?P<scope>[0-9a-f]{12})~(?P<pid>\d+)~(?P<start>\d*)")


def writer_mark() -> str:
    """This process's."""
    return _mark(os.getpid())  # a forked process has a mark of its own


def is_left_over(name: str, age_s: float) -> bool:
    """Whether the temporary file of this name belongs to nobody: its writer is dead, or not to be seen from here while
    the file has lain for `age_s`, a day or more."""
    found = _MARK.search(name)
    here = found is not None and found["scope"] == _scope_hash()
    dead = is_dead(int(found["pid"]), found["start"]) if found is not None and here else None
    return age_s >= FOREIGN_AGE_S if dead is None else dead


@cache
def _mark(pid: int) -> str:
    return f"{_scope_hash()}~{pid}~{start_ticks(pid) or ''}"


def _scope_hash() -> str:
    return hashlib.sha256(process_scope().encode()).hexdigest()[:12]


def process_scope() -> str:
    """Names the set of process ids that this process's belongs to: machine, boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()}/unknown/{os.getpid()}"  # equals no other: such a process is never called dead


def start_ticks(pid: int) -> str | None:
    """When a process of this scope started, in ticks since boot; None where it is a zombie, not there, or hidden.

    Tells a process from a later one with the same pid.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else fields[19]


def is_dead(pid: int, start: str) -> bool | None:
    """Whether the process of this scope that had this pid and `start_ticks` is gone (a zombie is). None where that
    can't be known: `start` is empty, or /proc hides the processes of other users (its option hidepid)."""
    if not start:
        return None
    fields = _stat(pid)
    if fields is not None:
        return fields[0] in ("Z", "X") or fields[19] != start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return None


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on, or None where it can't be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
