"""Planning a chunk: rows read, rendered and tokenized once, in bounded batches, into prepared records.

Responsible for: reading only the columns needed, per-row sampling settings, the chunk's content hash. A row that
can't be prepared becomes an error in a result segment of its own. How a row becomes tokens: `text.prepare`. Next:
`job.units`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from batchinfer.data.prepared import PreparedRows, write_prepared
from batchinfer.data.rows import RowBatch
from batchinfer.data.segments import ResultRow, write_segment
from batchinfer.data.values import ValueHasher
from batchinfer.job.context import JobContext, open_context
from batchinfer.job.ledger import ChunkSummary, retry_rows
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.units import row_params
from batchinfer.job.windows import Chunk
from batchinfer.text import prepare_rows
from batchinfer.types.rows import RowError

BATCH_ROWS = 1_024  # rows rendered and tokenized together: bounds memory, and is enough to fill the tokenizer's threads


@dataclass(slots=True)
class PreparedBatch:
    """Outcomes of consecutive rows: those prepared, and errors by row index."""

    prepared: PreparedRows
    errors: dict[int, RowError] = field(default_factory=dict)


def prepare_chunk(job: ResolvedJob, window: int, chunk: Chunk, *, epoch: int) -> ChunkSummary:
    """Prepares a chunk: writes `layout.prepared_chunk(...)` and, for rows with errors, `layout.plan_segment(...)`.

    Of a retry, the rows that it runs again; the content hash is of the whole chunk all the same.
    May run twice, also at the same time under different epochs.
    """
    context = open_context(job)
    layout = job.layout
    rows = None if job.retry is None else retry_rows(layout)[chunk.chunk]
    hasher = ValueHasher(context.hash_columns)
    pieces: list[PreparedRows] = []
    errors: list[ResultRow] = []
    failed: Counter[str] = Counter()
    for batch in iter_prepared_batches(job, context, chunk, rows=rows, hasher=hasher):
        pieces.append(batch.prepared)
        for row, error in batch.errors.items():
            errors.append(ResultRow(chunk=chunk.chunk, row=row, error=error))
            failed[str(error.error_class)] += 1
    prepared = PreparedRows.concat(pieces)
    content_hash = hasher.hexdigest()
    if errors:
        write_segment(layout.plan_segment(window, epoch, chunk.chunk), errors, replace=True)
    write_prepared(layout.prepared_chunk(window, epoch, chunk.chunk, content_hash), prepared)
    return ChunkSummary(
        window=window,
        chunk=chunk.chunk,
        num_rows=len(prepared) + len(errors),
        failed=dict(sorted(failed.items())),
        prompt_tokens=prepared.num_tokens,
        max_prompt_tokens=int(prepared.lengths.max()) if len(prepared) else 0,
        content_hash=content_hash,
        epoch=epoch,
    )


def iter_prepared_batches(
    job: ResolvedJob,
    context: JobContext,
    chunk: Chunk,
    *,
    rows: Sequence[int] | None = None,
    hasher: ValueHasher | None = None,
) -> Iterator[PreparedBatch]:
    """A chunk's rows, prepared, in batches of about a thousand. `hasher` takes in every row read."""
    wanted = None if rows is None else np.asarray(rows, dtype=np.int64)
    for batch in context.dataset.read(chunk.file, chunk.start, chunk.stop, context.hash_columns):
        if hasher is not None:
            hasher.update(batch.table)
        for start in range(batch.start, batch.stop, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, batch.stop)
            numbers = range(start, stop)
            if wanted is not None:
                chosen = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, stop)].tolist()
                if not chosen:
                    continue
                yield _prepare(job, context, chunk, batch, chosen)
            else:
                yield _prepare(job, context, chunk, batch, numbers)


def _prepare(
    job: ResolvedJob, context: JobContext, chunk: Chunk, batch: RowBatch, numbers: Sequence[int]
) -> PreparedBatch:
    """Rows `numbers` of the file, all inside the batch."""
    first, last = numbers[0], numbers[-1] + 1
    part = RowBatch(start=first, table=batch.table.slice(first - batch.start, last - first)).to_rows()
    good = [number for number in numbers if number not in batch.errors]
    errors = {number: batch.errors[number] for number in numbers if number in batch.errors}
    outcomes = prepare_rows(
        context.renderer,
        context.tokenizer,
        [part[number - first] for number in good],
        sampling=context.sampling,
        max_model_len=job.max_model_len,
    )
    kept: list[int] = []
    tokens: list[list[int]] = []
    params: list[str | None] = []
    for number, outcome in zip(good, outcomes, strict=True):
        if isinstance(outcome, RowError):
            errors[number] = outcome
        else:
            kept.append(number)
            tokens.append(outcome.token_ids)
            params.append(row_params(outcome.overrides) if outcome.overrides else None)
    return PreparedBatch(PreparedRows.from_lists(chunk.chunk, kept, tokens, params), dict(sorted(errors.items())))
