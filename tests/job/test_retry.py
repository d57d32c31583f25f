"""Failed rows run again: these rows only, settings recorded, parts replaced atomically, interrupted and resumed."""

from __future__ import annotations

import os

import pyarrow.parquet as pq
import pytest

from batchinfer.data.parts import read_footer
from batchinfer.errors import ConfigError, ResumeRefused
from batchinfer.job import windows as windows_module
from batchinfer.job.cleaning import fence_replacements
from batchinfer.job.commit import commit_chunk, part_summary
from batchinfer.job.driver_lock import DriverLock, TakenOver, lock_store
from batchinfer.job.manifest import freeze_job, load_manifest
from batchinfer.job.report import summarize
from batchinfer.job.resolve import resolve_job
from batchinfer.job.retry import finish_retry, open_retry
from batchinfer.job.verify import verify_job
from batchinfer.types.rows import ErrorClass, RowError


@pytest.fixture
def failed(shop, monkeypatch):
    """Three parts of 4 rows. Row 1: null. Row 2: too long. Rows 5 and 6: the engine said no. Part 3 is fine."""
    monkeypatch.setattr(windows_module, "MAX_CHUNK_ROWS", 4)
    prompts = [f"p{i}" for i in range(12)]
    prompts[1], prompts[2] = None, "x" * 200
    shop.write("a.parquet", {"prompt": prompts})

    def answer(prompt, file, row):
        if row == 5:
            return RowError(ErrorClass.ENGINE_CRASH, "it crashed")
        if row == 6:
            return RowError(ErrorClass.NON_FINITE_LOGITS, "NaN")
        return f"echo {prompt}"

    job = freeze_job(resolve_job(shop.spec(engine={"max_model_len": 128}, output={"token_ids": True})))
    shop.run(job, answer=answer)
    assert summarize(job).failed == {
        "engine_crash": 1,
        "invalid_prompt": 1,
        "non_finite_logits": 1,
        "prompt_too_long": 1,
    }
    shop.ran.clear()
    return shop


def resolved(shop, *overrides):
    sections = {"engine": {"max_model_len": 128}, "output": {"token_ids": True}}
    return resolve_job(shop.spec(*overrides, **sections), retry=True)


def run_retry(shop, plan, **options):
    shop.run(plan.job, epoch=5, **options)
    finish_retry(plan.job, epoch=5)


def test_retry_runs_retryable_rows_and_touches_no_other(failed):
    before = failed.read()
    parts = {path.name: path.read_bytes() for path in failed.parts()}
    plan = open_retry(resolved(failed), epoch=5)
    assert plan.failed == {"engine_crash": 1, "non_finite_logits": 1, "prompt_too_long": 1}
    assert plan.num_rows == plan.job.num_rows == 3
    run_retry(failed, plan)
    assert sorted(failed.ran) == [("a.parquet", 5), ("a.parquet", 6)], "the long prompt is refused while planning"
    after = failed.read()
    for row, (old, new) in enumerate(zip(before, after, strict=True)):
        if row in (5, 6):
            assert old["error"] is not None and new["error"] is None
            assert new["completion"] == f"echo p{row}" and new["token_ids"] == [5, 6, 7]
        else:
            assert old == new
    assert failed.parts()[2].read_bytes() == parts["part-00000-00002.parquet"]
    frozen = load_manifest(plan.job.layout)
    assert verify_job(frozen).ok
    report = summarize(frozen)
    assert report.failed == {"invalid_prompt": 1, "prompt_too_long": 1} and report.exit_code == 3
    assert report.cached_tokens == 10, "what was cached before is still counted"


def test_changed_limit_is_used_and_recorded(failed):
    job = resolved(failed, "engine.max_model_len=256", "sampling.temperature=0.5")
    assert job.overrides == {"engine.max_model_len": 256, "sampling.temperature": 0.5}
    plan = open_retry(job, "prompt_too_long", epoch=5)
    assert plan.failed == {"prompt_too_long": 1}
    assert plan.job.max_model_len == 256 and plan.job.sampling.temperature == 0.5
    assert plan.job.engine_config.max_model_len == 256
    run_retry(failed, plan)
    assert failed.ran == [("a.parquet", 2)]
    assert failed.read()[2]["completion"] == "echo " + "x" * 200
    footer = read_footer(failed.parts()[0])
    assert footer["settings"]["engine.max_model_len"] == 128, "what made the other rows"
    (entry,) = footer["retries"]
    assert entry == {
        "retry": 1,
        "epoch": 5,
        "settings": {"engine.max_model_len": 256, "sampling.temperature": 0.5},
        "rows": 1,
        "completed": 1,
    }
    assert verify_job(load_manifest(plan.job.layout)).ok
    # A second retry adds its own entry.
    plan = open_retry(resolved(failed), epoch=5)
    run_retry(failed, plan)
    assert plan.job.retry == 2
    assert [entry["retry"] for entry in read_footer(failed.parts()[0])["retries"]] == [1]
    assert [entry["retry"] for entry in read_footer(failed.parts()[1])["retries"]] == [2]


def test_the_submit_command_still_finds_its_job(failed):
    run_retry(failed, open_retry(resolved(failed, "engine.max_model_len=256"), epoch=5))
    job = resolve_job(failed.spec(engine={"max_model_len": 128}, output={"token_ids": True}))
    assert all(part_summary(job, chunk) is not None for window in job.windows() for chunk in window.chunks)


def test_a_row_that_fails_again_says_why_now(failed):
    plan = open_retry(resolved(failed), "engine_crash", epoch=5)
    run_retry(failed, plan, answer=lambda *_: RowError(ErrorClass.OUT_OF_MEMORY, "now this"))
    assert failed.read()[5]["error"] == {"class": "out_of_memory", "message": "now this"}
    assert verify_job(load_manifest(plan.job.layout)).ok


def test_interrupted_retry_goes_on_where_it_was(failed):
    plan = open_retry(resolved(failed), epoch=5)
    window = plan.job.windows()[0]
    assert [chunk.chunk for chunk in window.chunks] == [0, 1]
    # Planned and answered; of the two parts one is replaced; then the process dies.
    ledger = failed.plan(plan.job, 0, window.chunks)
    failed.answer(plan.job, ledger)
    commit_chunk(plan.job, ledger, window.chunks[0], epoch=5)
    again = open_retry(resolved(failed), epoch=5)
    assert again.resumed and again.job == plan.job
    failed.ran.clear()
    commit_chunk(again.job, ledger, window.chunks[0], epoch=6)
    commit_chunk(again.job, ledger, window.chunks[1], epoch=6)
    assert read_footer(failed.parts()[0])["retries"][0]["epoch"] == 5
    finish_retry(again.job, epoch=5)
    assert open_retry(resolved(failed), epoch=5).job.retry == 2, "the too long row is still there"
    # With other settings, an interrupted one is given up.
    assert open_retry(resolved(failed, "engine.max_model_len=200"), epoch=5).job.retry == 3


def test_nothing_to_retry(shop):
    shop.write("a.parquet", {"prompt": ["a", None]})
    shop.submit()
    assert open_retry(resolve_job(shop.spec(), retry=True), epoch=5) is None


def test_what_can_not_be_retried_is_said(failed, shop):
    with pytest.raises(ConfigError, match="no such error class; there are invalid_prompt"):
        open_retry(resolved(failed), "nonsense", epoch=5)
    with pytest.raises(ConfigError, match="wrong in themselves"):
        open_retry(resolved(failed), "invalid_prompt", epoch=5)
    with pytest.raises(ResumeRefused, match=r"sampling\.n: 1 -> 2"):
        resolved(failed, "sampling.n=2")
    with pytest.raises(ResumeRefused, match=r"input\.prompt"):
        resolved(failed, "input.prompt_column=null", "input.prompt='{prompt}'")
    failed.parts()[1].unlink()
    with pytest.raises(ResumeRefused, match="finish the job"):
        open_retry(resolved(failed), epoch=5)


def test_part_is_never_missing_while_it_is_replaced(failed, monkeypatch):
    import os

    real = os.replace
    seen = []

    def replace(source, target, **named):
        if str(target).endswith(".parquet"):
            seen.append(pq.read_table(target).num_rows)
            real(source, target, **named)
            seen.append(pq.read_table(target).num_rows)
        else:
            real(source, target, **named)

    monkeypatch.setattr(os, "replace", replace)
    run_retry(failed, open_retry(resolved(failed), epoch=5))
    assert seen == [4, 4, 4, 4]


def test_a_driver_that_was_succeeded_replaces_no_part(failed):
    """It may have been stopped between reading the part and replacing it, while others retried the same rows."""
    plan = open_retry(resolved(failed), epoch=5)
    window = plan.job.windows()[0]
    ledger = failed.plan(plan.job, 0, window.chunks)
    failed.answer(plan.job, ledger)
    before = [path.read_bytes() for path in failed.parts()]
    zombie = DriverLock.claim(lock_store(failed.output))
    zombie.release()
    DriverLock.claim(lock_store(failed.output)).release()
    with pytest.raises(TakenOver, match="another driver has taken over"):
        commit_chunk(plan.job, ledger, window.chunks[0], epoch=zombie.epoch)
    assert [path.read_bytes() for path in failed.parts()] == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_driver_that_stands_still_before_it_replaces_a_part_replaces_nothing_when_it_wakes(failed, monkeypatch, call):
    """Others take over, end the retry and run another one, all between its last look and its last step."""
    plan = open_retry(resolved(failed), epoch=5)
    window = plan.job.windows()[0]
    ledger = failed.plan(plan.job, 0, window.chunks)
    failed.answer(plan.job, ledger)
    zombie = DriverLock.claim(lock_store(failed.output))
    zombie.release()
    real = getattr(os, call)
    asleep, after = [], []

    def stand_still(*args, **named):
        if not asleep and list(failed.output.glob("__batchinfer/tmp/*-part-*")):
            asleep.append(True)
            with DriverLock.claim(lock_store(failed.output)) as lock:
                after.append(lock.epoch)
                fence_replacements(plan.job.layout, lock.epoch)
                after.append(commit_chunk(plan.job, ledger, window.chunks[0], epoch=lock.epoch))
        return real(*args, **named)

    monkeypatch.setattr(os, call, stand_still)
    with pytest.raises(TakenOver):
        commit_chunk(plan.job, ledger, window.chunks[0], epoch=zombie.epoch)
    footer = read_footer(failed.output / window.chunks[0].part)
    assert after[1].fresh and [entry["epoch"] for entry in footer["retries"]] == [after[0]]


def test_a_fence_leaves_what_the_driver_itself_and_later_ones_write(failed):
    layout = resolved(failed).layout
    paths = [layout.replacement("part-00000-00000.parquet", epoch) for epoch in (1, 2, 3)]
    other = layout.temporary("part-00000-00000.parquet")
    for path in (*paths, other):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    fence_replacements(layout, 2)
    assert [path.exists() for path in (*paths, other)] == [False, True, True, True]


def test_what_a_kill_left_of_a_finished_retry_goes_with_the_next(failed):
    plan = open_retry(resolved(failed), epoch=5)
    failed.run(plan.job, epoch=3, clean=False)
    layout = plan.job.layout
    (layout.work / "finished").write_bytes(b"{}")  # and then the process dies
    assert layout.segments(0).exists()
    open_retry(resolved(failed), epoch=5)
    assert not layout.segments(0).exists() and not layout.window(0).exists()


@pytest.mark.parametrize("given_up", [False, True])
def test_a_driver_that_was_succeeded_ends_no_retry(failed, given_up):
    plan = open_retry(resolved(failed), epoch=1)
    failed.plan(plan.job, 0, plan.job.windows()[0].chunks, epoch=2)
    for _ in range(2):
        DriverLock.claim(lock_store(failed.output)).release()
    with pytest.raises(TakenOver):
        if given_up:
            open_retry(resolved(failed, "engine.max_model_len=200"), epoch=1)
        else:
            finish_retry(plan.job, epoch=1)
    assert plan.job.layout.window(0).exists() and not (plan.job.layout.work / "finished").exists()
    assert open_retry(resolved(failed), epoch=2).resumed
