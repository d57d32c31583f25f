"""What the driver runs itself, for a small job: not once the run has ended, nor once the job is another driver's."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchinfer.cluster import tasks
from batchinfer.cluster.coordinator import Coordinator, _News
from batchinfer.cluster.out_of_memory import FOR_ENGINES
from batchinfer.cluster.outbox import Outbox
from batchinfer.cluster.progress import Progress
from batchinfer.cluster.resume import find_committed
from batchinfer.cluster.timings import RunTimings
from batchinfer.job import events as ev
from batchinfer.job.leases import Lease, WorkerState
from batchinfer.job.state import JobState, WindowPlan
from tests.cluster.test_resume_files import Planned


class NoWorkers:
    def dead(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def drop(self, name: str) -> None: ...

    def discard(self, name: str) -> None: ...


@pytest.fixture
def told() -> list[Progress]:
    return []


@pytest.fixture
def make(tmp_path: Path, told: list[Progress]) -> Callable[..., Coordinator]:
    """make(lost_lock, committed=chunks): of a small job that is planned, with a scheduler that would take no task."""
    planned = Planned(tmp_path)

    def made(lost_lock: Callable[[], bool] = lambda: False, *, committed: Sequence[int] = ()) -> Coordinator:
        windows = planned.job.windows()
        if committed:
            planned.answer(planned.plan)
            assert planned.finish(planned.plan) == 0
        for chunk in committed:
            tasks.commit_chunk(planned.run, 1, planned.plan, chunk)
        coordinator = Coordinator(
            job=planned.job,
            run=planned.run,
            epoch=1,
            state=JobState([WindowPlan(0, (0, 1))], committed=committed),
            workers=NoWorkers(),
            committed=find_committed(planned.job, windows),
            names=[],
            on_progress=told.append,
            lost_lock=lost_lock,
            timings=RunTimings(time.time()),
            first_window=windows[0],
        )
        coordinator.client = object()
        return coordinator

    return made


def test_once_it_is_closed_nothing_is_begun_and_what_was_has_ended(make: Callable[..., Coordinator]) -> None:
    coordinator = make()
    begun, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        begun.set()
        go_on.wait(30)
        ran.append("first")

    coordinator._submit(ev.FinishUnit(0, 0), first)
    coordinator._submit(ev.CleanWindow(0), lambda: ran.append("second"))
    assert begun.wait(30)
    threading.Timer(0.2, go_on.set).start()
    coordinator.close()
    assert ran == ["first"]


def test_nothing_is_begun_once_the_lock_is_lost(make: Callable[..., Coordinator]) -> None:
    coordinator = make(lambda: True)
    ran: list[str] = []
    task = ev.CleanWindow(0)
    coordinator._submit(task, lambda: ran.append("it"))
    heard: list[Any] = [coordinator.inbox.get(timeout=30) for _ in range(2)]
    coordinator.close()
    assert not ran
    assert isinstance(heard[0], ev.StopRequested) and "another driver" in heard[0].message
    assert isinstance(heard[1], ev.TaskFailed) and heard[1].task == task and heard[1].fatal
    with pytest.raises(queue.Empty):
        coordinator.inbox.get_nowait()


def test_tasks_of_a_small_job_are_handed_the_drivers_own_job(make: Callable[..., Coordinator]) -> None:
    """Not the path of its file, which may be that of the job before it."""
    coordinator = make()
    given: list[Any] = []
    coordinator._submit = lambda task, function, *args: given.append(args[0])  # type: ignore[method-assign]
    coordinator._start_task(ev.CleanWindow(0))
    coordinator._start_task(ev.CleanWindow(1))
    assert given[0].job is coordinator.job and given[1] == coordinator.run_path
    coordinator.close()


def test_counts_that_came_while_the_run_was_ending_are_in_its_timings(make: Callable[..., Coordinator]) -> None:
    coordinator = make()
    counts = {"cpu_s": 2.5, "computed_tokens": 9, "cached_tokens": 0, "generated_tokens": 4}
    coordinator.inbox.put(_News({"t": "stopped", "name": "w0"}))
    coordinator.inbox.put(_News({"t": "stats", "name": "w0", **counts}))
    coordinator.close()
    coordinator.hear_late_counts()
    layout = coordinator.job.layout
    coordinator.timings.write(layout)
    found = json.loads(layout.timings.read_text())
    assert found["engine"]["w0"] == counts and found["cpu_s"]["engine w0"] == 2.5


def test_a_cut_that_fails_once_is_tried_again(
    make: Callable[..., Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make()
    coordinator.client = None  # no worker yet: what is small is done at once
    layout, cut = coordinator.job.layout, tasks.cut_window
    layout.window(0).unlink()
    failures = [OSError(5, "Input/output error")]

    def failing(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return cut(*args)

    failing.__name__ = cut.__name__
    monkeypatch.setattr(tasks, "cut_window", failing)
    coordinator.begin()
    assert not failures
    assert layout.window(0).exists()
    assert coordinator.end is None


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_window_with_some_parts_out_is_not_counted_twice(
    make: Callable[..., Coordinator], told: list[Progress], chunk: int
) -> None:
    """Its units hold rows of those parts too. One of the five rows is an error that planning found, in chunk 0."""
    coordinator = make(committed=[chunk])
    coordinator.client = None  # then all is done at once, in this thread
    coordinator._report()
    coordinator.begin()
    coordinator._report()
    coordinator.close()
    assert coordinator.end == ev.EndJob("done")
    assert [(progress.tally.rows, progress.tally.failed) for progress in told] == [((3, 1), (2, 0))[chunk], (5, 1)]


def test_an_engine_that_memory_may_have_ended_is_told_with_its_unit(make: Callable[..., Coordinator]) -> None:
    coordinator = make()
    lease = Lease(worker="w0", piece=ev.Piece(window=2, unit=7, start=0, stop=50))
    coordinator.state.leases.workers["w0"] = WorkerState(phase="ready", leases={4: lease})
    died = {
        "t": "died",
        "name": "w0",
        "reason": "signal 9",
        "last_words": "",
        "in_flight": [[4, 10, 20]],
        "fatal": False,
    }
    for _ in range(2):
        coordinator._understand(_News({**died, "memory": "; not for want of memory, it seems"}))
    log = coordinator.job.layout.log
    assert coordinator.notes == [f"the engine of worker w0 died: signal 9; what it ran is run again (more in {log})"]
    event = coordinator._understand(_News({**died, "memory": f"; it took 3.00 GiB at most: {FOR_ENGINES}"}))
    _, note = coordinator.notes
    assert "died while it ran rows 10 to 19 of unit 7, window 2: signal 9; it took 3.00 GiB" in note
    assert isinstance(event, ev.EngineDied)
    assert event.reason == "signal 9"


def test_of_an_engine_that_was_ended_as_hung_nothing_is_said_of_memory(make: Callable[..., Coordinator]) -> None:
    coordinator = make()
    coordinator._ended_as_hung.add("w0")
    died = {"name": "w0", "t": "died", "reason": "signal 9", "last_words": "", "in_flight": [], "fatal": False}
    event = coordinator._understand(_News({**died, "memory": f"; it took 3.00 GiB at most: {FOR_ENGINES}"}))
    assert isinstance(event, ev.EngineDied)
    assert "showed no life" in event.reason
    assert event.last_words == ""
    (note,) = coordinator.notes
    assert "showed no life" in note and "3.00 GiB" not in note


def test_an_engine_that_can_not_be_started_again_is_not_told_of_so(make: Callable[..., Coordinator]) -> None:
    coordinator = make()
    died = {"name": "w0", "t": "died", "reason": "no such model", "last_words": "", "in_flight": [], "memory": ""}
    coordinator._understand(_News({**died, "fatal": True}))
    assert not coordinator.notes


def test_a_dead_worker_is_told_of_where_people_look(
    make: Callable[..., Coordinator], told: list[Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the terminal, once for a reason, and in the log each time."""
    coordinator = make()
    coordinator.client = SimpleNamespace(status="running")
    coordinator._outbox = Outbox(coordinator.client, lambda worker, message: None)
    monkeypatch.setattr(coordinator.workers, "dead", lambda: iter([("w0", "ended by signal 9")]))
    coordinator._tick()
    coordinator._tick()
    log = coordinator.job.layout.log
    assert told[-1].notes == (f"worker w0: ended by signal 9; it is started again (more in {log})",)
