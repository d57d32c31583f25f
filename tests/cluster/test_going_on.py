"""Rows in flight when an engine is stopped go on where they were: same rows, and no token generated twice."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.cluster import row_feed
from batchinfer.cluster.leased_rows import unit_segments
from batchinfer.cluster.row_feed import RowFeed
from batchinfer.data.partials import read_partials
from batchinfer.data.segments import merge_segments
from batchinfer.job.driver_lock import DriverLock, lock_store
from batchinfer.testing.faults import inside
from batchinfer.types.request import PartialOutput
from tests.cluster.conftest import JobFolder, alive
from tests.cluster.test_engine_rows import Workshop, run_to_end

# ------------------------------------------------------------------------ one engine after the other, in this process

TEXTS = [f"row {i} of {'some' * (i % 7)}" for i in range(30)]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 2, "n": 2},
    {"temperature": 0.9, "stop": ["q", "ab", "Zz"], "min_tokens": 20, "frequency_penalty": 0.5},
]


def lease_all(shop: Workshop, first: int = 0) -> RowFeed:
    feed = shop.feed()
    for number, unit in enumerate(shop.plan.units):
        feed.add(shop.lease(first + number, unit.unit, 0, unit.num_rows))
    return feed


def stopped_after(shop: Workshop, steps: int, first: int) -> RowFeed:
    feed = lease_all(shop, first)
    for _ in range(steps):
        feed.step()
    feed.close()
    return feed


def rows_of(shop: Workshop) -> list[dict[str, Any]]:
    folder = shop.job.layout.segments(0)
    table = merge_segments(path for unit in shop.plan.units for path in unit_segments(folder, unit.unit))
    return table.drop_columns(["cached_tokens"]).to_pylist()  # type: ignore[no-any-return]


def partials_of(shop: Workshop) -> list[Path]:
    return sorted(shop.job.layout.segments(0).glob("partial-*"))


def undisturbed(root: Path, texts: list[str] = TEXTS, **sampling: Any) -> tuple[list[dict[str, Any]], int]:
    (root / "calm").mkdir()
    shop = Workshop(root / "calm", texts, **sampling)
    feed = lease_all(shop)
    run_to_end(feed)
    feed.close()
    assert not partials_of(shop)
    return rows_of(shop), feed.engine.stats().num_generated_tokens


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("steps", [[1], [25], [9, 0, 40, 3]])
def test_rows_go_on_in_the_next_engine(tmp_path: Path, steps: list[int], sampling: dict[str, Any]) -> None:
    sampling = {"max_tokens": 50, **sampling}
    shop = Workshop(tmp_path, TEXTS, **sampling)
    generated = 0
    for run, count in enumerate(steps):
        generated += stopped_after(shop, count, 100 * run).engine.stats().num_generated_tokens
    feed = lease_all(shop, 1000)
    run_to_end(feed)
    feed.close()
    expected, least = undisturbed(tmp_path, **sampling)
    assert rows_of(shop) == expected
    generated += feed.engine.stats().num_generated_tokens
    # Of rows with two samples, one that had ended samples its last token once more.
    assert least <= generated <= least + (len(TEXTS) * len(steps) if sampling.get("n") == 2 else 0)


def test_the_longer_one_stays_whatever_a_later_engine_has_come_to(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, TEXTS, max_tokens=50)
    stopped_after(shop, 30, 0)
    before = partials_of(shop)
    assert before
    unit = shop.plan.units[0].unit
    found = read_partials(shop.job.layout.segments(0), unit, fingerprint=shop.job.fingerprint)
    stopped_after(shop, 1, 100)  # not all of them have begun again
    assert set(before) < set(partials_of(shop))
    after = read_partials(shop.job.layout.segments(0), unit, fingerprint=shop.job.fingerprint)
    assert after.keys() >= found.keys()
    for key, outputs in found.items():
        (one,), (other,) = outputs, after[key]
        assert list(other.token_ids)[: len(one.token_ids)] == list(one.token_ids)


def test_a_lease_of_a_part_of_the_unit_finds_its_own(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, TEXTS, max_tokens=50)
    unit = shop.plan.units[0]
    assert unit.num_rows == len(TEXTS)
    generated = 0
    for lease, start, stop, steps in ((0, 0, 20, 40), (1, 20, 30, 40), (2, 8, 30, 1000), (3, 0, 8, 1000)):
        feed = shop.feed()
        feed.add(shop.lease(lease, unit.unit, start, stop))
        for _ in range(steps):
            feed.step()
        feed.close()
        generated += feed.engine.stats().num_generated_tokens
    expected, least = undisturbed(tmp_path, max_tokens=50)
    assert rows_of(shop) == expected and generated == least


def test_equal_prompts_share_what_one_of_them_had(tmp_path: Path) -> None:
    texts = ["the same"] * 12
    shop = Workshop(tmp_path, texts, max_tokens=40)
    stopped_after(shop, 21, 0)
    feed = lease_all(shop, 100)
    run_to_end(feed)
    feed.close()
    expected, _ = undisturbed(tmp_path, texts, max_tokens=40)
    assert rows_of(shop) == expected
    assert feed.engine.stats().num_generated_tokens == 19


def other_vocabulary(outputs: tuple[PartialOutput, ...]) -> tuple[PartialOutput, ...]:
    return (PartialOutput((*outputs[0].token_ids[:-1], 512)),)


def other_n(outputs: tuple[PartialOutput, ...]) -> tuple[PartialOutput, ...]:
    return outputs * 2


@pytest.mark.parametrize("changed", [other_vocabulary, other_n])
def test_what_can_not_be_of_these_rows_is_told_once_and_they_begin_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: Callable[..., tuple[PartialOutput, ...]]
) -> None:
    shop = Workshop(tmp_path, TEXTS, max_tokens=50)
    stopped_after(shop, 30, 0)
    feed = lease_all(shop, 100)
    for lease in feed._leases.values():
        assert lease.partials
        lease.partials = {position: changed(outputs) for position, outputs in lease.partials.items()}
    with caplog.at_level(logging.WARNING):
        run_to_end(feed)
    feed.close()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"partial results of unit {shop.plan.units[0].unit} do not fit, their rows begin anew"
    ]
    expected, least = undisturbed(tmp_path, max_tokens=50)
    assert rows_of(shop) == expected and feed.engine.stats().num_generated_tokens == least


@pytest.mark.parametrize("by", ["taken over", "full disk"])
def test_a_stop_that_can_or_may_not_keep_them_is_a_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shop = Workshop(tmp_path, TEXTS, max_tokens=50)
    if by == "full disk":
        monkeypatch.setattr(row_feed, "write_partials", full)
    else:
        for _ in range(2):  # the workshop's engine is of epoch 1
            DriverLock.claim(lock_store(shop.job.layout.output)).release()
    with caplog.at_level(logging.WARNING):
        stopped_after(shop, 20, 0)
    assert not partials_of(shop)
    assert ("could not be kept: [Errno 28]" in caplog.text) == (by == "full disk")


# ------------------------------------------------------------------------------------------------------------- jobs

LONG = "fake://hash?vocab=512&max_model_len=512&step_delay_ms=10&eos_rate=0.002"
ROWS = 20
JOB: dict[str, Any] = {
    "engine": {"max_num_seqs": 10},
    "sampling": {"max_tokens": 200, "temperature": 0.7, "stop": ["~}", "Ab"]},
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, int]:
    """The rows of an undisturbed run, and how many tokens it generated."""
    other = JobFolder(tmp_path_factory.mktemp("calm"))
    other.input(ROWS)
    other.job(LONG.replace("=10&", "=0&"), **JOB)
    other.run()
    return other.table(), generated(other)


def generated(folder: JobFolder) -> int:
    """Tokens that the last run's engines generated (of each worker the last one)."""
    timings = json.loads((folder.state / "timings.json").read_text())
    return sum(int(engine["generated_tokens"]) for engine in timings["engine"].values())


def partials(folder: JobFolder) -> list[Path]:
    return sorted(folder.state.glob("segments/*/partial-*.arrow"))


def started(folder: JobFolder, seconds: float = 1.0, **options: Any) -> subprocess.Popen[str]:
    """A run that has been generating for a while."""
    seen = len(folder.events("lease"))
    driver = folder.start(**options)
    folder.wait_for(lambda: len(folder.events("lease")) > seen or driver.poll() is not None)
    time.sleep(seconds)
    return driver


def terminated(driver: subprocess.Popen[str]) -> str:
    driver.send_signal(signal.SIGTERM)
    _, said = driver.communicate(timeout=30)
    assert driver.returncode == 75, said
    assert "stopped by SIGTERM" in said and "the same command goes on" in said
    return said


def test_sigterm_and_the_same_command_generate_no_token_twice(folder: JobFolder, calm: tuple[pa.Table, int]) -> None:
    folder.input(ROWS)
    folder.job(LONG, **JOB)
    tokens = 0
    for _ in range(2):
        terminated(started(folder))
        assert partials(folder)
        tokens += generated(folder)
    assert 0 < tokens < calm[1]
    status = json.loads(folder.run("status", "out", "--json"))
    assert status["state"] == "interrupted" and status["rows_done"] < ROWS
    folder.run()
    tokens += generated(folder)
    assert tokens == calm[1], "tokens of all three runs, and of an undisturbed one"
    folder.run("verify", "out")
    assert folder.table().equals(calm[0])
    assert not partials(folder), "they go with their window"
    assert f"tokens out  {calm[1]:,}\n" in folder.run(), "each is counted once"


def test_killed_after_the_resume_it_still_has_what_the_first_run_kept(
    folder: JobFolder, calm: tuple[pa.Table, int]
) -> None:
    folder.input(ROWS)
    folder.job(LONG, **JOB)
    terminated(started(folder, 1.5))
    kept, tokens = partials(folder), generated(folder)
    driver = started(folder, 0.3)
    driver.kill()
    driver.communicate()
    assert set(kept) <= set(partials(folder))
    folder.run()
    assert folder.table().equals(calm[0])
    # What the first run had generated was not generated again by the third; what the killed one had was.
    assert tokens + generated(folder) <= calm[1]
    assert not partials(folder)


@pytest.mark.parametrize("process", ["worker_process", "engine_process"])
def test_a_worker_or_engine_that_is_taken_away_keeps_its_rows(
    folder: JobFolder, calm: tuple[pa.Table, int], process: str
) -> None:
    folder.input(ROWS)
    folder.job(LONG, **JOB)
    driver = started(folder)
    (pid,) = folder.of_kind(driver, process)
    os.kill(pid, signal.SIGTERM)
    folder.wait_for(lambda: partials(folder) or driver.poll() is not None)
    assert partials(folder)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 0, said + folder.logs()
    assert folder.table().equals(calm[0])
    assert generated(folder) < calm[1] - 10 * 10, "of the second engine"
    folder.run("verify", "out")


def test_signals_to_all_processes_keep_them_too(folder: JobFolder, calm: tuple[pa.Table, int]) -> None:
    """As a batch system does it at the end of the walltime."""
    folder.input(ROWS)
    folder.job(LONG, **JOB, cluster={"workers": 2})
    driver = started(folder)
    pids = folder.of_kind(driver, "_process")
    for pid in [*pids, driver.pid]:
        os.kill(pid, signal.SIGTERM)
    driver.communicate(timeout=30)
    assert driver.returncode == 75
    folder.wait_for(lambda: not any(map(alive, pids)), timeout=10)
    assert partials(folder)
    folder.run()
    assert generated(folder) < calm[1] - 10 * 10
    assert folder.table().equals(calm[0])


@pytest.mark.parametrize(
    "damage", ["cut", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flip", "rename"))]
)
def test_a_damaged_file_costs_its_rows_their_tokens_and_nothing_else(
    folder: JobFolder, calm: tuple[pa.Table, int], damage: str
) -> None:
    folder.input(ROWS)
    folder.job(LONG, **JOB)
    terminated(started(folder))
    for path in partials(folder):
        if damage == "cut":
            os.truncate(path, random.Random(0).randrange(path.stat().st_size))
        elif damage == "flip":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 16
            path.write_bytes(data)
        else:
            path.rename(path.with_name("partial-u00000-e999999-l000000-0123456789abcdef.arrow"))
    said = folder.run()
    assert "partial results partial-" in said and "are ignored, their rows begin anew" in said
    assert folder.table().equals(calm[0])
    folder.run("verify", "out")
    assert not partials(folder)


@pytest.mark.parametrize(
    "mode", ["torn_kill", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("error", "torn", "slow", "lost"))]
)
def test_a_fault_while_they_are_written_costs_nothing_else(
    folder: JobFolder, calm: tuple[pa.Table, int], mode: str
) -> None:
    folder.input(ROWS)
    folder.job(LONG, **JOB)
    site = f"{'link' if mode == 'lost' else 'fsync'} data.partials.write_partials"
    done = folder.root / "done"
    harm = inside.environment(folder.root / "harm", {"site": site, "mode": mode, "hit": 1, "done": str(done)})
    driver = started(folder, env=os.environ | {"BATCHINFER_TRACE": str(folder.trace)} | harm)
    terminated(driver)
    assert done.exists()
    assert ("could not be kept" in folder.logs()) == (mode in ("error", "torn", "lost"))
    folder.run()
    assert folder.table().equals(calm[0])
    assert not partials(folder)


@pytest.mark.slow
def test_fresh_moves_them_aside(folder: JobFolder, calm: tuple[pa.Table, int]) -> None:
    folder.input(ROWS)
    folder.job(LONG, **JOB)
    terminated(started(folder))
    assert partials(folder)
    folder.run("submit", "job.yaml", "--fresh")
    assert generated(folder) == calm[1]
    assert folder.table().equals(calm[0])
