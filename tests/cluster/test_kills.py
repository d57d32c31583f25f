"""Processes killed at bad moments: the rows come out as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pytest

from batchinfer.testing.faults.processes import catches
from tests.cluster.conftest import FAST, SLOW, JobFolder, alive, family

ROWS = 150
SETTINGS = {"engine": {"max_num_seqs": 8}, "sampling": {"temperature": 0.8, "max_tokens": 10}}


@pytest.fixture
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], pa.Table]:
    """The rows of an undisturbed run of the same job."""

    def run() -> pa.Table:
        other = JobFolder(tmp_path_factory.mktemp("calm"))
        other.input(ROWS)
        other.job(FAST, **SETTINGS)
        other.run()
        return other.table()

    return run


def went_on(folder: JobFolder, driver: subprocess.Popen[str], seen: int) -> bool:
    return len(folder.events("published")) > seen or driver.poll() is not None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_killed_and_resumed_equals_uninterrupted(folder: JobFolder, calm: Callable[[], pa.Table], seed: int) -> None:
    draw = random.Random(seed)
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    driver = folder.start()
    kills = 0
    for target in draw.sample(["driver", "worker_process", "engine_process", "driver"], 4):
        seen = len(folder.events("published"))
        folder.wait_for(partial(went_on, folder, driver, seen))
        time.sleep(draw.uniform(0.0, 0.4))
        if driver.poll() is not None:
            break
        victims = [driver.pid] if target == "driver" else folder.of_kind(driver, target)
        if not victims:
            continue
        below = family(driver.pid)
        os.kill(draw.choice(victims), signal.SIGKILL)
        kills += 1
        if target == "driver":
            driver.communicate()
            folder.wait_for(lambda below=below: not any(map(alive, below)), timeout=8)
            driver = folder.start()
    _, said = driver.communicate(timeout=90)
    assert driver.returncode == 0, said + folder.logs()
    assert kills >= 2
    folder.run("verify", "out")
    assert not folder.ran_again()
    assert_same_rows(folder.table(), calm())


def assert_same_rows(table: pa.Table, wanted: pa.Table) -> None:
    assert table.equals(wanted), [(a, b) for a, b in zip(table.to_pylist(), wanted.to_pylist(), strict=True) if a != b][
        :3
    ]


def test_a_killed_worker_is_replaced_and_its_engine_is_gone_within_seconds(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS, cluster={"workers": 2})
    driver = folder.start()
    folder.wait_for(folder.segments)
    victim = folder.of_kind(driver, "worker_process")[0]
    engines = [pid for pid, line in family(victim).items() if "engine_process" in line]
    os.kill(victim, signal.SIGKILL)
    folder.wait_for(lambda: not any(map(alive, engines)), timeout=8)
    folder.wait_for(lambda: len(folder.of_kind(driver, "worker_process")) == 2 or driver.poll() is not None)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    folder.run("verify", "out")


@pytest.mark.parametrize(
    ("death", "told"), [("", "ended by exit code 13"), ("&crash_signal=11", "ended by signal 11 (SIGSEGV)")]
)
def test_the_poison_row_is_found_and_all_others_complete(folder: JobFolder, death: str, told: str) -> None:
    texts = [f"row {i}" for i in range(40)]
    texts[23] = "row ~ 23"
    folder.input({"text": texts})
    folder.job(f"{FAST}&crash_token={ord('~')}{death}", engine={"max_num_seqs": 8})
    folder.run(code=3, timeout=110)
    rows = folder.rows()
    bad = [i for i, row in enumerate(rows) if row["error"]]
    assert bad == [23]
    assert rows[23]["error"]["class"] == "engine_crash"
    # Part of the output: the same wherever and whenever the job runs.
    assert rows[23]["error"]["message"] == (
        f"The engine died 2 times while it ran this row alone: the engine process {told}"
    )
    assert "its last words" in folder.logs()
    folder.run("verify", "out")


def test_after_a_killed_driver_nothing_is_left_running(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    driver = folder.start()
    folder.wait_for(folder.segments)
    below = family(driver.pid)
    assert len(below) >= 2
    os.kill(driver.pid, signal.SIGKILL)
    folder.wait_for(lambda: not any(map(alive, below)), timeout=8)
    assert '"interrupted"' in folder.run("status", "out", "--json")


def test_the_second_signal_ends_it_at_once(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    driver = folder.start()
    folder.wait_for(folder.segments)
    driver.send_signal(signal.SIGINT)
    time.sleep(0.05)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(5) == 75


@pytest.mark.parametrize("delay_s", [0.0, 0.15, 0.4, 0.8])
def test_a_driver_that_is_ended_while_starting_leaves_no_folder_behind(folder: JobFolder, delay_s: float) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    temporary = folder.root / "tmp"
    temporary.mkdir()
    driver = folder.start(env=os.environ | {"TMPDIR": str(temporary)})
    folder.wait_for(lambda: [*temporary.glob("batchinfer-*/worker-*.log")])
    time.sleep(delay_s)
    driver.send_signal(signal.SIGTERM)
    driver.communicate(timeout=30)
    assert not [*temporary.glob("batchinfer-*")]


def test_workers_of_a_killed_driver_tidy_up(folder: JobFolder) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    temporary = folder.root / "tmp"
    temporary.mkdir()
    driver = folder.start(env=os.environ | {"TMPDIR": str(temporary)})
    folder.wait_for(folder.segments)
    assert [*temporary.glob("batchinfer-*/worker-*.log")]
    driver.kill()
    driver.communicate(timeout=30)
    folder.wait_for(lambda: not [*temporary.glob("batchinfer-*/worker-*.log")], timeout=30)


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.6, 1.0, 1.5])
def test_a_signal_while_starting_is_an_interruption_too(folder: JobFolder, delay_s: float) -> None:
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    driver = folder.start()
    folder.wait_for(lambda: catches(driver.pid, signal.SIGTERM))  # before that, Python itself is starting
    time.sleep(delay_s)
    driver.send_signal(signal.SIGTERM)
    _, said = driver.communicate(timeout=30)
    assert driver.returncode == 75 and "SIGTERM" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_terminal_is_the_drivers_to_act_on(
    folder: JobFolder, number: signal.Signals
) -> None:
    """As with Ctrl-C and when the terminal is closed: engines still make durable what they have."""
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    driver = folder.start(start_new_session=True)
    folder.wait_for(folder.segments)
    processes = folder.of_kind(driver, "_process")
    assert len(processes) == 2
    time.sleep(0.6)  # for rows that have finished and are not durable yet
    sent = time.time()
    os.killpg(driver.pid, number)
    _, said = driver.communicate(timeout=30)
    assert driver.returncode == 75 and number.name in said and "goes on" in said
    assert not any(map(alive, processes))
    assert any(event["time"] > sent for event in folder.events("published"))
    folder.run()
    folder.run("verify", "out")


def test_a_hangup_that_was_ignored_at_the_start_stops_nothing(folder: JobFolder) -> None:
    """`nohup batchinfer submit`, and then the terminal is closed."""
    folder.input(ROWS)
    folder.job(SLOW, **SETTINGS)
    driver = folder.start(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), start_new_session=True)
    folder.wait_for(folder.segments)
    os.killpg(driver.pid, signal.SIGHUP)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 0, said
    assert folder.table().num_rows == ROWS


def test_parts_that_are_out_are_not_made_again_when_a_worker_dies(folder: JobFolder) -> None:
    """Dask runs finished tasks again whose results died with a worker; here results are files."""
    for number in range(10):
        rows = {"text": [f"{'x' * (number + 1)} file {number} row {i}" for i in range(12)]}
        folder.input(rows, f"{number}.parquet")
    folder.job(f"{FAST}&step_delay_ms=60", engine={"max_num_seqs": 4}, cluster={"workers": 2})
    driver = folder.start()
    folder.wait_for(lambda: len(list(folder.out.glob("part-*"))) >= 3)
    out = {path: path.stat().st_mtime_ns for path in folder.out.glob("part-*")}
    files = {int(path.name[5:10]) for path in out}
    killed_at = time.time()
    os.kill(folder.of_kind(driver, "worker_process")[0], signal.SIGKILL)
    _, said = driver.communicate(timeout=90)
    assert driver.returncode == 0, said
    assert all(path.stat().st_mtime_ns == when for path, when in out.items())
    late = [event for event in folder.events("lease") if event["leased_at"] > killed_at]
    assert not files & {chunk for event in late for chunk, _ in event["rows"]}
    assert folder.table().num_rows == 120
    folder.run("verify", "out")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_taken_away_again_and_again_are_nobodys_fault(folder: JobFolder, number: signal.Signals) -> None:
    folder.input(ROWS)
    folder.job(f"{FAST}&step_delay_ms=60", **SETTINGS, cluster={"workers": 3})
    driver = folder.start()
    folder.wait_for(folder.segments)
    for _ in range(8):
        time.sleep(1.5)
        for pid in folder.of_kind(driver, "worker_process")[:1]:
            os.kill(pid, number)
    if driver.poll() is None:
        for pid in folder.of_kind(driver, "worker_process"):
            os.kill(pid, number)
    _, said = driver.communicate(timeout=120)
    assert driver.returncode == 0, said
    assert not any(row["error"] for row in folder.rows())
    folder.run("verify", "out")
