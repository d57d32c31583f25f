"""Who runs which rows: workers, their engines, leases of pieces, and the blame for engine deaths.

    worker   joined > ready > (engine died > joined ...) > lost | stopped | quarantined

Part of the job's state machine (`job.state`, which knows of windows, chunks and the order of work): no clock, no
files. An open piece is in exactly one place: the queue, a lease, a probe (`job.suspects`), or being given up.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from batchinfer.job import events as ev
from batchinfer.job.events import Instruction, Piece
from batchinfer.job.suspects import Probe, carve, num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """How much to lease, and when to give up a row or a worker.

    min_leases, min_leased_rows   of leases that hold rows not begun: a worker gets units until it has both, or
    max_leases         in all; `rows_per_seq`: for each row that its engine runs at once, at least so many leased rows
    look_ahead         so many pieces of the queue are looked at for one whose prefix no other worker has computed
    deaths_alone       engine deaths with one single row in flight after which that row is given up
    failed_starts      of a worker's engine in a row, then the worker is quarantined
    lost_starts        times in a row that a worker was lost before its engine was ready, then the same
    fruitless_deaths   of a worker's engine in a row with no row finished in between, then the same; half of it
                       while other workers are healthy. It is more than a search among 512 suspects can need.
    """

    min_leases: int = 2
    min_leased_rows: int = 512
    rows_per_seq: int = 3
    max_leases: int = 64
    look_ahead: int = 32
    deaths_alone: int = 2
    failed_starts: int = 3
    lost_starts: int = 10
    fruitless_deaths: int = 32


@dataclass(slots=True, eq=False)
class Lease:
    worker: str
    piece: Piece
    probe: Probe | None = None
    revoked: bool = False
    stubborn: bool = False  # it had nothing to give back: not asked again
    begun: bool = False  # all of its rows are in the engine, or have an outcome
    rows_done: int = 0

    @property
    def rows_left(self) -> int:
        return max(0, self.piece.num_rows - self.rows_done)


@dataclass(slots=True, eq=False)
class WorkerState:
    phase: Literal["joined", "ready", "stopped", "lost", "quarantined"] = "joined"
    leases: dict[int, Lease] = field(default_factory=dict)
    probe: Probe | None = None
    failed_starts: int = 0
    lost_starts: int = 0
    fruitless_deaths: int = 0
    reason: str = ""
    fatal: bool = False
    num_seqs: int = 0
    last_unit: tuple[int, int] | None = None  # window and unit of the last grant: its prefixes are in the cache

    @property
    def leased_rows(self) -> int:
        return sum(lease.piece.num_rows for lease in self.leases.values())

    @property
    def rows_left(self) -> int:
        """Leased rows without a durable result."""
        return sum(lease.rows_left for lease in self.leases.values())


class Leases:
    def __init__(self, limits: LeaseLimits) -> None:
        self.limits = limits
        self.workers: dict[str, WorkerState] = {}
        self.open: dict[tuple[int, int], set[Piece]] = {}  # by window and unit: pieces without a durable result
        self._queue: deque[Piece] = deque()
        self._strikes: dict[Piece, int] = {}  # engine deaths that a queued or leased piece was in flight at
        self._probes: deque[Probe] = deque()  # those that wait for a worker
        self._giving_up: set[Piece] = set()
        self._leases: dict[int, Lease] = {}
        self._next_lease = 0
        self._shared_before: dict[int, list[int]] = {}  # by window: of each unit

    # Work --------------------------------------------------------------------------------------------------------

    def add(self, piece: Piece) -> None:
        self.open.setdefault((piece.window, piece.unit), set()).add(piece)
        self._queue.append(piece)

    def open_window(self, window: int, shared_before: list[int]) -> None:
        """The window's units are known: how many tokens the first row of each shares with the unit before it."""
        self._shared_before[window] = shared_before

    def close_window(self, window: int) -> None:
        self._shared_before.pop(window, None)

    def begun(self, worker: str, lease_id: int) -> None:
        lease = self.find(worker, lease_id)
        if lease is not None:
            lease.begun = True

    def progressed(self, worker: str, lease_id: int, rows: int) -> None:
        lease = self.find(worker, lease_id)
        if lease is not None:
            lease.rows_done += rows

    def is_open(self, window: int, unit: int) -> bool:
        return bool(self.open.get((window, unit)))

    def find(self, worker: str, lease: int) -> Lease | None:
        """The lease, if that worker still has it."""
        found = self._leases.get(lease)
        return found if found is not None and found.worker == worker else None

    def fruitful(self, worker: str) -> None:
        self.workers[worker].fruitless_deaths = 0

    def done(self, worker: str, lease_id: int) -> Piece:
        """Every row of the lease is durable."""
        lease = self._end(worker, lease_id)
        self._close(lease.piece)
        self._strikes.pop(lease.piece, None)
        if lease.probe is not None and lease.probe.finished(lease.piece):
            self.workers[worker].probe = None
            if lease.probe.survived():
                self._probes.appendleft(lease.probe)
        return lease.piece

    def returned(self, worker: str, lease_id: int, stop: int) -> None:
        """The lease ends at `stop` now; what was behind it is queued again."""
        lease = self._leases[lease_id]
        lease.revoked = False
        rest, back = carve(lease.piece, stop, lease.piece.stop)
        if back is None:
            lease.stubborn = True
            return
        strikes = self._strikes.pop(lease.piece, 0)
        self._close(lease.piece)
        for piece in [*rest, back]:
            self.open[piece.window, piece.unit].add(piece)
            if strikes:
                self._strikes[piece] = strikes
        if rest:
            lease.piece = rest[0]
        else:
            self._end(worker, lease_id)
        self._queue.appendleft(back)

    def refused(self, worker: str, lease_id: int) -> None:
        lease = self._leases[lease_id]
        if lease.probe is not None:
            self._take_back(self.workers[worker])
            return
        self._queue.appendleft(self._end(worker, lease_id).piece)

    def given_up(self, piece: Piece) -> bool:
        if piece not in self._giving_up:
            return False
        self._giving_up.discard(piece)
        self._close(piece)
        return True

    def _close(self, piece: Piece) -> None:
        self.open[piece.window, piece.unit].discard(piece)

    def forget_unit(self, window: int, unit: int) -> None:
        assert not self.open.pop((window, unit), None), "a finished unit has open pieces"

    def _end(self, worker: str, lease_id: int) -> Lease:
        del self.workers[worker].leases[lease_id]
        return self._leases.pop(lease_id)

    # Workers and their engines -----------------------------------------------------------------------------------

    def worker_joined(self, name: str, out: list[Instruction]) -> None:
        worker = self.workers.setdefault(name, WorkerState())
        if worker.phase == "quarantined":
            out.append(ev.Quarantine(name, worker.reason))
            return
        self._take_back(worker)
        worker.phase = "joined"

    def worker_lost(self, name: str, reason: str, out: list[Instruction]) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.phase in ("lost", "quarantined"):
            return
        self._take_back(worker)  # no row is blamed: workers are taken away for many reasons
        if worker.phase == "joined":
            worker.lost_starts += 1
            if worker.lost_starts >= self.limits.lost_starts:
                often = f"it was lost {worker.lost_starts} times in a row before its engine was ready: "
                self._quarantine(name, worker, often + reason, out)
        if worker.phase != "quarantined":
            worker.phase = "lost"

    def engine_ready(self, name: str, num_seqs: int = 0) -> None:
        worker = self.workers.setdefault(name, WorkerState())
        if worker.phase != "quarantined":
            self._take_back(worker)
            worker.phase, worker.failed_starts, worker.lost_starts = "ready", 0, 0
            worker.num_seqs, worker.last_unit = num_seqs, None

    def engine_stopped(self, name: str, stopping: bool, out: list[Instruction]) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.phase in ("lost", "quarantined"):
            return
        self._take_back(worker)
        worker.phase = "stopped" if stopping else "joined"
        if not stopping:  # somebody else told it to leave (a signal): nobody is to blame
            out.append(ev.RestartEngine(name))

    def engine_died(self, event: ev.EngineDied, out: list[Instruction]) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase in ("lost", "quarantined"):
            return
        was_ready, worker.phase = worker.phase == "ready", "joined"
        if not was_ready:
            self._count_failed_start(event.worker, worker, event.reason + event.last_words, event.fatal, out)
        else:
            worker.fruitless_deaths += 1
            self._blame(event, worker, out)
            others = any(w.phase == "ready" for w in self.workers.values() if w is not worker)
            if worker.fruitless_deaths >= self.limits.fruitless_deaths // (2 if others else 1):
                often = f"its engine died {worker.fruitless_deaths} times without finishing a row: "
                self._quarantine(event.worker, worker, often + event.reason + event.last_words, out)
        if worker.phase == "joined":
            out.append(ev.RestartEngine(event.worker))

    def all_quarantined(self) -> bool:
        return bool(self.workers) and all(w.phase == "quarantined" for w in self.workers.values())

    def _count_failed_start(
        self, name: str, worker: WorkerState, reason: str, fatal: bool, out: list[Instruction]
    ) -> None:
        worker.failed_starts += 1
        if fatal:
            worker.fatal = True
            self._quarantine(name, worker, reason, out)
        elif worker.failed_starts >= self.limits.failed_starts:
            often = f"its engine failed at {worker.failed_starts} starts in a row: "
            self._quarantine(name, worker, often + reason, out)

    def _quarantine(self, name: str, worker: WorkerState, reason: str, out: list[Instruction]) -> None:
        self._take_back(worker)
        worker.phase, worker.reason = "quarantined", reason
        out.append(ev.Quarantine(name, reason))

    def _take_back(self, worker: WorkerState) -> None:
        """Queue again, in order and first of all, what the worker had."""
        for lease_id in sorted(worker.leases, reverse=True):
            lease = worker.leases.pop(lease_id)
            del self._leases[lease_id]
            if lease.probe is None:
                self._queue.appendleft(lease.piece)
        if worker.probe is not None:
            worker.probe.interrupted()
            self._probes.append(worker.probe)
            worker.probe = None

    # Blame -------------------------------------------------------------------------------------------------------

    def _blame(self, event: ev.EngineDied, worker: WorkerState, out: list[Instruction]) -> None:
        """Rows in flight are suspects: at their second death they are searched; the rest is queued again."""
        hot: dict[int, Piece] = {}
        for lease_id, start, stop in event.in_flight:
            lease = worker.leases.get(lease_id)
            part = carve(lease.piece, start, stop)[1] if lease is not None else None
            if part is not None:
                hot[lease_id] = part
        if worker.probe is not None:
            self._narrow(worker, list(hot.values()), event, out)
            return
        suspects: list[Piece] = []
        requeue: list[Piece] = []
        for lease_id in sorted(worker.leases):
            piece = self._end(event.worker, lease_id).piece
            strikes = self._strikes.pop(piece, 0)
            part = hot.get(lease_id)
            rest = [piece] if part is None else carve(piece, part.start, part.stop)[0]
            self._close(piece)
            for left in rest:
                self._strikes[left] = strikes
            if part is not None and strikes:
                suspects.append(part)
                self.open[part.window, part.unit].add(part)
            elif part is not None:
                self._strikes[part] = 1
                rest.append(part)
            self.open[piece.window, piece.unit].update(rest)
            requeue += sorted(rest)
        self._queue.extendleft(reversed(requeue))
        if suspects:
            self._probes.append(Probe(suspects, event.worker))

    def _narrow(self, worker: WorkerState, hot: list[Piece], event: ev.EngineDied, out: list[Instruction]) -> None:
        probe, worker.probe = worker.probe, None
        assert probe is not None
        for lease_id in list(worker.leases):
            self._end(event.worker, lease_id)
        for piece in probe.pieces():
            self._close(piece)
        cleared = probe.died(hot, event.worker)
        for piece in [*cleared, *probe.suspects]:
            self.open[piece.window, piece.unit].add(piece)
        for piece in cleared:
            self._strikes[piece] = 1
        self._queue.extendleft(reversed(cleared))
        if probe.deaths_alone < self.limits.deaths_alone:
            self._probes.append(probe)
            return
        (row,) = probe.suspects
        self._giving_up.add(row)
        message = f"The engine died {probe.deaths_alone} times while it ran this row alone: {event.reason}"
        out.append(ev.GiveUpRow(row, message))

    # Granting ----------------------------------------------------------------------------------------------------

    def grant(self, out: list[Instruction]) -> None:
        ready = {name: worker for name, worker in self.workers.items() if worker.phase == "ready"}
        held_back = self._grant_probes(ready, out)
        while self._queue:
            wanting = [
                (worker.rows_left, name)
                for name, worker in ready.items()
                if name not in held_back and worker.probe is None and self._wants(worker)
            ]
            if not wanting:
                return
            name = min(wanting)[1]
            self._grant(name, self._take_for(ready[name]), None, out)
        self._revoke(ready, out)

    def _wants(self, worker: WorkerState) -> bool:
        if len(worker.leases) >= self.limits.max_leases:
            return False
        reserve = [lease.piece.num_rows for lease in worker.leases.values() if not lease.begun]
        rows = max(self.limits.min_leased_rows, self.limits.rows_per_seq * worker.num_seqs)
        return len(reserve) < self.limits.min_leases or sum(reserve) < rows

    def _take_for(self, worker: WorkerState) -> Piece:
        """The first piece of the queue, but rather one a little further on than one whose prefix another worker has
        computed and this one would have to compute again."""
        best, least = 0, None
        for place, piece in enumerate(itertools.islice(self._queue, self.limits.look_ahead)):
            again = self._computed_again(worker, piece)
            if least is None or again < least:
                best, least = place, again
            if not least:
                break
        piece = self._queue[best]
        del self._queue[best]
        return piece

    def _computed_again(self, worker: WorkerState, piece: Piece) -> int:
        """Tokens that the piece shares with the unit before it, but not with what this worker was given last."""
        shared = self._shared_before.get(piece.window)
        if piece.start or not shared or not shared[piece.unit]:
            return 0  # a piece that came back goes first
        own = 0
        if worker.last_unit is not None and worker.last_unit[0] == piece.window:
            first, last = sorted((worker.last_unit[1], piece.unit))
            own = min(shared[first + 1 : last + 1], default=shared[piece.unit])
        return max(0, shared[piece.unit] - own)

    def _grant(self, name: str, piece: Piece, probe: Probe | None, out: list[Instruction]) -> None:
        lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        lease = Lease(name, piece, probe)
        self._leases[lease_id] = self.workers[name].leases[lease_id] = lease
        self.workers[name].last_unit = (piece.window, piece.unit)
        out.append(ev.GrantLease(name, lease_id, piece, alone=probe is not None))

    def _grant_probes(self, ready: dict[str, WorkerState], out: list[Instruction]) -> set[str]:
        """Start waiting searches on workers that hold nothing. Returns the worker that is drained for the next."""
        while self._probes:
            probe = self._probes[0]
            names = [name for name, worker in ready.items() if worker.probe is None]
            # Not where its last death was, if there is a choice: a broken worker must not condemn a good row.
            names = [name for name in names if name != probe.died_on] or names
            if not names:
                return set()
            name = min(names, key=lambda n: (ready[n].leased_rows, n))
            if ready[name].leases:
                return {name}
            self._probes.popleft()
            old = set(probe.pieces())
            pieces = probe.begin()
            for piece in old:
                self._close(piece)
            for piece in probe.pieces():
                self.open[piece.window, piece.unit].add(piece)
            ready[name].probe = probe
            for piece in pieces:
                self._grant(name, piece, probe, out)
        return set()

    def _revoke(self, ready: dict[str, WorkerState], out: list[Instruction]) -> None:
        """The queue is empty, and somebody has nothing in reserve: who has most left gives back what it has not
        begun, unless the other would then have as much left as it has now (who has nothing always gets some)."""
        hungry = [
            worker
            for worker in ready.values()
            if worker.probe is None and all(lease.begun for lease in worker.leases.values())
        ]
        hungry.sort(key=lambda worker: worker.rows_left)
        asked = sum(1 for lease in self._leases.values() if lease.revoked)
        takers = deque(hungry[asked:])
        for _, worker in sorted(ready.items(), key=lambda item: -item[1].rows_left):
            if not takers:
                return
            choice = [
                (lease_id, lease)
                for lease_id, lease in worker.leases.items()
                if not lease.stubborn
                and not lease.revoked
                and not lease.begun
                and lease.probe is None
                and lease.piece.num_rows > 1
            ]
            if not choice or any(lease.revoked for lease in worker.leases.values()):
                continue
            lease_id, lease = choice[-1]
            half = len(choice) == 1
            size = lease.rows_left // 2 if half else lease.rows_left
            if takers[0].leases and takers[0].rows_left + size >= worker.rows_left:
                continue
            takers.popleft()
            lease.revoked = True
            out.append(ev.RevokeLease(lease.worker, lease_id, half=half))

    def check(self) -> None:
        """Every open piece is in exactly one place, pieces of a unit do not overlap, leases belong to workers."""
        places = [
            *self._queue,
            *(lease.piece for lease in self._leases.values() if lease.probe is None),
            *(piece for probe in self._probes for piece in probe.pieces()),
            *(piece for worker in self.workers.values() if worker.probe for piece in self._probe_open(worker)),
            *self._giving_up,
        ]
        assert len(places) == len(set(places)), "a piece is in two places"
        assert set(places) == {piece for pieces in self.open.values() for piece in pieces}
        for pieces in self.open.values():
            ordered = sorted(pieces)
            assert all(a.stop <= b.start for a, b in itertools.pairwise(ordered)), "pieces overlap"
            assert all(piece.num_rows > 0 for piece in ordered)
        held = {lease_id for worker in self.workers.values() for lease_id in worker.leases}
        assert held == set(self._leases)
        for worker in self.workers.values():
            assert worker.phase == "ready" or not worker.leases, "a lease without an engine"
            assert (worker.probe is None) or all(lease.probe is worker.probe for lease in worker.leases.values())

    @staticmethod
    def _probe_open(worker: WorkerState) -> list[Piece]:
        assert worker.probe is not None
        return [*(lease.piece for lease in worker.leases.values()), *worker.probe.spare]

    def rows_waiting(self) -> int:
        return num_rows(self._queue)
