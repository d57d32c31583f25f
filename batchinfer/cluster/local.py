"""Workers on this machine: started before the scheduler, started again when they die, ended with the driver.

They are plain child processes, not Dask nannies: a nanny's children re-import the caller's main module (which breaks
scripts without a main guard) and may not have children. Dask's scheduler runs inside the driver process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchinfer.cluster.engine_gpus import with_gpu
from batchinfer.cluster.lifecycle import how_it_ended
from batchinfer.cluster.out_of_memory import FOR_WORKERS, MemoryWatch


@dataclass(slots=True, eq=False)
class _Child:
    process: subprocess.Popen[str]
    memory: MemoryWatch
    told: int = 0  # how many of the lines


@dataclass(slots=True, eq=False, kw_only=True)
class LocalWorkers:
    """`began`: when the user asked for a run (seconds since 1970). `gpus`: what names the GPU of each worker's engine
    in CUDA_VISIBLE_DEVICES; empty: engines run on the CPU.

    `start` at once; `configure` when the job is frozen; `connect` when the scheduler is up.

    `dead` tells who died, and starts them again.
    """

    num_workers: int
    num_threads: int
    preload: Sequence[str]
    scratch: Path
    began: float
    gpus: Sequence[str] = ()
    _children: dict[str, _Child] = field(default_factory=dict)
    _dropped: set[str] = field(default_factory=set)
    _lines: list[dict[str, object]] = field(default_factory=list)  # told to every worker after its first line

    @property
    def names(self) -> list[str]:
        return [f"w{index}" for index in range(self.num_workers)]

    def start(self) -> None:
        """Those that are not there yet."""
        for name in self.names:
            if name not in self._children:
                self._spawn(name)

    def configure(self, *, run: str, epoch: int, log_folder: Path) -> None:
        told = {"run": run, "epoch": epoch, "log_folder": str(log_folder), "num_threads": self.num_threads}
        self._lines.append(told)
        self._tell_all()

    def connect(self, scheduler: str) -> None:
        self._lines.append({"scheduler": scheduler})
        self._tell_all()

    def dead(self) -> Iterator[tuple[str, str]]:
        """(worker, how it ended) of those that died since the last call; each is started again, unless dropped."""
        for name, child in list(self._children.items()):
            code = child.process.poll()
            if code is None:
                continue
            _close_pipe(child)
            del self._children[name]
            memory = child.memory.words(code, knobs=FOR_WORKERS)
            yield name, f"the worker process ended by {how_it_ended(code)}{memory}"
            if name not in self._dropped:
                self._spawn(name)

    def drop(self, name: str) -> None:
        """Do not start this worker again if it dies."""
        self._dropped.add(name)

    def discard(self, name: str) -> None:
        """This worker is given up by the scheduler: if its process is still there, it hangs."""
        child = self._children.get(name)
        if child is not None and child.process.poll() is None:
            _kill(child)

    def close(self, wait_s: float = 8.0) -> None:
        """Ends all workers: first by closing their standard input, in the end by force."""
        for child in self._children.values():
            _close_pipe(child)
            if not self._lines:
                child.process.kill()  # it was only warming up
        for child in self._children.values():
            try:
                child.process.wait(wait_s)
            except subprocess.TimeoutExpired:
                _kill(child)
                child.process.wait()
                wait_s = 0.1
        self._children.clear()

    def kill(self) -> None:
        """Ends all workers and their engines by force, without waiting."""
        for child in self._children.values():
            _kill(child)

    def _spawn(self, name: str) -> None:
        memory = MemoryWatch()
        gpu = self.gpus[self.names.index(name)] if self.gpus else None
        with (self.scratch / f"worker-{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "batchinfer.cluster.worker_process", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                bufsize=1,
                env=with_gpu(gpu),  # its engine inherits that
            )
        self._children[name] = child = _Child(process, memory)
        warm = {
            "name": name,
            "num_threads": self.num_threads,
            "preload": list(self.preload),
            "scratch": str(self.scratch),
        }
        _write(child, warm)
        self._tell_all()

    def _tell_all(self) -> None:
        for child in self._children.values():
            for line in self._lines[child.told :]:
                _write(child, line)
            child.told = len(self._lines)


def _write(child: _Child, message: dict[str, object]) -> None:
    assert child.process.stdin is not None
    try:
        child.process.stdin.write(json.dumps(message) + "\n")
        child.process.stdin.flush()
    except OSError:
        return  # it is dead: the next look at its exit code tells


def _kill(child: _Child) -> None:
    """The worker and its engine: one that hangs (or is stopped) would not heed the signal that it gets otherwise."""
    pids: list[str] = []
    for path in Path(f"/proc/{child.process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += path.read_text().split()
    child.process.kill()
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)


def _close_pipe(child: _Child) -> None:
    assert child.process.stdin is not None
    try:
        child.process.stdin.close()
    except OSError:
        return
