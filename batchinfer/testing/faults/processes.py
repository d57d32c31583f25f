"""A disturbed job's processes: started under a mark that their descendants inherit, found by it, sent signals.

Linux only: marks are read from /proc. Nothing without the mark is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

MARK = "BATCHINFER_FAULT_CAMPAIGN"
Role = Literal["driver", "worker", "engine", "other"]


@dataclass(frozen=True, slots=True)
class Found:
    """A process with the mark. `state` is its letter in /proc: T where it is stopped."""

    pid: int
    parent: int
    role: Role
    state: str


@dataclass(eq=False)
class Processes:
    """Everything that was started with this mark: drivers by `start`, workers and engines by them.

    `all`: those in use.
    """

    all: ClassVar[weakref.WeakSet[Processes]] = weakref.WeakSet()
    mark: str
    log: Path
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all.add(self)

    def start(
        self, *arguments: str, log: Path | None = None, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """`batchinfer ARGUMENTS`, in a session of its own; what it says goes to the log, or to another one."""
        environment = {**os.environ, **(more or {}), MARK: self.mark}
        with (log or self.log).open("ab") as file:
            file.write(f"\n$ batchinfer {' '.join(arguments)}\n".encode())
            file.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "batchinfer", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )
        self.drivers.append(process)
        return process

    def find(self, role: Role | None = None) -> list[Found]:
        """Those that are there, zombies left out."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                process = Found(int(entry.name), int(fields[1]), _role((entry / "cmdline").read_bytes()), fields[0])
                if process.state not in ("Z", "X") and role in (None, process.role):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def below(self, pid: int) -> list[Found]:
        """The process and its descendants."""
        everyone = self.find()
        wanted = {pid}
        while more := {process.pid for process in everyone if process.parent in wanted} - wanted:
            wanted |= more
        return [process for process in everyone if process.pid in wanted]

    def wait_until_gone(self, pids: Sequence[int], timeout_s: float) -> list[int]:
        """Those of the processes that are still there after a while."""
        end = awake() + timeout_s
        while True:
            self.reap()
            left = {process.pid for process in self.find()} & set(pids)
            if not left or awake() > end:
                return sorted(left)
            time.sleep(0.05)

    def reap(self) -> None:
        for driver in self.drivers:
            driver.poll()

    def end_all(self) -> None:
        """By force, stopped ones too."""
        for process in self.find():
            send(process.pid, signal.SIGKILL)
        for driver in self.drivers:
            driver.wait()


class Awake:
    """Seconds in which this process ran: while a machine or its processes are suspended, no time goes by."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._last = time.monotonic()
        threading.Thread(target=self._watch, name="awake", daemon=True).start()

    def __call__(self) -> float:
        return min(time.monotonic(), self._last + 1.0) - self._lost

    def _watch(self) -> None:
        while True:
            time.sleep(0.1)
            now = time.monotonic()
            self._lost += max(0.0, now - self._last - 1.0)
            self._last = now


awake = Awake()


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, as Linux sees it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signum - 1) & 1)


def send(pid: int, signum: signal.Signals) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], object], timeout_s: float) -> bool:
    end = awake() + timeout_s
    while not condition():
        if awake() > end:
            return False
        time.sleep(0.03)
    return True


def _role(cmdline: bytes) -> Role:
    if b"engine_process" in cmdline:
        return "engine"
    if b"worker_process" in cmdline:
        return "worker"
    return "driver" if b"batchinfer" in cmdline else "other"
