"""Planning a chunk: rows read, rendered and tokenized once, in bounded batches, into prepared records.

Responsible for: reading only the columns needed, per-row sampling settings, too-long prompts, the chunk's content
hash. A row that can't be prepared becomes an error in a result segment of its own. Next: `job.units`.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.job.ledger import ChunkSummary
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.windows import Chunk


def prepare_chunk(
    job: ResolvedJob, window: int, chunk: Chunk, *, epoch: int, rows: Sequence[int] | None = None
) -> ChunkSummary:
    """Prepares a chunk: writes `layout.prepared_chunk(...)` and, for rows with errors, `layout.plan_segment(...)`.

    rows   only these rows of the file (a retry), ascending
    May run twice, also at the same time under different epochs.
    """
    raise NotImplementedError
