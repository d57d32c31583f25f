"""How a run's time went: moments, what each process did at the start, CPU seconds by process. Written for people and
benchmarks to `OUT/__batchinfer/timings.json`, of the last run; nothing is decided by it.

    moments   seconds since the start: job_frozen, scheduler_up, worker_joined, engine_ready, rows_ready (the first
              units are cut), first_lease, first_token, first_durable, last_durable, last_committed, end
    spans     {process, name, begin_s, end_s, cpu_s}: what took how long until the first token
    cpu_s     by process (driver, "worker w0", "engine w0"), over its whole life; `cpu_s_at_first_token`: until then
    engine    by worker: the engine's own counts (`cluster.row_feed.RowFeed.stats`), the last that it told
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from batchinfer.cluster.phases import Span, phases
from batchinfer.data.fs import LocalStore
from batchinfer.job.layout import JobLayout

_log = logging.getLogger("batchinfer.cluster")


class RunTimings:
    """One thread's. `started`: when the command was given (seconds since 1970)."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.moments: dict[str, float] = {}
        self._spans: list[dict[str, Any]] = []
        self._cpu_s: dict[str, float] = {}
        self._cpu_s_of_dead: dict[str, float] = {}
        self._cpu_s_at_first_token: dict[str, float] = {}
        self._engine: dict[str, Mapping[str, Any]] = {}

    def moment(self, name: str, at: float | None = None) -> None:
        """Keeps the first of a name; of those that begin with `last_`, the last."""
        if name not in self.moments or name.startswith("last_"):
            if name == "first_token":
                self._cpu_s_at_first_token = {**self._cpu_s, "driver": time.process_time()}
            self.moments[name] = (time.time() if at is None else at) - self.started

    def spans(self, process: str, spans: Iterable[Span]) -> None:
        for span in spans:
            self._spans.append(
                {
                    "process": process,
                    "name": span["name"],
                    "begin_s": round(span["begin"] - self.started, 3),
                    "end_s": round(span["end"] - self.started, 3),
                    "cpu_s": round(span["cpu_s"], 3),
                }
            )

    def cpu_s(self, process: str, seconds: float) -> None:
        """What a process has used so far. Less than before: it is a new one of the name."""
        before = self._cpu_s.get(process, 0.0)
        if seconds < before:
            self._cpu_s_of_dead[process] = self._cpu_s_of_dead.get(process, 0.0) + before
        self._cpu_s[process] = seconds

    def engine(self, worker: str, stats: Mapping[str, Any]) -> None:
        self._engine[worker] = {key: value for key, value in stats.items() if key not in ("t", "name", "worker_cpu_s")}

    @property
    def first_token_s(self) -> float | None:
        """From the start to the first token that any engine generated."""
        return self.moments.get("first_token")

    def start_text(self) -> str:
        """One line about the start, for the log."""
        told = ("job_frozen", "scheduler_up", "worker_joined", "rows_ready", "engine_ready", "first_lease")
        steps = ", ".join(f"{name} {self.moments[name]:.2f}" for name in told if name in self.moments)
        return f"start to first token {self.moments['first_token']:.2f} s ({steps})"

    def write(self, layout: JobLayout) -> None:
        self.spans("driver", phases.take())
        self.cpu_s("driver", time.process_time())
        data = {
            "started_at_s": self.started,
            "moments": {name: round(at, 3) for name, at in self.moments.items()},
            "cpu_s": {
                name: round(seconds + self._cpu_s_of_dead.get(name, 0.0), 3) for name, seconds in self._cpu_s.items()
            },
            "cpu_s_at_first_token": self._cpu_s_at_first_token,
            "engine": self._engine,
            "spans": sorted(self._spans, key=lambda span: float(span["begin_s"])),
        }
        try:
            LocalStore(layout.output).replace(layout.key(layout.timings), json.dumps(data, indent=1).encode())
        except OSError as error:
            _log.warning("the timings can't be written: %s", error)
