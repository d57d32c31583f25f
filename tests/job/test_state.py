"""The job's state machine: events in, instructions out. No process, no file."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from batchinfer.job import events as ev
from batchinfer.job.events import Instruction, Piece, Tally, UnitInfo
from batchinfer.job.leases import LeaseLimits
from batchinfer.job.state import JobState, Limits, WindowPlan


class Driver:
    """Feeds a state and checks its invariants after every event."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self.last: list[Instruction] = state.start()

    def __call__(self, event: ev.Event) -> list[Instruction]:
        self.last = self.state.handle(event)
        self.state.check()
        return self.last

    def grants(self) -> dict[str, list[ev.GrantLease]]:
        found: dict[str, list[ev.GrantLease]] = {}
        for instruction in self.last:
            if isinstance(instruction, ev.GrantLease):
                found.setdefault(instruction.worker, []).append(instruction)
        return found


def units(*sizes: int, chunks: Iterable[int] = (0,)) -> tuple[UnitInfo, ...]:
    return tuple(UnitInfo(i, size, size * 10, frozenset(chunks)) for i, size in enumerate(sizes))


def running(
    *sizes: int,
    workers: tuple[str, ...] = ("w0",),
    limits: Limits | None = None,
    lease_limits: LeaseLimits | None = None,
) -> Driver:
    """One window of one chunk, cut into units of these sizes, with workers whose engines are ready."""
    lease_limits = lease_limits or LeaseLimits(min_leased_rows=1)
    drive = Driver(JobState([WindowPlan(0, (0,))], limits=limits, lease_limits=lease_limits))
    for worker in workers:
        drive(ev.WorkerJoined(worker))
        drive(ev.EngineReady(worker))
    drive(ev.ChunkPlanned(0, 0, sum(sizes), 0))
    drive(ev.WindowCut(0, units(*sizes)))
    return drive


def test_a_job_from_start_to_end() -> None:
    drive = Driver(JobState([WindowPlan(0, (0, 1))]))
    assert drive.last == [ev.PlanChunk(0, 0), ev.PlanChunk(0, 1)]
    assert drive(ev.ChunkPlanned(0, 1, 6, 1)) == []
    assert drive(ev.ChunkPlanned(0, 0, 5, 0)) == [ev.CutWindow(0)]
    assert drive(ev.WindowCut(0, units(4, 6, chunks=(0, 1)))) == []  # nobody is there to run them
    assert drive(ev.WorkerJoined("w0")) == []
    assert drive(ev.EngineReady("w0")) == [
        ev.GrantLease("w0", 0, Piece(0, 0, 0, 4)),
        ev.GrantLease("w0", 1, Piece(0, 1, 0, 6)),
    ]
    drive(ev.LeaseProgress("w0", 0, Tally(4, 0, 40, 8, 0)))
    assert drive(ev.LeaseDone("w0", 0)) == [ev.FinishUnit(0, 0)]
    assert drive(ev.LeaseDone("w0", 1)) == [ev.FinishUnit(0, 1)]
    assert drive(ev.UnitFinished(0, 0, 0, Tally(4, 0, 40, 8, 0))) == []
    assert drive(ev.UnitFinished(0, 1, 0, Tally(6, 0, 60, 12, 0))) == [ev.CommitChunk(0, 0), ev.CommitChunk(0, 1)]
    assert drive(ev.ChunkCommitted(0, 0)) == []
    assert drive(ev.ChunkCommitted(0, 1)) == [ev.CleanWindow(0)]
    assert drive(ev.WindowCleaned(0)) == [ev.EndJob("done")]
    assert drive.state.tally == Tally(11, 1, 100, 20, 0)


def test_nothing_to_do() -> None:
    assert JobState([]).start() == [ev.EndJob("done")]
    assert JobState([WindowPlan(0, (0, 1))], committed={0, 1}).start() == [ev.EndJob("done")]


def test_only_chunks_that_are_not_out_are_planned() -> None:
    state = JobState([WindowPlan(0, (0, 1)), WindowPlan(1, (2, 3))], committed={0, 1, 2})
    assert state.start() == [ev.PlanChunk(1, 3)]


def test_a_window_of_error_rows_only_is_committed_without_an_engine() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))]))
    drive(ev.ChunkPlanned(0, 0, 3, 3))
    assert drive(ev.WindowCut(0, ())) == [ev.CommitChunk(0, 0)]


def test_a_chunk_is_committed_when_the_units_with_its_rows_are_finished() -> None:
    drive = Driver(JobState([WindowPlan(0, (0, 1))]))
    drive(ev.EngineReady("w0"))
    drive(ev.ChunkPlanned(0, 0, 1, 0))
    drive(ev.ChunkPlanned(0, 1, 2, 0))
    drive(ev.WindowCut(0, (UnitInfo(0, 1, 1, frozenset({0})), UnitInfo(1, 2, 1, frozenset({1})))))
    drive(ev.LeaseDone("w0", 0))
    assert drive(ev.UnitFinished(0, 0, 0, Tally(1))) == [ev.CommitChunk(0, 0)]


def test_a_unit_that_an_earlier_run_finished_is_only_checked() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))]))
    drive(ev.EngineReady("w0"))
    drive(ev.ChunkPlanned(0, 0, 4, 0, fresh=False))
    out = drive(ev.WindowCut(0, (UnitInfo(0, 4, 1, frozenset({0}), complete=True),)))
    assert out == [ev.FinishUnit(0, 0)]


def test_two_windows_are_in_flight() -> None:
    drive = Driver(JobState([WindowPlan(i, (i,)) for i in range(5)]))
    assert drive.last == [ev.PlanChunk(0, 0), ev.PlanChunk(1, 1)]
    drive(ev.EngineReady("w0"))
    drive(ev.ChunkPlanned(0, 0, 2, 0))
    drive(ev.WindowCut(0, units(2)))
    drive(ev.LeaseDone("w0", 0))
    # All rows of the first window have run: the third is planned while the first is committed.
    assert drive(ev.UnitFinished(0, 0, 0, Tally(2))) == [ev.CommitChunk(0, 0), ev.PlanChunk(2, 2)]


def test_work_is_pulled_and_spread() -> None:
    drive = running(10, 10, 10, 10, 10, workers=("w0", "w1"))
    assert {name: len(grants) for name, grants in drive.grants().items()} == {"w0": 2, "w1": 2}
    assert [g.piece.unit for g in drive(ev.LeaseDone("w1", 1)) if isinstance(g, ev.GrantLease)] == [4]


def test_small_units_are_leased_until_there_are_rows_enough() -> None:
    drive = running(*[10] * 8, lease_limits=LeaseLimits(min_leased_rows=45, max_leases=16))
    assert len(drive.grants()["w0"]) == 5


def test_leases_whose_rows_are_all_begun_are_no_reserve() -> None:
    drive = running(*[10] * 8)
    assert len(drive.grants()["w0"]) == 2
    assert [g.piece.unit for g in drive(ev.LeaseBegun("w0", 0)) if isinstance(g, ev.GrantLease)] == [2]
    assert drive(ev.LeaseBegun("w1", 0)) == []  # not its lease: late news
    assert drive(ev.LeaseBegun("w0", 99)) == []


def test_an_engine_that_runs_many_rows_at_once_is_leased_more() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))]))
    drive(ev.WorkerJoined("w0"))
    drive(ev.EngineReady("w0", num_seqs=300))
    drive(ev.ChunkPlanned(0, 0, 4000, 0))
    drive(ev.WindowCut(0, units(*[100] * 40)))
    assert len(drive.grants()["w0"]) == 9  # three times as many rows as run at once


def shared(*tokens: int) -> tuple[UnitInfo, ...]:
    """Units of ten rows, each of which shares so many tokens with the one before it."""
    return tuple(UnitInfo(i, 10, 10, frozenset({0}), shared_before=count) for i, count in enumerate(tokens))


def test_a_prefix_is_computed_by_one_worker_where_there_are_others_to_take() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))], lease_limits=LeaseLimits(min_leases=1, min_leased_rows=1)))
    for worker in ("w0", "w1"):
        drive(ev.WorkerJoined(worker))
        drive(ev.EngineReady(worker))
    drive(ev.ChunkPlanned(0, 0, 60, 0))
    # Units 0 to 2 share 900 tokens and 3 to 5 other 900; all of them share 20.
    drive(ev.WindowCut(0, shared(0, 900, 900, 20, 900, 900)))
    assert {name: [g.piece.unit for g in grants] for name, grants in drive.grants().items()} == {"w0": [0], "w1": [3]}
    assert [g.piece.unit for g in drive(ev.LeaseBegun("w1", 1)) if isinstance(g, ev.GrantLease)] == [4]
    assert [g.piece.unit for g in drive(ev.LeaseBegun("w0", 0)) if isinstance(g, ev.GrantLease)] == [1]
    assert [g.piece.unit for g in drive(ev.LeaseBegun("w1", 2)) if isinstance(g, ev.GrantLease)] == [5]
    # Nothing else is left: rather compute the prefix again than idle.
    assert [g.piece.unit for g in drive(ev.LeaseBegun("w1", 4)) if isinstance(g, ev.GrantLease)] == [2]


def test_who_runs_short_is_given_a_share_but_not_more_than_that() -> None:
    drive = running(40, 40, workers=("w0", "w1"), lease_limits=LeaseLimits(min_leases=2, min_leased_rows=1))
    assert len(drive.grants()["w0"]) == len(drive.grants()["w1"]) == 1
    assert drive(ev.LeaseBegun("w1", 1)) == []  # it has as many rows left as the other
    progress = Tally(rows=30, prompt_tokens=30)
    assert drive(ev.LeaseProgress("w1", 1, progress)) == [ev.RevokeLease("w0", 0, half=True)]
    assert drive(ev.LeaseReturned("w0", 0, 20)) == [ev.GrantLease("w1", 2, Piece(0, 0, 20, 40))]


def test_a_lost_worker_costs_nobody_anything() -> None:
    drive = running(4, 4, 4, 4, workers=("w0", "w1"))
    drive.last = drive(ev.WorkerLost("w0"))
    assert drive.grants() == {}  # w1 has its two
    done = drive(ev.LeaseDone("w1", 1))
    assert [i.piece for i in done if isinstance(i, ev.GrantLease)] == [Piece(0, 0, 0, 4)]
    assert drive(ev.LeaseDone("w0", 0)) == []  # late news of a lease that has moved on


def test_a_worker_that_comes_back_gets_work_again() -> None:
    drive = running(4, 4)
    drive(ev.WorkerLost("w0"))
    drive(ev.WorkerJoined("w0"))
    assert [g.piece.unit for g in drive(ev.EngineReady("w0")) if isinstance(g, ev.GrantLease)] == [0, 1]


def test_workers_lost_ten_times_while_running_are_no_reason_to_give_up() -> None:
    drive = running(4, 4)
    for _ in range(30):
        drive(ev.WorkerLost("w0"))
        drive(ev.WorkerJoined("w0"))
        drive(ev.EngineReady("w0"))
        assert len(drive.grants()["w0"]) == 2
    assert drive.state.given_up == 0


def test_an_idle_worker_gets_what_another_has_not_begun() -> None:
    drive = running(100, workers=("w0", "w1"))
    assert drive.last[-1] == ev.RevokeLease("w0", 0, half=True)
    out = drive(ev.LeaseReturned("w0", 0, 60))
    assert out == [ev.GrantLease("w1", 1, Piece(0, 0, 60, 100))]
    assert drive(ev.LeaseDone("w1", 1))[0] == ev.RevokeLease("w0", 0, half=True)  # idle again
    assert drive(ev.LeaseReturned("w0", 0, 60)) == []  # nothing to give: not asked again
    assert drive(ev.LeaseDone("w0", 0)) == [ev.FinishUnit(0, 0)]


def test_a_unit_with_lost_results_is_run_again_and_then_given_up_loudly() -> None:
    drive = running(4, limits=Limits(unit_tries=2))
    drive(ev.LeaseDone("w0", 0))
    assert drive(ev.UnitFinished(0, 0, 2, Tally())) == [ev.GrantLease("w0", 1, Piece(0, 0, 0, 4))]
    assert drive(ev.UnitFinished(0, 0, 2, Tally())) == []  # told twice: it runs again once
    drive(ev.LeaseDone("w0", 1))
    drive(ev.UnitFinished(0, 0, 2, Tally()))
    (end,) = drive(ev.EngineStopped("w0"))
    assert isinstance(end, ev.EndJob) and end.outcome == "failed" and "2 results of unit 0" in end.message


# Engines that die ------------------------------------------------------------------------------------------------


def run_until_end(drive: Driver, poison: set[int], workers: dict[str, int] | None = None) -> dict[str, int]:
    """Plays engines: all granted rows are in flight at once; a poison row kills. Returns deaths by worker."""
    deaths: dict[str, int] = {}
    leases: dict[str, dict[int, Piece]] = {}
    todo = list(drive.last)
    for _ in range(10_000):
        while todo:
            instruction = todo.pop(0)
            match instruction:
                case ev.GrantLease(worker, lease, piece, _):
                    leases.setdefault(worker, {})[lease] = piece
                case ev.RevokeLease(worker, lease, _):
                    if lease in leases.get(worker, {}):
                        todo += drive(ev.LeaseReturned(worker, lease, leases[worker][lease].stop))
                case ev.RestartEngine(worker):
                    todo += drive(ev.EngineReady(worker))
                case ev.FinishUnit(window, unit):
                    todo += drive(ev.UnitFinished(window, unit, 0, Tally()))
                case ev.GiveUpRow(piece, message):
                    assert piece.num_rows == 1 and piece.start in poison, "an innocent row was given up"
                    assert "this row alone" in message
                    todo += drive(ev.RowGivenUp(piece))
                case ev.CommitChunk(window, chunk):
                    todo += drive(ev.ChunkCommitted(window, chunk))
                case ev.CleanWindow(window):
                    todo += drive(ev.WindowCleaned(window))
                case ev.EndJob():
                    return deaths
        for worker in sorted(leases):
            mine = leases[worker]
            if not mine:
                continue
            broken = workers is not None and workers.get(worker, 0)
            if broken or any(row in poison for p in mine.values() for row in range(p.start, p.stop)):
                deaths[worker] = deaths.get(worker, 0) + 1
                flight = tuple((lease, piece.start, piece.stop) for lease, piece in mine.items())
                leases[worker] = {}
                todo += drive(ev.EngineDied(worker, "signal 11", flight))
            else:
                lease = min(mine)
                del mine[lease]
                todo += drive(ev.LeaseDone(worker, lease))
            break
        else:
            raise AssertionError("nothing is left to happen, and the job has not ended")
    raise AssertionError("the job does not end")


@pytest.mark.parametrize("workers", [("w0",), ("w0", "w1", "w2")])
@pytest.mark.parametrize("poison", [{0}, {17}, {99}, {3, 4}, {0, 50, 99}])
def test_the_poison_rows_are_found_and_no_other_row_is_blamed(poison: set[int], workers: tuple[str, ...]) -> None:
    drive = running(100, workers=workers)
    deaths = run_until_end(drive, poison)
    assert drive.state.given_up == len(poison)
    assert drive.state.outcome == "done"
    assert sum(deaths.values()) <= len(poison) * (2 + 7 + 2)  # two strikes, halving of 100 rows, twice alone


def test_one_engine_death_blames_nobody() -> None:
    drive = running(4, 4)
    out = drive(ev.EngineDied("w0", "signal 9", ((0, 0, 4), (1, 0, 2))))
    assert out == [ev.RestartEngine("w0")]
    again = drive(ev.EngineReady("w0"))
    assert all(isinstance(i, ev.GrantLease) and not i.alone for i in again)
    run_until_end(drive, set())
    assert drive.state.given_up == 0 and drive.state.outcome == "done"


def test_deaths_with_another_cause_condemn_no_row() -> None:
    """Killed from outside at each first lease, five times: rows are searched, all survive."""
    drive = running(8, 8)
    for _ in range(5):
        flight = tuple((g.lease, g.piece.start, g.piece.stop) for g in drive.grants()["w0"])
        drive(ev.EngineDied("w0", "signal 9", flight))
        drive(ev.EngineReady("w0"))
    run_until_end(drive, set())
    assert drive.state.given_up == 0 and drive.state.outcome == "done"


def test_rows_that_were_not_begun_are_no_suspects() -> None:
    drive = running(100)
    drive(ev.EngineDied("w0", "x", ((0, 10, 20),)))
    out = drive(ev.EngineReady("w0"))
    assert sorted(i.piece for i in out if isinstance(i, ev.GrantLease)) == [Piece(0, 0, 0, 10), Piece(0, 0, 10, 20)]


def test_an_engine_that_fails_at_each_start_is_quarantined_and_the_others_finish() -> None:
    drive = running(4, workers=("w0",))
    drive(ev.WorkerJoined("w1"))
    assert drive(ev.EngineDied("w1", "no device")) == [ev.RestartEngine("w1")]
    assert drive(ev.EngineDied("w1", "no device")) == [ev.RestartEngine("w1")]
    (out,) = drive(ev.EngineDied("w1", "no device"))
    assert isinstance(out, ev.Quarantine) and "3 starts" in out.reason and "no device" in out.reason
    assert drive(ev.EngineReady("w1")) == []
    drive.last = [ev.GrantLease("w0", 0, Piece(0, 0, 0, 4))]
    run_until_end(drive, set())
    assert drive.state.outcome == "done"


def test_a_broken_worker_does_not_condemn_good_rows() -> None:
    drive = running(20, 20, 20, 20, workers=("w0", "w1"))
    run_until_end(drive, set(), workers={"w0": 1})
    assert drive.state.outcome == "done" and drive.state.given_up == 0


def test_all_workers_quarantined_ends_the_job_with_the_reason() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))]))
    drive(ev.WorkerJoined("w0"))
    for _ in range(3):
        drive(ev.EngineDied("w0", "out of memory"))
    assert drive.state.outcome == "failed"
    end = drive.last[-1]
    assert isinstance(end, ev.EndJob) and "out of memory" in end.message


def test_a_model_that_cannot_be_used_ends_the_job_at_once_as_the_users_error() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))]))
    drive(ev.WorkerJoined("w0"))
    out = drive(ev.EngineDied("w0", "no such architecture", fatal=True))
    assert out[-1] == ev.EndJob("refused", "no such architecture")


def test_an_engine_that_kills_everything_ends_the_job() -> None:
    drive = running(*[50] * 4, lease_limits=LeaseLimits(min_leased_rows=1, fruitless_deaths=12))
    with pytest.raises(AssertionError, match="given up"):
        run_until_end(drive, set(), workers={"w0": 1})  # alone there is nobody to compare with: a row is blamed
    drive = running(*[5000] * 4, lease_limits=LeaseLimits(min_leased_rows=1, fruitless_deaths=8))
    run_until_end(drive, set(), workers={"w0": 1})
    assert drive.state.outcome == "failed"


def test_an_engine_told_to_leave_by_a_signal_is_started_again_without_blame() -> None:
    drive = running(4)
    assert drive(ev.EngineStopped("w0")) == [ev.RestartEngine("w0")]
    assert [i.piece for i in drive(ev.EngineReady("w0")) if isinstance(i, ev.GrantLease)] == [Piece(0, 0, 0, 4)]


# Stopping --------------------------------------------------------------------------------------------------------


def test_stop_waits_for_engines_and_commits_but_not_for_plans() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,)), WindowPlan(1, (1,))]))
    drive(ev.EngineReady("w0"))
    drive(ev.ChunkPlanned(0, 0, 4, 0))
    drive(ev.WindowCut(0, units(4)))
    drive(ev.LeaseDone("w0", 0))
    assert drive(ev.StopRequested("SIGTERM")) == [ev.StopEngine("w0")]
    assert drive(ev.EngineStopped("w0")) == []  # the unit is being finished
    assert drive(ev.UnitFinished(0, 0, 0, Tally(4))) == [ev.CommitChunk(0, 0)]
    assert drive(ev.ChunkCommitted(0, 0)) == [ev.CleanWindow(0)]
    assert drive(ev.WindowCleaned(0)) == [ev.EndJob("interrupted", "SIGTERM")]


def test_stop_does_not_wait_for_ever() -> None:
    drive = running(4)
    drive(ev.Tick(100.0))
    drive(ev.StopRequested("SIGTERM"))
    assert drive(ev.Tick(107.0)) == []
    assert drive(ev.Tick(108.5)) == [ev.EndJob("interrupted", "SIGTERM")]


def test_no_worker_for_long_ends_the_job() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))], limits=Limits(no_worker_s=60.0)))
    drive(ev.Tick(0.0))
    assert drive(ev.Tick(59.0)) == []
    out = drive(ev.Tick(61.0))
    assert isinstance(out[-1], ev.EndJob) and out[-1].outcome == "failed" and "No worker" in out[-1].message


@pytest.mark.parametrize(
    ("rows", "failed", "stops"),
    [(99, 99, False), (100, 100, True), (200, 100, True), (201, 100, False), (1000, 499, False)],
)
def test_failure_limit_auto(rows: int, failed: int, stops: bool) -> None:
    drive = running(2000)
    out = drive(ev.LeaseProgress("w0", 0, Tally(rows, failed)))
    assert (ev.StopEngine("w0") in out) == stops
    if stops:
        (end,) = drive(ev.EngineStopped("w0"))
        assert isinstance(end, ev.EndJob) and end.outcome == "failure_limit"


def test_few_bad_rows_among_many_do_not_stop_the_job_while_it_is_planned() -> None:
    drive = Driver(JobState([WindowPlan(0, (0, 1))]))
    drive(ev.WorkerJoined("w0"))
    assert drive(ev.ChunkPlanned(0, 0, 16_384, 150)) == []
    assert drive(ev.ChunkPlanned(0, 1, 16_384, 16_384))[0] != ev.StopEngine("w0")


def test_a_template_that_fails_for_every_row_stops_the_job() -> None:
    drive = Driver(JobState([WindowPlan(0, (0, 1))]))
    drive(ev.WorkerJoined("w0"))
    assert ev.StopEngine("w0") in drive(ev.ChunkPlanned(0, 0, 1000, 1000))


def test_failure_limit_by_number_counts_all() -> None:
    drive = running(2000, limits=Limits(max_failed_rows=3))
    assert ev.StopEngine("w0") not in drive(ev.LeaseProgress("w0", 0, Tally(1000, 3)))
    assert ev.StopEngine("w0") in drive(ev.LeaseProgress("w0", 0, Tally(1, 1)))


def test_a_task_is_tried_again_and_then_ends_the_job() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))]))
    task = ev.PlanChunk(0, 0)
    assert drive(ev.TaskFailed(task, "stale file handle")) == [task]
    assert drive(ev.TaskFailed(task, "stale file handle")) == [task]
    assert drive(ev.TaskFailed(task, "stale file handle")) == [ev.EndJob("failed", "stale file handle")]


def test_wrong_input_found_by_a_task_is_not_tried_again() -> None:
    drive = Driver(JobState([WindowPlan(0, (0,))]))
    out = drive(ev.TaskFailed(ev.PlanChunk(0, 0), "the input changed", fatal=True, refused=True))
    assert out == [ev.EndJob("refused", "the input changed")]


@pytest.mark.parametrize("limit", [None, 120])
def test_rows_that_failed_in_an_earlier_run_do_not_stop_this_one(limit: int | None) -> None:
    """Exit code 4 says: mend the cause, the same command goes on. What failed then has its durable error rows."""
    drive = running(2000, 2000, limits=Limits(max_failed_rows=limit))
    drive(ev.LeaseDone("w0", 0))  # every row was durable before
    drive(ev.UnitFinished(0, 0, 0, Tally(2000, 2000)))
    assert ev.StopEngine("w0") not in drive(ev.LeaseProgress("w0", 1, Tally(1000, 99)))
    assert drive.state.tally.failed == 2099
    assert ev.StopEngine("w0") in drive(ev.LeaseProgress("w0", 1, Tally(800, 801)))
