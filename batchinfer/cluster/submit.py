"""The whole of a run: from a checked job to parts on disk. Used by the command line and by the Python API.

Order matters for the start: workers and their engines have been warming up since before this module was
imported (`cluster.warm`); they are told what to load as soon as the job is frozen, and Dask's scheduler comes up
meanwhile. Nothing here prints.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from batchinfer.cluster.lifecycle import behind_engines, in_thread
from batchinfer.cluster.local import LocalWorkers
from batchinfer.cluster.phases import phases
from batchinfer.cluster.progress import Progress
from batchinfer.cluster.resume import Committed, find_committed
from batchinfer.cluster.status_writer import StatusWriter
from batchinfer.cluster.timings import RunTimings
from batchinfer.errors import BatchinferError, ConfigError, FailureLimitReached, Interrupted
from batchinfer.job.cleaning import clean_leftovers, fence_replacements
from batchinfer.job.driver_lock import DriverLock, lock_store
from batchinfer.job.manifest import ResolvedJob, freeze_job, load_manifest, move_aside, save_run
from batchinfer.job.report import JobReport, summarize
from batchinfer.job.resolve import resolve_job
from batchinfer.job.retry import finish_retry, open_retry
from batchinfer.job.spec import JobSpec
from batchinfer.job.state import JobState, Limits, WindowPlan
from batchinfer.job.status import State
from batchinfer.job.windows import Window
from batchinfer.log import log_to_file

_log = logging.getLogger("batchinfer.cluster")
_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended that ran to its end.

    rows_run           in this run: of a resumed job, those that were not in parts before
    already_finished   it was before, and nothing was run
    first_token_s      from the start to the first token; None where no engine ran
    """

    output: Path
    report: JobReport
    elapsed_s: float
    rows_run: int
    already_finished: bool = False
    notes: tuple[str, ...] = ()
    first_token_s: float | None = None

    @property
    def exit_code(self) -> int:
        return self.report.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """What a run tells while it runs. `said` gets sentences, `progress` a few moments a second."""

    said: Callable[[str], None] = lambda text: None
    progress: Callable[[Progress], None] = lambda progress: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What engines did: rows run, what is worth a word in the end, seconds to the first token."""

    rows_run: int = 0
    notes: Sequence[str] = ()
    first_token_s: float | None = None


def run_job(
    spec: JobSpec,
    workers: LocalWorkers,
    *,
    fresh: bool = False,
    extend: bool = False,
    listener: Listener | None = None,
) -> JobResult:
    """Runs a job, or goes on with it. Raises Interrupted, FailureLimitReached, ConfigError, BatchinferError.

    workers   from `cluster.warm.local_workers`, started or not
    """
    start = time.monotonic()
    listener = listener or Listener()
    with _Signals() as signals:
        return _run_job(spec, workers, signals, fresh, extend, listener, start)


def _run_job(
    spec: JobSpec,
    workers: LocalWorkers,
    signals: _Signals,
    fresh: bool,
    extend: bool,
    listener: Listener,
    start: float,
) -> JobResult:
    with phases.span("resolves the job"):
        job = resolve_here(spec, extend=extend, ignore_existing=fresh)
    if fresh and job.layout.output.exists():
        # Refuses while somebody is at work there; held until the folder has its new name.
        with _first_writes(job.layout.output):
            lock = _claim(job, listener)
            try:
                aside = move_aside(job.layout)
            except BaseException:
                lock.release()
                raise
        if aside is not None:
            DriverLock(lock_store(aside), lock.epoch).release()
            listener.said(f"the old output was moved to {aside}")
    with _driving(job, listener) as lock:
        with phases.span("freezes the job"):
            job = freeze_job(job)
        return _result(job, _run(job, lock, workers, signals, listener), start)


def retry_job(
    spec: JobSpec, workers: LocalWorkers, *, error_class: str | None = None, listener: Listener | None = None
) -> JobResult:
    """Runs failed rows again and replaces them. Raises like `run_job`."""
    start = time.monotonic()
    listener = listener or Listener()
    job = resolve_here(spec, retry=True)
    if load_manifest(job.layout) is None:
        raise ConfigError(f"{job.layout.output} holds no job; submit it first, then retry what failed")
    with _Signals() as signals, _driving(job, listener) as lock:
        plan = open_retry(job, error_class, epoch=lock.epoch)
        whole = load_manifest(job.layout)
        assert whole is not None
        if plan is None:
            listener.said("no row is to be run again")
            return _result(whole, _Run(), start)
        listener.said("1 row is run again" if plan.num_rows == 1 else f"{plan.num_rows} rows are run again")
        run = _run(plan.job, lock, workers, signals, listener)
        finish_retry(plan.job, epoch=lock.epoch)
        return _result(whole, run, start)


def resolve_here(
    spec: JobSpec,
    *,
    extend: bool = False,
    ignore_existing: bool = False,
    retry: bool = False,
    only_look: bool = False,
) -> ResolvedJob:
    """`job.resolve.resolve_job` for engines on this machine."""
    if spec.input.path.startswith("memory://"):
        raise ConfigError(
            f"input.path {spec.input.path}: memory:// lies in this process alone, and workers are processes of their "
            "own; give a file, or hand a datasets.Dataset to batchinfer.map"
        )
    try:
        return resolve_job(spec, extend=extend, ignore_existing=ignore_existing, retry=retry, only_look=only_look)
    except OSError as error:  # indexes of input files are kept in a temporary folder at first
        if error.errno in _OF_THE_DISK:
            raise _disk_trouble(error, Path(spec.output.path)) from error
        raise


def _claim(job: ResolvedJob, listener: Listener) -> DriverLock:
    seconds = float(job.spec.cluster.takeover_timeout_s)
    return DriverLock.claim(lock_store(job.layout.output), on_wait=listener.said, takeover_after_s=seconds)


@contextlib.contextmanager
def _first_writes(output: Path) -> Iterator[None]:
    """What is done first in the output folder, or to it: that it can't be done is told in one message."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_THE_DISK:
            raise _disk_trouble(error, output) from error
        raise ConfigError(
            f"output.path {output} can't be written to: {error.strerror or error}; give a folder that can"
        ) from error


@contextlib.contextmanager
def _driving(job: ResolvedJob, listener: Listener) -> Iterator[DriverLock]:
    """This process is the job's driver, and writes its log."""
    layout = replace(job.layout, retry=None)
    with _first_writes(layout.output):
        claimed = _claim(job, listener)
    with claimed as lock, log_to_file(layout.log):
        try:
            lock.start_heartbeat()
            fence_replacements(layout, lock.epoch)
            yield lock
        except BatchinferError as error:
            _log.error("the run ends: %s", error)
            raise
        except OSError as error:
            if error.errno not in _OF_THE_DISK:
                _log.exception("the run ends by an unexpected error")
                raise
            _log.error("the run ends: %s", error)
            raise _disk_trouble(error, layout.output) from error
        except BaseException:
            _log.exception("the run ends by an unexpected error")
            raise


def _disk_trouble(error: OSError, output: Path) -> BatchinferError:
    return BatchinferError(
        f"{error.filename or output}: {error.strerror}; everything finished is kept, and once that is mended the same "
        "command goes on"
    )


def _run(job: ResolvedJob, lock: DriverLock, workers: LocalWorkers, signals: _Signals, listener: Listener) -> _Run:
    """Runs what is not in parts yet."""
    windows = job.windows()
    committed = find_committed(job, windows)
    plans = [WindowPlan(window.window, tuple(chunk.chunk for chunk in window.chunks)) for window in windows]
    state = JobState(plans, committed=committed.chunks, limits=limits_of(job.spec))
    writer = StatusWriter(job, lock.epoch, committed, sum(len(plan.chunks) for plan in plans))
    out = committed.chunks
    finished = [w.window for w in windows if all(chunk.chunk in out for chunk in w.chunks)]
    clean_leftovers(job.layout, finished, epoch=lock.epoch)
    if state.idle:
        _log.info("nothing is left to do")
        writer.end("finished")
        return _Run()
    run = str(save_run(job, lock.epoch))
    num_rows = sum(window.num_rows for window in windows)
    _log.info("epoch %d: %d of %d rows are in parts that are out", lock.epoch, committed.tally.rows, num_rows)

    def progressed(progress: Progress) -> None:
        writer.progress(progress)
        listener.progress(progress)

    timings = RunTimings(workers.began)
    told = Listener(said=listener.said, progress=progressed)
    try:
        first = next(w for w in windows if not all(chunk.chunk in out for chunk in w.chunks))
        notes = run_on_local_workers(job, run, lock, state, committed, first, workers, timings, signals, told)
    except BatchinferError as error:
        ends: dict[type, State] = {Interrupted: "interrupted", FailureLimitReached: "failure_limit"}
        writer.end(ends.get(type(error), "failed"), str(error))
        raise
    finally:
        with contextlib.suppress(OSError):  # it may hold the keys of the job's storage
            Path(run).unlink()
    writer.end("finished")
    return _Run(rows_run=job.num_rows - committed.tally.rows, notes=tuple(notes), first_token_s=timings.first_token_s)


def _result(job: ResolvedJob, run: _Run, start: float) -> JobResult:
    """Counted from the parts themselves: what was published, not what was meant to be."""
    report = summarize(job)
    if report.rows_done != report.rows_total:
        raise BatchinferError(
            f"{job.layout.output}: the parts hold {report.rows_done} rows and the input {report.rows_total}; "
            "`batchinfer verify` names them, and the same command goes on"
        )
    return JobResult(
        output=job.layout.output,
        report=report,
        elapsed_s=time.monotonic() - start,
        rows_run=run.rows_run,
        already_finished=run.rows_run == 0,
        notes=tuple(run.notes),
        first_token_s=run.first_token_s,
    )


def limits_of(spec: JobSpec) -> Limits:
    most = spec.failure.max_failed_rows
    return Limits(max_failed_rows=None if most == "auto" else most, no_worker_s=float(spec.cluster.worker_timeout_s))


def run_on_local_workers(
    job: ResolvedJob,
    run: str,
    lock: DriverLock,
    state: JobState,
    committed: Committed,
    first_window: Window,
    workers: LocalWorkers,
    timings: RunTimings,
    signals: _Signals,
    listener: Listener,
) -> list[str]:
    """Runs until the job is done; returns what is worth a word in the end. Raises what ended it otherwise.

    first_window   the first that is not done
    """
    log_folder = job.layout.state / "logs"
    timings.moment("job_frozen")
    if workers.gpus:
        _log.info("GPUs: %s", ", ".join(map(" ".join, zip(workers.names, workers.gpus, strict=True))))
    workers.start()
    workers.configure(run=run, epoch=lock.epoch, log_folder=log_folder)
    from batchinfer.cluster.coordinator import Coordinator

    coordinator = Coordinator(
        job=job,
        run=run,
        epoch=lock.epoch,
        state=state,
        workers=workers,
        committed=committed,
        names=workers.names,
        on_progress=listener.progress,
        lost_lock=lambda: lock.lost,
        timings=timings,
        first_window=first_window,
    )
    signals.stop_in_order(coordinator.stop)
    coordinator.begin()
    # Not beside that: engines load meanwhile, which takes longest, and before it ends no worker needs a scheduler.
    in_thread("imports", _import_dask).join()
    from batchinfer.cluster.dask_settings import apply_settings

    apply_settings(worker_ttl_s=job.spec.cluster.hang_timeout_s / 2)
    from distributed import Client, LocalCluster

    from batchinfer.cluster.engine_plugin import EnginePlugin, SchedulerNews

    with phases.span("starts the scheduler"):
        cluster = LocalCluster(
            n_workers=0,
            threads_per_worker=1,
            dashboard_address=None,
            host="127.0.0.1",
            silence_logs=logging.CRITICAL,
            # Without it Dask tries the dashboard's port, also to serve nothing, and warns where that is taken.
            scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
        )
        client = Client(cluster, timeout=30)
    timings.moment("scheduler_up")
    try:
        client.register_plugin(SchedulerNews())
        client.register_plugin(
            EnginePlugin(
                run=run,
                epoch=lock.epoch,
                num_threads=workers.num_threads,
                preload=workers.preload,
                log_folder=str(log_folder),
                on_gpus=bool(workers.gpus),
            )
        )
        workers.connect(cluster.scheduler_address)
        end = coordinator.run(client)
    finally:
        coordinator.close()
        workers.close()
        coordinator.hear_late_counts()
        with contextlib.suppress(Exception):  # its workers are gone: it may complain, and need not be heard
            client.close(timeout=2)
            cluster.close(timeout=2)
        timings.moment("end")
        timings.write(job.layout)
    match end.outcome:
        case "done":
            return coordinator.notes
        case "interrupted":
            raise Interrupted(f"{end.message}; everything finished is kept, the same command goes on")
        case "failure_limit":
            raise FailureLimitReached(
                f"{end.message} Mend the cause and run the same command again: it goes on. Rows that have failed stay "
                "error rows until `batchinfer retry`. If the rows themselves are wrong, raise failure.max_failed_rows "
                "to go on with them, or mend input or template and start over with --fresh."
            )
        case "refused":
            raise ConfigError(end.message)
        case _:
            raise BatchinferError(f"{end.message}\nThe log: {job.layout.log}; the same command goes on.")


def _import_dask() -> None:
    """Ahead of its use; what is wrong with it is told there."""
    behind_engines()
    with contextlib.suppress(Exception), phases.span("imports Dask"):
        from batchinfer.cluster.dask_settings import apply_settings

        apply_settings()
        import distributed  # noqa: F401


class _Signals:
    """SIGINT, SIGTERM and SIGHUP stop the run in order; the second one ends it at once (nothing durable is lost).

    One that is ignored already stays so: `nohup` does that with SIGHUP, a shell with the SIGINT of what it runs in the
    background.

    Before there is anything to stop in order, they raise Interrupted where the driver stands. A library that is being
    imported or started may swallow that, so it is remembered until there is.
    """

    def __init__(self) -> None:
        self._stop: Callable[[str], None] | None = None
        self._came = ""
        self._count = 0
        self._old: dict[int, Any] = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            os._exit(Interrupted.exit_code)  # workers and engines end with this process
        message = f"stopped by {signal.Signals(signum).name}"
        self._came = message
        if self._stop is None:
            raise Interrupted(f"{message}; the same command goes on")
        self._stop(message)

    def stop_in_order(self, stop: Callable[[str], None]) -> None:
        """From now on, signals call `stop`; at once if one came before and was swallowed."""
        self._stop = stop
        if self._came:
            stop(self._came)

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
