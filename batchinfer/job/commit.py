"""Committing a chunk: input columns read again, joined with the results, published under the part's fixed name.

The publish is create-if-absent and is the commit: idempotent, safe under a kill at any point and under two
drivers. Not for deciding when a chunk is ready (`job.state`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchinfer.job.ledger import WindowPlan
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.windows import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSummary:
    """A committed part. `fresh`: published now, not found. Token counts are over completed rows."""

    chunk: int
    num_rows: int
    failed: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_bytes: int
    fresh: bool = True


def commit_chunk(job: ResolvedJob, plan: WindowPlan, chunk: Chunk, *, epoch: int) -> CommitSummary:
    """Writes and publishes the chunk's part from the window's compacted units and plan segments.

    Returns the existing part's summary where a good one is there; a broken one (cut short) is moved aside and
    written again. Raises InputError where the input changed since it was planned, BatchinferError naming the
    rows where a row has no result.
    """
    raise NotImplementedError


def part_summary(job: ResolvedJob, chunk: Chunk) -> CommitSummary | None:
    """What the chunk's part says by its footer, or None where there is no good part of this job."""
    raise NotImplementedError


def clean_window(job: ResolvedJob, window: int) -> None:
    """Deletes prepared files and segments of a window whose parts are all out. May be killed and run again."""
    raise NotImplementedError


def clean_temporary(job: ResolvedJob) -> int:
    """Removes temporary files that dead processes left; returns how many."""
    raise NotImplementedError
