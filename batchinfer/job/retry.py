"""Running failed rows again: which rows of which parts, under which changed settings.

A retry is a job of its own over the same chunks (`ResolvedJob.retry` is its number): it is planned, run and committed
by the same functions, keeps its state under retries/r<number>/, touches no other row, and goes on after a kill.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchinfer.data.fs import LocalStore
from batchinfer.data.parts import failed_rows
from batchinfer.errors import ConfigError, ResumeRefused
from batchinfer.job.commit import part_summary
from batchinfer.job.driver_lock import refuse_if_succeeded
from batchinfer.job.manifest import ResolvedJob, load_manifest
from batchinfer.job.report import job_chunks
from batchinfer.types.rows import ErrorClass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPlan:
    """What a retry runs. `job` is to be run like any other; `failed` counts its rows by error class."""

    job: ResolvedJob
    failed: Mapping[str, int]
    resumed: bool

    @property
    def num_rows(self) -> int:
        return sum(self.failed.values())


def open_retry(job: ResolvedJob, error_class: str | None = None, *, epoch: int) -> RetryPlan | None:
    """Finds the failed rows and writes down what is to run; None where there is nothing to run again.

    job          from `resolve_job(spec, retry=True)`; its `overrides` say what is changed for these rows
    error_class  only rows of this class; None: of all retryable classes
    epoch        of this driver, which holds the lock

    Goes on with a retry of the same class and settings that was interrupted. Raises ConfigError for a class
    that is unknown, or that can't end differently, and TakenOver where a later driver has the job.
    """
    classes = _classes(job, error_class)
    frozen = load_manifest(job.layout)
    if frozen is None:
        raise ConfigError(f"{job.layout.output} holds no job; submit it first, then retry what failed")
    request = {"classes": sorted(classes), "overrides": dict(job.overrides)}
    numbers = _numbers(job)
    if numbers:
        last = _retry_job(job, frozen, numbers[-1])
        data = _read(last)
        if data is not None and not _finished(last):
            if data["request"] == request:
                return RetryPlan(job=last, failed=data["failed"], resumed=True)
            finish_retry(last, epoch=epoch)  # given up for another one
        elif data is not None:
            finish_retry(last, epoch=epoch)  # a kill may have come before its files were deleted
    rows: dict[int, list[int]] = {}
    failed: Counter[str] = Counter()
    for chunk in job_chunks(replace(job, retry=None)):
        summary = part_summary(frozen, chunk)
        if summary is None:
            raise ResumeRefused(
                f"{job.layout.output}: part {chunk.part} is not there yet; finish the job with submit before a retry"
            )
        if any(name in classes for name in summary.failed):
            found = [(row, name) for row, name in failed_rows(job.layout.output / chunk.part) if name in classes]
            rows[chunk.chunk] = sorted(row for row, _ in found)
            failed.update(name for _, name in found)
    if not rows:
        return None
    retry = _retry_job(job, frozen, (numbers[-1] if numbers else 0) + 1)
    layout = retry.layout
    text = json.dumps({"format": 1, "request": request, "failed": dict(sorted(failed.items())), "rows": rows})
    if not LocalStore(layout.output).put_if_absent(layout.key(layout.retry_plan), text.encode()):
        raise ResumeRefused(f"{layout.retry_plan} was just written by another process; run the command again")
    return RetryPlan(job=retry, failed=dict(sorted(failed.items())), resumed=False)


def finish_retry(job: ResolvedJob, *, epoch: int) -> None:
    """Every part is replaced (or the retry is given up): marks it and deletes its windows, rows and segments.

    `epoch`: of this driver. Raises TakenOver where a later one may be at work on the same retry.
    """
    layout = job.layout
    refuse_if_succeeded(layout.output, epoch)
    LocalStore(layout.output).put_if_absent(layout.key(layout.work / "finished"), b"{}")
    for name in ("windows", "prepared", "segments"):
        shutil.rmtree(layout.work / name, ignore_errors=True)


def _classes(job: ResolvedJob, error_class: str | None) -> frozenset[str]:
    if error_class is None:
        return frozenset(str(item) for item in ErrorClass if item.retryable)
    try:
        chosen = ErrorClass(error_class)
    except ValueError:
        names = ", ".join(str(item) for item in ErrorClass)
        raise ConfigError(f"--class {error_class}: no such error class; there are {names}") from None
    if not chosen.retryable and not job.overrides:
        raise ConfigError(
            f"--class {error_class}: such rows are wrong in themselves and would fail again; mend the input, or change "
            "a setting with --set"
        )
    return frozenset({str(chosen)})


def _retry_job(job: ResolvedJob, frozen: ResolvedJob, number: int) -> ResolvedJob:
    """The retry as a job: frozen settings with the overrides, under the fingerprint of the job it belongs to."""
    return replace(
        job,
        semantic={**frozen.semantic, **job.overrides},
        facts={**frozen.facts, "base_fingerprint": frozen.fingerprint},
        retry=number,
    )


def _numbers(job: ResolvedJob) -> list[int]:
    folder = job.layout.retries
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            with contextlib.suppress(ValueError):
                found.append(int(path.name.removeprefix("r")))
    return sorted(found)


def _read(job: ResolvedJob) -> dict[str, Any] | None:
    data = LocalStore(job.layout.output).get(job.layout.key(job.layout.retry_plan))
    return None if data is None else json.loads(data)


def _finished(job: ResolvedJob) -> bool:
    return (job.layout.work / "finished").exists()
