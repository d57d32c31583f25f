"""What the job does next: events in, instructions out. No clock, no files, no threads, no Dask.

    window   waiting > planning (chunk by chunk) > cutting > running > cleaning > done
    unit     pieces in the queue or on lease (`job.leases`) > finishing (checked, compacted) > finished
    chunk    planned > committed, once every unit that holds rows of it is finished

Everything it asks for can be done twice without harm (results are files, a part is published once), so a lost
worker or a lost message needs no states of its own: the piece is queued again. The words of events and
instructions are in `job.events`; `cluster.coordinator` carries the instructions out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from batchinfer.job import events as ev
from batchinfer.job.events import Event, Instruction, Piece, Tally, Task
from batchinfer.job.leases import LeaseLimits, Leases


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to hold back and when to give up.

    max_failed_rows     None: stop when `min_failed_rows` failed and they are half of those finished; counted by
                        itself for rows that fail in planning (of those planned) and in the engine (in this run).
                        A number: stop when more failed in both together. What failed in an engine in an earlier run
                        is not counted: the cause may be mended, and then the same command must go on
    max_running_windows   planned or run at the same time; `max_open_windows` counts those being committed as well
    no_worker_s         how long to wait for a worker when there is none
    stop_s              how long a stopping job waits for engines and commits
    """

    max_failed_rows: int | None = None
    min_failed_rows: int = 100
    max_running_windows: int = 2
    max_open_windows: int = 3
    task_tries: int = 3
    unit_tries: int = 3
    no_worker_s: float = 300.0
    stop_s: float = 8.0


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """A window of the input: its number and the numbers of its chunks."""

    window: int
    chunks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Unit:
    info: ev.UnitInfo
    tally: Tally = field(default_factory=Tally)
    tries: int = 0
    finished: bool = False


@dataclass(slots=True, eq=False)
class _Window:
    phase: Literal["planning", "cutting", "running", "cleaning"] = "planning"
    unplanned: set[int] = field(default_factory=set)
    uncommitted: set[int] = field(default_factory=set)
    committing: set[int] = field(default_factory=set)
    units: dict[int, _Unit] = field(default_factory=dict)
    unfinished: Counter[int] = field(default_factory=Counter)  # by chunk: units that hold rows of it

    @property
    def has_rows_to_run(self) -> bool:
        return self.phase != "cleaning" and (
            self.phase != "running" or any(not unit.finished for unit in self.units.values())
        )


class JobState:
    def __init__(
        self,
        windows: Iterable[WindowPlan],
        *,
        committed: Collection[int] = (),
        limits: Limits | None = None,
        lease_limits: LeaseLimits | None = None,
    ) -> None:
        """`committed`: chunks whose parts are out. Windows without other chunks are not touched."""
        self.limits = limits or Limits()
        self.leases = Leases(lease_limits or LeaseLimits())
        self.planned_rows = 0  # of the windows opened so far
        self.planning_failed = 0
        self.given_up = 0
        self.tally = Tally()  # outcomes in the windows opened so far, also those of earlier runs
        self.fresh = Tally()  # outcomes that engines produced in this run
        self.outcome: ev.Outcome | None = None
        self._waiting: deque[tuple[int, tuple[int, ...]]] = deque()
        for plan in windows:
            todo = tuple(chunk for chunk in plan.chunks if chunk not in committed)
            if todo:
                self._waiting.append((plan.window, todo))
        self._windows: dict[int, _Window] = {}
        self._tasks: dict[Task, int] = {}  # asked for and not answered, with the number of failures
        self._stopping: tuple[ev.Outcome, str] | None = None
        self._stop_deadline: float | None = None
        self._now: float | None = None
        self._alone_since: float | None = None
        self._handlers: dict[type, Callable[[Any, list[Instruction]], None]] = {
            ev.WorkerJoined: lambda e, out: self.leases.worker_joined(e.worker, out),
            ev.WorkerLost: lambda e, out: self.leases.worker_lost(e.worker, e.reason, out),
            ev.EngineReady: lambda e, out: self.leases.engine_ready(e.worker, e.num_seqs),
            ev.EngineDied: self._on_engine_died,
            ev.EngineStopped: lambda e, out: self.leases.engine_stopped(e.worker, self.stopping, out),
            ev.ChunkPlanned: self._on_chunk_planned,
            ev.WindowCut: self._on_window_cut,
            ev.LeaseProgress: self._on_lease_progress,
            ev.LeaseBegun: lambda e, out: self.leases.begun(e.worker, e.lease),
            ev.LeaseDone: self._on_lease_done,
            ev.LeaseReturned: self._on_lease_returned,
            ev.LeaseRefused: self._on_lease_refused,
            ev.UnitFinished: self._on_unit_finished,
            ev.RowGivenUp: self._on_row_given_up,
            ev.ChunkCommitted: self._on_chunk_committed,
            ev.WindowCleaned: self._on_window_cleaned,
            ev.TaskFailed: self._on_task_failed,
            ev.StopRequested: lambda e, out: self._stop("interrupted", e.message, out),
            ev.Tick: self._on_tick,
        }

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._waiting and not self._windows

    @property
    def stopping(self) -> bool:
        return self._stopping is not None

    @property
    def phase(self) -> str:
        """One word for the user: what the job is waiting for."""
        if self.outcome is not None:
            return self.outcome
        if self.stopping:
            return "stopping"
        phases = {window.phase for window in self._windows.values()}
        if "running" in phases and any(window.has_rows_to_run for window in self._windows.values()):
            workers = self.leases.workers.values()
            if not any(worker.phase == "ready" for worker in workers):
                here = any(worker.phase == "joined" for worker in workers)
                return "loading the model" if here else "waiting for workers"
            return "running"
        return "planning" if phases & {"planning", "cutting"} else "committing"

    def uncommitted(self, window: int) -> frozenset[int]:
        """Chunks of an open window whose parts are not out."""
        return frozenset(self._windows[window].uncommitted)

    def start(self) -> list[Instruction]:
        out: list[Instruction] = []
        self._advance(out)
        return out

    def handle(self, event: Event) -> list[Instruction]:
        """Events about leases, windows or workers that are no longer known are late news, and ignored."""
        out: list[Instruction] = []
        if self.outcome is None:
            self._handlers[type(event)](event, out)
            self._advance(out)
        return out

    # Leases ------------------------------------------------------------------------------------------------------

    def _on_engine_died(self, event: ev.EngineDied, out: list[Instruction]) -> None:
        if self.stopping:
            self.leases.engine_stopped(event.worker, True, out)
            return
        tasks: list[Instruction] = []
        self.leases.engine_died(event, tasks)
        for instruction in tasks:
            if isinstance(instruction, ev.GiveUpRow):
                self._ask(instruction, out)
            else:
                out.append(instruction)

    def _on_lease_progress(self, event: ev.LeaseProgress, out: list[Instruction]) -> None:
        lease = self.leases.find(event.worker, event.lease)
        if lease is None:
            return
        self._unit(lease.piece).tally += event.tally
        self.tally += event.tally
        self.fresh += event.tally
        if event.tally.rows:
            self.leases.fruitful(event.worker)
            self.leases.progressed(event.worker, event.lease, event.tally.rows)
        self._check_failures(out)

    def _on_lease_done(self, event: ev.LeaseDone, out: list[Instruction]) -> None:
        if self.leases.find(event.worker, event.lease) is not None:
            self.leases.fruitful(event.worker)
            self._piece_closed(self.leases.done(event.worker, event.lease), out)

    def _on_lease_returned(self, event: ev.LeaseReturned, out: list[Instruction]) -> None:
        if self.leases.find(event.worker, event.lease) is not None:
            self.leases.returned(event.worker, event.lease, event.stop)

    def _on_lease_refused(self, event: ev.LeaseRefused, out: list[Instruction]) -> None:
        if self.leases.find(event.worker, event.lease) is not None:
            self.leases.refused(event.worker, event.lease)

    def _on_row_given_up(self, event: ev.RowGivenUp, out: list[Instruction]) -> None:
        self._answered(ev.GiveUpRow, event.piece)
        if self.leases.given_up(event.piece):
            self.given_up += 1
            lost = Tally(rows=1, failed=1)
            self._unit(event.piece).tally += lost
            self.tally += lost
            self.fresh += lost
            self._piece_closed(event.piece, out)
            self._check_failures(out)

    def _unit(self, piece: Piece) -> _Unit:
        return self._windows[piece.window].units[piece.unit]

    def _piece_closed(self, piece: Piece, out: list[Instruction]) -> None:
        if not self.leases.is_open(piece.window, piece.unit):
            self._ask(ev.FinishUnit(piece.window, piece.unit), out)

    # Windows, units, chunks --------------------------------------------------------------------------------------

    def _on_chunk_planned(self, event: ev.ChunkPlanned, out: list[Instruction]) -> None:
        window = self._windows.get(event.window)
        self._tasks.pop(ev.PlanChunk(event.window, event.chunk), None)
        if window is None or event.chunk not in window.unplanned:
            return
        window.unplanned.discard(event.chunk)
        self.planned_rows += event.num_rows
        self.planning_failed += event.failed
        self.tally += Tally(rows=event.failed, failed=event.failed)
        if not window.unplanned:
            window.phase = "cutting"
            self._ask(ev.CutWindow(event.window), out)
        self._check_failures(out)

    def _on_window_cut(self, event: ev.WindowCut, out: list[Instruction]) -> None:
        window = self._windows.get(event.window)
        self._tasks.pop(ev.CutWindow(event.window), None)
        if window is None or window.phase != "cutting":
            return
        window.phase = "running"
        self.leases.open_window(event.window, [info.shared_before for info in event.units])
        for info in event.units:
            window.units[info.unit] = _Unit(info)
            window.unfinished.update(info.chunks)
            assert info.num_rows > 0, "a unit without rows"
            if info.complete:
                self._ask(ev.FinishUnit(event.window, info.unit), out)
            else:
                self.leases.add(Piece(event.window, info.unit, 0, info.num_rows))
        self._commit_what_is_complete(event.window, window, window.uncommitted, out)

    def _on_unit_finished(self, event: ev.UnitFinished, out: list[Instruction]) -> None:
        window = self._windows.get(event.window)
        if self._tasks.pop(ev.FinishUnit(event.window, event.unit), None) is None:
            return  # told before: the unit may be running again by now
        unit = window.units.get(event.unit) if window else None
        if window is None or unit is None or unit.finished:
            return
        if event.missing:  # segments were lost: the unit is run again, and skips what is still there
            unit.tries += 1
            if unit.tries >= self.limits.unit_tries:
                message = f"{event.missing} results of unit {event.unit} of window {event.window} are gone"
                self._stop("failed", f"{message}, after {unit.tries} runs of it.", out)
            else:
                self.leases.add(Piece(event.window, event.unit, 0, unit.info.num_rows))
            return
        self.tally += event.tally - unit.tally
        unit.tally, unit.finished = event.tally, True
        self.leases.forget_unit(event.window, event.unit)
        window.unfinished.subtract(unit.info.chunks)
        self._commit_what_is_complete(event.window, window, unit.info.chunks, out)

    def _commit_what_is_complete(
        self, number: int, window: _Window, chunks: Collection[int], out: list[Instruction]
    ) -> None:
        """Of these chunks: a window may have thousands."""
        for chunk in sorted(chunks):
            if chunk in window.uncommitted and chunk not in window.committing and not window.unfinished[chunk]:
                window.committing.add(chunk)
                self._ask(ev.CommitChunk(number, chunk), out)

    def _on_chunk_committed(self, event: ev.ChunkCommitted, out: list[Instruction]) -> None:
        window = self._windows.get(event.window)
        self._tasks.pop(ev.CommitChunk(event.window, event.chunk), None)
        if window is None or event.chunk not in window.uncommitted:
            return
        window.uncommitted.discard(event.chunk)
        window.committing.discard(event.chunk)
        if not window.uncommitted:
            window.phase = "cleaning"
            self._ask(ev.CleanWindow(event.window), out)

    def _on_window_cleaned(self, event: ev.WindowCleaned, out: list[Instruction]) -> None:
        self._tasks.pop(ev.CleanWindow(event.window), None)
        self._windows.pop(event.window, None)
        self.leases.close_window(event.window)

    # Tasks -------------------------------------------------------------------------------------------------------

    def _ask(self, task: Task, out: list[Instruction]) -> None:
        if task not in self._tasks:
            self._tasks[task] = 0
            out.append(task)

    def _answered(self, kind: type[ev.GiveUpRow], piece: Piece) -> None:
        for task in list(self._tasks):
            if isinstance(task, kind) and task.piece == piece:
                del self._tasks[task]

    def _on_task_failed(self, event: ev.TaskFailed, out: list[Instruction]) -> None:
        if event.task not in self._tasks:
            return
        self._tasks[event.task] += 1
        if event.fatal or event.refused or self._tasks[event.task] >= self.limits.task_tries:
            del self._tasks[event.task]
            self._stop("refused" if event.refused else "failed", event.message, out)
        else:
            out.append(event.task)

    # The whole job -----------------------------------------------------------------------------------------------

    def _check_failures(self, out: list[Instruction]) -> None:
        limits = self.limits
        if limits.max_failed_rows is not None:
            failed = self.planning_failed + self.fresh.failed
            if failed > limits.max_failed_rows:
                message = f"{failed} rows failed, and failure.max_failed_rows is {limits.max_failed_rows}."
                self._stop("failure_limit", message, out)
            return
        for failed, finished, where in (
            (self.planning_failed, self.planned_rows, "planned"),
            (self.fresh.failed, self.fresh.rows, "run"),
        ):
            if failed >= limits.min_failed_rows and 2 * failed >= finished:
                message = f"{failed} of the {finished} rows {where} so far failed (failure.max_failed_rows: auto)."
                self._stop("failure_limit", message, out)

    def _stop(self, outcome: ev.Outcome, message: str, out: list[Instruction]) -> None:
        """Engines make durable what they have; commits under way come to their end."""
        if self._stopping:
            return
        self._stopping = (outcome, message)
        if self._now is not None:
            self._stop_deadline = self._now + self.limits.stop_s
        for task in list(self._tasks):
            if isinstance(task, (ev.PlanChunk, ev.CutWindow)):
                del self._tasks[task]  # an unfinished plan is thrown away
        for name, worker in self.leases.workers.items():
            if worker.phase in ("joined", "ready"):
                out.append(ev.StopEngine(name))

    def _on_tick(self, event: ev.Tick, out: list[Instruction]) -> None:
        self._now = event.now
        if self._stopping and self._stop_deadline is None:
            self._stop_deadline = event.now + self.limits.stop_s
        if any(worker.phase in ("joined", "ready") for worker in self.leases.workers.values()):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = event.now
        elif event.now - self._alone_since >= self.limits.no_worker_s and not self._stopping:
            waited = f"No worker for {event.now - self._alone_since:.0f} s (cluster.worker_timeout_s)."
            self._stop("failed", waited, out)

    def _advance(self, out: list[Instruction]) -> None:
        if self.leases.all_quarantined() and not self._stopping and not self.idle:
            workers = self.leases.workers.values()
            reasons = "\n".join(sorted({worker.reason for worker in workers}))
            if all(worker.fatal for worker in workers):
                self._stop("refused", reasons, out)
            else:
                self._stop("failed", f"No worker is left: {reasons}", out)
        if self._stopping:
            late = self._stop_deadline is not None and self._now is not None and self._now >= self._stop_deadline
            engines = any(worker.phase == "ready" for worker in self.leases.workers.values())
            if late or not (engines or self._tasks):
                self._end(*self._stopping, out)
            return
        self._open_windows(out)
        self.leases.grant(out)
        if self.idle:
            self._end("done", "", out)

    def _open_windows(self, out: list[Instruction]) -> None:
        while (
            self._waiting
            and len(self._windows) < self.limits.max_open_windows
            and sum(w.has_rows_to_run for w in self._windows.values()) < self.limits.max_running_windows
        ):
            number, chunks = self._waiting.popleft()
            self._windows[number] = _Window(unplanned=set(chunks), uncommitted=set(chunks))
            for chunk in chunks:
                self._ask(ev.PlanChunk(number, chunk), out)

    def _end(self, outcome: ev.Outcome, message: str, out: list[Instruction]) -> None:
        self.outcome = outcome
        out.append(ev.EndJob(outcome, message))

    def check(self) -> None:
        """Invariants; tests call it after every event."""
        self.leases.check()
        if self.outcome is not None or self._stopping:
            return
        for number, window in self._windows.items():
            assert window.uncommitted or window.phase == "cleaning"
            if window.phase != "running":
                continue
            for unit in window.units.values():
                is_open = self.leases.is_open(number, unit.info.unit)
                finishing = ev.FinishUnit(number, unit.info.unit) in self._tasks
                assert is_open + finishing + unit.finished == 1, "a unit that nobody works on, or that two do"
            waiting = {c for unit in window.units.values() if not unit.finished for c in unit.info.chunks}
            assert window.committing == window.uncommitted - waiting, "a complete chunk is not being committed"
            assert all(ev.CommitChunk(number, chunk) in self._tasks for chunk in window.committing)
