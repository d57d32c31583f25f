"""`batchinfer plan` and `submit --dry-run`: what a run would meet and cost. Writes nothing, loads no model."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from batchinfer.cli.texts import count, counts_text, duration, num_bytes, number, rate, table
from batchinfer.cost import Device, Prediction
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.plan_report import PlanReport, Survey
from batchinfer.job.spec import JobSpec

MAX_PROMPT_CHARACTERS = 2_000
_HIDDEN = ("input.now", "model.hash", "model.tokenizer_hash", "model.chat_template_hash")
BAR_WIDTH = 40


def show_plan(
    spec: JobSpec,
    *,
    read_rows: bool,
    extend: bool = False,
    ignore_existing: bool = False,
    device: Device | None = None,
    as_json: bool = False,
) -> int:
    """`device` and `as_json` go with `read_rows`."""
    from batchinfer.cluster.submit import resolve_here

    job = resolve_here(spec, extend=extend, ignore_existing=ignore_existing, only_look=True)
    if not as_json:
        click.echo(settings_text(job))
        click.echo(work_text(job, ignore_existing))
    if not read_rows:
        return 0
    from batchinfer.job.plan_report import plan_report

    report = plan_report(job, device=device, on_window=_progress(job) if sys.stderr.isatty() else None)
    click.echo(report_json(report) if as_json else report_text(report))
    return 0


def report_json(report: PlanReport) -> str:
    """The fields of `PlanReport`; settings by key, with "value" and "source"."""
    fields = dataclasses.asdict(report)
    fields["settings"] = {key: {"value": value, "source": source} for key, value, source in report.settings}
    return json.dumps(fields)


def settings_text(job: ResolvedJob) -> str:
    rows = [
        (key, f"{_value(job.semantic[key])}  ({job.sources.get(key, '')})")
        for key in sorted(job.semantic)
        if key not in _HIDDEN and job.semantic[key] not in (None, [], {})
    ]
    text = f"Settings that decide the output (value, and where it came from)\n{table(rows)}"
    return text if job.arithmetic.degraded is None else f"{text}\n  Note: {job.arithmetic.degraded}"


def work_text(job: ResolvedJob, ignore_existing: bool) -> str:
    from batchinfer.job.report import summarize

    windows = job.windows()
    rows: list[tuple[str, object]] = [
        ("input", f"{count(job.num_rows, 'row')} in {count(len(job.input['files']), 'file')}"),
        ("output", f"{job.layout.output}: {count(sum(len(w.chunks) for w in windows), 'file')}"),
        ("windows", number(len(windows))),
        ("workers", _workers(job)),
    ]
    if job.layout.manifest.exists() and not ignore_existing:
        report = summarize(job)
        rows.append(("done already", f"{count(report.rows_done, 'row')} in {count(report.parts_done, 'file')}"))
    return f"\nWork\n{table(rows)}"


def _workers(job: ResolvedJob) -> str:
    if job.semantic["engine.device"] != "cuda" or "workers" in job.spec.cluster.model_fields_set:
        return f"{job.spec.cluster.workers} on this machine"
    return "one for each GPU of the machine that runs it"


def report_text(report: PlanReport) -> str:
    survey = report.survey
    good = survey.rows - survey.rows_failed
    rows: list[tuple[str, object]] = [("rows", number(survey.rows))]
    if survey.rows_failed:
        rows.append(("bad rows", f"{number(survey.rows_failed)} ({counts_text(survey.failed)})"))
    if good:
        shared = 100 * survey.shared_tokens / max(survey.prompt_tokens, 1)
        rows += [
            (
                "prompt tokens",
                f"{number(survey.prompt_tokens)}, {number(survey.prompt_tokens / good)} a row, longest "
                f"{number(survey.max_prompt_tokens)}",
            ),
            (
                "shared prefixes",
                f"{number(survey.shared_tokens)} tokens ({shared:.0f} %) are computed once for several rows",
            ),
            ("equal prompts", f"{number(survey.duplicate_rows)} rows repeat another row's prompt"),
            (
                "output tokens",
                f"{number(survey.output_tokens)} assumed (each row's max_tokens, but no more than 256 a sample)",
            ),
        ]
        if survey.clamped_rows:
            rows.append(("cut by context", f"{count(survey.clamped_rows, 'row')} may not generate all of max_tokens"))
        if report.kv_bytes_per_token is not None:
            longest = num_bytes(report.kv_bytes_longest or 0)
            rows.append(("KV memory", f"{num_bytes(report.kv_bytes_per_token)} a token, {longest} the longest row"))
        if report.predicted_s is not None:
            rows.append(("time", f"about {duration(report.predicted_s)} on one worker"))
    text = f"\nRows\n{table(rows)}"
    if good:
        text += f"\n  ({report.prediction})"
        if report.on_device is not None:
            text += f"\n\n{prediction_text(report.on_device)}"
        elif report.off_device is not None:
            text += f"\n\nOn the device: {report.off_device}"
        text += f"\n\nPrompt lengths\n{histogram_text(survey.histogram)}"
    text += _examples(survey)
    if report.first_prompt is not None and report.first_row is not None:
        shown = report.first_prompt[:MAX_PROMPT_CHARACTERS]
        cut = "" if shown == report.first_prompt else "\n..."
        file, row = report.first_row
        text += f"\n\nFirst prompt (row {row} of {file}, {number(report.first_prompt_tokens)} tokens)\n{shown}{cut}"
    return text


def prediction_text(found: Prediction) -> str:
    share = "" if found.num_devices == 1 else f", {num_bytes(found.weight_bytes / found.num_devices)} on each device"
    balanced = "always" if found.balanced_batch is None else f"below {count(found.balanced_batch, 'row')}"
    rows = [
        ("weights", f"{num_bytes(found.weight_bytes)} in {found.weights}{share}"),
        (
            "KV cache",
            f"{num_bytes(found.kv_bytes_per_token)} a token in {found.kv_cache_dtype}; "
            f"{count(found.most_rows, 'row')} of {number(found.row_tokens)} tokens fit beside the weights",
        ),
        ("prefill", f"{_tera(found.prefill_operations)} operations: {_seconds(found.prefill_s)}"),
        (
            "decode step",
            f"{count(found.batch, 'row')}, {num_bytes(found.step_bytes)}, {_tera(found.step_operations)} operations: "
            f"{_seconds(found.step_s)}, bound by {found.bound}",
        ),
        (
            "tokens out",
            f"{rate(found.decode_tokens_per_s)} a second; one row alone {rate(1 / found.single_step_s)} "
            f"({_seconds(found.single_step_s)} each)",
        ),
        ("memory-bound", f"{balanced} (products alone: each row's KV cache is read on top)"),
        ("time", f"{_seconds(found.total_s)}, first for the prompts, then for decoding"),
    ]
    return (
        f"On {found.device}\n{table(rows)}\n"
        "  (a roofline bound: each step as long as reading its bytes or doing its operations at the device's stated "
        "rates, all rows\n  of the mean length, nothing for the host, between devices, or at the end of the job; steps "
        "that compute prompts\n  while others decode can take less in all; not yet compared with a GPU)"
    )


def _seconds(value: float) -> str:
    return duration(value) if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _tera(operations: float) -> str:
    return f"{operations / 1e12:,.3g} T" if operations < 1e15 else f"{operations / 1e15:,.3g} P"


def histogram_text(histogram: Mapping[int, int]) -> str:
    most = max(histogram.values(), default=1)
    rows = []
    for bucket in range(min(histogram, default=0), max(histogram, default=-1) + 1):
        count = histogram.get(bucket, 0)
        low = 2 ** (bucket - 1) + 1 if bucket else 0
        bar = "#" * max(round(BAR_WIDTH * count / most), 1 if count else 0)
        rows.append((f"{number(low)} to {number(2**bucket)}", f"{number(count):>12}  {bar}"))
    return table(rows)


def _examples(survey: Survey) -> str:
    lines = [
        f"  {name}: row {bad.row} of {bad.file}: {bad.message}"
        for name, examples in survey.examples.items()
        for bad in examples
    ]
    return "\n\nBad rows, for example\n" + "\n".join(lines) if lines else ""


def _value(value: object) -> str:
    text = repr(value) if isinstance(value, (str, list, dict)) else str(value)
    text = text.strip("'\"") if isinstance(value, str) and "\\" not in text else text
    return text if len(text) <= 100 else text[:97] + "..."


def _progress(job: ResolvedJob) -> Any:
    def tell(survey: Survey) -> None:
        click.echo(f"\r{number(survey.rows)} of {number(job.num_rows)} rows read", nl=False, err=True)
        if survey.rows >= job.num_rows:
            click.echo("\r" + " " * 60 + "\r", nl=False, err=True)

    return tell
