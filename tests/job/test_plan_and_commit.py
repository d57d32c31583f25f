"""From rows to parts in one process: counts, order, identity, error rows, planning's records."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.data.parts import read_footer
from batchinfer.data.prepared import read_prepared
from batchinfer.errors import BatchinferError, InputError, ResumeRefused
from batchinfer.job import windows as windows_module
from batchinfer.job.commit import commit_chunk, part_summary
from batchinfer.job.driver_lock import DriverLock, lock_store
from batchinfer.job.ledger import load_window, window_to_json
from batchinfer.job.manifest import freeze_job, load_manifest, load_run, save_run
from batchinfer.job.planner import prepare_chunk
from batchinfer.job.report import summarize
from batchinfer.job.resolve import resolve_job
from batchinfer.job.units import cut_units
from batchinfer.job.verify import verify_job


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 10 rows and windows from 16 rows on, so that small inputs have many."""
    monkeypatch.setattr(windows_module, "MAX_CHUNK_ROWS", 10)
    monkeypatch.setattr(windows_module, "FIRST_WINDOW_ROWS", 16)
    monkeypatch.setattr(windows_module, "MAX_WINDOW_ROWS", 40)


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 60, 131])
def test_rows_out_equal_rows_in_and_each_holds_its_own_id(shop, small_chunks, count):
    shop.write("a.parquet", {"prompt": pa.array([f"id {i}" for i in range(count)], pa.string()), "id": range(count)})
    job = shop.submit()
    rows = shop.read()
    assert [row["id"] for row in rows] == list(range(count))
    assert [row["source_row"] for row in rows] == list(range(count))
    assert [row["completion"] for row in rows] == [f"echo id {i}" for i in range(count)]
    assert all(row["error"] is None and row["source_file"] == "a.parquet" for row in rows)
    report = verify_job(job)
    assert report.ok and report.rows_found == count
    summary = summarize(job)
    assert summary.complete and summary.exit_code == 0 and summary.rows_done == count
    assert pyarrow.dataset.dataset(shop.output).count_rows() == count
    assert len(shop.ran) == count


def test_files_with_identical_bytes_stay_two(shop):
    for name in ("a.parquet", "b.parquet"):
        shop.write(name, {"prompt": [f"same {i}" for i in range(50)] * 2})
    job = shop.submit(sampling={"temperature": 1.0, "seed": 5})
    rows = shop.read()
    assert [(row["source_file"], row["source_row"]) for row in rows] == [
        (name, i) for name in ("a.parquet", "b.parquet") for i in range(100)
    ]
    keys = {job.stream_key(file, row) for file in (0, 1) for row in range(100)}
    assert len(keys) == 200, "equal prompts have streams of their own"


def test_bad_rows_become_error_rows_and_cost_no_other_row(shop):
    prompts = ["hi", None, "", "   ", "x" * 300, "nan", "None", "y" * 255, "z" * 254]
    shop.write("a.parquet", {"prompt": prompts})
    job = shop.submit()
    rows = shop.read()
    classes = [row["error"]["class"] if row["error"] else None for row in rows]
    assert classes[0] is None and classes[3] is None and classes[5] is None and classes[6] is None
    assert classes[1] == "invalid_prompt"
    assert classes[4] == "prompt_too_long"
    assert "300" in rows[4]["error"]["message"] and "256" in rows[4]["error"]["message"]
    assert rows[4]["completion"] is None
    report = summarize(job)
    assert report.exit_code == 3
    assert report.failed["prompt_too_long"] == 1
    assert verify_job(job).ok
    assert ("a.parquet", 4) not in shop.ran


def test_exactly_max_model_len_is_too_long_and_one_less_runs(shop):
    shop.write("a.parquet", {"prompt": ["a" * n for n in (14, 15, 16, 17)]})
    shop.submit(engine={"max_model_len": 16})
    assert [row["error"] is None for row in shop.read()] == [True, True, False, False]


def test_only_bad_rows(shop):
    shop.write("a.parquet", {"prompt": pa.array([None, None], pa.string())})
    job = shop.submit()
    assert [row["error"]["class"] for row in shop.read()] == ["invalid_prompt"] * 2
    assert verify_job(job).ok


def test_n_above_one_gives_lists(shop):
    shop.write("a.parquet", {"prompt": ["p", None]})
    job = shop.submit(sampling={"n": 3, "temperature": 0.5}, output={"token_ids": True})
    good, bad = shop.read()
    assert good["completion"] == ["echo p"] * 3 and good["token_ids"] == [[5, 6, 7]] * 3
    assert bad["completion"] is None
    assert verify_job(job).ok


def test_per_row_settings_and_bad_ones(shop):
    shop.write("a.parquet", {"prompt": ["a", "b", "c"], "limit": [3, None, -1]})
    job = freeze_job(resolve_job(shop.spec(input={"sampling_columns": {"max_tokens": "limit"}})))
    (window,) = job.windows()
    plan = shop.plan(job, 0, window.chunks)
    (unit,) = plan.units
    rows = read_prepared(job.layout.prepared_unit(0, plan.epoch, unit.unit))
    found = {int(row): job.sampling_of(rows.params_of(i)).max_tokens for i, row in enumerate(rows.rows)}
    assert found == {0: 3, 1: 8}
    assert plan.chunks[0].failed == {"invalid_sampling": 1}


def test_units_hold_each_prepared_row_once_whatever_the_order_of_planning(shop, monkeypatch, small_chunks):
    monkeypatch.setattr("batchinfer.job.token_order.MIN_UNIT_WORK", 60)
    shared = "a long beginning that many rows share, "
    prompts = [f"{shared if i % 3 else ''}row {i % 40}" for i in range(14)] + [None] * 2
    shop.write("a.parquet", {"prompt": prompts})
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    plan = shop.plan(job, 0, window.chunks)
    again = cut_units(
        job, 0, [prepare_chunk(job, 0, chunk, epoch=2) for chunk in reversed(window.chunks)][::-1], epoch=2
    )
    assert again == plan, "another driver's plan holds"
    assert load_window(job.layout, 0) == plan
    seen = []
    for unit in plan.units:
        rows = read_prepared(job.layout.prepared_unit(0, plan.epoch, unit.unit))
        assert len(rows) == unit.num_rows and rows.num_tokens == unit.prompt_tokens
        assert sum(n for _, n in unit.chunks) == unit.num_rows
        assert unit.computed_tokens <= unit.prompt_tokens
        seen += list(zip(rows.chunks.tolist(), rows.rows.tolist(), strict=True))
    assert len(plan.units) > 1
    assert sorted(seen) == [(int(i >= 10), i) for i in range(14)]
    assert plan.shared_tokens >= 8 * len(shared)
    assert not list(job.layout.prepared(0, 1).glob("c*")), "the chunks' own files are gone"


def test_equal_prompts_are_counted_as_duplicates(shop):
    shop.write("a.parquet", {"prompt": ["same"] * 5 + ["other"]})
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    assert shop.plan(job, 0, window.chunks).duplicate_rows == 4


def shared_chars(a: str, b: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_parts_say_how_many_tokens_could_be_shared(shop, small_chunks):
    texts = [f"{'abcdefghijk'[i % 11] * 20} {i}" for i in range(60)]
    shop.write("a.parquet", {"prompt": texts})
    job = shop.submit()
    plan_of_each_window = 0
    for window in job.windows():
        rows = sorted(text for chunk in window.chunks for text in texts[chunk.start : chunk.stop])
        plan_of_each_window += sum(itertools.starmap(shared_chars, itertools.pairwise(rows)))
    assert summarize(job).shareable_tokens == plan_of_each_window > 0


def test_only_prompt_columns_are_read_when_planning(shop, monkeypatch):
    shop.write("a.parquet", {"prompt": ["a", "b"], "wide": [b"x" * 100_000] * 2})
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    from batchinfer.data.dataset import InputDataset

    asked = []
    real = InputDataset.read
    monkeypatch.setattr(
        InputDataset,
        "read",
        lambda self, file, start=0, stop=None, columns=None: (
            asked.append(columns) or real(self, file, start, stop, columns)
        ),
    )
    prepare_chunk(job, 0, window.chunks[0], epoch=1)
    assert asked == [("prompt",)]


def test_footer_says_what_made_the_part(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    job = shop.submit(sampling={"temperature": 0.5, "seed": 11}, engine={"max_num_seqs": 7})
    footer = read_footer(shop.parts()[0])
    assert footer["fingerprint"] == job.fingerprint
    assert footer["settings"]["sampling.temperature"] == 0.5
    assert footer["settings"]["seed"] == 11
    assert footer["settings"]["model.hash"] == job.semantic["model.hash"]
    assert footer["engine"]["max_num_seqs"] == 7
    assert (footer["source_file"], footer["start"], footer["stop"]) == ("a.parquet", 0, 1)


def test_missing_results_are_named_and_nothing_is_published(shop):
    shop.write("a.parquet", {"prompt": ["a", "b", "c"]})
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    plan = shop.plan(job, 0, window.chunks)
    shop.answer(job, plan)
    from batchinfer.data.segments import read_segment, write_compacted

    path = job.layout.unit_results(0, 0)
    write_compacted(path, read_segment(path).slice(0, 2), replace=True)
    with pytest.raises(BatchinferError, match=r"1 of the rows 0 to 2 of a\.parquet have no result, the first are 2"):
        commit_chunk(job, plan, window.chunks[0], epoch=1)
    assert shop.parts() == []
    assert not list((job.layout.state / "tmp").iterdir())


def test_input_changed_between_planning_and_commit_is_refused(shop):
    shop.write("a.parquet", {"prompt": ["a", "b"]})
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    plan = shop.plan(job, 0, window.chunks)
    shop.answer(job, plan)
    shop.write("a.parquet", {"prompt": ["a", "X"]})
    with pytest.raises(InputError, match=r"a\.parquet"):
        commit_chunk(job, plan, window.chunks[0], epoch=1)
    assert shop.parts() == []


def test_commit_again_finds_the_part_and_changes_nothing(shop):
    shop.write("a.parquet", {"prompt": ["a", "b"]})
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    plan = shop.plan(job, 0, window.chunks)
    shop.answer(job, plan)
    first = commit_chunk(job, plan, window.chunks[0], epoch=1)
    before = shop.parts()[0].read_bytes()
    second = commit_chunk(job, plan, window.chunks[0], epoch=2)
    assert first.fresh and not second.fresh
    assert shop.parts()[0].read_bytes() == before
    assert (first.num_rows, first.prompt_tokens, first.completion_tokens) == (2, 2, 6)


@pytest.mark.parametrize("cut", [1, 8, None])
def test_a_part_cut_short_is_named_moved_aside_and_written_again(shop, cut, caplog):
    shop.write("a.parquet", {"prompt": ["a", "b"]})
    job = shop.submit()
    (part,) = shop.parts()
    good = part.read_bytes()
    part.write_bytes(good[:-cut] if cut else b"")
    assert not verify_job(job).ok
    assert part_summary(job, job.windows()[0].chunks[0]) is None
    assert "part-00000-00000.parquet is broken" in caplog.text
    shop.run(job, epoch=2)
    assert verify_job(job).ok
    assert len(list((job.layout.state / "broken").iterdir())) == 1
    assert pyarrow.dataset.dataset(shop.output).count_rows() == 2


def test_a_driver_that_stands_still_before_it_moves_a_broken_part_leaves_its_successors_good_one(shop, monkeypatch):
    shop.write("a.parquet", {"prompt": ["a", "b"]})
    job = freeze_job(resolve_job(shop.spec()))
    ((chunk,),) = (window.chunks for window in job.windows())
    plan = shop.plan(job, 0, [chunk])
    shop.answer(job, plan)
    part = shop.output / chunk.part
    part.write_bytes(b"cut")
    first = DriverLock.claim(lock_store(shop.output))
    first.release()
    real = os.rename
    later = []

    def stand_still(source, target, **named):
        if not later and str(source) == str(part):
            with DriverLock.claim(lock_store(shop.output)) as lock:
                later.append(lock.epoch)
                later.append(commit_chunk(job, plan, chunk, epoch=lock.epoch))
        return real(source, target, **named)

    monkeypatch.setattr(os, "rename", stand_still)
    assert not commit_chunk(job, plan, chunk, epoch=first.epoch).fresh
    assert later[1].fresh and read_footer(part)["epoch"] == later[0] == 2
    (broken,) = (job.layout.state / "broken").iterdir()
    assert broken.read_bytes() == b"cut"


def test_part_of_another_job_is_never_overwritten(shop):
    shop.write("a.parquet", {"prompt": ["a", "b"]})
    job = shop.submit()
    before = shop.parts()[0].read_bytes()
    job.layout.manifest.unlink()
    with pytest.raises(ResumeRefused, match="no manifest of a job"):
        resolve_job(shop.spec())
    # Even past that check, commit refuses.
    other = freeze_job(resolve_job(shop.spec(sampling={"temperature": 0.3}), ignore_existing=True))
    with pytest.raises(ResumeRefused, match="was not written by this job"):
        shop.run(other)
    assert shop.parts()[0].read_bytes() == before


def test_job_survives_files_and_processes(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    job = freeze_job(
        resolve_job(
            shop.spec(
                input={"storage_options": {"secret": "hunter2"}},
                sampling={"logit_bias": {3: 1.5}, "stop": "x"},
            )
        )
    )
    path = save_run(job, 1)
    assert path.stat().st_mode & 0o077 == 0
    back = load_run(path)
    assert back == job and back.fingerprint == job.fingerprint
    assert back.sampling.logit_bias == {3: 1.5} and back.sampling.stop == ("x",)
    assert "hunter2" not in job.layout.manifest.read_text()
    assert load_manifest(job.layout).fingerprint == job.fingerprint
    assert json.loads(job.layout.manifest.read_text())["fingerprint"] == job.fingerprint
    config = back.engine_config
    assert (config.model, config.max_model_len, config.dtype, config.split_size) == (
        "fake://hash?max_model_len=256",
        256,
        "float32",
        256,
    )


def test_foreign_and_hidden_files_in_both_folders_are_ignored(shop):
    shop.write("a.parquet", {"prompt": ["a", "b"]})
    shop.output.mkdir()
    for folder in (shop.input, shop.output):
        for name in (".nfs000123", "_SUCCESS", "x.crc", "._x.parquet"):
            (folder / name).write_bytes(b"junk")
    (shop.output / "sub").mkdir()
    job = shop.submit()
    assert verify_job(job).ok
    assert len(shop.read()) == 2


def test_prepared_rows_are_sorted_by_token_ids(shop):
    prompts = ["b", "a", "ab", "", "b", "aa", "ba"]
    shop.write("a.parquet", {"prompt": [p + "x" for p in prompts]})
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    plan = shop.plan(job, 0, window.chunks)
    rows = read_prepared(job.layout.prepared_unit(0, plan.epoch, 0))
    tokens = [tuple(rows.token_ids(i).tolist()) for i in range(len(rows))]
    assert tokens == sorted(tokens)
    assert np.array_equal(rows.rows, sorted(range(7), key=lambda i: (prompts[i] + "x", i)))


words = st.text(st.sampled_from("ab "), max_size=6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.none() | words, max_size=40), st.integers(1, 7), st.integers(20, 200))
def test_laws_of_units(new_shop, prompts, batch_rows, unit_work):
    """Each good row is in exactly one unit, units follow one another in token order; batch sizes change nothing."""
    plans = []
    for rows_at_once in (batch_rows, 1_000):
        shop = new_shop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("batchinfer.job.token_order.MIN_UNIT_WORK", unit_work)
            patch.setattr("batchinfer.job.planner.BATCH_ROWS", rows_at_once)
            shop.write("a.parquet", {"prompt": pa.array(prompts, pa.string())})
            job = freeze_job(resolve_job(shop.spec(sampling={"seed": 1})))
            (window,) = job.windows()
            plan = shop.plan(job, 0, window.chunks)
        found = []
        for unit in plan.units:
            rows = read_prepared(job.layout.prepared_unit(0, 1, unit.unit))
            found += [(tuple(rows.token_ids(i).tolist()), int(rows.rows[i])) for i in range(len(rows))]
        assert found == sorted(found)
        good = [i for i, prompt in enumerate(prompts) if prompt]
        assert sorted(row for _, row in found) == good
        assert plan.chunks[0].num_failed == len(prompts) - len(good)
        plans.append((plan.units, plan.shared_tokens, plan.duplicate_rows, plan.chunks[0].content_hash))
    assert plans[0] == plans[1]


def test_costs_of_a_chunk_do_not_grow_with_the_number_of_files(shop, monkeypatch):
    """Ten thousand small files: what a chunk's planning and commit look at must not be the whole job each time."""
    for i in range(30):
        shop.write(f"{i:02d}.parquet", {"prompt": [f"p{i}"]})
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    shop.plan(job, 0, window.chunks)
    looked: list[int] = []

    class Files(list):
        def __iter__(self):
            looked.append(1)
            return super().__iter__()

    job.input["files"] = Files(job.input["files"])
    for chunk in window.chunks:
        prepare_chunk(job, 0, chunk, epoch=2)
    assert not looked
    plan = load_window(job.layout, 0)
    parts = plan.by_chunk()
    assert all(len(part.chunks) == 1 and len(window_to_json(part)) < 1500 for part in parts.values())
    assert all(part.units_of(chunk) for chunk, part in parts.items())
    shop.answer(job, plan)
    for chunk in window.chunks:
        commit_chunk(job, parts[chunk.chunk], chunk, epoch=1)
    assert verify_job(job).ok and len(looked) < 10, "verify looks at all files a few times, not for each"
