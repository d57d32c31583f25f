"""A short campaign of faults (`scripts/fault_campaign` runs long ones), and that its judgement can fail."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.job.driver_lock import DriverLock, lock_store
from batchinfer.job.layout import JobLayout
from batchinfer.job.status import JobStatus, write_status
from batchinfer.testing.faults import inside, kinds, rounds
from batchinfer.testing.faults.campaign import Plan, _Jobs, in_turn
from batchinfer.testing.faults.jobs import CampaignJob, make_job
from batchinfer.testing.faults.kinds import KINDS
from batchinfer.testing.faults.processes import MARK, send
from batchinfer.testing.faults.rounds import Calm, Round, Verdict, rows_run_again, run_calm

ROOT = Path(__file__).parents[2]
SHORT = (
    "kill_driver,file_fault,zombie_worker,terminate_all,cut_files,zombie_family,file_fault,kill_engine,disturbed_retry"
)


@pytest.mark.timeout(900)
def test_a_short_campaign_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/fault_campaign", "--rounds", "8", "--jobs", "2", "--seed", "5"]
    command += ["--faults", SHORT, "--most-faults", "2", "--limit", "200", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=880)
    assert run.returncode == 0, run.stderr + run.stdout
    found = json.loads(run.stdout)
    assert found["ok"] and found["rounds"] == 8 and found["runs"] > 8
    assert sum(found["faults"].values()) >= 5


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[CampaignJob, Calm]:
    """A job and its undisturbed run, with several parts."""
    folder = tmp_path_factory.mktemp("campaign")
    for seed in range(100):
        place = folder / str(seed)
        job = make_job(place, seed, rows=40)
        if len([*(place / "input").iterdir()]) == 5:
            return job, run_calm(job, place / "calm", retried=False)
    raise AssertionError("no job with five files")


@pytest.fixture
def round_(calm: tuple[CampaignJob, Calm], tmp_path: Path) -> Iterator[Round]:
    """A round whose output is the undisturbed one's, to be harmed."""
    job = replace(calm[0], step_delay_ms=0)  # as it was run: it stands in the model's name
    made = Round(0, job, 0, tmp_path / "round", draw=random.Random(0), limit_s=60, next_site=str)
    shutil.copytree(job.folder / "calm" / "out", tmp_path / "copy")
    (tmp_path / "copy").rename(made.output)  # at once: the round's reader looks already
    yield made
    made.close()


def judged(round_: Round, calm: tuple[CampaignJob, Calm]) -> Verdict:
    return round_.judge(calm[1])


def test_an_unharmed_output_passes(round_: Round, calm: tuple[CampaignJob, Calm]) -> None:
    verdict = judged(round_, calm)
    assert verdict.ok and verdict.looks > 0, verdict


def test_a_lost_part_is_seen(round_: Round, calm: tuple[CampaignJob, Calm]) -> None:
    part = sorted(round_.output.glob("part-*"))[1]
    rows = pq.read_metadata(part).num_rows
    part.unlink()
    verdict = judged(round_, calm)
    assert (verdict.lost, verdict.doubled, verdict.different) == (rows, 0, 0)
    assert any("not there" in text for text in verdict.problems)


def test_doubled_rows_are_seen_by_the_count_and_by_the_reader(round_: Round, calm: tuple[CampaignJob, Calm]) -> None:
    part = sorted(round_.output.glob("part-*"))[1]
    shutil.copy(part, part.with_name("part-00099-00000.parquet"))
    verdict = judged(round_, calm)
    assert verdict.doubled == pq.read_metadata(part).num_rows and verdict.lost == 0
    assert any("a reader found rows of" in text for text in verdict.problems)


def test_duckdb_sees_what_its_own_glob_takes(round_: Round, calm: tuple[CampaignJob, Calm]) -> None:
    """Hidden files too, which other readers leave alone: whatever ends like a part is data to it."""
    part = sorted(round_.output.glob("part-*"))[1]
    shutil.copy(part, part.with_name(".hidden.parquet"))
    assert len(round_.reader.ask_duckdb()) == min(3, pq.read_metadata(part).num_rows)
    part.with_name(".hidden.parquet").write_bytes(b"PAR1")
    (problem,) = round_.reader.ask_duckdb()
    assert problem.startswith("DuckDB can't read")


def test_another_completion_is_seen(round_: Round, calm: tuple[CampaignJob, Calm]) -> None:
    part = sorted(round_.output.glob("part-*"))[0]
    table = pq.read_table(part)
    column = table.schema.get_field_index("prompt_tokens")
    other = pa.array([7_777, *table["prompt_tokens"].to_pylist()[1:]], pa.int32())
    pq.write_table(table.set_column(column, table.field(column), other), part)
    verdict = judged(round_, calm)
    assert (verdict.lost, verdict.doubled, verdict.different) == (0, 0, 1)
    assert any(text.startswith("verify:") and part.name in text for text in verdict.problems)


def test_a_torn_part_is_seen_by_the_reader(round_: Round) -> None:
    part = sorted(round_.output.glob("part-*"))[0]
    part.write_bytes(part.read_bytes()[:-9])
    round_.reader.look()
    assert [text for text in round_.reader.problems if part.name in text]


def test_what_is_left_lying_and_other_exit_codes_are_seen(round_: Round, calm: tuple[CampaignJob, Calm]) -> None:
    folder = round_.layout.segments(0)
    folder.mkdir(parents=True)
    (folder / "u00000-e000001-l000000-0000.arrow").write_bytes(b"")
    round_.driver = round_.processes.start("submit", "nowhere.yaml")
    round_.driver.wait(60)
    verdict = judged(round_, calm)
    assert any("files left" in text for text in verdict.problems)
    assert any("exit code 2" in text for text in verdict.problems)


def test_what_outlives_a_killed_driver_is_seen_unless_it_stands_still(
    round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "LEAVE_S", 0.2)
    script = "import subprocess, time; [subprocess.Popen(['sleep', '60']) for _ in '12']; time.sleep(60)"
    driver = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, MARK: round_.processes.mark})
    round_.wait(lambda: len(round_.processes.below(driver.pid)) == 3)
    stopped, running = (found.pid for found in round_.processes.below(driver.pid) if found.pid != driver.pid)
    send(stopped, signal.SIGSTOP)
    round_.wait(lambda: any(found.state == "T" for found in round_.processes.find()))
    round_.kill(driver)
    assert round_.verdict.problems == [f"processes [{running}] outlive their driver"]


def test_some_jobs_have_several_windows(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path / str(seed), seed, rows=60) for seed in range(12)]
    assert {job.several_windows for job in jobs} == {True, False}
    for job in jobs:
        assert ("window_rows" in job.settings["input"]) == job.several_windows


def lay(round_: Round, name: str) -> Path:
    path = round_.layout.state / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("windows/w0003.json", 3),
        ("prepared/w0002-e000001/u00000.arrow", 2),
        ("segments/w0001/plan-e000001-c000000.arrow", 1),
        ("driver/000001.beat", None),
        ("status.json", None),
    ],
)
def test_what_is_cut_short_is_noted_with_its_window(round_: Round, name: str, window: int | None) -> None:
    path = lay(round_, name)
    path.write_bytes(b"0123456789")
    kinds._cut(round_, path)
    noted = [json.loads(line) for line in round_.trace.read_text().splitlines()] if round_.trace.exists() else []
    assert [event["window"] for event in noted] == ([] if window is None else [window])
    assert path.stat().st_size < 10


LATE = "segments/w0000/u00000-e000001-l000000-0000.arrow"


def test_what_earlier_drivers_and_the_killed_left_goes_with_the_next_command(
    round_: Round, calm: tuple[CampaignJob, Calm]
) -> None:
    DriverLock.claim(lock_store(round_.output)).release()
    dead = f"{round_.layout.temporary('').name.partition('~')[0]}~{2**22 + 5}~77~0~part-00000-00000.parquet"
    paths = [lay(round_, name) for name in (LATE, "prepared/w0000-e000001/u00000.arrow", f"tmp/{dead}")]
    paths.append(lay(round_, "windows/w0000.json"))
    paths[-1].write_text('{"window": 0, "epoch": 1}')
    verdict = judged(round_, calm)
    assert verdict.ok and verdict.starts == 1, verdict
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize(
    "name", ["windows/w0000.json", "segments/w0000/u00000.arrow", LATE.replace("e000001", "e000002")]
)
@pytest.mark.parametrize("retried", [False, True])
def test_a_window_that_was_not_cleaned_is_seen_though_the_next_command_cleans_it(
    round_: Round, calm: tuple[CampaignJob, Calm], name: str, retried: bool
) -> None:
    DriverLock.claim(lock_store(round_.output)).release()
    path = lay(round_, name)
    if path.suffix == ".json":
        path.write_text('{"window": 0, "epoch": 2}')
    if retried:
        round_.begin_retry()
    verdict = judged(round_, calm)
    assert any(text.startswith("1 files left, as") and name in text for text in verdict.problems)
    assert not path.exists()


def test_a_next_command_that_fails_is_seen(round_: Round, calm: tuple[CampaignJob, Calm]) -> None:
    DriverLock.claim(lock_store(round_.output)).release()
    lay(round_, LATE)
    round_.path.write_text("{}")
    verdict = judged(round_, calm)
    assert any("submit ends with exit code 2" in text for text in verdict.problems)


def test_rows_that_ran_though_they_were_durable_are_counted(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    events = [
        {"event": "lease", "window": 0, "rows": [[0, 1], [0, 2], [1, 3]], "leased_at": 1.0},
        {"event": "published", "window": 0, "rows": [[0, 1], [0, 2]], "time": 2.0},
        {"event": "lease", "window": 0, "rows": [[0, 1]], "leased_at": 1.5},  # before it was durable
        {"event": "lease", "window": 0, "rows": [[0, 2], [1, 3]], "leased_at": 3.0},
        {"event": "destroyed", "window": 0, "rows": [[0, 1]]},
        {"event": "lease", "window": 0, "rows": [[0, 1]], "leased_at": 4.0},
        {"event": "destroyed", "window": 0, "rows": None},
        {"event": "lease", "window": 0, "rows": [[0, 2]], "leased_at": 5.0},
    ]
    trace.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert rows_run_again(trace) == ([(0, 0, 2)], 8)


def harm(tmp_path: Path, mode: str) -> dict[str, object]:
    site = "fsync job.status.write_status"
    return {"site": site, "mode": mode, "hit": 2, "done": str(tmp_path / "done")}


def write(layout: JobLayout, number: int) -> str:
    try:
        write_status(layout, JobStatus(name=str(number), state="running", rows_total=1))
    except OSError as error:
        return "failed" if "injected" in str(error) else str(error)
    return "good"


@pytest.mark.parametrize("mode", [mode for mode in inside.MODES if not mode.endswith("kill")])
def test_a_file_fault_does_its_harm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    slept: list[float] = []
    monkeypatch.setattr(inside, "time", SimpleNamespace(sleep=slept.append))
    for name in inside.CALLS:
        monkeypatch.setattr(os, name, getattr(os, name))  # to be restored
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(harm(tmp_path, mode)))
    monkeypatch.setenv(inside.VARIABLE, str(plan))
    inside.arm()
    layout = JobLayout(tmp_path / "out")
    second = "good" if mode in ("slow", "stale") else "failed"
    found = [(write(layout, number), len(slept)) for number in range(4)]
    assert [outcome for outcome, _ in found] == ["good", second, "good", "good"]
    assert [count for _, count in found] == ([0, 1, 1, 1] if mode == "slow" else [0] * 4)
    assert slept == [inside.SLOW_S] * (mode == "slow")
    assert (tmp_path / "done").exists()
    assert not [*layout.state.glob(".tmp-*")]


@pytest.mark.parametrize("mode", ["kill", "torn_kill"])
def test_a_torn_write_and_a_kill_reach_every_process_of_the_environment(tmp_path: Path, mode: str) -> None:
    out = tmp_path / "out"
    code = (
        "from pathlib import Path; from batchinfer.job.layout import JobLayout\n"
        "from batchinfer.job.status import JobStatus, write_status\n"
        f"for number in range(4): write_status(JobLayout(Path({str(out)!r})), "
        "JobStatus(name=str(number), state='running', rows_total=1))\n"
    )
    more = inside.environment(tmp_path / "faults", harm(tmp_path, mode))
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | more, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert json.loads(JobLayout(out).status.read_bytes())["name"] == "0"
    (left,) = JobLayout(out).state.glob(".tmp-*")
    text = left.read_text()
    if mode == "kill":
        assert json.loads(text)["name"] == "1"
    else:  # its first bytes alone: the file's times have no fixed length to compare with
        assert text.startswith('{\n "name": "1"')
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


def test_every_kind_comes_round_and_files_more_often() -> None:
    order = in_turn(list(KINDS))
    assert set(order) == set(KINDS) and order.count("file_fault") >= len(KINDS) // 2 - 1
    assert in_turn(["kill_all"]) == ["kill_all"] and in_turn(["file_fault"]) == ["file_fault"]


def test_a_campaign_that_is_ended_reaches_every_round_though_they_leave_meanwhile(tmp_path: Path) -> None:
    jobs = _Jobs(Plan(rounds=3, seed=0), tmp_path)
    expired: list[Leaving] = []

    class Leaving:
        def expire(self) -> None:
            expired.append(self)
            jobs.rounds.remove(self)  # type: ignore[arg-type]

    jobs.rounds = [Leaving(), Leaving(), Leaving()]  # type: ignore[list-item]
    jobs.abandon()
    assert len(expired) == 3
