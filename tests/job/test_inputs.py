"""Kinds of input through the whole path: JSON Lines, odd batch sizes, huge rows, prompts without columns."""

from __future__ import annotations

import gzip
import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.job import planner
from batchinfer.job import windows as windows_module
from batchinfer.job.manifest import freeze_job, load_run, move_aside, save_run
from batchinfer.job.report import summarize
from batchinfer.job.resolve import resolve_job
from batchinfer.job.verify import verify_job


@pytest.mark.parametrize("packed", [False, True])
def test_json_lines_with_broken_lines(shop, packed, monkeypatch):
    monkeypatch.setattr(windows_module, "MAX_CHUNK_ROWS", 3)
    lines = [json.dumps({"prompt": f"p{i}", "id": i}) for i in range(5)]
    lines[2] = '{"prompt": broken'
    lines.append(json.dumps({"prompt": 7, "id": 5}))
    data = ("\n".join(lines) + "\n").encode()
    if packed:
        (shop.input / "a.jsonl.gz").write_bytes(gzip.compress(data))
    else:
        (shop.input / "a.jsonl").write_bytes(data)
    job = resolve_job(shop.spec())
    assert not shop.output.exists(), "nothing is written before the job is known to be good"
    job = freeze_job(job)
    (entry,) = job.input["files"]
    if entry["seek_index"]:
        assert entry["seek_index"].startswith(str(job.layout.input_cache))
    job = load_run(save_run(job, 1))
    shop.run(job)
    rows = shop.read()
    assert [row["source_row"] for row in rows] == list(range(6))
    classes = [row["error"]["class"] if row["error"] else None for row in rows]
    assert classes[:5] == [None, None, "invalid_row", None, None]
    assert classes[5] in ("invalid_row", "invalid_prompt"), "a number is no prompt"
    assert verify_job(job).ok
    assert resolve_job(shop.spec()).input["files"][0]["seek_index"] == entry["seek_index"]


@pytest.mark.parametrize(("read", "tokenize"), [(50, 17), (1, 60), (60, 1), (7, 3)])
def test_batch_sizes_that_do_not_divide(shop, monkeypatch, read, tokenize):
    import batchinfer.data.dataset as dataset_module

    monkeypatch.setattr(dataset_module, "MAX_BATCH_ROWS", read)
    monkeypatch.setattr(planner, "BATCH_ROWS", tokenize)
    shop.write("a.parquet", {"prompt": [f"id {i}" for i in range(60)]})
    job = shop.submit()
    assert [row["completion"] for row in shop.read()] == [f"echo id {i}" for i in range(60)]
    assert verify_job(job).ok


def test_one_huge_row_costs_itself_only(shop):
    prompts = [f"id {i}" for i in range(1000)]
    prompts[500] = "word " * 40_000
    prompts[700] = "x" * 5_000_000
    shop.write("a.parquet", {"prompt": prompts})
    begin = time.monotonic()
    job = shop.submit()
    assert time.monotonic() - begin < 60
    rows = shop.read()
    failed = {row["source_row"]: row["error"]["message"] for row in rows if row["error"]}
    assert failed.keys() == {500, 700}
    assert "200,000 tokens" in failed[500] and "256" in failed[500]
    assert summarize(job).failed == {"prompt_too_long": 2} and summarize(job).exit_code == 3


def test_prompt_without_columns(shop):
    shop.write("a.parquet", {"x": [1, 2, 3]})
    job = shop.submit(input={"prompt_column": None, "prompt": "Tell a joke."})
    assert [row["completion"] for row in shop.read()] == ["echo Tell a joke."] * 3
    assert [row["x"] for row in shop.read()] == [1, 2, 3]
    assert verify_job(job).ok


def test_messages_with_templates_and_from_a_column(shop):
    struct = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    messages = pa.array([[{"role": "user", "content": "hi"}], None, [], [{"role": "user", "content": None}]], struct)
    shop.write("a.parquet", {"messages": messages, "topic": ["t0", "t1", None, "t3"]})
    job = shop.submit(input={"prompt_column": None, "messages_column": "messages"})
    rows = shop.read()
    assert rows[0]["completion"] == "echo <user>hi\n<assistant>"
    assert [row["error"] is None for row in rows] == [True, False, False, False]
    assert rows[0]["messages"] == [{"role": "user", "content": "hi"}] and rows[1]["messages"] is None
    assert verify_job(job).ok
    assert job.semantic["model.chat_template_hash"] and "messages" in job.facts["chat_template"]
    spec = shop.spec(
        input={"prompt_column": None, "messages": [{"role": "user", "content": "About {topic}"}]},
        output={"path": "out2", "columns": ["topic"]},
    )
    job = freeze_job(resolve_job(spec))
    shop.run(job)
    (part,) = (shop.root / "out2").glob("part-*.parquet")
    table = pq.read_table(part)
    assert table.column_names[:2] == ["topic", "source_file"]
    assert table["completion"].to_pylist()[1] == "echo <user>About t1\n<assistant>"
    assert table["completion"].to_pylist()[2] is None, "a null in a template is an error row"


def test_limit_and_many_tiny_files(shop):
    for n in range(30):
        shop.write(f"f{n:02d}.parquet", {"prompt": [f"{n}-{i}" for i in range(n % 3)]})
    job = shop.submit(input={"limit": 12})
    assert len(shop.read()) == 12
    assert verify_job(job).ok
    assert len(job.windows()) == 1


def test_pass_through_types_and_large_ids(shop):
    ids = pa.array([9007199254740993, None, -9223372036854775808], pa.int64())
    stamps = pa.array([1, None, 3], pa.timestamp("ns", "UTC"))
    shop.write("a.parquet", {"prompt": ["a", "b", "c"], "id": ids, "t": stamps, "s": ["007", None, "1"]})
    job = shop.submit(input={"id_column": "id"})
    table = pq.read_table(shop.parts()[0])
    assert table["id"].combine_chunks().equals(ids) and table["t"].type == stamps.type
    assert table["s"].to_pylist() == ["007", None, "1"]
    assert verify_job(job).ok


def test_no_input_columns_carried(shop):
    shop.write("a.parquet", {"prompt": ["a", None]})
    job = shop.submit(output={"columns": []})
    assert pq.read_schema(shop.parts()[0]).names[0] == "source_file"
    assert verify_job(job).ok


def test_same_job_over_another_input_in_one_process(shop):
    """Opened inputs are kept per process: not past the input that they were opened for."""
    for prompts in (["a", "b"], ["c", "d", "e"]):
        shop.write("a.parquet", {"prompt": prompts})
        job = resolve_job(shop.spec(sampling={"seed": 1}), ignore_existing=True)
        move_aside(job.layout)
        job = freeze_job(job)
        shop.run(job)
        assert [row["completion"] for row in shop.read()] == [f"echo {p}" for p in prompts]
        assert verify_job(job).ok
