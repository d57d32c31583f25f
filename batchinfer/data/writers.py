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
    if found is None or found["scope"] != _scope_hash():
        return age_s >= FOREIGN_AGE_S
    return process_start(int(found["pid"])) != found["start"]


@cache
def _mark(pid: int) -> str:
    return f"{_scope_hash()}~{pid}~{process_start(pid) or ''}"


def _scope_hash() -> str:
    return hashlib.sha256(process_scope().encode()).hexdigest()[:12]


def process_scope() -> str:
    """Names the set of process ids that this process's belongs to: machine, boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()}/unknown/{os.getpid()}"  # equals no other: such a process is never called dead


def process_start(pid: int) -> str | None:
    """When a process of this scope started, in ticks since boot; None where it is not there or a zombie.

    Tells a process from a later one with the same pid.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
