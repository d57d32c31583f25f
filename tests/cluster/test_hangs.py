"""Engines and workers that hang or never come up: noticed in bounded time, the rows run elsewhere, the job ends."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from batchinfer.cluster.coordinator import DONE_HERE_ROWS
from tests.cluster.conftest import FAST, SLOW, JobFolder, alive

ROWS = 120
SETTINGS = {"engine": {"max_num_seqs": 8}, "sampling": {"max_tokens": 10, "temperature": 0.7}}

# Runs in every Python that the driver starts, before anything else: acts up in the engines of one worker alone.
SICK_ENGINE = """
import os, signal, sys
line = open("/proc/self/cmdline").read()
if "engine_process" in line:
    path = os.environ["SICK"]
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        open(path, "w").write(str(os.getppid()))
        first = True
    except FileExistsError:
        first = False
    if {always} and open(path).read() in ("", str(os.getppid())) or first:
        {act}
"""


def sick(folder: JobFolder, act: str, *, always: bool) -> dict[str, str]:
    """Environment in which the engine of the worker that starts one first acts up: at every start, or at its first."""
    place = folder.root / "sick"
    place.mkdir()
    (place / "sitecustomize.py").write_text(SICK_ENGINE.format(act=act, always=always))
    return os.environ | {
        "PYTHONPATH": str(place),
        "SICK": str(folder.root / "sick-worker"),
        "BATCHINFER_TRACE": str(folder.trace),
    }


def complete(folder: JobFolder, count: int = ROWS) -> None:
    rows = folder.rows()
    assert [row["source_row"] for row in rows] == list(range(count))
    assert not any(row["error"] for row in rows)
    folder.run("verify", "out")


def test_a_worker_whose_engine_always_fails_is_left_out_and_the_job_completes(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS, cluster={"workers": 2})
    said = folder.run(env=sick(folder, "os._exit(7)", always=True), timeout=90)
    assert "is not used any more: its engine failed at 3 starts in a row" in said and "exit code 7" in said
    complete(folder)


def test_when_every_engine_fails_the_job_ends_with_the_reason(folder: JobFolder) -> None:
    folder.input(5)
    folder.job(FAST)
    said = folder.run(env=sick(folder, "os._exit(7)", always=True), code=1, timeout=60)
    assert "No worker is left" in said and "exit code 7" in said and "same command goes on" in said
    folder.run()


@pytest.mark.slow
def test_an_engine_that_hangs_while_it_starts_is_started_again(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(FAST, **SETTINGS, cluster={"hang_timeout_s": 2})
    folder.run(env=sick(folder, "os.kill(os.getpid(), signal.SIGSTOP)", always=False), timeout=90)
    assert "showed no life" in folder.logs()
    complete(folder)


def test_an_engine_that_hangs_is_ended_and_its_rows_run_again(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS, cluster={"hang_timeout_s": 4})
    driver = folder.start()
    folder.wait_for(folder.segments)
    (engine,) = folder.of_kind(driver, "engine_process")
    os.kill(engine, signal.SIGSTOP)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    assert "showed no life" in folder.logs() and not alive(engine)
    complete(folder)


def test_a_worker_that_hangs_is_replaced(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS, cluster={"hang_timeout_s": 4})
    driver = folder.start()
    folder.wait_for(folder.segments)
    (worker,) = folder.of_kind(driver, "worker_process")
    os.kill(worker, signal.SIGSTOP)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    assert not alive(worker)
    complete(folder)


def test_an_interrupted_job_leaves_nobody_behind_though_its_engine_hangs(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    driver = folder.start()
    folder.wait_for(folder.segments)
    processes = folder.of_kind(driver, "_process")
    os.kill(folder.of_kind(driver, "engine_process")[0], signal.SIGSTOP)
    driver.send_signal(signal.SIGTERM)
    start = time.monotonic()
    driver.communicate(timeout=40)
    assert driver.returncode == 75 and time.monotonic() - start < 25
    folder.wait_for(lambda: not any(map(alive, processes)), timeout=10)


# The first planning of a chunk lets nothing else run in its worker, heartbeats included.
BUSY_PLANNING = """
import ctypes, os, threading
if "worker_process" in open("/proc/self/cmdline").read():
    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "prepare_chunk":
            try:
                os.close(os.open(os.environ["SICK"], os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                return
            ctypes.PyDLL(None).sleep({seconds})
    threading.setprofile(profile)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_planning_that_keeps_a_worker_from_any_heartbeat_is_done_by_another(folder: JobFolder, workers: int) -> None:
    count = DONE_HERE_ROWS + 1  # fewer are planned by the driver
    folder.input(count)
    folder.job(FAST, cluster={"workers": workers, "hang_timeout_s": 4})
    place = folder.root / "sick"
    place.mkdir()
    (place / "sitecustomize.py").write_text(BUSY_PLANNING.format(seconds=9))
    env = {"PYTHONPATH": str(place), "SICK": str(folder.root / "busy"), "BATCHINFER_TRACE": str(folder.trace)}
    folder.run(env=os.environ | env, timeout=90)
    assert (folder.root / "busy").exists()
    complete(folder, count)
    assert not folder.ran_again()


@pytest.mark.slow
def test_a_driver_that_was_stopped_for_a_while_goes_on(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS, cluster={"workers": 2, "hang_timeout_s": 8})
    driver = folder.start()
    folder.wait_for(folder.segments)
    driver.send_signal(signal.SIGSTOP)
    time.sleep(5)
    driver.send_signal(signal.SIGCONT)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    complete(folder)


@pytest.mark.slow
def test_a_stopped_driver_is_succeeded_and_does_no_harm_when_it_wakes(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(f"{FAST}&step_delay_ms=300", **SETTINGS)
    zombie = folder.start()
    folder.wait_for(folder.segments)
    zombie.send_signal(signal.SIGSTOP)
    successor = folder.start()
    _wait_for_epoch(folder.state / "driver" / "000002.json")
    zombie.send_signal(signal.SIGCONT)
    _, said = zombie.communicate(timeout=30)
    assert zombie.returncode == 75 and "another driver has taken over" in said
    _, said = successor.communicate(timeout=150)
    assert successor.returncode == 0, said
    assert json.loads(folder.run("status", "out", "--json"))["epoch"] == 2
    complete(folder)


def _wait_for_epoch(claim: Path) -> None:
    end = time.monotonic() + 60
    while not claim.exists():
        assert time.monotonic() < end, "nobody took over"
        time.sleep(0.2)
