"""A worker on this machine: `python -m batchinfer.cluster.worker_process PARENT_PID`, started by `cluster.local`.

Told in three lines on its standard input, each as soon as it is known: what to warm up, what to run, where the
scheduler is. The engine process is started before Dask is even imported, so that libraries and model load while
everything else comes up. The end of standard input means that the driver is gone.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from batchinfer.cluster.engine_host import EngineHost
from batchinfer.cluster.lifecycle import (
    behind_engines,
    end_with_parent,
    exit_after,
    in_thread,
    leave_interrupts_to_the_driver,
    log_to,
)
from batchinfer.cluster.phases import phases, process_start
from batchinfer.garbage import WHILE_LOADING

PARENT_GONE_S = 0.2  # a process that ends closes its pipes a moment before it is gone
started_engine: EngineHost | None = None
_scratch: str | None = None


def main() -> int:
    global _scratch
    gc.set_threshold(*WHILE_LOADING)
    signal.signal(signal.SIGTERM, _terminated)  # until Dask's loop has a better way
    end_with_parent(int(sys.argv[1]))
    leave_interrupts_to_the_driver()
    warm = _told()
    _scratch = warm["scratch"]
    host = EngineHost(
        name=warm["name"],
        num_threads=warm["num_threads"],
        preload=warm["preload"],
        log=Path(warm["scratch"]) / f"engine-{warm['name']}.log",
    )
    host.start()
    phases.add("started", process_start(), time.process_time())
    config = _told()
    folder = Path(config["log_folder"])
    log = folder / f"engine-{warm['name']}.log"
    host.configure(run=config["run"], epoch=config["epoch"], log=log, num_threads=config["num_threads"])
    importing = in_thread("imports", _import_dask)
    log_to(folder / f"worker-{warm['name']}.log")
    importing.join()
    # The plugin finds the engine under this module's importable name, not under __main__.
    import batchinfer.cluster.worker_process as importable

    importable.started_engine = host
    code = _serve(_told()["scheduler"], warm, host)
    _tidy_up_for_the_driver()
    return code


def _tidy_up_for_the_driver() -> None:
    """One that was killed has not removed the scratch folder."""
    if _scratch is not None and os.getppid() != int(sys.argv[1]):
        shutil.rmtree(_scratch, ignore_errors=True)


def _terminated(signum: int, frame: FrameType | None) -> None:
    _tidy_up_for_the_driver()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _import_dask() -> None:
    """In a thread of its own, and not before the job is frozen: the engine takes longest, and must not wait for a core
    meanwhile."""
    behind_engines()
    with phases.span("imports Dask"):
        from batchinfer.cluster.dask_settings import apply_settings

        apply_settings()
        import distributed  # noqa: F401


def _told() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        end = time.monotonic() + PARENT_GONE_S
        while os.getppid() == int(sys.argv[1]) and time.monotonic() < end:
            time.sleep(0.01)
        _tidy_up_for_the_driver()
        os._exit(0)  # the driver has no use for us, or is gone; the engine ends with us
    told: dict[str, Any] = json.loads(line)
    return told


def _serve(scheduler: str, config: dict[str, Any], host: EngineHost) -> int:
    import asyncio

    from distributed import Worker

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        worker = Worker(
            scheduler,
            name=config["name"],
            nthreads=1,
            memory_limit=0,
            dashboard=False,
            local_directory=config["scratch"],
            host="127.0.0.1",
        )
        leaving = threading.Event()

        def leave() -> None:
            if not leaving.is_set():
                leaving.set()
                exit_after(8.0, 1)
                asyncio.run_coroutine_threadsafe(worker.close(timeout=2, executor_wait=False), loop)

        loop.add_signal_handler(signal.SIGTERM, leave)

        def watch_driver() -> None:
            sys.stdin.read()  # until its end
            leave()

        in_thread("watch-driver", watch_driver)
        async with worker:
            await worker.finished()

    asyncio.run(serve())
    host.close(2.0)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # daemon threads may be reading: nothing is left to tidy up
