"""Workers started before it is known what exactly they will run, so that libraries load while the job is checked.

Imports next to nothing: this runs before the heavy parts of the driver are imported. Nothing is written but to a
scratch folder, which goes away again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.cluster.local import LocalWorkers
from batchinfer.errors import ConfigError
from batchinfer.job.layout import JobLayout

if TYPE_CHECKING:
    from batchinfer.job.spec import JobSpec

_FAKE = "fake://"
_MOST_WORKERS = 64  # of any machine
_ALWAYS = ("batchinfer.cluster.row_feed",)
_FOR_MODELS = ("torch", "batchinfer.runner.load")


@contextlib.contextmanager
def local_workers(spec: JobSpec, *, start: bool = True) -> Iterator[LocalWorkers]:
    """Workers for a job, ended when the context is left. `start=False` where there is likely nothing to run."""
    cores = num_cores()
    if spec.cluster.workers > max(_MOST_WORKERS, 4 * cores):
        raise ConfigError(
            f"cluster.workers is {spec.cluster.workers}, each of them a process with an engine of its own, and this "
            f"machine has {cores} cores; give at most {max(_MOST_WORKERS, 4 * cores)}"
        )
    scratch = Path(tempfile.mkdtemp(prefix="batchinfer-"))
    workers = LocalWorkers(
        num_workers=spec.cluster.workers,
        num_threads=spec.engine.num_threads or fair_threads(spec.cluster.workers),
        preload=_ALWAYS if spec.model.path.startswith(_FAKE) else (*_FOR_MODELS, *_ALWAYS),
        scratch=scratch,
    )
    try:
        if start and not is_finished(Path(spec.output.path)):
            workers.start()
        yield workers
    finally:
        workers.close()
        shutil.rmtree(scratch, ignore_errors=True)


def is_finished(output: Path) -> bool:
    """A guess from the small status file, only to save starting workers for nothing."""
    try:
        status = json.loads(JobLayout(output).status.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(status, dict) and status.get("state") == "finished"


def fair_threads(num_workers: int) -> int:
    """CPU threads of each engine, so that engines do not fight for cores."""
    return max(1, num_cores() // num_workers)


def num_cores() -> int:
    """That this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
