"""A worker on this machine: `python -m batchinfer.cluster.worker_process PARENT_PID`, started by `cluster.local`.

The first line of its standard input says what to do. The engine process is started before Dask is even imported,
so that the model loads while everything else comes up. The end of standard input means that the driver is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from batchinfer.cluster.engine_host import EngineHost
from batchinfer.cluster.lifecycle import end_with_parent, exit_after, in_thread, leave_interrupts_to_the_driver

started_engine: EngineHost | None = None


def main() -> int:
    end_with_parent(int(sys.argv[1]))
    leave_interrupts_to_the_driver()
    config = json.loads(sys.stdin.readline())
    host = EngineHost(
        run=config["run"],
        epoch=config["epoch"],
        name=config["name"],
        num_threads=config["num_threads"],
        log=config["engine_log"],
    )
    host.start()
    # The plugin finds the engine under this module's importable name, not under __main__.
    import batchinfer.cluster.worker_process as importable

    importable.started_engine = host
    return _serve(config, host)


def _serve(config: dict[str, Any], host: EngineHost) -> int:
    import asyncio

    from batchinfer.cluster.dask_settings import apply_settings

    apply_settings()
    from distributed import Worker

    scheduler = json.loads(sys.stdin.readline() or "{}").get("scheduler")
    if scheduler is None:
        host.close(2.0)
        return 1

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
                asyncio.run_coroutine_threadsafe(worker.close(), loop)

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
