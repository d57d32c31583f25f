"""What a job has done so far, added up from its parts' footers; the final summary and the exit code.

Works from files alone, so that a resumed or finished job gives the same numbers. Times of a run are the driver's
to tell (`job.status`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from batchinfer.job.commit import CommitSummary, part_summary
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.windows import Chunk

EXIT_COMPLETE = 0
EXIT_SOME_FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Sums over the parts that are out.

    prompt_tokens     of completed rows; `cached_tokens` of them were shared with other rows and not computed again
    shareable_tokens  the most that could have been shared: tokens of all planned rows that stand in a prefix of
                      another row, token by token, each window's rows sorted
    failed            error rows by class
    finish_reasons    completions by how they ended
    arithmetic        how the model computes, and who chose that; "" for a fake model
    """

    rows_total: int
    rows_done: int
    failed: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    shareable_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    parts_total: int = 0
    parts_done: int = 0
    num_bytes: int = 0
    arithmetic: str = ""

    @property
    def rows_failed(self) -> int:
        return sum(self.failed.values())

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def complete(self) -> bool:
        return self.parts_done == self.parts_total

    @property
    def exit_code(self) -> int:
        """Of a finished job: 0 every row completed, 3 some are error rows."""
        return EXIT_SOME_FAILED if self.rows_failed else EXIT_COMPLETE


def job_chunks(job: ResolvedJob) -> Iterator[Chunk]:
    for window in job.windows():
        yield from window.chunks


def summarize(job: ResolvedJob) -> JobReport:
    """Reads the footer of every part that is out: about a millisecond each."""
    total = done = parts = parts_done = 0
    failed: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for chunk in job_chunks(job):
        parts += 1
        total += chunk.num_rows
        summary = part_summary(job, chunk)
        if summary is not None:
            parts_done += 1
            done += summary.num_rows
            failed.update(summary.failed)
            reasons.update(summary.finish_reasons)
            sums.update(_countable(summary))
    computed = job.arithmetic
    return JobReport(
        rows_total=total,
        rows_done=done,
        failed=dict(sorted(failed.items())),
        parts_total=parts,
        parts_done=parts_done,
        prompt_tokens=sums["prompt_tokens"],
        cached_tokens=sums["cached_tokens"],
        shareable_tokens=sums["shareable_tokens"],
        completion_tokens=sums["completion_tokens"],
        finish_reasons=dict(sorted(reasons.items())),
        num_bytes=sums["num_bytes"],
        arithmetic="" if computed.kernels == "fake" else f"{computed} ({computed.sources['quantization']})",
    )


def _countable(summary: CommitSummary) -> dict[str, int]:
    names = ("prompt_tokens", "cached_tokens", "shareable_tokens", "completion_tokens", "num_bytes")
    return {name: getattr(summary, name) for name in names}
