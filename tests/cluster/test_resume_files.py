"""Going on with files that an earlier run left half done, damaged or late: nothing is lost, and nothing stays stuck."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.cluster import tasks
from batchinfer.cluster.local import LocalWorkers
from batchinfer.cluster.resume import Committed, load_usable_window
from batchinfer.cluster.status_writer import StatusWriter
from batchinfer.cluster.submit import Listener, _driving, resolve_here, run_job
from batchinfer.data.prepared import row_identities
from batchinfer.data.segments import ResultRow, SegmentName, results_table, write_compacted, write_segment
from batchinfer.errors import BatchinferError
from batchinfer.job.cleaning import clean_leftovers
from batchinfer.job.driver_lock import DriverLock, TakenOver, last_driver, lock_store
from batchinfer.job.ledger import WindowPlan, load_window
from batchinfer.job.manifest import freeze_job, save_run
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import JobSpec
from batchinfer.job.status import read_status
from batchinfer.types.request import CompletionOutput

TEXTS = {"a": ["one", "two", None], "b": ["three", "four"]}


class Planned:
    """A job of two files, one chunk each, whose only window is planned under epoch 1."""

    def __init__(self, root: Path) -> None:
        (root / "in").mkdir()
        for name, texts in TEXTS.items():
            pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), root / "in" / f"{name}.parquet")
        spec = JobSpec.from_dict(
            {
                "model": {"path": "fake://hash?max_model_len=256"},
                "input": {"path": str(root / "in"), "prompt": "{text}"},
                "output": {"path": str(root / "out")},
                "sampling": {"max_tokens": 6, "seed": 1},
            }
        )
        self.job = freeze_job(resolve_job(spec))
        self.layout = self.job.layout
        self.run = str(save_run(self.job, 1))
        self.plan = self.plan_window(1, [0, 1])

    def plan_window(self, epoch: int, chunks: list[int]) -> WindowPlan:
        summaries = [tasks.plan_chunk(self.run, epoch, 0, chunk) for chunk in chunks]
        return tasks.cut_window(self.run, epoch, 0, summaries)

    def answer(self, plan: WindowPlan) -> None:
        for unit in plan.units:
            chunks, rows = row_identities(self.layout.prepared_unit(0, plan.epoch, unit.unit))
            results = [result(int(c), int(r)) for c, r in zip(chunks, rows, strict=True)]
            write_segment(self.layout.segments(0) / str(SegmentName(unit.unit, plan.epoch, 1, 0)), results)

    def finish(self, plan: WindowPlan) -> int:
        """Rows without a result, over all units."""
        return sum(tasks.finish_unit(self.run, 0, unit.unit, plan.epoch).missing for unit in plan.units)


def result(chunk: int, row: int) -> ResultRow:
    output = CompletionOutput(index=0, text=f"{chunk}/{row}", token_ids=(1,), finish_reason="stop")
    return ResultRow(chunk=chunk, row=row, outputs=[output], prompt_tokens=3)


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    return Planned(tmp_path)


@pytest.mark.parametrize("damage", ["prepared gone", "prepared torn", "errors gone", "errors torn", "plan torn"])
def test_a_window_whose_files_are_damaged_is_planned_again_from_the_start(planned: Planned, damage: str) -> None:
    layout = planned.layout
    planned.answer(planned.plan)
    what, how = damage.split()
    path = {
        "prepared": layout.prepared_unit(0, 1, 0),
        "errors": layout.plan_segment(0, 1, 0),
        "plan": layout.window(0),
    }[what]
    assert load_usable_window(layout, 0, {0, 1}, epoch=1) == planned.plan
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9])
    assert load_usable_window(layout, 0, {0, 1}, epoch=1) is None
    # Results go too: they may be what a half-done deletion has left.
    assert not layout.window(0).exists() and not layout.segments(0).exists()
    assert not list((layout.work / "prepared").glob("w0000-*"))
    again = planned.plan_window(2, [0, 1])
    planned.answer(again)
    assert planned.finish(again) == 0
    for chunk in (0, 1):
        tasks.commit_chunk(planned.run, 2, again, chunk)


def test_a_driver_that_was_succeeded_deletes_nothing(planned: Planned) -> None:
    """It may wake when the next one has planned the window for other chunks, and has half of the results."""
    layout = planned.layout
    planned.answer(planned.plan)
    store = lock_store(layout.output)
    for _ in range(2):
        DriverLock.claim(store).release()
    for call in (
        lambda: load_usable_window(layout, 0, {0, 1, 2}, epoch=1),
        lambda: tasks.clean_window(planned.run, 1, 0),
    ):
        with pytest.raises(TakenOver):
            call()
        assert layout.window(0).exists() and [*layout.segments(0).iterdir()]
    tasks.clean_window(planned.run, 2, 0)
    assert not layout.window(0).exists() and not layout.segments(0).exists()


def test_a_plan_of_other_chunks_is_not_taken(planned: Planned) -> None:
    """As after a broken part: then a window is planned for that part's chunk alone, and another part breaks."""
    shutil.rmtree(planned.layout.segments(0))
    planned.layout.window(0).unlink()
    alone = planned.plan_window(2, [0])
    assert load_usable_window(planned.layout, 0, {0}, epoch=1) == alone
    assert load_usable_window(planned.layout, 0, {0, 1}, epoch=1) is None
    assert {chunk.chunk for chunk in planned.plan_window(3, [0, 1]).chunks} == {0, 1}


def test_late_results_of_another_cut_do_not_pass_for_those_of_the_unit(planned: Planned) -> None:
    """A driver that was succeeded writes a segment after the window was cleaned; units may be cut otherwise now."""
    unit = planned.plan.units[0].unit
    chunks, rows = row_identities(planned.layout.prepared_unit(0, 1, unit))
    own = [result(int(c), int(r)) for c, r in zip(chunks, rows, strict=True)]
    folder = planned.layout.segments(0)
    write_segment(folder / str(SegmentName(unit, 1, 7, 0)), [*own[1:], result(1, 77)])
    assert tasks.finish_unit(planned.run, 0, unit, 1).missing == 1
    write_segment(folder / str(SegmentName(unit, 1, 8, 0)), own[:1])
    outcome = tasks.finish_unit(planned.run, 0, unit, 1)
    assert (outcome.missing, outcome.tally.rows) == (0, len(own))


@pytest.mark.parametrize("stale", ["other rows", "rows missing", "torn"])
def test_a_compacted_unit_that_is_not_this_ones_is_made_again(planned: Planned, stale: str) -> None:
    planned.answer(planned.plan)
    unit = planned.plan.units[0].unit
    path = planned.layout.unit_results(0, unit)
    rows = [result(1, 90 + i) for i in range(planned.plan.units[0].num_rows)]
    table = results_table(rows if stale != "rows missing" else rows[:0])
    write_compacted(path, table)
    if stale == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    assert planned.finish(planned.plan) == 0
    for chunk in (0, 1):
        tasks.commit_chunk(planned.run, 1, planned.plan, chunk)


def test_cutting_again_after_a_lost_answer_gives_the_plan_that_is_there(planned: Planned) -> None:
    """Dask runs a task again whose worker died with the answer; what it read is deleted by then."""
    summaries = list(planned.plan.chunks)
    assert tasks.cut_window(planned.run, 1, 0, summaries) == planned.plan


def test_another_drivers_plan_of_other_chunks_is_refused(planned: Planned) -> None:
    summary = tasks.plan_chunk(planned.run, 2, 0, 0)
    planned.layout.window(0).unlink()
    planned.plan_window(2, [0])
    late = [tasks.plan_chunk(planned.run, 3, 0, chunk) for chunk in (0, 1)]
    with pytest.raises(BatchinferError, match="same command"):
        tasks.cut_window(planned.run, 3, 0, late)
    assert summary.chunk == 0


def test_what_is_left_of_finished_windows_goes_at_the_next_start(planned: Planned) -> None:
    """Killed between the last commit and the cleaning; or a late engine wrote after the cleaning."""
    planned.answer(planned.plan)
    clean_leftovers(planned.layout, finished=[1], epoch=2)
    assert load_window(planned.layout, 0) is not None
    clean_leftovers(planned.layout, finished=[0], epoch=2)
    left = [
        path for path in planned.layout.work.rglob("*") if path.is_file() and path.name.startswith(("w0", "u", "c0"))
    ]
    assert not left, left


def test_a_driver_that_was_succeeded_does_not_have_the_last_word(planned: Planned) -> None:
    """It may wake after the next one has finished the job: `status` must go on saying so."""
    store = lock_store(planned.layout.output)
    DriverLock.claim(store).release()
    writer = StatusWriter(planned.job, 1, Committed(), 2)
    writer.end("interrupted")
    assert read_status(planned.layout.output).state == "interrupted"
    DriverLock.claim(store).release()
    StatusWriter(planned.job, 2, Committed(), 2).end("failed", "the second's")
    writer.end("interrupted", "another driver has taken over")
    found = read_status(planned.layout.output)
    assert (found.state, found.epoch, found.message) == ("failed", 2, "the second's")


class Failing:
    """A call that fails once."""

    def __init__(self, call: Callable[..., Any], code: int, at: int) -> None:
        self.call, self.code, self.left = call, code, at

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise OSError(self.code, os.strerror(self.code))
        return self.call(*args, **named)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_trouble_of_the_disk_is_one_message_and_a_bug_is_not_hidden_behind_it(planned: Planned, code: int) -> None:
    with (
        pytest.raises(BatchinferError, match=rf"some/file: {os.strerror(code)}; .* the same command goes on"),
        _driving(planned.job, Listener()),
    ):
        raise OSError(code, os.strerror(code), "some/file")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "link"):  # at the first thing that is written, and at its first sign of life
            patch.setattr(os, name, Failing(getattr(os, name), code, at=1 if name == "link" else 3))
            failing = pytest.raises(BatchinferError, match="the same command goes on")
            with failing as caught, _driving(planned.job, Listener()):
                pass
            assert caught.value.exit_code == 1
    with pytest.raises(ConnectionResetError), _driving(planned.job, Listener()):
        raise ConnectionResetError(errno.ECONNRESET, "a bug")


@pytest.mark.parametrize("call", ["link", "rename"])
@pytest.mark.parametrize(
    ("code", "said"), [(errno.ENOSPC, "the same command goes on"), (errno.EACCES, "can't be written to: Permission")]
)
def test_trouble_of_the_disk_before_the_old_output_is_aside_is_one_message(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, said: str
) -> None:
    """At the claim, and at the rename: then the claim is given back."""
    workers = LocalWorkers(num_workers=1, num_threads=1, preload=(), scratch=tmp_path / "scratch", began=0.0)
    monkeypatch.setattr(os, call, Failing(getattr(os, call), code, at=1))
    with pytest.raises(BatchinferError, match=said):
        run_job(planned.job.spec, workers, fresh=True)
    assert planned.layout.window(0).exists() and [*tmp_path.glob("out*")] == [planned.layout.output]
    found = last_driver(lock_store(planned.layout.output))
    assert found is None if call == "link" else found is not None and found.released


def test_a_full_disk_while_the_input_is_read_is_one_message_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 3)
    spec = JobSpec.from_dict(
        {
            "model": {"path": "fake://hash?max_model_len=256"},
            "input": {"path": str(tmp_path / "rows.jsonl"), "prompt": "{text}"},
            "output": {"path": str(tmp_path / "out")},
        }
    )
    monkeypatch.setattr(os, "fsync", Failing(os.fsync, errno.ENOSPC, at=1))
    with pytest.raises(BatchinferError, match=r"No space left.* the same command goes on") as caught:
        resolve_here(spec)
    assert caught.value.exit_code == 1
    assert resolve_here(spec).num_rows == 3
