"""The job's state machine against a simulated world in which anything may die at any time, messages come twice or
late, and results vanish."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchinfer.job import events as ev
from batchinfer.job.events import Piece, Tally, UnitInfo
from batchinfer.job.leases import LeaseLimits
from batchinfer.job.state import JobState, Limits, WindowPlan

WORKERS = ("w0", "w1", "w2")
PATIENCE_S = 300.0
Row = tuple[int, int, int]


class World(RuleBasedStateMachine):
    """Workers with leases, tasks that were asked for; what is durable stays durable whatever dies."""

    @initialize(
        sizes=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=4),
        poison=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 8)), max_size=2),
    )
    def begin(self, sizes: list[list[int]], poison: set[Row]) -> None:
        self.sizes = sizes
        self.poison = {row for row in poison if row[0] < len(sizes) and row[1] < len(sizes[row[0]])}
        self.poison = {row for row in self.poison if row[2] < sizes[row[0]][row[1]]}
        self.durable: set[Row] = set()
        self.given_up: set[Row] = set()
        self.committed: Counter[int] = Counter()
        self.now = 0.0
        self.start_driver()

    def start_driver(self) -> None:
        """The first, or the next one, which finds what is durable."""
        plans = [WindowPlan(w, (2 * w, 2 * w + 1)) for w in range(len(self.sizes))]
        self.state = JobState(
            plans,
            committed=set(self.committed),
            limits=Limits(min_failed_rows=10**9, unit_tries=10**9, no_worker_s=PATIENCE_S),
            lease_limits=LeaseLimits(
                min_leased_rows=6, max_leases=3, fruitless_deaths=10**9, failed_starts=10**9, lost_starts=10**9
            ),
        )
        self.leases: dict[str, dict[int, Piece]] = {}
        self.past: list[tuple[str, int]] = []  # leases that are no more
        self.alone: set[int] = set()
        self.alive: dict[str, bool] = {}  # worker: whether its engine is ready
        self.tasks: list[ev.Task] = []
        self.answers: list[ev.Event] = []
        self.finished: set[tuple[int, int]] = set()
        self.ended: ev.EndJob | None = None
        self.alone_since: float | None = None  # without a worker, by the clock's ticks
        self.revoked: list[ev.RevokeLease] = []
        self.carry_out(self.state.start())

    def carry_out(self, instructions: list[ev.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ev.GrantLease(worker, lease, piece, alone):
                    assert self.alive.get(worker), "a lease for a worker without an engine"
                    mine = self.leases.setdefault(worker, {})
                    if alone:
                        assert all(other in self.alone for other in mine), "a suspect with company"
                        self.alone.add(lease)
                    else:
                        assert not any(other in self.alone for other in mine), "company for a suspect"
                    mine[lease] = piece
                case ev.RevokeLease():
                    self.revoked.append(instruction)
                case ev.RestartEngine():
                    pass
                case ev.EndJob():
                    self.ended = instruction
                case ev.StopEngine() | ev.Quarantine():
                    raise AssertionError(f"no reason for {instruction}")
                case _:
                    assert instruction not in self.tasks, "asked for twice"
                    self.tasks.append(instruction)

    def tell(self, event: ev.Event) -> None:
        self.carry_out(self.state.handle(event))

    def answer(self, event: ev.Event) -> None:
        self.answers.append(event)
        self.tell(event)

    def drop_leases(self, worker: str) -> None:
        self.past += [(worker, lease) for lease in self.leases.pop(worker, {})]

    def ignored(self, event: ev.Event) -> None:
        before = self.state.tally, self.state.fresh, self.state.planned_rows
        assert self.state.handle(event) == []
        assert before == (self.state.tally, self.state.fresh, self.state.planned_rows)

    # Messages that come twice, or late ---------------------------------------------------------------------------

    @precondition(lambda self: self.past)
    @rule(data=st.data(), rows=st.integers(0, 9), other=st.sampled_from(WORKERS))
    def late_news_of_a_lease(self, data: st.DataObject, rows: int, other: str) -> None:
        """From an engine that has it no more, or from a worker that never had it."""
        worker, lease = data.draw(st.sampled_from(self.past))
        worker = data.draw(st.sampled_from([worker, other]))
        for event in (
            ev.LeaseProgress(worker, lease, Tally(rows=rows)),
            ev.LeaseBegun(worker, lease),
            ev.LeaseReturned(worker, lease, rows),
            ev.LeaseRefused(worker, lease),
            ev.LeaseDone(worker, lease),
        ):
            self.ignored(event)

    @rule(worker=st.sampled_from(WORKERS), teller=st.sampled_from(WORKERS))
    def news_of_anothers_lease(self, worker: str, teller: str) -> None:
        for lease in self.leases.get(worker, {}):
            if teller != worker:
                self.ignored(ev.LeaseProgress(teller, lease, Tally(rows=1)))
                self.ignored(ev.LeaseDone(teller, lease))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer_again(self, data: st.DataObject) -> None:
        """Dask runs a task again whose worker died with the answer, and the first answer may come all the same."""
        event = data.draw(st.sampled_from(self.answers))
        if not any(isinstance(event, kind) and self.asks_again(event, task) for kind, task in self.asked()):
            self.ignored(event)

    def asked(self) -> list[tuple[type, ev.Task]]:
        return [(ev.UnitFinished, task) for task in self.tasks if isinstance(task, ev.FinishUnit)]

    @staticmethod
    def asks_again(event: ev.Event, task: ev.Task) -> bool:
        """The unit has been run again since, and is being looked at once more: its old answer would pass."""
        assert isinstance(event, ev.UnitFinished) and isinstance(task, ev.FinishUnit)
        return (event.window, event.unit) == (task.window, task.unit)

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def progress_told_twice(self, worker: str, data: st.DataObject) -> None:
        mine = self.leases.get(worker, {})
        if mine:
            lease = data.draw(st.sampled_from(sorted(mine)))
            piece = mine[lease]
            rows = self.rows(Piece(piece.window, piece.unit, piece.start, piece.start + 1)) - self.poison
            tally = Tally(rows=len(rows - self.durable))
            self.durable |= rows
            for _ in range(2):
                self.tell(ev.LeaseProgress(worker, lease, tally))

    @rule(worker=st.sampled_from(WORKERS))
    def ready_told_twice(self, worker: str) -> None:
        """As where the news of an engine's end is lost: what it had is leased again."""
        if self.alive.get(worker):
            self.drop_leases(worker)
            self.leases[worker] = {}
            self.tell(ev.EngineReady(worker))

    @rule(worker=st.sampled_from(WORKERS))
    def joined_told_twice(self, worker: str) -> None:
        if worker in self.alive:
            self.drop_leases(worker)
            self.alive[worker] = False
            self.tell(ev.WorkerJoined(worker))

    @rule(worker=st.sampled_from(WORKERS))
    def engine_fails_to_start(self, worker: str) -> None:
        if self.alive.get(worker) is False:
            self.tell(ev.EngineDied(worker, "no memory"))

    # The clock, results that vanish, the next driver --------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.25, 10.0, PATIENCE_S / 2, PATIENCE_S, 10 * PATIENCE_S]))
    def tick(self, seconds: float) -> None:
        """Time alone changes nothing, but for a job that has no worker for long: that ends, and another goes on."""
        if self.ended is not None:
            return
        self.now += seconds
        if self.alive:
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = self.now
        elif self.now - self.alone_since >= PATIENCE_S:
            self.tell(ev.Tick(self.now))
            assert self.state.stopping
            self.tasks = [task for task in self.tasks if not isinstance(task, (ev.PlanChunk, ev.CutWindow))]
            while self.tasks:  # commits under way come to their end
                self._do(self.tasks[0])
            assert self.ended is not None and self.ended.outcome == "failed" and "No worker" in self.ended.message
            self.start_driver()
            return
        self.ignored(ev.Tick(self.now))

    @precondition(lambda self: self.ended is None)
    @rule()
    def kill_the_driver(self) -> None:
        """Its workers end with it."""
        self.start_driver()

    @precondition(lambda self: any(isinstance(task, ev.FinishUnit) for task in self.tasks))
    @rule(data=st.data())
    def lose_results(self, data: st.DataObject) -> None:
        """Segments of a unit are gone when it is looked at, which is told twice."""
        task = data.draw(st.sampled_from([task for task in self.tasks if isinstance(task, ev.FinishUnit)]))
        rows = sorted(row for row in self.durable if row[:2] == (task.window, task.unit))
        self.durable -= set(data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=3)))
        self._do(task)
        self.ignored(self.answers[-1])

    # Workers and engines -----------------------------------------------------------------------------------------

    @staticmethod
    def rows(piece: Piece) -> set[Row]:
        return {(piece.window, piece.unit, row) for row in range(piece.start, piece.stop)}

    @rule(worker=st.sampled_from(WORKERS))
    def start_worker(self, worker: str) -> None:
        if worker not in self.alive:
            self.alive[worker] = False
            self.tell(ev.WorkerJoined(worker))

    @rule(worker=st.sampled_from(WORKERS))
    def engine_comes_up(self, worker: str) -> None:
        if self.alive.get(worker) is False:
            self.alive[worker] = True
            self.leases[worker] = {}
            self.tell(ev.EngineReady(worker))

    @rule(worker=st.sampled_from(WORKERS))
    def lose_worker(self, worker: str) -> None:
        if worker in self.alive:
            del self.alive[worker]
            self.drop_leases(worker)
            self.tell(ev.WorkerLost(worker))

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def kill_engine(self, worker: str, data: st.DataObject) -> None:
        """From outside: no row is guilty."""
        if self.alive.get(worker):
            flight = []
            for lease, piece in self.leases[worker].items():
                start = data.draw(st.integers(piece.start, piece.stop))
                stop = data.draw(st.integers(start, piece.stop))
                self.durable |= self.rows(Piece(piece.window, piece.unit, piece.start, start)) - self.poison
                flight.append((lease, start, stop))
            self.die(worker, flight)

    def die(self, worker: str, flight: list[tuple[int, int, int]]) -> None:
        self.alive[worker] = False
        self.drop_leases(worker)
        self.leases[worker] = {}
        self.tell(ev.EngineDied(worker, "signal", tuple(f for f in flight if f[1] < f[2])))

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def run_lease(self, worker: str, data: st.DataObject) -> None:
        """Rows in flight are all that it holds; a poison row among them kills it."""
        mine = self.leases.get(worker, {})
        if not mine:
            return
        held = set().union(*(self.rows(piece) for piece in mine.values()))
        if held & self.poison - self.durable:
            self.die(worker, [(lease, piece.start, piece.stop) for lease, piece in mine.items()])
            return
        lease = data.draw(st.sampled_from(sorted(mine)))
        piece = mine.pop(lease)
        tally = Tally(rows=len(self.rows(piece) - self.durable))
        self.durable |= self.rows(piece)
        self.tell(ev.LeaseProgress(worker, lease, tally))
        self.tell(ev.LeaseDone(worker, lease))
        self.past.append((worker, lease))

    @precondition(lambda self: self.revoked)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        revoke = self.revoked.pop()
        piece = self.leases.get(revoke.worker, {}).get(revoke.lease)
        if piece is not None:
            stop = data.draw(st.integers(piece.start, piece.stop))
            if stop == piece.start:
                del self.leases[revoke.worker][revoke.lease]
                self.past.append((revoke.worker, revoke.lease))
            else:
                self.leases[revoke.worker][revoke.lease] = Piece(piece.window, piece.unit, piece.start, stop)
            self.tell(ev.LeaseReturned(revoke.worker, revoke.lease, stop))

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def lose_a_grant(self, worker: str, data: st.DataObject) -> None:
        mine = self.leases.get(worker, {})
        if mine:
            lease = data.draw(st.sampled_from(sorted(mine)))
            if lease in self.alone:
                self.past += [(worker, other) for other in mine]
                mine.clear()
            else:
                self.past.append((worker, lease))
                del mine[lease]
            self.tell(ev.LeaseRefused(worker, lease))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def do_task(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.tasks))
        self.tasks.remove(task)
        match task:
            case ev.PlanChunk(window, chunk):
                self.answer(ev.ChunkPlanned(window, chunk, 5, 0))
            case ev.CutWindow(window):
                infos = [
                    UnitInfo(unit, size, size, frozenset({2 * window, 2 * window + unit % 2}))
                    for unit, size in enumerate(self.sizes[window])
                ]
                self.answer(ev.WindowCut(window, tuple(infos)))
            case ev.FinishUnit(window, unit):
                size = self.sizes[window][unit]
                missing = self.rows(Piece(window, unit, 0, size)) - self.durable
                if missing:
                    self.answer(ev.UnitFinished(window, unit, len(missing), Tally()))
                else:
                    self.finished.add((window, unit))
                    self.answer(ev.UnitFinished(window, unit, 0, Tally(rows=size)))
            case ev.GiveUpRow(piece, _):
                assert self.rows(piece) <= self.poison, "an innocent row is given up"
                self.given_up |= self.rows(piece)
                self.durable |= self.rows(piece)
                self.answer(ev.RowGivenUp(piece))
            case ev.CommitChunk(window, chunk):
                self.committed[chunk] += 1
                for unit, size in enumerate(self.sizes[window]):
                    if chunk in (2 * window, 2 * window + unit % 2):
                        assert self.rows(Piece(window, unit, 0, size)) <= self.durable
                self.answer(ev.ChunkCommitted(window, chunk))
            case ev.CleanWindow(window):
                assert self.committed[2 * window] and self.committed[2 * window + 1]
                self.answer(ev.WindowCleaned(window))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "state"):
            self.state.check()

    def teardown(self) -> None:
        """From wherever it stands, the job comes to its end, with every row durable and committed once."""
        if not hasattr(self, "state"):
            return
        for _ in range(2000):
            if self.ended is not None:
                break
            for worker in WORKERS[:2]:
                self.start_worker(worker)
                self.engine_comes_up(worker)
            moved = bool(self.tasks or self.revoked or any(self.leases.values()))
            assert moved, "the job hangs"
            while self.revoked:
                revoke = self.revoked.pop()
                piece = self.leases.get(revoke.worker, {}).get(revoke.lease)
                if piece is not None:
                    self.tell(ev.LeaseReturned(revoke.worker, revoke.lease, piece.stop))
            for worker in WORKERS:
                self._run_all(worker)
            for task in list(self.tasks):
                self._do(task)
            self.state.check()
        assert self.ended == ev.EndJob("done")
        everything = {(w, u, r) for w, us in enumerate(self.sizes) for u, n in enumerate(us) for r in range(n)}
        assert everything <= self.durable
        assert self.given_up <= self.poison
        assert set(self.committed) == set(range(2 * len(self.sizes)))
        assert set(self.committed.values()) <= {1}
        assert self.state.tally.rows <= len(everything)
        assert not any(self.leases.values()), "a lease without an end"

    def _run_all(self, worker: str) -> None:
        mine = self.leases.get(worker, {})
        held: set[Row] = set().union(*(self.rows(piece) for piece in mine.values())) if mine else set()
        if held & self.poison - self.durable:
            self.die(worker, [(lease, piece.start, piece.stop) for lease, piece in mine.items()])
            return
        for lease in sorted(mine):
            piece = mine.pop(lease, None)
            if piece is not None:
                self.durable |= self.rows(piece)
                self.tell(ev.LeaseDone(worker, lease))

    def _do(self, task: ev.Task) -> None:
        class First:
            def draw(self, _: object) -> ev.Task:
                return task

        self.do_task.__wrapped__(self, First()) if hasattr(self.do_task, "__wrapped__") else World.do_task(
            self, First()
        )


World.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestJobState = World.TestCase
