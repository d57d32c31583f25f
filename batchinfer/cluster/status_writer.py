"""Keeps the job's small status file fresh, and its log readable: what `batchinfer status` reads elsewhere."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from batchinfer.cluster.progress import Progress
from batchinfer.cluster.resume import Committed
from batchinfer.job.driver_lock import succeeded
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.report import summarize
from batchinfer.job.status import JobStatus, State, write_status

_log = logging.getLogger("batchinfer.cluster")
WRITE_EVERY_S = 2.0
LOG_EVERY_S = 30.0


class StatusWriter:
    def __init__(self, job: ResolvedJob, epoch: int, committed: Committed, parts_total: int) -> None:
        self._layout = replace(job.layout, retry=None)
        self._job = job
        self._status = JobStatus(
            name=job.name,
            state="planning",
            rows_total=job.num_rows,
            rows_done=committed.tally.rows,
            rows_failed=committed.tally.failed,
            prompt_tokens=committed.tally.prompt_tokens,
            cached_tokens=committed.tally.cached_tokens,
            shareable_tokens=committed.shareable_tokens,
            completion_tokens=committed.tally.completion_tokens,
            parts_total=parts_total,
            parts_done=len(committed.chunks),
            epoch=epoch,
        )
        self._written = self._logged = float("-inf")

    def progress(self, progress: Progress) -> None:
        self._status = replace(
            self._status,
            state="planning" if progress.phase == "planning" else "running",
            rows_done=progress.tally.rows,
            rows_failed=progress.tally.failed,
            prompt_tokens=progress.tally.prompt_tokens,
            cached_tokens=progress.tally.cached_tokens,
            shareable_tokens=progress.shareable_tokens,
            first_token_s=progress.first_token_s,
            completion_tokens=progress.tally.completion_tokens,
            parts_done=progress.parts_done,
            workers=progress.workers_ready,
            rows_per_s=progress.rows_per_s,
            prompt_tokens_per_s=progress.prompt_tokens_per_s,
            completion_tokens_per_s=progress.completion_tokens_per_s,
            elapsed_s=progress.elapsed_s,
            eta_s=progress.eta_s,
            message="; ".join(progress.notes),
            updated_at_s=time.time(),
        )
        now = time.monotonic()
        if now - self._written < WRITE_EVERY_S:
            return
        self._written = now
        self._write()
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            _log.info(
                "%s: %d of %d rows, %d failed, %.0f rows/s, %.0f tokens/s in, %.0f out",
                progress.phase,
                progress.tally.rows,
                progress.num_rows,
                progress.tally.failed,
                progress.rows_per_s,
                progress.prompt_tokens_per_s,
                progress.completion_tokens_per_s,
            )

    def end(self, state: State, message: str = "") -> None:
        """The last word. A finished job's numbers are those of its parts."""
        self._status = replace(self._status, state=state, message=message, eta_s=None, updated_at_s=time.time())
        if state == "finished":
            report = summarize(replace(self._job, retry=None))
            self._status = replace(
                self._status,
                rows_total=report.rows_total,
                rows_done=report.rows_done,
                failed=report.failed,
                rows_failed=report.rows_failed,
                prompt_tokens=report.prompt_tokens,
                cached_tokens=report.cached_tokens,
                shareable_tokens=report.shareable_tokens,
                completion_tokens=report.completion_tokens,
                parts_total=report.parts_total,
                parts_done=report.parts_done,
            )
        self._write()

    def _write(self) -> None:
        """A driver that was succeeded has nothing to say any more: what it wrote would pass for the last word."""
        try:
            if succeeded(self._layout.output, self._status.epoch):
                return
            write_status(self._layout, self._status)
        except OSError as error:  # a full disk must not end the job here: it will say so where rows are at stake
            _log.warning("the status file can't be written: %s", error)
