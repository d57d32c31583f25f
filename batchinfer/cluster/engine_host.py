"""The engine process as its worker sees it: started, spoken to in JSON lines, its death noticed.

Knows nothing of Dask. Messages that come before somebody listens are kept. Which rows were in flight is known from
the engine's own words (`begun`), which outlive it in the pipe. The other end is `cluster.engine_process`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.cluster.engine_gpus import with_gpu
from batchinfer.cluster.lifecycle import how_it_ended, in_thread
from batchinfer.cluster.out_of_memory import FOR_ENGINES, MemoryWatch

Message = dict[str, Any]
_TAIL_BYTES = 2000


class EngineHost:
    """One engine process at a time. Thread-safe.

    `start` is to be called from a thread that lives as long as the worker: the engine ends with it.
    """

    def __init__(
        self, *, name: str, num_threads: int, preload: Sequence[str], log: Path, gpu: str | None = None
    ) -> None:
        """`preload`: modules that the engine imports while it waits for `configure`. `gpu`: what names its GPU in
        CUDA_VISIBLE_DEVICES; None: it sees what this process does."""
        self.process: subprocess.Popen[str] | None = None
        self._preload = {"name": name, "num_threads": num_threads, "preload": list(preload)}
        self._config: Message | None = None
        self._gpu = gpu
        self._log = log
        self._log_start = 0
        self._memory = MemoryWatch()
        self._mutex = threading.Lock()
        self._writing = threading.Lock()
        self._listener: Callable[[Message], None] | None = None
        self._early: list[Message] = []

    def listen(self, listener: Callable[[Message], None]) -> None:
        """Every message from now on, after those that came before."""
        with self._mutex:
            self._listener = listener
            early, self._early = self._early, []
            for message in early:
                listener(message)

    def start(self) -> None:
        """Starts the engine process, or does nothing if one is alive. Without `configure` it only warms up."""
        if self.process is not None and self.process.poll() is None:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._memory = MemoryWatch()
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "batchinfer.cluster.engine_process", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env=with_gpu(self._gpu),
            )
        self.process = process
        in_thread(f"engine-{process.pid}", lambda: self._read(process))
        self.send(self._preload)
        if self._config is not None:
            self.send(self._config)

    def configure(self, *, run: str, epoch: int, log: Path, num_threads: int) -> None:
        """What to load, with how many threads, and where to log from now on. Once."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._log_start = log, log.stat().st_size if log.exists() else 0
        self._config = {"run": run, "epoch": epoch, "log": str(log), "num_threads": num_threads}
        self.send(self._config)

    def send(self, message: Mapping[str, Any]) -> None:
        """To a dead engine: nothing happens. Its death is, or will be, told by a message of its own."""
        process = self.process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError, OSError, ValueError), self._writing:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def close(self, wait_s: float = 5.0) -> None:
        process = self.process
        if process is None:
            return
        self.send({"t": "stop"})
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _tell(self, message: Message) -> None:
        with self._mutex:
            if self._listener is None:
                self._early.append(message)
            else:
                self._listener(message)

    def _read(self, process: subprocess.Popen[str]) -> None:
        watch = self._memory
        begun: dict[int, tuple[int, int]] = {}
        last: Message = {}
        stopped = False
        assert process.stdout is not None
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # cut short by a kill
            kind = message["t"]
            if kind == "begun":
                begun[message["lease"]] = (message["start"], message["stop"])
                continue
            if kind == "done":
                begun.pop(message["lease"], None)
            if kind == "failed":
                last = message
                continue
            stopped = stopped or kind == "stopped"
            if kind != "stopped":
                self._tell(message)
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        if stopped:
            self._tell({"t": "stopped"})
            return
        reason = last.get("message") or f"the engine process ended by {how_it_ended(code)}"
        last_words = "" if "message" in last else self._last_words()
        memory = "" if "message" in last else watch.words(code, knobs=FOR_ENGINES)
        suspects = {} if last.get("blameless") else begun
        in_flight = [(lease, start, stop) for lease, (start, stop) in suspects.items() if start < stop]
        fatal = bool(last.get("fatal"))
        told = {"reason": reason, "last_words": last_words, "memory": memory, "in_flight": in_flight, "fatal": fatal}
        self._tell({"t": "died", **told})

    def _last_words(self) -> str:
        """The last words of this engine in its log, for the message."""
        try:
            with self._log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _TAIL_BYTES))
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
        except OSError:
            return ""
        return f"; its last words ({self._log}): {lines[-1][:500]}" if lines else ""
