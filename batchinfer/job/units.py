"""Cutting a window's prepared rows into units along prefix edges.

Rows are sorted by token ids, so that rows sharing a prefix stand together, and cut where neighbours share least
(`job.token_order`). A pure function of the rows: never of the worker count. Earlier units are larger, the last
ones small, so that workers end at about the same time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchinfer.data.prepared import PreparedRows, iter_prepared, write_prepared
from batchinfer.errors import BatchinferError
from batchinfer.job.ledger import ChunkSummary, Unit, WindowPlan, load_window, publish_window
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.token_order import Ints, RaggedTokens, cut_positions, neighbour_lcp, sort_rows
from batchinfer.types.request import SamplingParams

# What a row is taken to generate when its max_tokens allows more: only the size of units depends on it.
ASSUMED_OUTPUT_TOKENS = 256


def cut_units(job: ResolvedJob, window: int, chunks: Sequence[ChunkSummary], *, epoch: int) -> WindowPlan:
    """Sorts and cuts what `prepare_chunk` wrote for every chunk of a window under this epoch.

    Writes `layout.prepared_unit(...)` files, then windows/<w>.json create-if-absent, then deletes the chunks' prepared
    files. Returns the plan that holds: another driver's if it was first (its prepared files are then the ones to use).
    """
    layout = job.layout
    found = load_window(layout, window)
    if found is not None:  # what it was cut from may be deleted already
        return _same_chunks(found, chunks)
    paths = [layout.prepared_chunk(window, epoch, chunk.chunk, chunk.content_hash) for chunk in chunks]
    rows = _read_all(paths, sum(chunk.prompt_tokens for chunk in chunks))
    tokens = RaggedTokens(rows.tokens, rows.offsets)
    order = sort_rows(tokens)
    lcp = neighbour_lcp(tokens, order)
    lengths = tokens.lengths[order]
    output = output_tokens(job, rows)[order]
    starts = cut_positions(lcp, lengths, output)
    stops = [*starts[1:].tolist(), len(rows)] if len(starts) else []
    units = []
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops, strict=True)):
        members = rows.take(order[start:stop])
        write_prepared(layout.prepared_unit(window, epoch, number), members)
        # The first row of a unit shares nothing inside it.
        computed = int((lengths[start:stop] - lcp[start:stop]).sum() + lcp[start])
        owners, counts = np.unique(members.chunks, return_counts=True)
        units.append(
            Unit(
                unit=number,
                num_rows=stop - start,
                prompt_tokens=int(lengths[start:stop].sum()),
                computed_tokens=computed,
                work=computed + int(output[start:stop].sum()),
                chunks=tuple(zip(owners.tolist(), counts.tolist(), strict=True)),
                shared_before=int(lcp[start]),
            )
        )
    owners, at = np.unique(rows.chunks[order], return_inverse=True)
    shareable = dict(zip(owners.tolist(), np.bincount(at, weights=lcp).astype(np.int64).tolist(), strict=True))
    plan = publish_window(
        layout,
        WindowPlan(
            window=window,
            epoch=epoch,
            chunks=tuple(replace(chunk, shareable_tokens=shareable.get(chunk.chunk, 0)) for chunk in chunks),
            units=tuple(units),
            prompt_tokens=int(lengths.sum()),
            shared_tokens=int(lcp.sum()),
            duplicate_rows=num_duplicates(lcp, lengths),
        ),
    )
    _same_chunks(plan, chunks)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return plan


def _same_chunks(plan: WindowPlan, chunks: Sequence[ChunkSummary]) -> WindowPlan:
    """Two drivers at once may see different parts out, and so plan different chunks of a window."""
    if not {chunk.chunk for chunk in plan.chunks} >= {chunk.chunk for chunk in chunks}:
        raise BatchinferError(
            f"window {plan.window} was planned by another driver (epoch {plan.epoch}) for other chunks; nothing is "
            "lost, the same command plans it again"
        )
    return plan


def _read_all(paths: Sequence[Path], num_tokens: int) -> PreparedRows:
    """The rows of several files. Tokens go straight to their place: a window's are a large part of all memory."""
    tokens = np.empty(num_tokens, dtype=np.int32)
    filled = 0
    without: list[PreparedRows] = []
    lengths = [np.zeros(1, dtype=np.int64)]
    for path in paths:
        for piece in iter_prepared(path):
            tokens[filled : filled + piece.num_tokens] = piece.tokens
            filled += piece.num_tokens
            lengths.append(piece.lengths)
            # Copies: the piece's arrays are views that would keep its tokens in memory.
            chunks, rows = piece.chunks.copy(), piece.rows.copy()
            offsets = np.zeros(len(piece) + 1, dtype=np.int64)
            without.append(replace(piece, chunks=chunks, rows=rows, offsets=offsets, tokens=tokens[:0]))
    assert filled == num_tokens, "summaries and prepared files of a window belong together"
    return replace(PreparedRows.concat(without), tokens=tokens, offsets=np.cumsum(np.concatenate(lengths)))


def num_duplicates(lcp: Ints, lengths: Ints) -> int:
    """Rows whose whole prompt equals that of the row before, in token order."""
    if len(lcp) < 2:
        return 0
    return int(np.count_nonzero((lcp[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])))


def output_tokens(job: ResolvedJob, rows: PreparedRows) -> Ints:
    """[n]: tokens that each row is taken to generate: its max_tokens, at most 256 a sample."""
    found = np.full(len(rows), _assumed(job.sampling), dtype=np.int64)
    if rows.params is not None:
        known: dict[str, int] = {}
        for i, params in enumerate(rows.params_list()):
            if params is not None:
                if params not in known:
                    known[params] = _assumed(job.sampling_of(params))
                found[i] = known[params]
    return found


def _assumed(sampling: SamplingParams) -> int:
    limit = ASSUMED_OUTPUT_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    return min(limit, ASSUMED_OUTPUT_TOKENS) * sampling.n


def row_params(changed: dict[str, object]) -> str | None:
    """A row's own sampling settings as they stand in prepared records: equal settings give equal text."""
    return json.dumps(changed, sort_keys=True, separators=(",", ":")) if changed else None
