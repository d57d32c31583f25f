"""Committing a chunk: input columns read again, joined with the results, published under the part's fixed name.

The publish is create-if-absent and is the commit: idempotent, safe under a kill at any point and under two
drivers. Only a retry, whose driver holds the lock, replaces a part: with its rows merged over the part's own. Not
for deciding when a chunk is ready (`job.state`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import batchinfer
from batchinfer.data.fs import publish_file, replace_file
from batchinfer.data.parts import BrokenPart, read_footer, read_part_results, write_part
from batchinfer.data.segments import ChunkResults, merge_tables, read_chunk_results
from batchinfer.errors import InputError, ResumeRefused
from batchinfer.job.context import open_context
from batchinfer.job.driver_lock import refuse_if_succeeded
from batchinfer.job.ledger import WindowPlan
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.windows import Chunk

log = logging.getLogger("batchinfer.job")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSummary:
    """A committed part. `fresh`: published now, not found. Token counts are over completed rows, but for
    `shareable_tokens`: over all that were planned, how many stand in a prefix of another row of the window.
    `finish_reasons`: completions by how they ended."""

    chunk: int
    num_rows: int
    failed: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_bytes: int
    shareable_tokens: int = 0
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    fresh: bool = True

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())


def commit_chunk(job: ResolvedJob, plan: WindowPlan, chunk: Chunk, *, epoch: int) -> CommitSummary:
    """Writes and publishes the chunk's part from the window's compacted units and plan segments.

    Returns the existing part's summary where a good one is there; a broken one (cut short) is moved aside and
    written again. Raises InputError where the input changed since it was planned, BatchinferError naming the
    rows where a row has no result.
    """
    layout = job.layout
    target = layout.output / chunk.part
    was_there = target.exists()
    found = part_summary(job, chunk)
    if found is not None:
        return found
    context = open_context(job)
    planned = plan.summary_of(chunk.chunk)
    paths = [layout.unit_results(plan.window, unit.unit) for unit in plan.units_of(chunk.chunk)]
    if planned.num_failed:
        paths.append(layout.plan_segment(plan.window, planned.epoch, chunk.chunk))
    results: Any = ChunkResults(tuple(paths), chunk.chunk)
    footer = part_footer(job, chunk, epoch=epoch, shareable_tokens=planned.shareable_tokens)
    if job.retry is not None:
        before = read_footer(target)
        again = read_chunk_results(paths, chunk.chunk)
        footer = retry_footer(job, before, again, epoch=epoch, shareable_tokens=planned.shareable_tokens)
        results = merge_tables([(None, again), (None, read_part_results(target, chunk.chunk))])
    elif was_there and part_summary(job, chunk) is None:  # not one that another driver has just published
        refuse_if_succeeded(layout.output, epoch)
        move_broken_aside(job, chunk)
    # A replacement says whose it is, so that a later driver can take it away before it is in place.
    tmp = layout.replacement(chunk.part, epoch) if job.retry is not None else layout.temporary(chunk.part)
    tmp.parent.mkdir(parents=True, exist_ok=True)
    try:
        written = write_part(
            tmp,
            dataset=context.dataset,
            file=chunk.file,
            start=chunk.start,
            stop=chunk.stop,
            results=results,
            layout=context.output,
            footer=footer,
            hash_columns=context.hash_columns,
        )
        check_content(job, chunk, planned.content_hash, written.input_hash)
        won = True
        if job.retry is not None:
            _replace_part(tmp, target, layout.output, epoch)
        else:
            won = publish_file(tmp, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            tmp.unlink()
    summary = part_summary(job, chunk)
    if summary is None:
        raise BrokenPart(f"{target} was published and can't be read back; check the file system")
    return replace(summary, fresh=won)


def _replace_part(tmp: Path, target: Path, output: Path, epoch: int) -> None:
    """An older result must not replace what came after it.

    A later driver that claims before the look here is seen by it; one that claims after it finds `tmp`, takes it away
    (`cleaning.fence_replacements`), and nothing is replaced, however long this process stood still in between.
    """
    refuse_if_succeeded(output, epoch)
    try:
        replace_file(tmp, target)
    except FileNotFoundError:
        refuse_if_succeeded(output, epoch)
        raise


def check_content(job: ResolvedJob, chunk: Chunk, planned: str, found: str) -> None:
    """Raises InputError where the rows read at commit are not those that were planned."""
    if planned != found:
        raise InputError(
            f"input file {job.file_name(chunk.file)}, rows {chunk.start} to {chunk.stop - 1}: the values changed "
            "between planning and writing the output; results would stand beside other prompts. Restore the file and "
            "run the same command again, or start over with --fresh"
        )


def part_footer(job: ResolvedJob, chunk: Chunk, *, epoch: int, shareable_tokens: int) -> dict[str, Any]:
    """What made the part, in JSON values; `data.parts` adds rows, counts and hashes."""
    return {
        "format": 1,
        "job": job.name,
        "fingerprint": base_fingerprint(job),
        "chunk": chunk.chunk,
        "file": chunk.file,
        "in_file": chunk.in_file,
        "input_fingerprint": job.input["files"][chunk.file]["fingerprint"],
        "settings": dict(job.semantic),
        "engine": {
            name: getattr(job.spec.engine, name)
            for name in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "block_size")
        },
        "batchinfer": batchinfer.__version__,
        "facts": {key: value for key, value in job.facts.items() if key not in _MANIFEST_ONLY},
        "epoch": epoch,
        "shareable_tokens": shareable_tokens,
        "retries": [],
    }


_MANIFEST_ONLY = ("chat_template", "model_path", "base_fingerprint")  # long, or nobody's business downstream
_FOOTER_KEYS = (
    "format",
    "job",
    "fingerprint",
    "chunk",
    "file",
    "in_file",
    "input_fingerprint",
    "settings",
    "engine",
    "batchinfer",
    "facts",
    "epoch",
)


def retry_footer(
    job: ResolvedJob, before: Mapping[str, Any], results: Any, *, epoch: int, shareable_tokens: int
) -> dict[str, Any]:
    """The footer of a part that a retry replaces: what made it first, and one more entry under `retries`."""
    kept = {key: before[key] for key in (*_FOOTER_KEYS, "retries")}
    completed = results["error_class"].null_count
    entry = {
        "retry": job.retry,
        "epoch": epoch,
        "settings": dict(job.overrides),
        "rows": results.num_rows,
        "completed": completed,
    }
    # Results read back from a part no longer say what was cached.
    cached = before["cached_tokens"] + before.get("cached_tokens_before", 0)
    return {
        **kept,
        "retries": [*before["retries"], entry],
        "cached_tokens_before": cached,
        "shareable_tokens": before.get("shareable_tokens", 0) + shareable_tokens,
    }


def part_summary(job: ResolvedJob, chunk: Chunk) -> CommitSummary | None:
    """What the chunk's part says by its footer, or None where there is none or it is broken (which is logged).

    For a retry, a part that it has not replaced yet counts as none.

    Raises ResumeRefused where a complete part of another job has the name.
    """
    path = job.layout.output / chunk.part
    if not path.exists():
        return None
    try:
        footer = read_footer(path)
        summary = _summary_of(footer, chunk, path)
    except (BrokenPart, KeyError) as error:
        log.warning("part %s is broken and will be written again: %s", path.name, error)
        return None
    wanted = (chunk.chunk, job.file_name(chunk.file), chunk.start, chunk.stop)
    found = (footer["chunk"], footer["source_file"], footer["start"], footer["stop"])
    if footer["fingerprint"] != base_fingerprint(job) or wanted != found:
        raise ResumeRefused(
            f"{path} was not written by this job (it holds rows {footer['start']} to {footer['stop'] - 1} of "
            f"{footer['source_file']!r}, job {footer.get('job')!r}); move it away, or give another output.path"
        )
    if job.retry is not None and all(entry["retry"] != job.retry for entry in footer["retries"]):
        return None
    return summary


def base_fingerprint(job: ResolvedJob) -> str:
    """The fingerprint that parts carry: a retry's is that of the job it belongs to."""
    return str(job.facts.get("base_fingerprint", job.fingerprint))


def _summary_of(footer: Mapping[str, Any], chunk: Chunk, path: Path) -> CommitSummary:
    return CommitSummary(
        chunk=chunk.chunk,
        num_rows=footer["num_rows"],
        failed=footer["failed"],
        prompt_tokens=footer["prompt_tokens"],
        cached_tokens=footer["cached_tokens"] + footer.get("cached_tokens_before", 0),
        completion_tokens=footer["completion_tokens"],
        num_bytes=path.stat().st_size,
        shareable_tokens=footer.get("shareable_tokens", 0),
        finish_reasons=footer.get("finish_reasons", {}),
        fresh=False,
    )


def move_broken_aside(job: ResolvedJob, chunk: Chunk) -> None:
    """A broken part is kept for a look, out of readers' sight, and its name is free again.

    It is looked at once more where nobody else moves it: if this process stood still after its last look, a later
    driver may have published a good one under the name, which then gets it back.
    """
    path = job.layout.output / chunk.part
    aside = job.layout.state / "broken" / job.layout.temporary(path.name).name
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.rename(aside)
    except FileNotFoundError:  # another attempt was faster
        return
    try:
        _summary_of(read_footer(aside), chunk, aside)
    except (BrokenPart, KeyError):
        log.warning("part %s is moved aside to %s", path.name, aside)
        return
    publish_file(aside, path)
    log.warning("part %s is whole by now, and stays", path.name)
