"""What `batchinfer plan` says, without loading a model."""

from __future__ import annotations

import subprocess
import sys

from batchinfer.job import windows as windows_module
from batchinfer.job.plan_report import Survey, merge_surveys, plan_report
from batchinfer.job.resolve import resolve_job


def test_the_prompt_shown_is_of_a_row_that_will_run(shop):
    shop.write("a.parquet", {"prompt": [None, "x" * 300, "", "a", "fine"], "max": [1, 1, 1, 0, 1]})
    report = plan_report(resolve_job(shop.spec(input={"sampling_columns": {"max_tokens": "max"}})))
    assert (report.first_prompt, report.first_row, report.first_prompt_tokens) == ("fine", ("a.parquet", 4), 4)


def test_report_of_a_small_job(shop):
    head = "h" * 40
    prompts = [head + f"{i:02d}" for i in range(10)] + [None, "x" * 300, "x" * 301, None, None, None]
    shop.write("a.parquet", {"prompt": prompts})
    job = resolve_job(shop.spec(engine={"max_model_len": 128}))
    report = plan_report(job)
    survey = report.survey
    assert survey.rows == 16 and survey.rows_failed == 6
    assert survey.failed == {"invalid_prompt": 4, "prompt_too_long": 2}
    assert [bad.row for bad in survey.examples["invalid_prompt"]] == [10, 13, 14]
    assert survey.examples["prompt_too_long"][0].file == "a.parquet"
    assert "300" in survey.examples["prompt_too_long"][0].message
    assert survey.prompt_tokens == 420 and survey.max_prompt_tokens == 42
    assert survey.histogram == {6: 10}, "33 to 64 tokens"
    assert survey.shared_tokens == 9 * 41, "the tens digit is shared, too"
    assert survey.output_tokens == 80 and survey.longest_tokens == 50
    assert report.first_prompt == prompts[0] and report.first_row == ("a.parquet", 0)
    assert report.first_prompt_tokens == 42
    assert ("engine.max_model_len", 128, "user") in report.settings
    assert ("sampling.temperature", 0.0, "default") in report.settings
    assert not shop.output.exists(), "plan writes nothing"


def test_windows_add_up_to_the_whole(shop, monkeypatch):
    shop.write("a.parquet", {"prompt": [f"row {i}" for i in range(40)] + [None] * 5})
    whole = plan_report(resolve_job(shop.spec())).survey
    monkeypatch.setattr(windows_module, "FIRST_WINDOW_ROWS", 7)
    monkeypatch.setattr(windows_module, "MAX_WINDOW_ROWS", 7)
    seen = []
    parts = plan_report(resolve_job(shop.spec()), on_window=seen.append).survey
    assert len(seen) == 7 and seen[-1] == parts
    for name in ("rows", "failed", "examples", "prompt_tokens", "histogram", "output_tokens", "longest_tokens"):
        assert getattr(whole, name) == getattr(parts, name), name
    assert parts.shared_tokens < whole.shared_tokens, "prefixes are shared within a window"


def test_no_good_rows_and_no_rows(shop):
    shop.write("a.parquet", {"prompt": ["x" * 999]})
    report = plan_report(resolve_job(shop.spec()))
    assert report.survey.rows_failed == 1 and report.survey.longest_tokens == 0
    assert merge_surveys([]) == Survey()


def test_per_row_settings_count(shop):
    shop.write("a.parquet", {"prompt": ["ab", "cd"], "m": [100, None], "k": [1, 3]})
    spec = shop.spec(input={"sampling_columns": {"max_tokens": "m", "n": "k"}})
    survey = plan_report(resolve_job(spec)).survey
    assert survey.output_tokens == 100 + 3 * 8
    assert survey.longest_tokens == 102 and survey.clamped_rows == 0


def test_rows_whose_max_tokens_does_not_fit_are_counted(shop):
    shop.write("a.parquet", {"prompt": ["x" * 16, "x" * 17, "x" * 31, "x" * 5], "m": [16, 16, 2, None]})
    spec = shop.spec(input={"sampling_columns": {"max_tokens": "m"}}, engine={"max_model_len": 32})
    survey = plan_report(resolve_job(spec)).survey
    assert survey.clamped_rows == 2 and survey.longest_tokens == 32


def test_planning_loads_neither_torch_nor_dask():
    code = (
        "import sys, batchinfer.job.plan_report, batchinfer.job.commit, batchinfer.job.retry, batchinfer.job.status;"
        "assert not {'torch', 'dask', 'distributed', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
