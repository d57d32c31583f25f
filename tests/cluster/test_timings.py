"""Moments, spans and CPU time of a run, as they are gathered."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from batchinfer.cluster.lifecycle import behind_engines
from batchinfer.cluster.phases import Phases, process_start
from batchinfer.cluster.timings import RunTimings
from batchinfer.job.layout import JobLayout


def test_first_moments_stay_and_last_ones_move(tmp_path: Path) -> None:
    timings = RunTimings(started=100.0)
    for name, at in (("first_token", 102.5), ("first_token", 103.0), ("last_durable", 104.0), ("last_durable", 109.0)):
        timings.moment(name, at)
    assert timings.first_token_s == 2.5
    timings.cpu_s("engine w0", 4.0)
    timings.cpu_s("engine w0", 1.0)  # a new process of the name
    timings.cpu_s("engine w0", 1.5)
    timings.spans("engine w0", [{"name": "loads", "begin": 101.0, "end": 101.5, "cpu_s": 0.4}])
    timings.write(JobLayout(tmp_path))
    found = json.loads(JobLayout(tmp_path).timings.read_text())
    assert found["moments"] == {"first_token": 2.5, "last_durable": 9.0}
    assert found["cpu_s"]["engine w0"] == 5.5 and found["cpu_s"]["driver"] > 0
    mine = [span for span in found["spans"] if span["process"] == "engine w0"]
    assert mine == [{"process": "engine w0", "name": "loads", "begin_s": 1.0, "end_s": 1.5, "cpu_s": 0.4}]


def test_moments_are_written_as_they_were_and_not_as_they_were_heard_of(tmp_path: Path) -> None:
    timings = RunTimings(started=100.0)
    order = ["job_frozen", "rows_ready", "first_lease", "first_token", "first_durable", "last_durable", "end"]
    times = {name: 101.0 + number for number, name in enumerate(order)}
    for name in sorted(order):  # messages of several processes come in any order
        timings.moment(name, times[name])
    timings.write(JobLayout(tmp_path))
    moments = json.loads(JobLayout(tmp_path).timings.read_text())["moments"]
    assert moments == {name: times[name] - 100.0 for name in order}
    told = timings.start_text()
    assert "first token 4.00 s" in told and "job_frozen 1.00, rows_ready 2.00, first_lease 3.00" in told


def test_spans_are_taken_once() -> None:
    phases = Phases()
    with phases.span("waits"):
        time.sleep(0.01)
    (span,) = phases.take()
    assert span["name"] == "waits" and span["end"] - span["begin"] >= 0.01 and phases.take() == []
    assert 0 < time.time() - process_start() < 7 * 24 * 3600


def test_only_the_thread_that_says_so_gives_way() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def work() -> None:
        for _ in range(2):
            behind_engines()
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] == seen[1] == min(before + 5, 19) and os.getpriority(os.PRIO_PROCESS, 0) == before
