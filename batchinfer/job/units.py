"""Cutting a window's prepared rows into units along prefix edges.

Rows are sorted by token ids, so that rows sharing a prefix stand together, and cut where neighbours share least.
A pure function of the rows: never of the worker count. Earlier units are larger, the last ones small, so that
workers end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer.job.ledger import ChunkSummary, WindowPlan
from batchinfer.job.manifest import ResolvedJob


def cut_units(job: ResolvedJob, window: int, chunks: Sequence[ChunkSummary], *, epoch: int) -> WindowPlan:
    """Sorts and cuts what `prepare_chunk` wrote for every chunk of a window under this epoch.

    Writes `layout.prepared_unit(...)` files, then windows/<w>.json create-if-absent, then deletes the chunks' prepared
    files. Returns the plan that holds: another driver's if it was first (its prepared files are then the ones to use).
    """
    raise NotImplementedError
