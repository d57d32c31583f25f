"""What an earlier run has left: parts that are out, windows that are planned. By files alone.

Results of single rows are not looked at here: the engine process skips rows that segments hold already.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from batchinfer.data.prepared import is_whole_arrow_file
from batchinfer.job.cleaning import clean_window
from batchinfer.job.commit import CommitSummary, part_summary
from batchinfer.job.driver_lock import refuse_if_succeeded
from batchinfer.job.events import Tally
from batchinfer.job.layout import JobLayout
from batchinfer.job.ledger import WindowPlan, load_window
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.windows import Window

_log = logging.getLogger("batchinfer.cluster")


@dataclass(slots=True, kw_only=True)
class Committed:
    """Parts that are out: their chunks and outcomes, and how many of their prompt tokens could have been shared.

    in_open_windows   outcomes by chunk, of windows that hold other chunks as well whose parts are not out
    """

    chunks: set[int] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)
    shareable_tokens: int = 0
    in_open_windows: dict[int, Tally] = field(default_factory=dict)

    def add_window(self, window: Window, summaries: Sequence[CommitSummary]) -> None:
        """`summaries`: of those of its parts that are out."""
        self.shareable_tokens += sum(summary.shareable_tokens for summary in summaries)
        found = {summary.chunk: _tally_of(summary) for summary in summaries}
        self.chunks.update(found)
        self.tally = sum(found.values(), self.tally)
        if len(found) < len(window.chunks):
            self.in_open_windows |= found

    def told_again(self, plan: WindowPlan) -> Tally:
        """What of `tally` the units of a planned window will tell once more: they hold rows of all its chunks. Rows
        that failed in planning are told with the chunks that are left."""
        found = Tally()
        for chunk in plan.chunks:
            if chunk.chunk in self.in_open_windows:
                failed = chunk.num_failed
                found += self.in_open_windows[chunk.chunk] - Tally(rows=failed, failed=failed)
        return found


def _tally_of(summary: CommitSummary) -> Tally:
    return Tally(
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
        summaries = [summary for chunk in window.chunks if (summary := part_summary(job, chunk)) is not None]
        found.add_window(window, summaries)
    return found


def load_usable_window(layout: JobLayout, window: int, chunks: Collection[int], *, epoch: int) -> WindowPlan | None:
    """The window's plan, if it is one for these chunks and all that was written with it is there and whole.

    Otherwise the window is cleaned, to be planned and run again: what stands beside an unusable plan may be what a
    deletion or a copy has left, and one window's work is a small price. (A plan may be for other chunks where parts
    were lost after their window had been cleaned: then it is planned for their chunks alone.) `epoch`: of this driver.
    Raises TakenOver where a later one may have written what is not understood here.
    """
    try:
        plan = load_window(layout, window)
        if plan is None:
            return None
        problem = _problem_of(layout, plan, chunks)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"its plan can't be read ({type(error).__name__}: {error})"
    if problem is None:
        return plan
    _log.warning("window %d was planned, but %s: it is planned again", window, problem)
    refuse_if_succeeded(layout.output, epoch)
    clean_window(layout, window)
    return None


def _problem_of(layout: JobLayout, plan: WindowPlan, chunks: Collection[int]) -> str | None:
    summaries = {summary.chunk: summary for summary in plan.chunks}
    if not summaries.keys() >= set(chunks):
        return "for other chunks"
    for unit in plan.units:
        if not is_whole_arrow_file(layout.prepared_unit(plan.window, plan.epoch, unit.unit)):
            return f"the prepared rows of unit {unit.unit} are gone or cut short"
    for chunk in chunks:
        summary = summaries[chunk]
        errors = layout.plan_segment(plan.window, summary.epoch, chunk)
        if summary.num_failed and not is_whole_arrow_file(errors):
            return f"the errors found in chunk {chunk} are gone or cut short"
    return None
