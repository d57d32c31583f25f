"""Inside the engine process, without a process: leased rows, the feed and the sink, over the fake runner."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.cluster import tasks
from batchinfer.cluster.leased_rows import LeasedRows, open_lease, unit_segments
from batchinfer.cluster.row_feed import FIRST_ROWS, RowFeed
from batchinfer.data.prepared import PreparedRows
from batchinfer.data.segments import merge_segments
from batchinfer.engine import load_engine
from batchinfer.job.ledger import WindowPlan
from batchinfer.job.manifest import ResolvedJob, freeze_job, save_run
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import JobSpec
from batchinfer.types.rows import ErrorClass


def leased(num_rows: int = 10, todo: list[int] | None = None) -> LeasedRows:
    rows = PreparedRows.from_lists(0, list(range(num_rows)), [[1]] * num_rows)
    positions = np.asarray(list(range(num_rows)) if todo is None else todo, np.int64)
    return LeasedRows(lease=0, window=0, unit=0, start=0, stop=num_rows, rows=rows, todo=positions)


def test_rows_are_begun_in_order_and_settle_in_any_order() -> None:
    lease = leased()
    assert lease.begun_range(4) == (0, 4)
    assert lease.begin(4).tolist() == [0, 1, 2, 3]
    lease.made_durable([1, 2])
    assert lease.begun_range(2) == (0, 6)
    lease.made_durable([0])
    assert lease.begun_range(0) == (3, 4)
    assert lease.begin(100).tolist() == [4, 5, 6, 7, 8, 9]
    lease.made_durable(range(3, 10))
    assert lease.begun_range(0) == (10, 10)


def test_rows_with_results_are_not_begun() -> None:
    lease = leased(6, todo=[2, 5])
    assert lease.begun_range(1) == (2, 3)
    assert lease.begin(9).tolist() == [2, 5]
    assert not lease.ended
    lease.num_ended = 2
    assert lease.ended


@pytest.mark.parametrize(("begun", "half", "stop"), [(0, False, 0), (3, False, 3), (4, True, 7), (10, False, 10)])
def test_what_is_given_back_was_not_begun(begun: int, half: bool, stop: int) -> None:
    lease = leased()
    lease.begin(begun)
    assert lease.give_back(half=half) == stop
    assert lease.begin(100).tolist() == list(range(begun, stop))


def test_a_lease_is_cut_where_a_new_prefix_begins() -> None:
    groups = [[group] * 50 + [row] for group in range(8) for row in range(5)]
    rows = PreparedRows.from_lists(0, list(range(40)), groups)
    for begun, half, stop in ((0, True, 20), (3, True, 20), (3, False, 5), (5, False, 5), (38, False, 38)):
        lease = LeasedRows(lease=0, window=0, unit=0, start=0, stop=40, rows=rows, todo=np.arange(40))
        lease.begin(begun)
        assert lease.give_back(half=half) == stop, (begun, half)


class Workshop:
    def __init__(self, root: Path, texts: list[str], **sampling: Any) -> None:
        pq.write_table(pa.table({"text": texts}), root / "in.parquet")
        spec = JobSpec.from_dict(
            {
                "model": {"path": "fake://hash?max_model_len=256"},
                "input": {"path": str(root / "in.parquet"), "prompt": "{text}"},
                "output": {"path": str(root / "out")},
                "sampling": {"max_tokens": 6, "seed": 1, **sampling},
                "engine": {"max_num_seqs": 16},
            }
        )
        self.job: ResolvedJob = freeze_job(resolve_job(spec))
        self.run = str(save_run(self.job, 1))
        self.plan: WindowPlan = tasks.cut_window(self.run, 1, 0, [tasks.plan_chunk(self.run, 1, 0, 0)])
        self.said: list[dict[str, Any]] = []

    def feed(self) -> RowFeed:
        engine = load_engine(self.job.engine_config)
        return RowFeed(
            engine, self.job, epoch=1, report=lambda message: self.said.append(json.loads(json.dumps(message)))
        )

    def lease(self, number: int, unit: int, start: int, stop: int) -> LeasedRows:
        keys = {"lease": number, "window": 0, "unit": unit, "epoch": 1, "start": start, "stop": stop}
        return open_lease(self.job.layout, fingerprint=self.job.fingerprint, **keys)

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.said if message["t"] == kind]


def run_to_end(feed: RowFeed) -> None:
    while feed.busy:
        feed.step()
        feed.engine.check()


def test_a_lease_ends_with_durable_rows_and_a_second_one_runs_nothing(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, [f"row {i}" for i in range(40)])
    feed = shop.feed()
    for number, unit in enumerate(shop.plan.units):
        feed.add(shop.lease(number, unit.unit, 0, unit.num_rows))
    run_to_end(feed)
    feed.close()
    assert len(shop.kinds("done")) == len(shop.plan.units)
    assert sum(message["rows"] for message in shop.kinds("progress")) == 40
    begun = [message for message in shop.said if message["t"] in ("begun", "progress")]
    assert begun[0]["t"] == "begun"  # told before anything can happen to the rows
    for unit in shop.plan.units:
        outcome = tasks.finish_unit(shop.run, 0, unit.unit, 1)
        assert (outcome.missing, outcome.tally.rows, outcome.tally.failed) == (0, unit.num_rows, 0)
        assert outcome == tasks.finish_unit(shop.run, 0, unit.unit, 1)
    shop.said.clear()
    feed = shop.feed()
    first = shop.plan.units[0]
    feed.add(shop.lease(99, first.unit, 0, first.num_rows))
    assert not feed.busy
    feed.close()
    assert [message["t"] for message in shop.said] == ["done"]


def test_an_idle_engine_hears_that_its_last_results_were_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row has ended and nothing is left to run: if nobody asked, the lease would stay open for good."""

    def full(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shop = Workshop(tmp_path, [f"row {i}" for i in range(5)])
    feed = shop.feed()
    for number, unit in enumerate(shop.plan.units):
        feed.add(shop.lease(number, unit.unit, 0, unit.num_rows))
    monkeypatch.setattr("batchinfer.cluster.result_sink.write_segment", full)
    with pytest.raises(OSError, match="No space left"):
        run_to_end(feed)
        while True:  # as the engine process does while it has nothing to do
            feed.sink.flush_if_due()
            time.sleep(0.01)
    assert not shop.kinds("done") and not shop.kinds("progress")


def test_a_unit_with_missing_rows_is_not_compacted(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, [f"row {i}" for i in range(20)])
    unit = shop.plan.units[0]
    feed = shop.feed()
    feed.add(shop.lease(0, unit.unit, 0, unit.num_rows - 1))
    run_to_end(feed)
    feed.close()
    assert tasks.finish_unit(shop.run, 0, unit.unit, 1).missing == 1
    assert not shop.job.layout.unit_results(0, unit.unit).exists()
    tasks.give_up_row(shop.run, 1, 0, unit.unit, 1, unit.num_rows - 1, "it kills")
    outcome = tasks.finish_unit(shop.run, 0, unit.unit, 1)
    assert (outcome.missing, outcome.tally.failed) == (0, 1)
    table = merge_segments(unit_segments(shop.job.layout.segments(0), unit.unit))
    assert ErrorClass.ENGINE_CRASH in table["error_class"].to_pylist()


@pytest.mark.parametrize(("temperature", "requests"), [(0.0, 2), (0.9, 30)])
def test_equal_greedy_prompts_run_once(tmp_path: Path, temperature: float, requests: int) -> None:
    shop = Workshop(tmp_path, ["same"] * 15 + ["other"] * 15, temperature=temperature)
    feed = shop.feed()
    for number, unit in enumerate(shop.plan.units):
        feed.add(shop.lease(number, unit.unit, 0, unit.num_rows))
    run_to_end(feed)
    assert feed.engine.stats().num_requests <= requests + len(shop.plan.units)
    feed.close()
    paths = [path for unit in shop.plan.units for path in unit_segments(shop.job.layout.segments(0), unit.unit)]
    table = merge_segments(paths)
    assert table.num_rows == 30
    texts = {row["completion"][0] for row in table.to_pylist()}
    assert len(texts) == 2 if temperature == 0 else len(texts) > 25
    computed = [row["prompt_tokens"] - row["cached_tokens"] for row in table.to_pylist()]
    if not temperature:  # what does not run computes nothing
        assert sum(count > 0 for count in computed) <= requests + len(shop.plan.units)


def test_the_first_token_waits_for_few_rows_and_then_the_batch_is_filled(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, [f"row {i} {'x' * i}" for i in range(60)])
    feed = shop.feed()
    for number, unit in enumerate(shop.plan.units):
        feed.add(shop.lease(number, unit.unit, 0, unit.num_rows))
    feed.step()
    assert feed.engine.num_unfinished <= FIRST_ROWS and len(shop.kinds("first_token")) == 1
    feed.step()
    assert feed.engine.stats().num_running + feed.engine.stats().num_waiting >= 16
    run_to_end(feed)
    feed.close()
    assert len(shop.kinds("first_token")) == 1
    assert sorted(message["lease"] for message in shop.kinds("begun_all")) == list(range(len(shop.plan.units)))


def test_rows_given_back_are_not_run_and_the_rest_is_done(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, [f"row {i}" for i in range(60)])
    unit = max(shop.plan.units, key=lambda unit: unit.num_rows)
    feed = shop.feed()
    feed.add(shop.lease(0, unit.unit, 0, unit.num_rows))
    feed.step()
    feed.give_back(0, half=True)
    (returned,) = shop.kinds("returned")
    run_to_end(feed)
    feed.close()
    assert shop.kinds("done") == [{"t": "done", "lease": 0}]
    assert sum(message["rows"] for message in shop.kinds("progress")) == returned["stop"] < unit.num_rows
    feed.give_back(0, half=False)  # late: it is over
    assert len(shop.kinds("returned")) == 1


def test_a_lease_that_is_cut_behind_what_is_begun_is_all_begun(tmp_path: Path) -> None:
    """Else it would pass for a reserve, and its worker be given nothing."""
    shop = Workshop(tmp_path, [f"row {i}" for i in range(60)])
    unit = max(shop.plan.units, key=lambda unit: unit.num_rows)
    feed = shop.feed()
    lease = shop.lease(0, unit.unit, 0, unit.num_rows)
    feed.add(lease)
    feed.step()
    assert lease.num_left and not shop.kinds("begun_all")
    while lease.num_left:
        feed.give_back(0, half=False)
    said = [message["t"] for message in shop.said if message["t"] in ("returned", "begun_all")]
    assert said[-2:] == ["returned", "begun_all"] and said.count("begun_all") == 1
    run_to_end(feed)
    feed.close()
    assert len(shop.kinds("begun_all")) == 1 and len(shop.kinds("done")) == 1
