"""The pieces between processes: the engine's host, workers of this machine, lifecycle."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchinfer.cluster.engine_host import EngineHost, Message
from batchinfer.cluster.lifecycle import how_it_ended
from batchinfer.cluster.local import LocalWorkers
from batchinfer.cluster.warm import fair_threads
from tests.cluster.conftest import alive


def wait_for(condition: object, timeout: float = 20) -> None:
    end = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EngineHost]:
    made = EngineHost(name="w0", num_threads=1, preload=[], log=tmp_path / "early.log")
    yield made
    made.kill()
    if made.process is not None:
        made.process.wait()


def test_an_engine_that_cannot_read_its_job_says_why(host: EngineHost, tmp_path: Path) -> None:
    heard: list[Message] = []
    host.listen(heard.append)
    host.start()
    host.configure(run=str(tmp_path / "none.json"), epoch=1, log=tmp_path / "logs" / "engine.log", num_threads=1)
    wait_for(lambda: heard)
    (died,) = heard
    assert died["t"] == "died" and "none.json" in died["reason"] and not died["in_flight"]
    host.send({"t": "stop"})  # to a dead one: nothing happens


def test_a_killed_engine_is_reported_with_the_signal_and_started_again(host: EngineHost) -> None:
    heard: list[Message] = []
    host.start()
    assert host.process is not None
    first = host.process.pid
    host.start()
    assert host.process.pid == first  # one at a time
    host.kill()
    time.sleep(0.2)
    host.listen(heard.append)  # what came before is not lost
    wait_for(lambda: heard)
    assert "SIGKILL" in heard[0]["reason"] and not heard[0]["fatal"]
    host.start()
    assert host.process.pid != first


def test_dead_workers_are_told_and_started_again_unless_dropped(tmp_path: Path) -> None:
    workers = LocalWorkers(num_workers=2, num_threads=1, preload=[], scratch=tmp_path, began=time.time())
    workers.start()
    try:
        pids = [child.process.pid for child in workers._children.values()]
        workers.drop("w1")
        workers.discard("w0")
        workers.discard("w1")
        told: dict[str, str] = {}
        wait_for(lambda: told.update(workers.dead()) or len(told) == 2)
        assert all("SIGKILL" in reason for reason in told.values())
        assert list(workers._children) == ["w0"]
    finally:
        workers.close()
    assert not any(map(alive, pids))


def test_how_a_process_ended_in_words() -> None:
    assert how_it_ended(3) == "exit code 3"
    assert "SIGKILL" in how_it_ended(-9) and "memory" in how_it_ended(-9)
    assert "SIGSEGV" in how_it_ended(-11)


def test_engines_share_the_cores() -> None:
    cores = fair_threads(1)
    assert fair_threads(cores) == 1 and fair_threads(2 * cores) == 1
    assert fair_threads(2) == max(1, cores // 2)


def test_a_child_whose_parent_is_gone_already_leaves() -> None:
    code = "from batchinfer.cluster.lifecycle import end_with_parent; end_with_parent(1 << 22); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1 and not done.stdout


def test_a_worker_that_is_gone_holds_up_no_message_to_the_one_in_its_place() -> None:
    """Dask tries for a long time to reach an address where nobody listens."""
    import threading

    from batchinfer.cluster.outbox import Outbox

    gone = threading.Event()
    sent: list[tuple[str, Message]] = []
    lost: list[Message] = []

    class Client:
        def run(self, function: object, messages: list[Message], workers: list[str]) -> None:
            if workers == ["old"]:
                gone.wait(20)
                raise OSError("no such worker")
            sent.extend((workers[0], message) for message in messages)

    outbox = Outbox(Client(), lambda worker, message: lost.append(message))
    outbox.send("w0", "old", {"t": "lease", "lease": 1})
    outbox.forget("old")
    for number in range(2, 5):
        outbox.send("w0", "new", {"t": "lease", "lease": number})
    wait_for(lambda: len(sent) == 3, timeout=5)
    assert [message["lease"] for _, message in sent] == [2, 3, 4] and not lost
    gone.set()
    wait_for(lambda: lost == [{"t": "lease", "lease": 1}], timeout=5)
    outbox.forget("new")
    outbox.forget("never seen")


@pytest.mark.parametrize(("blameless", "suspects"), [(False, [[3, 10, 14]]), (True, [])])
def test_no_row_is_suspected_of_a_full_disk(host: EngineHost, blameless: bool, suspects: list[list[int]]) -> None:
    lines: list[Message] = [
        {"t": "begun", "lease": 2, "start": 0, "stop": 5},
        {"t": "begun", "lease": 3, "start": 10, "stop": 14},
        {"t": "done", "lease": 2},
        {"t": "failed", "message": "OSError: no space left", "fatal": False, "blameless": blameless},
    ]
    heard: list[Message] = []
    host.listen(heard.append)
    script = f"import json\nfor line in {lines!r}: print(json.dumps(line))"
    engine = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    host._read(engine)
    died = heard[-1]
    assert died["t"] == "died" and "no space left" in died["reason"]
    assert [list(entry) for entry in died["in_flight"]] == suspects


def test_a_signal_that_a_library_swallowed_stops_the_run_all_the_same() -> None:
    """Before the run can be stopped in order, a signal is an exception wherever the driver stands."""
    from batchinfer.cluster.submit import _Signals

    stopped: list[str] = []
    with _Signals() as signals:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception as error:  # as code does that tries whether something works
            assert "SIGTERM" in str(error)
        signals.stop_in_order(stopped.append)
    assert stopped == ["stopped by SIGTERM"]


@pytest.mark.parametrize(("most", "rows"), [("auto", None), (0, 0), (7, 7)])
def test_limits_are_the_jobs(most: str | int, rows: int | None) -> None:
    from batchinfer.cluster.submit import limits_of
    from batchinfer.job.spec import JobSpec

    job = {"model": {"path": "fake://hash"}, "input": {"path": "in", "prompt": "x"}, "output": {"path": "out"}}
    job |= {"cluster": {"worker_timeout_s": 41}, "failure": {"max_failed_rows": most}}
    limits = limits_of(JobSpec.from_dict(job))
    assert (limits.no_worker_s, limits.max_failed_rows) == (41.0, rows)
