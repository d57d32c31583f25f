"""The small snapshot that a driver keeps fresh, and `status` from files alone, on any machine.

Responsible for: status.json, telling a dead driver from a live one. Not for showing it (`cli`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from batchinfer.data.fs import LocalStore
from batchinfer.errors import ConfigError
from batchinfer.job.driver_lock import last_driver
from batchinfer.job.layout import JobLayout
from batchinfer.job.manifest import load_manifest
from batchinfer.job.report import summarize

State = Literal["planning", "running", "finished", "failure_limit", "interrupted", "failed", "not_started"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Where a job stands. Rates are over the last while, as the driver measures them.

    state            interrupted also where a driver died without a word
    cached_tokens    prompt tokens that were shared with other rows and not computed again
    shareable_tokens the most of them that could be, of what is planned so far
    first_token_s    from the start of the last run to its first token
    rows_done        rows with a durable result (or, where only parts can be asked, rows in parts)
    updated_at_s     when the driver wrote it, by that host's clock; quiet_s: how old it is by this one's
    """

    name: str
    state: State
    rows_total: int
    rows_done: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    rows_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    shareable_tokens: int = 0
    completion_tokens: int = 0
    parts_total: int = 0
    parts_done: int = 0
    workers: int = 0
    rows_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    completion_tokens_per_s: float = 0.0
    elapsed_s: float = 0.0
    eta_s: float | None = None
    first_token_s: float | None = None
    message: str = ""
    epoch: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    updated_at_s: float = field(default_factory=time.time)
    quiet_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def write_status(layout: JobLayout, status: JobStatus) -> None:
    """Replaces the snapshot, atomically."""
    LocalStore(layout.output).replace(layout.key(layout.status), status.to_json().encode())


def read_status(output: str | Path) -> JobStatus:
    """Where the job in an output folder stands, from its files. Raises ConfigError where there is no job."""
    layout = JobLayout(Path(output))
    store = LocalStore(layout.output)
    data = store.get(layout.key(layout.status))
    status = _parse(data) if data is not None else None
    if status is None:
        job = load_manifest(layout)
        if job is None:
            raise ConfigError(f"{output}: no batchinfer job here; give a job file, or the folder of its output")
        report = summarize(job)
        status = JobStatus(
            name=job.name,
            state="finished" if report.complete else "not_started",
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
            host="",
            pid=0,
        )
    return _with_driver(status, layout)


def _with_driver(status: JobStatus, layout: JobLayout) -> JobStatus:
    quiet_s = max(0.0, time.time() - status.updated_at_s)
    status = replace(status, quiet_s=quiet_s)
    if status.state not in ("planning", "running", "not_started"):
        return status
    driver = last_driver(LocalStore(layout.output))
    if driver is None:
        return status
    if driver.gone:
        return replace(
            status,
            state="interrupted",
            eta_s=None,
            message="the process that ran it is gone; run the same command again to go on",
        )
    if status.state == "not_started":
        return replace(status, state="planning")
    return status


def _parse(data: bytes) -> JobStatus | None:
    """None where another version wrote it, or it is damaged: then parts are asked."""
    try:
        raw = json.loads(data)
        known = {f.name for f in fields(JobStatus)}
        return JobStatus(**{key: value for key, value in raw.items() if key in known})
    except (ValueError, TypeError, AttributeError):
        return None
