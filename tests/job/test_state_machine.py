"""The job's state machine against a simulated world in which anything may die at any time."""

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
        plans = [WindowPlan(w, (2 * w, 2 * w + 1)) for w in range(len(sizes))]
        limits = Limits(min_failed_rows=10**9)
        self.state = JobState(
            plans,
            limits=limits,
            lease_limits=LeaseLimits(
                min_leased_rows=6, max_leases=3, fruitless_deaths=10**9, failed_starts=10**9, lost_starts=10**9
            ),
        )
        self.leases: dict[str, dict[int, Piece]] = {}
        self.alone: set[int] = set()
        self.alive: dict[str, bool] = {}  # worker: whether its engine is ready
        self.tasks: list[ev.Task] = []
        self.durable: set[Row] = set()
        self.given_up: set[Row] = set()
        self.committed: Counter[int] = Counter()
        self.ended: ev.EndJob | None = None
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
            self.leases.pop(worker, None)
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

    @precondition(lambda self: self.revoked)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        revoke = self.revoked.pop()
        piece = self.leases.get(revoke.worker, {}).get(revoke.lease)
        if piece is not None:
            stop = data.draw(st.integers(piece.start, piece.stop))
            if stop == piece.start:
                del self.leases[revoke.worker][revoke.lease]
            else:
                self.leases[revoke.worker][revoke.lease] = Piece(piece.window, piece.unit, piece.start, stop)
            self.tell(ev.LeaseReturned(revoke.worker, revoke.lease, stop))

    @rule(worker=st.sampled_from(WORKERS), data=st.data())
    def lose_a_grant(self, worker: str, data: st.DataObject) -> None:
        mine = self.leases.get(worker, {})
        if mine:
            lease = data.draw(st.sampled_from(sorted(mine)))
            if lease in self.alone:
                mine.clear()
            else:
                del mine[lease]
            self.tell(ev.LeaseRefused(worker, lease))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def do_task(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.tasks))
        self.tasks.remove(task)
        match task:
            case ev.PlanChunk(window, chunk):
                self.tell(ev.ChunkPlanned(window, chunk, 5, 0))
            case ev.CutWindow(window):
                infos = [
                    UnitInfo(unit, size, size, frozenset({2 * window, 2 * window + unit % 2}))
                    for unit, size in enumerate(self.sizes[window])
                ]
                self.tell(ev.WindowCut(window, tuple(infos)))
            case ev.FinishUnit(window, unit):
                size = self.sizes[window][unit]
                missing = self.rows(Piece(window, unit, 0, size)) - self.durable
                assert not missing, "a unit is finished before its rows are"
                self.tell(ev.UnitFinished(window, unit, 0, Tally(rows=size)))
            case ev.GiveUpRow(piece, _):
                assert self.rows(piece) <= self.poison, "an innocent row is given up"
                self.given_up |= self.rows(piece)
                self.durable |= self.rows(piece)
                self.tell(ev.RowGivenUp(piece))
            case ev.CommitChunk(window, chunk):
                self.committed[chunk] += 1
                for unit, size in enumerate(self.sizes[window]):
                    if chunk in (2 * window, 2 * window + unit % 2):
                        assert self.rows(Piece(window, unit, 0, size)) <= self.durable
                self.tell(ev.ChunkCommitted(window, chunk))
            case ev.CleanWindow(window):
                assert self.committed[2 * window] and self.committed[2 * window + 1]
                self.tell(ev.WindowCleaned(window))

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
