"""Whole jobs by the command line over fake models: results, exit codes, what the user reads."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster.conftest import FAST, SLOW, JobFolder


def test_a_job_from_start_to_end(folder: JobFolder) -> None:
    folder.input(60)
    folder.job("fake://echo?max_model_len=512", sampling={"max_tokens": 100})
    said = folder.run()
    assert "The job is finished." in said and "60" in said
    rows = folder.rows()
    assert [row["source_row"] for row in rows] == list(range(60))
    assert all(row["completion"] == row["text"] and row["error"] is None for row in rows)
    assert "Proved" in folder.run("verify", "job.yaml")
    state = json.loads(folder.run("status", "out", "--json"))
    assert (state["state"], state["rows_done"], state["rows_failed"]) == ("finished", 60, 0)
    timings = json.loads((folder.state / "timings.json").read_text())
    moments = timings["moments"]
    # Clocks of several processes: their order is looked at where times are given (test_timings.py).
    told = {"job_frozen", "rows_ready", "first_lease", "first_token", "first_durable", "last_durable", "end"}
    assert told <= set(moments)
    assert state["first_token_s"] == pytest.approx(moments["first_token"], abs=0.001)
    assert set(timings["cpu_s"]) == {"driver", "worker w0", "engine w0"} and min(timings["cpu_s"].values()) > 0
    assert {span["process"] for span in timings["spans"]} == {"driver", "worker w0", "engine w0"}
    assert timings["engine"]["w0"]["generated_tokens"] > 0
    # Again: says so, runs nothing, same exit code.
    before = sorted(path.stat().st_mtime_ns for path in folder.out.glob("part-*"))
    assert "finished already" in folder.run()
    assert sorted(path.stat().st_mtime_ns for path in folder.out.glob("part-*")) == before


@pytest.mark.parametrize("num_rows", [0, 1])
def test_very_small_inputs(folder: JobFolder, num_rows: int) -> None:
    folder.input({"text": ["only"] * num_rows} if num_rows else {"text": []})
    if not num_rows:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder.root / "in/rows.parquet")
    folder.job()
    folder.run()
    assert folder.table().num_rows == num_rows
    folder.run("verify", "out")


def test_bad_rows_are_error_rows_and_retry_touches_only_them(folder: JobFolder) -> None:
    texts = [f"row {i}" for i in range(30)]
    texts[7], texts[20] = None, "long " * 300
    folder.input({"text": texts})
    folder.job(engine={"max_model_len": 256})
    said = folder.run(code=3)
    assert "error rows" in said and "invalid_prompt" in said and "prompt_too_long" in said
    before = folder.rows()
    assert [i for i, row in enumerate(before) if row["error"]] == [7, 20]
    assert folder.run(code=3).count("finished already") == 1
    said = folder.run("retry", "job.yaml", "--class", "prompt_too_long", "--set", "engine.max_model_len=2048", code=2)
    assert "max_model_len" in said  # the fake model has 512 positions
    folder.trace.unlink()
    folder.job(FAST, engine={"max_model_len": 256})
    folder.run("retry", "job.yaml", "--set", "engine.max_model_len=512", code=3)
    assert sum(len(event["rows"]) for event in folder.events("lease")) <= 1
    folder.run("verify", "out")
    after = folder.rows()
    assert [row for i, row in enumerate(after) if i != 20] == [row for i, row in enumerate(before) if i != 20]


def test_equal_rows_and_equal_files_are_rows_of_their_own(folder: JobFolder) -> None:
    """Identical prompts at temperature 1 give samples of their own; greedy ones run once and count each."""
    folder.input({"text": ["same"] * 25}, "a.parquet")
    folder.input({"text": ["same"] * 25}, "b.parquet")
    folder.job(sampling={"temperature": 1.0, "max_tokens": 12})
    folder.run()
    rows = folder.rows()
    assert len(rows) == 50 and len({row["completion"] for row in rows}) > 40
    folder.run("submit", "job.yaml", "--set", "sampling.temperature=0", "--set", "output.path=greedy")
    folder.out = folder.root / "greedy"
    rows = folder.rows()
    assert len(rows) == 50 and len({row["completion"] for row in rows}) == 1


def test_one_worker_and_two_give_the_same_rows(folder: JobFolder) -> None:
    folder.input(120)
    folder.job(sampling={"temperature": 0.8, "max_tokens": 12})
    folder.run()
    one = folder.table()
    folder.run("submit", "job.yaml", "--set", "cluster.workers=2", "--set", "output.path=two")
    folder.out = folder.root / "two"
    assert folder.table().equals(one)


def test_two_workers_compute_hardly_more_prompt_tokens_than_one(folder: JobFolder) -> None:
    """Documents, several questions about each, in any order: what is shared is computed once, and said."""
    texts = [f"{doc:03d} {chr(97 + doc % 26) * 150} question {q}" for doc in range(60) for q in range(4)]
    random.Random(0).shuffle(texts)
    folder.input({"text": texts})
    computed = {}
    for workers in (1, 2):
        folder.job(FAST + "&step_delay_ms=5", cluster={"workers": workers}, engine={"max_num_seqs": 16})
        folder.run("submit", "job.yaml", "--fresh")
        status = json.loads(folder.run("status", "out", "--json"))
        computed[workers] = status["prompt_tokens"] - status["cached_tokens"]
        # Which rows a second worker takes over, and when, hangs on the clock: a few documents may be computed twice.
        assert (0.97 if workers == 1 else 0.9) <= status["cached_tokens"] / status["shareable_tokens"] <= 1
    assert computed[2] <= 1.2 * computed[1]
    survey = folder.run("plan", "job.yaml", "--set", "output.path=elsewhere")
    assert f"{status['shareable_tokens']:,}" in survey


def test_the_failure_limit_stops_the_job(folder: JobFolder) -> None:
    folder.input({"text": [None, "a", "b"] * 5})
    folder.job(failure={"max_failed_rows": 3})
    said = folder.run(code=4)
    assert "max_failed_rows" in said
    assert json.loads(folder.run("status", "out", "--json"))["state"] == "failure_limit"
    # The limit is no part of what makes the bytes: raised, the same output goes on.
    folder.run("submit", "job.yaml", "--set", "failure.max_failed_rows=100", code=3)
    folder.run("verify", "out")


def test_auto_failure_limit_on_failing_engines_rows(folder: JobFolder) -> None:
    """Every row that holds the token fails in the engine: half of those finished, and a hundred."""
    folder.input({"text": [f"z{i}" for i in range(400)]})
    folder.job(f"{FAST}&nan_token={ord('z')}")
    folder.run(code=4)


def test_stop_and_go_on(folder: JobFolder) -> None:
    folder.input(150)
    folder.job(SLOW, engine={"max_num_seqs": 8})
    driver = folder.start()
    folder.wait_for(folder.segments)
    driver.send_signal(signal.SIGTERM)
    _, said = driver.communicate(timeout=20)
    assert driver.returncode == 75, said
    assert "goes on" in said
    assert json.loads(folder.run("status", "out", "--json"))["state"] == "interrupted"
    durable = {tuple(row) for event in folder.events("published") for row in event["rows"]}
    assert durable
    folder.trace.unlink()
    folder.run()
    again = {tuple(row) for event in folder.events("lease") for row in event["rows"]}
    assert not again & durable, "rows that were durable ran again"
    folder.run("verify", "out")


def test_a_second_submit_is_refused_while_the_first_is_at_work(folder: JobFolder) -> None:
    folder.input(600)
    folder.job(SLOW, engine={"max_num_seqs": 4})
    driver = folder.start()
    folder.wait_for(folder.segments)
    said = folder.run(code=2)
    assert "one driver at a time" in said
    driver.send_signal(signal.SIGINT)
    assert driver.wait(20) == 75


def test_a_changed_setting_is_refused_by_name_and_fresh_moves_aside(folder: JobFolder) -> None:
    folder.input(5)
    folder.job()
    folder.run()
    said = folder.run("submit", "job.yaml", "--set", "sampling.max_tokens=9", code=2)
    assert "max_tokens" in said and "--fresh" in said
    folder.run("submit", "job.yaml", "--set", "sampling.max_tokens=9", "--fresh")
    assert all(row["completion_tokens"] == 9 for row in folder.rows())
    assert len([path for path in folder.root.iterdir() if path.name.startswith("out")]) == 2


def test_works_with_standard_output_closed(folder: JobFolder) -> None:
    folder.input(10)
    folder.job()
    command = f"exec {sys.executable} -m batchinfer submit job.yaml >&- 2>&- <&-"
    process = subprocess.run(["bash", "-c", command], cwd=folder.root, timeout=60, check=False)
    assert process.returncode == 0
    assert folder.table().num_rows == 10


def test_an_engine_that_cannot_start_ends_the_job_with_the_reason(folder: JobFolder) -> None:
    folder.input(5)
    folder.job("fake://hash?crash=1")
    said = folder.run(code=2, timeout=60)
    assert "crash" in said


def test_broken_parts_are_noticed_named_and_made_again(folder: JobFolder) -> None:
    for name in "abcd":
        folder.input({"text": [f"{name} {i}" for i in range(5)]}, f"{name}.parquet")
    folder.job()
    folder.run()
    whole = folder.table()
    parts = sorted(folder.out.glob("part-*"))
    kept = parts[3].stat().st_mtime_ns
    for part, cut in zip(parts, (1, 8, parts[2].stat().st_size), strict=False):
        data = part.read_bytes()
        part.write_bytes(data[: len(data) - cut])
    said = folder.run("verify", "out", code=1)
    assert "NOT proved: 3 problems" in said and all(part.name in said for part in parts[:3])
    folder.run()
    assert folder.table().equals(whole)
    assert parts[3].stat().st_mtime_ns == kept
    log = (folder.state / "log.txt").read_text()
    assert all(f"part {part.name} is broken" in log for part in parts[:3])


def test_a_batch_that_raises_costs_only_the_rows_that_make_it_raise(folder: JobFolder) -> None:
    texts = [f"id {i}" if i % 9 else f"id {i} ~" for i in range(60)]
    folder.input({"text": texts})
    folder.job(f"fake://echo?max_model_len=512&raise_token={ord('~')}", engine={"max_num_seqs": 17})
    folder.run("submit", "job.yaml", "--set", "sampling.max_tokens=30", code=3)
    for row, text in zip(folder.rows(), texts, strict=True):
        assert row["text"] == text
        assert (row["error"] is not None) == ("~" in text)
        assert row["completion"] == (None if "~" in text else text)
    folder.run("verify", "out")


def test_the_process_ends_soon_after_the_last_row(folder: JobFolder) -> None:
    folder.input(20)
    folder.job(cluster={"workers": 2})
    folder.run()
    last = max(event["time"] for event in folder.events("published"))
    assert time.time() - last < 10


def test_a_long_row_holds_back_no_short_one(folder: JobFolder) -> None:
    """Rows sorted by length, the first generates for long: others are durable long before it ends, order is kept."""
    texts = [("x" * (40 - i)) + f" {i}" for i in range(40)]
    folder.input({"text": texts, "limit": [260] + [3] * 39})
    folder.job(SLOW, input={"sampling_columns": {"max_tokens": "limit"}}, sampling={"ignore_eos": True})
    folder.run()
    rows = folder.rows()
    assert [row["text"] for row in rows] == texts
    assert [row["completion_tokens"] for row in rows] == [260] + [3] * 39
    published = {row: event["time"] for event in folder.events("published") for _, row in event["rows"]}
    early = [row for row in range(1, 40) if published[row] < published[0] - 0.5]
    assert len(early) > 30, sorted(published.items())


def test_memory_limits_of_dask_do_not_end_workers(folder: JobFolder) -> None:
    """A model's memory is the engine's business; with a limit, workers would be killed while they load."""
    folder.input(10)
    folder.job()
    limits = {
        f"DASK_DISTRIBUTED__WORKER__MEMORY__{name}": "0.0001" for name in ("TARGET", "SPILL", "PAUSE", "TERMINATE")
    }
    folder.run(env=os.environ | limits | {"DASK_WORKER__MEMORY_LIMIT": "1MB"})
    assert folder.table().num_rows == 10


def test_two_jobs_at_once_do_not_meet(folder: JobFolder) -> None:
    """Ports, scratch folders, names: nothing is shared, and nothing is said about it."""
    folder.input(30)
    folder.job(SLOW)
    first = folder.start()
    said = folder.run("submit", "job.yaml", "--set", "output.path=other")
    _, error = first.communicate(timeout=60)
    assert first.returncode == 0
    assert "HTTP server" not in said + error and "warn" not in (said + error).lower()
