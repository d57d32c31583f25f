"""Planning and commit as plain functions: Dask tasks in the worker processes, beside the engines, or run in the driver,
for a small job.

Each takes the run's job and numbers, and returns something small. Workers know the job by the path of its file
(`job.manifest.save_run`); the driver hands over its own (`OpenJob`), since the file of a job that it ran before may
have had the same path. Each may run twice, also at the same time: what it writes are files that only one of several
writers gets to publish. What they do is in `batchinfer.job` and `batchinfer.data`; when they are due, in `job.state`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import pyarrow as pa

from batchinfer.cluster.leased_rows import unit_segments
from batchinfer.cluster.lifecycle import behind_engines
from batchinfer.data.prepared import Int32, Int64, read_prepared, row_identities
from batchinfer.data.segments import (
    ResultRow,
    SegmentName,
    merge_segments,
    read_segment,
    write_compacted,
    write_segment,
)
from batchinfer.job import cleaning, commit, planner, units
from batchinfer.job.driver_lock import refuse_if_succeeded
from batchinfer.job.events import Tally
from batchinfer.job.ledger import ChunkSummary, WindowPlan
from batchinfer.job.manifest import ResolvedJob, load_run
from batchinfer.job.windows import Chunk
from batchinfer.types.rows import ErrorClass, RowError

P = ParamSpec("P")
T = TypeVar("T")
GIVEN_UP_LEASE = 999_999  # stands for the driver's own hand in the names of result segments
_COUNTED = ("chunk", "row", "prompt_tokens", "completion_tokens", "cached_tokens", "error_class")


@dataclass(frozen=True, slots=True)
class UnitOutcome:
    missing: int
    tally: Tally


def behind(task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The task, at lower priority than engines: how it is run on a worker."""
    behind_engines()
    return task(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job and its chunks by number."""

    job: ResolvedJob
    chunks: Mapping[int, Chunk]

    @classmethod
    def of(cls, job: ResolvedJob) -> OpenJob:
        return cls(job, {chunk.chunk: chunk for window in job.windows() for chunk in window.chunks})


Run = str | OpenJob


def _open(run: Run) -> OpenJob:
    return run if isinstance(run, OpenJob) else _load(run)


@functools.lru_cache(maxsize=2)
def _load(path: str) -> OpenJob:
    """In workers alone, which live for one run."""
    return OpenJob.of(load_run(path))


def plan_chunk(run: Run, epoch: int, window: int, chunk: int) -> ChunkSummary:
    opened = _open(run)
    return planner.prepare_chunk(opened.job, window, opened.chunks[chunk], epoch=epoch)


def cut_window(run: Run, epoch: int, window: int, summaries: Sequence[ChunkSummary]) -> WindowPlan:
    return units.cut_units(_open(run).job, window, summaries, epoch=epoch)


def finish_unit(run: Run, window: int, unit: int, prepared_epoch: int) -> UnitOutcome:
    """Compacts the unit's segments, if each of its rows has a result; counts the outcomes.

    Rows are told by their identity, not by their number: a file under the unit's name may be cut short, or be a late
    one of an earlier cut of this window.
    """
    layout = _open(run).job.layout
    target = layout.unit_results(window, unit)
    wanted = _as_keys(*row_identities(layout.prepared_unit(window, prepared_epoch, unit)))
    table = read_segment(target, _COUNTED) if target.exists() else None
    if table is None or not np.array_equal(_keys_of(table), np.sort(wanted)):
        merged = merge_segments(unit_segments(layout.segments(window), unit))
        own = np.isin(_keys_of(merged), wanted)
        table = merged if own.all() else merged.filter(pa.array(own))
        if len(table) < len(wanted):
            return UnitOutcome(len(wanted) - len(table), Tally())
        write_compacted(target, table, replace=True)
    failed = table["error_class"].is_valid().to_numpy()

    def total(column: str) -> int:
        return int(table[column].fill_null(0).to_numpy()[~failed].sum())

    completion = sum(int(chunk.flatten().to_numpy().sum()) for chunk in table["completion_tokens"].chunks)
    return UnitOutcome(
        0,
        Tally(
            rows=len(table),
            failed=int(failed.sum()),
            prompt_tokens=total("prompt_tokens"),
            completion_tokens=completion,
            cached_tokens=total("cached_tokens"),
        ),
    )


def _keys_of(table: pa.Table) -> Int64:
    return _as_keys(table["chunk"].to_numpy(), table["row"].to_numpy())


def _as_keys(chunks: Int32, rows: Int64) -> Int64:
    """One number a row, in the order of (chunk, row)."""
    return (chunks.astype(np.int64) << 40) | rows


def give_up_row(run: Run, epoch: int, window: int, unit: int, prepared_epoch: int, position: int, message: str) -> None:
    """Writes the error result of a row that kills its engine."""
    layout = _open(run).job.layout
    prepared = read_prepared(layout.prepared_unit(window, prepared_epoch, unit)).slice(position, position + 1)
    row = ResultRow(
        chunk=int(prepared.chunks[0]),
        row=int(prepared.rows[0]),
        error=RowError(ErrorClass.ENGINE_CRASH, message),
        prompt_tokens=prepared.num_tokens,
    )
    name = SegmentName(unit, epoch, GIVEN_UP_LEASE, position)
    write_segment(layout.segments(window) / str(name), [row])


def commit_chunk(run: Run, epoch: int, plan: WindowPlan, chunk: int) -> commit.CommitSummary:
    opened = _open(run)
    return commit.commit_chunk(opened.job, plan, opened.chunks[chunk], epoch=epoch)


def clean_window(run: Run, epoch: int, window: int) -> None:
    layout = _open(run).job.layout
    refuse_if_succeeded(layout.output, epoch)  # a later driver may have planned the window anew
    cleaning.clean_window(layout, window)
