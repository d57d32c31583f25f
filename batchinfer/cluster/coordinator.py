"""The driver's loop: what happens in the world becomes events for `job.state`, its instructions are carried out.

Decides nothing about work; knows how to ask for it: planning and commit steps are Dask tasks, or run in the driver,
for a small job; leases are messages to engines. Everything arrives in one queue, so that the state machine is fed by
one thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from batchinfer.cluster import tasks
from batchinfer.cluster.lifecycle import in_thread
from batchinfer.cluster.out_of_memory import FOR_ENGINES
from batchinfer.cluster.outbox import Outbox
from batchinfer.cluster.phases import phases
from batchinfer.cluster.progress import Progress, ProgressMeter
from batchinfer.cluster.resume import Committed, load_usable_window
from batchinfer.cluster.timings import RunTimings
from batchinfer.cluster.wire import TOPIC, Message
from batchinfer.errors import BatchinferError, ConfigError
from batchinfer.job import events as ev
from batchinfer.job.driver_lock import TakenOver
from batchinfer.job.events import Event, Instruction, Tally
from batchinfer.job.ledger import ChunkSummary, WindowPlan
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.state import JobState
from batchinfer.job.windows import Window

_log = logging.getLogger("batchinfer.cluster")
TICK_EVERY_S = 0.25
DONE_HERE_ROWS = 2_048
DONE_HERE_CHUNKS = 8
MAX_NOTES = 50
LOADING_IS_SLOWER = 3  # times as long may an engine be silent before it is ready: models lie on slow disks
MISSED_TICKS_S = 10.0  # then this process itself was stopped for a while, and can't say who was silent
_PRIORITY: Mapping[type, int] = {ev.PlanChunk: 0, ev.CutWindow: 5, ev.CleanWindow: 1}
_TAKEN_OVER = "another driver has taken over this job"
_COMMIT_PRIORITY = 10  # of everything else: what frees disk and makes progress durable goes first


class Workers(Protocol):
    """What starts workers (`cluster.local`)."""

    def dead(self) -> Iterator[tuple[str, str]]: ...
    def drop(self, name: str) -> None: ...
    def discard(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _News:
    """A message from a worker or the scheduler."""

    message: Message


@dataclass(frozen=True, slots=True)
class _TaskDone:
    task: ev.Task
    result: Any


class Coordinator:
    def __init__(
        self,
        *,
        job: ResolvedJob,
        run: str,
        epoch: int,
        state: JobState,
        workers: Workers,
        committed: Committed,
        names: list[str],
        on_progress: Callable[[Progress], None],
        lost_lock: Callable[[], bool],
        timings: RunTimings,
        first_window: Window,
    ) -> None:
        """`committed`: the parts that are out already. `first_window`: the first that is not done; a small one is
        planned and committed in this process, which has all that this takes open, before a worker could."""
        self.job = job
        self.run_path = run
        self.epoch = epoch
        self.state = state
        self.client: Any = None
        self.workers = workers
        self.on_progress = on_progress
        self.lost_lock = lost_lock
        self.timings = timings
        self.inbox: queue.SimpleQueue[Event | _News | _TaskDone] = queue.SimpleQueue()
        self.end: ev.EndJob | None = None
        self.notes: list[str] = []
        self._committed = committed
        self._parts_done = len(committed.chunks)
        self._shareable_tokens = committed.shareable_tokens
        self._addresses: dict[str, str] = {}
        self._plans: dict[int, WindowPlan | None] = {}
        self._commits: dict[int, dict[int, WindowPlan]] = {}  # by window and chunk: the part of the plan it needs
        self._summaries: dict[int, dict[int, ChunkSummary]] = {}
        self._futures: dict[ev.Task, Any] = {}
        self._serial = 0
        self._engine_tokens: dict[str, tuple[int, int]] = {}
        self._past_tokens = (0, 0)  # of engines that are gone
        self._hang_s = float(job.spec.cluster.hang_timeout_s)
        self._heard: dict[str, float] = {}
        self._ended_as_hung: set[str] = set()
        self._last_tick = time.monotonic()
        self._meter = ProgressMeter(job.name, job.num_rows, committed.tally, time.monotonic())
        self._client_away_since: float | None = None
        small = first_window.num_rows <= DONE_HERE_ROWS and len(first_window.chunks) <= DONE_HERE_CHUNKS
        self._done_here = first_window.window if small else None
        self._own_job = tasks.OpenJob.of(job) if small else None
        self._own = ThreadPoolExecutor(1, "own-tasks")
        self._early_tasks: list[ev.Task] = []  # asked for before there was a client
        for name in names:
            self.inbox.put(ev.WorkerJoined(name))

    def stop(self, message: str) -> None:
        """From any thread, or a signal handler."""
        self.inbox.put(ev.StopRequested(message))

    def begin(self) -> None:
        """Begins with what needs no workers: planning the first rows, where that takes but a moment."""
        if self.job.arithmetic.degraded is not None:
            self._note(self.job.arithmetic.degraded)
        self._carry_out(self.state.start())
        while self.end is None and not self.inbox.empty():
            event = self._understand(self.inbox.get())
            if event is not None:
                self._feed(event)

    def run(self, client: Any) -> ev.EndJob:
        """Runs to the end, which is returned. `client`: Dask's, of a scheduler that workers are to join."""
        self.client = client
        self._outbox = Outbox(client, self._undelivered)
        client.subscribe_topic(TOPIC, lambda event: self.inbox.put(_News(event[1])))
        early, self._early_tasks = self._early_tasks, []
        for task in early:
            self._start_task(task)
        next_tick = time.monotonic()
        while self.end is None:
            try:
                item = self.inbox.get(timeout=max(0.0, next_tick - time.monotonic()))
            except queue.Empty:
                next_tick = time.monotonic() + TICK_EVERY_S
                self._tick()
                continue
            event = self._understand(item)
            if event is not None:
                self._feed(event)
            if time.monotonic() > next_tick + 1.0:  # a flood of messages must not starve the clock
                next_tick = time.monotonic() + TICK_EVERY_S
                self._tick()
        self._report()
        return self.end

    def close(self) -> None:
        """However the run ended: once this returns, no task of this process writes, and the job's lock may go."""
        self._own.shutdown(wait=True, cancel_futures=True)

    def hear_late_counts(self) -> None:
        """What engines counted until they ended, told while the run was ending: for the timings alone."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self.inbox.get_nowait()
                if isinstance(item, _News) and item.message["t"] in ("first_token", "stats"):
                    self._understand(item)

    def _feed(self, event: Event) -> None:
        self._carry_out(self.state.handle(event))

    # The world's news --------------------------------------------------------------------------------------------

    def _understand(self, item: Event | _News | _TaskDone) -> Event | None:
        if isinstance(item, _TaskDone):
            return self._task_done(item.task, item.result)
        if not isinstance(item, _News):
            return item
        message = item.message
        name = message["name"]  # Dask overwrites "worker" with an address
        self._heard[name] = time.monotonic()
        if "worker_cpu_s" in message:
            self.timings.cpu_s(f"worker {name}", message["worker_cpu_s"])
        match message["t"]:
            case "joined":
                self._addresses[name] = message["address"]
                self.timings.moment("worker_joined")
                self.timings.spans(f"worker {name}", message["spans"])
                return None if name in self.state.leases.workers else ev.WorkerJoined(name)
            case "left":
                if self._addresses.get(name) != message["address"]:
                    return None
                self._outbox.forget(self._addresses.pop(name))
                self._forget_engine(name)
                if not self.state.stopping:
                    self.workers.discard(name)
                return ev.WorkerLost(name, "the worker left the cluster")
            case "ready":
                _log.info("the engine of worker %s is ready after %.1f s", name, message["load_s"])
                self.timings.moment("engine_ready")
                self.timings.spans(f"engine {name}", message["spans"])
                return ev.EngineReady(name, message["max_num_seqs"])
            case "died":
                reason, memory = message["reason"], message["memory"]
                if name in self._ended_as_hung:
                    self._ended_as_hung.discard(name)
                    memory = ""  # we have killed it
                    reason = (
                        f"it showed no life for {self._hang_s:.0f} s or more (cluster.hang_timeout_s), and was ended"
                    )
                flight = tuple((lease, start, stop) for lease, start, stop in message["in_flight"])
                where = self._units_of(name, flight)
                last_words = memory + message["last_words"]
                _log.warning("the engine of worker %s died%s: %s%s", name, where, reason, last_words)
                if FOR_ENGINES in memory:  # it may have been memory: the user can do something
                    self._note(f"the engine of worker {name} died{where}: {reason}{memory}")
                elif not message["fatal"] and not self.state.stopping:
                    self._tell(f"the engine of worker {name} died: {reason}; what it ran is run again ({self._log_at})")
                self._forget_engine(name)
                return ev.EngineDied(name, reason, flight, message["fatal"], last_words)
            case "stopped":
                self._forget_engine(name)
                return ev.EngineStopped(name)
            case "first_token":
                self.timings.cpu_s(f"engine {name}", message["cpu_s"])
                known = self.timings.first_token_s
                self.timings.moment("first_token", message["at"])
                self.timings.spans(f"engine {name}", message["spans"])
                if known is None:
                    _log.info("%s", self.timings.start_text())
            case "progress":
                self.timings.moment("first_durable")
                self.timings.moment("last_durable")
                counts = {key: message[key] for key in Tally.__dataclass_fields__}
                return ev.LeaseProgress(name, message["lease"], Tally(**counts))
            case "begun_all":
                return ev.LeaseBegun(name, message["lease"])
            case "done":
                return ev.LeaseDone(name, message["lease"])
            case "returned":
                return ev.LeaseReturned(name, message["lease"], message["stop"])
            case "note":
                self._note(f"worker {name}: {message['text']}")
            case "stats":
                self.timings.cpu_s(f"engine {name}", message["cpu_s"])
                self.timings.engine(name, message)
                prompt = message["computed_tokens"] + message["cached_tokens"] - message["generated_tokens"]
                self._engine_tokens[name] = (max(prompt, 0), message["generated_tokens"])
        return None

    def _units_of(self, name: str, flight: Sequence[tuple[int, int, int]]) -> str:
        """Where the rows in flight stand, for the log."""
        worker = self.state.leases.workers.get(name)
        leases = {} if worker is None else worker.leases
        pieces = [(leases[lease].piece, start, stop) for lease, start, stop in flight if lease in leases]
        units = [f"rows {start} to {stop - 1} of unit {p.unit}, window {p.window}" for p, start, stop in pieces]
        return f" while it ran {' and '.join(units)}" if units else ""

    def _note(self, text: str) -> None:
        """For the log, the terminal and the final report: each once, and not without end."""
        if self._tell(text):
            _log.warning("%s", text)

    def _tell(self, text: str) -> bool:
        """What the log says in other words."""
        if text in self.notes or len(self.notes) >= MAX_NOTES:
            return False
        self.notes.append(text)
        return True

    @property
    def _log_at(self) -> str:
        return f"more in {self.job.layout.log}"

    def _forget_engine(self, name: str) -> None:
        prompt, completion = self._engine_tokens.pop(name, (0, 0))
        self._past_tokens = (self._past_tokens[0] + prompt, self._past_tokens[1] + completion)

    def _tick(self) -> None:
        for name, reason in self.workers.dead():
            self._outbox.forget(self._addresses.pop(name, ""))  # what the scheduler will say of it is late news
            self._forget_engine(name)
            self._heard[name] = time.monotonic()
            self._ended_as_hung.discard(name)
            if not self.state.stopping:
                _log.warning("worker %s: %s; it is started again", name, reason)
                self._tell(f"worker {name}: {reason}; it is started again ({self._log_at})")
                self._feed(ev.WorkerLost(name, reason))
                self._feed(ev.WorkerJoined(name))
            else:
                self._feed(ev.EngineStopped(name))
        if self.lost_lock():
            self._feed(ev.StopRequested(_TAKEN_OVER))
        self._watch_client()
        self._watch_engines()
        self._feed(ev.Tick(time.monotonic()))
        self._report()

    def _watch_engines(self) -> None:
        """An engine that has work speaks every few seconds, between two steps. One that hangs is ended: it then
        counts as died, and the rows that it hangs on are found like those that kill. So is one that hangs while it
        starts. (A hanging worker is noticed by Dask's scheduler, or here while it has not joined.)"""
        now = time.monotonic()
        if now - self._last_tick > MISSED_TICKS_S:
            self._heard.clear()
        self._last_tick = now
        for name, worker in self.state.leases.workers.items():
            heard = self._heard.setdefault(name, now)
            if worker.phase not in ("joined", "ready") or (worker.phase == "ready" and not worker.leases):
                continue
            limit_s = self._hang_s * (1 if worker.phase == "ready" else LOADING_IS_SLOWER)
            if now - heard > limit_s:
                _log.warning("worker %s has been silent for %.0f s: its engine is ended", name, now - heard)
                self._heard[name] = now
                if name in self._addresses:
                    self._ended_as_hung.add(name)
                    self._send(name, {"t": "kill"})
                else:
                    self.workers.discard(name)

    def _watch_client(self) -> None:
        """Without the scheduler nothing goes on, and Dask's futures would only say "cancelled"."""
        if self.client.status == "running":
            self._client_away_since = None
        elif self._client_away_since is None:
            self._client_away_since = time.monotonic()
        elif time.monotonic() - self._client_away_since > 30.0:
            self._feed(ev.StopRequested("the connection to the Dask scheduler is lost"))

    def _report(self) -> None:
        states = self.state.leases.workers.values()
        sums = [sum(pair[i] for pair in self._engine_tokens.values()) + self._past_tokens[i] for i in (0, 1)]
        self.on_progress(
            self._meter.measure(
                time.monotonic(),
                self.state.tally,
                phase=self.state.phase,
                parts_done=self._parts_done,
                prompt_tokens=sums[0],
                completion_tokens=sums[1],
                workers_ready=sum(worker.phase == "ready" for worker in states),
                workers=len(states),
                notes=tuple(self.notes),
                shareable_tokens=self._shareable_tokens,
                first_token_s=self.timings.first_token_s,
            )
        )

    # Instructions ------------------------------------------------------------------------------------------------

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ev.GrantLease():
                    self._grant(instruction)
                case ev.RevokeLease(worker, lease, half):
                    self._send(worker, {"t": "revoke", "lease": lease, "half": half})
                case ev.RestartEngine(worker):
                    self._send(worker, {"t": "restart"})
                case ev.StopEngine(worker):
                    self._send(worker, {"t": "stop"})
                case ev.Quarantine(worker, reason):
                    self._note(f"worker {worker} is not used any more: {reason}")
                    self.workers.drop(worker)
                    self._send(worker, {"t": "kill"})
                case ev.EndJob():
                    self.end = instruction
                case _:
                    self._start_task(instruction)

    def _grant(self, grant: ev.GrantLease) -> None:
        self.timings.moment("first_lease")
        plan = self._plans[grant.piece.window]
        assert plan is not None
        piece = grant.piece
        message = {
            "t": "lease",
            "lease": grant.lease,
            "window": piece.window,
            "unit": piece.unit,
            "start": piece.start,
            "stop": piece.stop,
            "epoch": plan.epoch,
        }
        if grant.alone:
            _log.info("looking for the row that kills engines: %d rows alone on %s", piece.num_rows, grant.worker)
        self._send(grant.worker, message)

    def _send(self, worker: str, message: Message) -> None:
        address = self._addresses.get(worker)
        if address is None:
            self._undelivered(worker, message)
        else:
            self._outbox.send(worker, address, message)

    def _undelivered(self, worker: str, message: Message) -> None:
        if message["t"] == "lease":
            self.inbox.put(ev.LeaseRefused(worker, message["lease"]))

    # Tasks -------------------------------------------------------------------------------------------------------

    def _start_task(self, task: ev.Task) -> None:
        run: tasks.Run = self.run_path
        if self._own_job is not None and _window_of(task) == self._done_here:
            run = self._own_job
        epoch = self.epoch
        match task:
            case ev.PlanChunk(window, chunk):
                if self._found_plan(window) is not None:
                    summary = self._commits[window][chunk].chunks[0]
                    self.inbox.put(ev.ChunkPlanned(window, chunk, summary.num_rows, summary.num_failed, fresh=False))
                    return
                self._submit(task, tasks.plan_chunk, run, epoch, window, chunk)
            case ev.CutWindow(window):
                plan = self._plans[window]
                if plan is not None:
                    self.inbox.put(_TaskDone(task, plan))
                    return
                summaries = self._summaries[window]  # kept until it is cut: that can fail, and is tried again
                ordered = [summaries[chunk] for chunk in sorted(summaries)]
                self._submit(task, tasks.cut_window, run, epoch, window, ordered)
            case ev.FinishUnit(window, unit):
                self._submit(task, tasks.finish_unit, run, window, unit, self._plan(window).epoch)
            case ev.GiveUpRow(piece, message):
                prepared = self._plan(piece.window).epoch
                self._submit(
                    task, tasks.give_up_row, run, epoch, piece.window, piece.unit, prepared, piece.start, message
                )
            case ev.CommitChunk(window, chunk):
                self._submit(task, tasks.commit_chunk, run, epoch, self._commits[window][chunk], chunk)
            case ev.CleanWindow(window):
                self._submit(task, tasks.clean_window, run, epoch, window)

    def _plan(self, window: int) -> WindowPlan:
        plan = self._plans[window]
        assert plan is not None, "a window without a plan"
        return plan

    def _found_plan(self, window: int) -> WindowPlan | None:
        if window not in self._plans:
            plan = load_usable_window(self.job.layout, window, self.state.uncommitted(window), epoch=self.epoch)
            self._keep_plan(window, plan)
        return self._plans[window]

    def _keep_plan(self, window: int, plan: WindowPlan | None) -> None:
        self._plans[window] = plan
        if plan is not None and window not in self._commits:
            self._commits[window] = plan.by_chunk()
            left = self.state.uncommitted(window)
            self._shareable_tokens += sum(c.shareable_tokens for c in plan.chunks if c.chunk in left)
            self._meter.told_again(self._committed.told_again(plan))

    def _submit(self, task: ev.Task, function: Callable[..., Any], *args: Any) -> None:
        window = _window_of(task)
        if window == self._done_here:
            if self.client is None:
                with phases.span(f"plans: {function.__name__}"):
                    self._collect(task, functools.partial(function, *args))
            else:
                self._own.submit(self._do_here, task, functools.partial(tasks.behind, function, *args))
            return
        if self.client is None:
            self._early_tasks.append(task)
            return
        self._serial += 1
        key = f"{function.__name__}-{self.epoch}-{self._serial}"  # never equal to another: Dask would merge them
        priority = _PRIORITY.get(type(task), _COMMIT_PRIORITY) - window / 1e6
        future = self.client.submit(tasks.behind, function, *args, key=key, pure=False, priority=priority)
        self._futures[task] = future
        # Dask calls back in one thread: a result that is being looked for at a dead worker must not hold up others.
        future.add_done_callback(lambda done: in_thread("collect", lambda: self._collect(task, done.result)))

    def _do_here(self, task: ev.Task, function: Callable[[], Any]) -> None:
        """In the thread for it. Nothing is begun for a job that is another driver's by now."""
        if self.lost_lock():
            self.stop(_TAKEN_OVER)
            self.inbox.put(ev.TaskFailed(task, _TAKEN_OVER, fatal=True))
        else:
            self._collect(task, function)

    def _collect(self, task: ev.Task, result_of: Callable[[], Any]) -> None:
        """In a thread of its own."""
        try:
            result = result_of()
        except TakenOver as error:
            self.stop(_TAKEN_OVER)
            self.inbox.put(ev.TaskFailed(task, str(error), fatal=True))
        except ConfigError as error:
            self.inbox.put(ev.TaskFailed(task, str(error), fatal=True, refused=True))
        except BatchinferError as error:
            self.inbox.put(ev.TaskFailed(task, str(error), fatal=not isinstance(error, OSError)))
        except BaseException as error:  # cancelled futures raise what is no Exception
            what = f"{type(error).__name__}: {error}"
            self.inbox.put(ev.TaskFailed(task, f"{task} failed: {what}"))
            _log.warning("%s failed", task, exc_info=error)
        else:
            self.inbox.put(_TaskDone(task, result))

    def _task_done(self, task: ev.Task, result: Any) -> Event:
        self._futures.pop(task, None)  # the scheduler forgets the result
        match task:
            case ev.PlanChunk(window, chunk):
                self._summaries.setdefault(window, {})[chunk] = result
                return ev.ChunkPlanned(window, chunk, result.num_rows, result.num_failed)
            case ev.CutWindow(window):
                self._summaries.pop(window, None)
                self._keep_plan(window, result)
                self.timings.moment("rows_ready")
                return ev.WindowCut(window, tuple(self._unit_info(result, unit) for unit in result.units))
            case ev.FinishUnit(window, unit):
                return ev.UnitFinished(window, unit, result.missing, result.tally)
            case ev.GiveUpRow(piece, _):
                return ev.RowGivenUp(piece)
            case ev.CommitChunk(window, chunk):
                _log.info("part of chunk %d is out: %d rows, %d bytes", chunk, result.num_rows, result.num_bytes)
                self._parts_done += 1
                self.timings.moment("last_committed")
                return ev.ChunkCommitted(window, chunk)
            case ev.CleanWindow(window):
                self._plans.pop(window, None)
                self._commits.pop(window, None)
                return ev.WindowCleaned(window)

    def _unit_info(self, plan: WindowPlan, unit: Any) -> ev.UnitInfo:
        chunks = frozenset(chunk for chunk, _ in unit.chunks)
        complete = self.job.layout.unit_results(plan.window, unit.unit).exists()
        return ev.UnitInfo(unit.unit, unit.num_rows, unit.work, chunks, complete, unit.shared_before)


def _window_of(task: ev.Task) -> int:
    return task.piece.window if isinstance(task, ev.GiveUpRow) else task.window
