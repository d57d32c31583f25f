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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchinfer.cluster import engine_gpus
from batchinfer.cluster.local import LocalWorkers
from batchinfer.cluster.phases import process_start
from batchinfer.errors import ConfigError
from batchinfer.job.layout import JobLayout

if TYPE_CHECKING:
    from batchinfer.job.spec import JobSpec

_FAKE = "fake://"
_CUDA = "cuda"
_MOST_WORKERS = 64  # of any machine
_ALWAYS = ("batchinfer.cluster.row_feed",)
_FOR_MODELS = ("torch", "batchinfer.runner.load")


@contextlib.contextmanager
def early_worker(job: str, overrides: Sequence[str]) -> Iterator[LocalWorkers]:
    """A first worker for the job of this file, started before the file is understood: `fit` it when it is.

    Whether there is a model to load is guessed from the text. Nothing is started where the file can't be read, nor
    where it may be a job on GPUs: which one an engine has must be known before it starts.
    """
    began = process_start()
    with _workers(began) as workers:
        with contextlib.suppress(OSError):
            text = Path(job).read_text(errors="replace")
            fake, cuda = (any(word in part for part in (text, *overrides)) for word in (_FAKE, _CUDA))
            workers.preload = _ALWAYS if fake else (*_FOR_MODELS, *_ALWAYS)
            if not cuda:
                workers.start()
        yield workers


def fit(workers: LocalWorkers, spec: JobSpec, *, start: bool = True) -> None:
    """Makes the workers those that the job asks for; with `start`, starts them if something is left to run."""
    cores = num_cores()
    if spec.cluster.workers > max(_MOST_WORKERS, 4 * cores):
        raise ConfigError(
            f"cluster.workers is {spec.cluster.workers}, each of them a process with an engine of its own, and this "
            f"machine has {cores} cores; give at most {max(_MOST_WORKERS, 4 * cores)}"
        )
    found = engine_gpus.gpus_of(spec)
    if found:
        workers.close()  # one that was started before its GPU was known
    workers.num_workers = engine_gpus.num_workers(spec, found) if found else spec.cluster.workers
    workers.gpus = tuple(gpu.handle for gpu in found[: workers.num_workers])
    most_threads = engine_gpus.MOST_THREADS if found else cores
    workers.num_threads = spec.engine.num_threads or min(most_threads, fair_threads(workers.num_workers))
    workers.preload = _ALWAYS if spec.model.path.startswith(_FAKE) else (*_FOR_MODELS, *_ALWAYS)
    if start and not is_finished(Path(spec.output.path)):
        workers.start()


@contextlib.contextmanager
def local_workers(spec: JobSpec, *, start: bool = True) -> Iterator[LocalWorkers]:
    """Workers for a job, ended when the context is left. `start=False` where there is likely nothing to run."""
    with _workers(time.time()) as workers:
        fit(workers, spec, start=start)
        yield workers


@contextlib.contextmanager
def _workers(began: float) -> Iterator[LocalWorkers]:
    scratch = Path(tempfile.gettempdir(), f"batchinfer-{os.urandom(8).hex()}")
    workers = LocalWorkers(num_workers=1, num_threads=num_cores(), preload=_ALWAYS, scratch=scratch, began=began)
    _there.append(workers)  # before its folder is made: a signal may come in between
    try:
        try:
            scratch.mkdir(0o700)
        except OSError as error:
            raise ConfigError(
                f"can't make the folder {scratch} for what workers need meanwhile: {error.strerror}; set TMPDIR to a "
                "folder that can be written to"
            ) from None
        yield workers
    finally:
        workers.close()
        shutil.rmtree(scratch, ignore_errors=True)
        _there.remove(workers)


def abandon_workers() -> None:
    """Ends all workers at once, and removes their scratch folders. For whoever ends the process on the spot."""
    for workers in _there:
        workers.kill()
        shutil.rmtree(workers.scratch, ignore_errors=True)


_there: list[LocalWorkers] = []


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
