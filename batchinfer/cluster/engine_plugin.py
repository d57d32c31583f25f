"""The worker's part: messages from the driver to its engine, and from the engine to the driver.

Driver to worker: `wire.deliver`, called through `Client.run`, in order. Worker to driver: Dask events on one topic, in
order; `SchedulerNews` tells on the same topic when a worker is gone. A worker started by `cluster.worker_process`
has its engine already; on any other Dask worker the plugin starts it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed import SchedulerPlugin, WorkerPlugin

from batchinfer.cluster import worker_process
from batchinfer.cluster.engine_gpus import gpu_of_worker
from batchinfer.cluster.engine_host import EngineHost, Message
from batchinfer.cluster.phases import phases
from batchinfer.cluster.wire import NAME, TOPIC


class EnginePlugin(WorkerPlugin):  # type: ignore[misc]
    name = NAME
    idempotent = True

    def __init__(
        self, *, run: str, epoch: int, num_threads: int, preload: Sequence[str], log_folder: str, on_gpus: bool
    ) -> None:
        self.run = run
        self.epoch = epoch
        self.num_threads = num_threads
        self.preload = tuple(preload)
        self.log_folder = log_folder
        self.on_gpus = on_gpus

    def setup(self, worker: Any) -> None:
        self.worker = worker
        if worker_process.started_engine is not None:
            self.host = worker_process.started_engine
        else:
            log = Path(self.log_folder) / f"engine-{worker.name}.log"
            self.host = EngineHost(
                name=str(worker.name),
                num_threads=self.num_threads,
                preload=self.preload,
                log=log,
                gpu=gpu_of_worker(os.environ) if self.on_gpus else None,
            )
            self.host.configure(run=self.run, epoch=self.epoch, log=log, num_threads=self.num_threads)
        self._tell({"t": "joined", "address": worker.address, "spans": phases.take()})
        self.host.listen(self._tell)
        self.host.start()

    def _tell(self, message: Message) -> None:
        more = {"name": str(self.worker.name), "worker_cpu_s": time.process_time()}
        self.worker.log_event(TOPIC, {**message, **more})

    def receive(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["t"] == "restart":
                self.host.start()
            elif message["t"] == "kill":
                self.host.kill()
            else:
                self.host.send(message)

    def teardown(self, worker: Any) -> None:
        self.host.close(3.0)


class SchedulerNews(SchedulerPlugin):  # type: ignore[misc]
    """Tells the driver when a worker has left."""

    name = "batchinfer-news"
    idempotent = True

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        state = getattr(scheduler, "workers", {}).get(worker)
        with contextlib.suppress(Exception):  # news are a convenience of the scheduler's: never in its way
            name = str(state.name) if state is not None else self.names.get(worker, "")
            scheduler.log_event(TOPIC, {"t": "left", "name": name, "address": worker})

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self.names[worker] = str(scheduler.workers[worker].name)

    def start(self, scheduler: Any) -> None:
        self.names: dict[str, str] = {}
