"""What an earlier run has left: parts that are out, windows that are planned. By files alone.

Results of single rows are not looked at here: the engine process skips rows that segments hold already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchinfer.data.fs import LocalStore
from batchinfer.job.commit import CommitSummary, part_summary
from batchinfer.job.events import Tally
from batchinfer.job.layout import JobLayout
from batchinfer.job.ledger import WindowPlan, load_window
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.windows import Window

_log = logging.getLogger("batchinfer.cluster")


@dataclass(slots=True, kw_only=True)
class Committed:
    """Parts that are out: their chunks and outcomes."""

    chunks: set[int] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)

    def add(self, summary: CommitSummary) -> None:
        self.chunks.add(summary.chunk)
        self.tally += Tally(
            summary.num_rows,
            summary.num_failed,
            summary.prompt_tokens,
            summary.completion_tokens,
            summary.cached_tokens,
        )


def find_committed(job: ResolvedJob, windows: Iterable[Window]) -> Committed:
    """Looks at the footer of each chunk's part. A part that is not whole does not count."""
    found = Committed()
    for window in windows:
        for chunk in window.chunks:
            summary = part_summary(job, chunk)
            if summary is not None:
                found.add(summary)
    return found


def load_usable_window(layout: JobLayout, window: int) -> WindowPlan | None:
    """The window's plan if all its files are there. A plan whose prepared rows are gone is removed.

    (They go with the window's segments once all its parts are out; if a part is lost after that, the window is
    planned and run again.)
    """
    plan = load_window(layout, window)
    if plan is None:
        return None
    for unit in plan.units:
        if not layout.prepared_unit(window, plan.epoch, unit.unit).exists():
            _log.warning("window %d was planned, but its prepared rows are gone: it is planned again", window)
            LocalStore(layout.output).delete(layout.key(layout.window(window)))
            return None
    return plan
