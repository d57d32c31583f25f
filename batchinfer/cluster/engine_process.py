"""The engine process: leased pieces in, result segments out. `python -m batchinfer.cluster.engine_process PARENT_PID`.

Speaks JSON lines with `cluster.engine_host`: commands on standard input, reports on what was standard output. Three
threads: the loop (owns the engine), the commands (reads leases' rows ahead of the loop), the writer
(`cluster.result_sink`). Ends on `stop`, SIGTERM or the end of its input, after what has finished is durable, and what
rows in flight have so far.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.cluster.lifecycle import (
    end_with_parent,
    exit_after,
    in_thread,
    leave_interrupts_to_the_driver,
    log_to,
)
from batchinfer.cluster.phases import phases, process_start
from batchinfer.errors import BatchinferError, ConfigError, EngineError
from batchinfer.garbage import RARELY

if TYPE_CHECKING:
    from batchinfer.cluster.leased_rows import LeasedRows
    from batchinfer.cluster.row_feed import RowFeed
    from batchinfer.job.frozen_job import EngineJob

STATS_EVERY_S = 2.0
_log = logging.getLogger("batchinfer.engine_process")
Command = dict[str, Any]


class Reports:
    """Reports to the worker. Thread-safe; a worker that is gone is noticed by the end of our input instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever else prints goes to the log
        self._mutex = threading.Lock()

    def __call__(self, message: dict[str, Any]) -> None:
        try:
            with self._mutex:
                self._out.write(json.dumps(message) + "\n")
        except OSError:
            return


class WarningsToDriver(logging.Handler):
    """What is worth a warning here (a smaller batch because memory ran out) belongs into the job's report."""

    def __init__(self, report: Reports) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report({"t": "note", "text": record.getMessage()[:500]})


class EngineProcess:
    def __init__(self, config: Command, report: Reports) -> None:
        self.report = report
        self.config = config
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.stopping = threading.Event()
        self.job: EngineJob | None = None
        self._loaded = threading.Event()

    # Commands, in a thread of their own --------------------------------------------------------------------------

    def read_commands(self) -> None:
        try:
            for line in sys.stdin:
                command = json.loads(line)
                if command["t"] == "lease":
                    self._open_lease(command)
                elif command["t"] == "stop":
                    break
                else:
                    self.inbox.put((command["t"], command))
        finally:  # also where a dying worker cut a line short
            self.stop()

    def stop(self) -> None:
        if not self.stopping.is_set():
            self.stopping.set()
            self.inbox.put(("stop", None))
            exit_after(6.0, 1)  # even if a step hangs

    def _open_lease(self, command: Command) -> None:
        from batchinfer.cluster.leased_rows import open_lease

        self._loaded.wait()
        assert self.job is not None
        keys = ("lease", "window", "unit", "epoch", "start", "stop")
        try:
            told = {key: command[key] for key in keys}
            self.inbox.put(("lease", open_lease(self.job.layout, fingerprint=self.job.fingerprint, **told)))
        except Exception as error:
            self.inbox.put(("broken", error))

    # The loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        feed = self._load()
        last_stats = time.monotonic()
        while not self.stopping.is_set():
            self._take_commands(feed, wait=not feed.busy)
            was_busy = feed.busy
            if feed.busy:
                feed.step()
            now = time.monotonic()
            if now - last_stats >= STATS_EVERY_S or was_busy > feed.busy:
                last_stats = now
                self.report({"t": "stats", **feed.stats()})
        feed.close()
        self.report({"t": "stats", **feed.stats()})
        self.report({"t": "stopped"})

    def _take_commands(self, feed: RowFeed, *, wait: bool) -> None:
        while not self.stopping.is_set():
            try:
                kind, payload = self.inbox.get(block=wait, timeout=0.5)
            except queue.Empty:
                feed.sink.flush_if_due()
                return
            wait = False
            if kind == "lease":
                lease: LeasedRows = payload
                feed.add(lease)
            elif kind == "revoke":
                feed.give_back(payload["lease"], half=payload["half"])
            elif kind == "broken":
                raise payload

    def _load(self) -> RowFeed:
        start = time.monotonic()
        with phases.span("reads the job"):
            from batchinfer.job.frozen_job import load_engine_job

            self.job = load_engine_job(self.config["run"])
            self._loaded.set()
            from batchinfer.cluster.row_feed import RowFeed
            from batchinfer.engine import load_engine

        threads = self.config["num_threads"]
        engine_config = self.job.engine_config
        if engine_config.num_threads is None:
            engine_config = replace(engine_config, num_threads=threads)
        with phases.span("loads the model"):
            engine = load_engine(engine_config, late_tokenizer=True)  # the driver has planned with it
        # What is loaded stays, so the collector need not look at it again.
        gc.freeze()
        gc.set_threshold(*RARELY)
        gc.enable()
        feed = RowFeed(engine, self.job, epoch=self.config["epoch"], report=self.report)
        seconds = time.monotonic() - start
        told = {"load_s": round(seconds, 2), "max_num_seqs": engine.scheduler.max_num_seqs, "spans": phases.take()}
        self.report({"t": "ready", **told})
        _log.info("engine ready after %.1f s, %d threads", seconds, threads)
        return feed


def warm_up(warm: Command) -> None:
    """What can be done before it is known what to load. Environment first: libraries read it as they load."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(variable, str(warm["num_threads"]))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the planner, not the engine, encodes in bulk
    from batchinfer_kernels import determinism

    determinism.prepare()
    for module in warm["preload"]:
        with phases.span(f"imports {module}"):
            importlib.import_module(module)


def main() -> int:
    gc.disable()  # until all is loaded: there is nothing to find meanwhile
    end_with_parent(int(sys.argv[1]))
    leave_interrupts_to_the_driver()
    report = Reports()
    phases.add("started", process_start(), time.process_time())
    first = sys.stdin.readline()
    if not first:
        return 1
    warm: Command = json.loads(first)
    try:
        warm_up(warm)
    except Exception as error:
        traceback.print_exc()
        report({"t": "failed", "message": f"{type(error).__name__}: {error}", "fatal": False})
        return 1
    second = sys.stdin.readline()
    if not second:
        return 1
    config: Command = {**warm, **json.loads(second)}
    log_to(Path(config["log"]))
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("batchinfer").addHandler(WarningsToDriver(report))
    process = EngineProcess(config, report)
    signal.signal(signal.SIGTERM, lambda *_: process.stop())
    in_thread("commands", process.read_commands)
    try:
        process.run()
    except ConfigError as error:
        _log.error("the engine can't be built: %s", error)
        report({"t": "failed", "message": str(error), "fatal": True})
        return 2
    except Exception as error:
        # A full disk or a file that can't be read is no row's doing: none must be suspected.
        files = isinstance(error, OSError) or (
            isinstance(error, BatchinferError) and not isinstance(error, EngineError)
        )
        message = f"{type(error).__name__}: {error}"
        report({"t": "failed", "message": message, "fatal": False, "blameless": files})
        with contextlib.suppress(OSError):  # the log lies on the same disk
            traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # threads may be reading or inside a kernel: nothing is left to tidy up
