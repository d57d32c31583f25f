"""Results as text: plain functions from what the rooms report to what a person reads. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from batchinfer.errors import ModelError
from batchinfer.types.rows import ErrorClass

if TYPE_CHECKING:
    from batchinfer.cluster.deep_verify import DeepReport
    from batchinfer.cluster.submit import JobResult
    from batchinfer.job.report import JobReport
    from batchinfer.job.status import JobStatus
    from batchinfer.job.verify import VerifyReport
    from batchinfer.modelfiles import ModelFiles

MAX_PROBLEMS = 50


def number(value: float) -> str:
    return f"{value:,.0f}"


def count(value: int, thing: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number(value)} {thing}{'' if value == 1 else 's'}"


def rate(value: float) -> str:
    if value >= 100_000:
        return f"{value / 1000:,.0f}k"
    if value >= 10_000:
        return f"{value / 1000:.1f}k"
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.1 or not value else f"{value:.2g}"


def duration(seconds: float) -> str:
    seconds = round(seconds)
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def num_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def table(rows: Sequence[tuple[str, object]]) -> str:
    width = max((len(key) for key, _ in rows), default=0)
    return "\n".join(f"  {key:<{width}}  {value}" for key, value in rows)


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number(count)} {name}" for name, count in sorted(counts.items(), key=lambda i: -i[1]))


def result_text(result: JobResult) -> str:
    report = result.report
    head = "The job is finished already." if result.already_finished else "The job is finished."
    rows: list[tuple[str, object]] = [("rows", number(report.rows_done))]
    if report.rows_failed:
        rows.append(("error rows", f"{number(report.rows_failed)} ({counts_text(report.failed)})"))
    rows += [
        ("tokens in", number(report.prompt_tokens) + sharing_text(report)),
        ("tokens out", number(report.completion_tokens)),
    ]
    if report.finish_reasons:
        rows.append(("ended by", counts_text(report.finish_reasons)))
    if report.arithmetic:
        rows.append(("computed in", report.arithmetic))
    if not result.already_finished:
        seconds = max(result.elapsed_s, 1e-9)
        speed = f"{rate(result.rows_run / seconds)} rows/s" if result.rows_run else ""
        start = "" if result.first_token_s is None else f", {result.first_token_s:.1f} s to the first token"
        rows.append(("time", f"{duration(seconds)}{', ' + speed if speed else ''}{start}"))
    rows.append(("output", f"{result.output} ({count(report.parts_done, 'file')}, {num_bytes(report.num_bytes)})"))
    text = f"{head}\n{table(rows)}"
    if report.rows_failed:
        text += "\nThe column `error` says what is wrong with each error row"
        again = any(name in report.failed for name in ErrorClass if name.retryable)
        text += "; `batchinfer retry` runs those again that another attempt or other limits can help." if again else "."
    for note in result.notes:
        text += f"\nNote: {note}"
    return text


def sharing_text(counts: JobReport | JobStatus) -> str:
    """Of the prompt tokens, how many were shared, and how many of those that could be."""
    if not counts.cached_tokens and not counts.shareable_tokens:
        return ""
    computed = counts.prompt_tokens - counts.cached_tokens
    text = f" ({number(computed)} computed, {number(counts.cached_tokens)} shared"
    if counts.cached_tokens > counts.shareable_tokens:  # across windows, which are counted one by one
        text += f": more than the {number(counts.shareable_tokens)} that rows of one window have in common"
    elif counts.shareable_tokens:
        share = 100 * counts.cached_tokens / counts.shareable_tokens
        text += f": {share:.1f} % of the {number(counts.shareable_tokens)} that can be"
    return text + ")"


def status_text(status: JobStatus) -> str:
    share = f" ({100 * status.rows_done / status.rows_total:.1f} %)" if status.rows_total else ""
    rows: list[tuple[str, object]] = [
        ("state", status.state.replace("_", " ")),
        ("rows", f"{number(status.rows_done)} of {number(status.rows_total)}{share}"),
        ("files", f"{number(status.parts_done)} of {number(status.parts_total)}"),
    ]
    if status.rows_failed:
        classes = f" ({counts_text(status.failed)})" if status.failed else ""
        rows.append(("error rows", number(status.rows_failed) + classes))
    rows += [
        ("tokens", f"{number(status.prompt_tokens)} in, {number(status.completion_tokens)} out"),
    ]
    if status.cached_tokens:
        rows.append(("shared", sharing_text(status).strip(" ()")))
    if status.first_token_s is not None:
        rows.append(("start", f"{status.first_token_s:.1f} s to the first token"))
    if status.state in ("planning", "running"):
        rows.append(("workers", status.workers))
        rows.append(
            (
                "per second",
                f"{rate(status.rows_per_s)} rows, {rate(status.prompt_tokens_per_s)} tokens in, "
                f"{rate(status.completion_tokens_per_s)} tokens out",
            )
        )
        if status.eta_s is not None:
            rows.append(("time left", duration(status.eta_s)))
        rows.append(("driver", f"process {status.pid} on {status.host}, {duration(status.quiet_s)} ago"))
    if status.message:
        rows.append(("note", status.message))
    return f"{status.name}\n{table(rows)}"


def verify_text(report: VerifyReport) -> str:
    counts = (
        f"{number(report.rows_found)} of {number(report.rows_expected)} rows in "
        f"{number(report.parts_found)} of {count(report.parts_expected, 'file')}"
    )
    if report.ok:
        failed = f"; {number(report.rows_failed)} of them are error rows" if report.rows_failed else ""
        return f"Proved: every input row is in the output exactly once, and all checksums hold.\n  {counts}{failed}"
    lines = [f"NOT proved: {count(len(report.problems), 'problem')}", f"  {counts}"]
    lines += [f"  {problem}" for problem in report.problems[:MAX_PROBLEMS]]
    if len(report.problems) > MAX_PROBLEMS:
        lines.append(f"  and {number(len(report.problems) - MAX_PROBLEMS)} more")
    if report.parts_found < report.parts_expected:
        lines.append(
            "Files that are not there yet, or are lost: `batchinfer submit` with the same job file makes them."
        )
    return "\n".join(lines)


def deep_text(report: DeepReport) -> str:
    if not report.rows_run:
        lines = ["Nothing was run again, and nothing compared: there is no completed row to choose from."]
    elif report.ok:
        lines = [f"Run again: {count(report.rows_run, 'completed row')}, with the same bytes."]
    else:
        lines = [f"NOT reproduced: {number(len(report.differing))} of {count(report.rows_run, 'row')} run again"]
        lines += [f"  {text}" for text in report.differing[:MAX_PROBLEMS]]
        if len(report.differing) > MAX_PROBLEMS:
            lines.append(f"  and {number(len(report.differing) - MAX_PROBLEMS)} more")
    lines += [f"  left out: {text}" for text in report.left_out[:MAX_PROBLEMS]]
    return "\n".join(lines)


def arithmetic_text(files: ModelFiles) -> str:
    """What a job that leaves it open would run in here, and why."""
    from batchinfer.arithmetic import resolve_arithmetic, this_machine

    found = resolve_arithmetic(files, this_machine())
    return f"{found} ({found.sources['quantization']})" + (f"; {found.degraded}" if found.degraded else "")


def model_text(files: ModelFiles) -> str:
    """What the files say, and whether such a model can be run."""
    from batchinfer.modelfiles.supported import check_supported

    config = files.config
    rows: list[tuple[str, object]] = [
        ("kind", files.kind),
        ("architecture", ", ".join(config.get("architectures") or []) or "unknown"),
    ]
    for key, words in (
        ("num_hidden_layers", "layers"),
        ("hidden_size", "hidden size"),
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "KV heads"),
        ("head_dim", "head size"),
        ("kv_lora_rank", "size of latents"),
        ("num_experts", "experts"),
        ("num_local_experts", "experts"),
        ("n_routed_experts", "experts"),
        ("num_experts_per_tok", "experts of a token"),
        ("vocab_size", "vocabulary"),
    ):
        if config.get(key) is not None:
            value = config[key]
            rows.append((words, number(value) if isinstance(value, int) else repr(value)))
    try:
        check_supported(files)
        runs = "yes"
    except ModelError as error:
        runs = f"no: {error}"
    rows += [
        ("context", f"{number(files.max_model_len)} tokens"),
        ("end tokens", ", ".join(map(str, sorted(files.eos_token_ids))) or "none"),
        ("chat templates", ", ".join(files.chat_templates) or "none"),
        ("tokenizer", files.tokenizer.kind),
    ]
    rows.append(("can be run", runs))
    if runs == "yes" and files.kind != "fake":
        rows.append(("computed in", arithmetic_text(files)))
    if files.weight_files:
        size = sum(path.stat().st_size for path in files.weight_files)
        rows.append(("weights", f"{count(len(files.weight_files), 'file')}, {num_bytes(size)}"))
    if files.generation_config:
        rows.append(("generation", ", ".join(f"{k}={v}" for k, v in sorted(files.generation_config.items()))))
    return f"{files.name}\n{table(rows)}"
