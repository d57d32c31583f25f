"""Messages from the driver to workers: in order for each worker, never in the way of the driver's loop.

A worker that hangs holds up only its own thread here. What can't be delivered is reported by `undelivered`; whether
it arrived after all does not matter, since everything a lease does can be done twice.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

from batchinfer.cluster.engine_plugin import deliver
from batchinfer.cluster.lifecycle import in_thread

_log = logging.getLogger("batchinfer.cluster")
Message = dict[str, Any]


class Outbox:
    def __init__(self, client: Any, undelivered: Callable[[str, Message], None]) -> None:
        self._client = client
        self._undelivered = undelivered
        self._queues: dict[str, queue.SimpleQueue[tuple[str, Message]]] = {}

    def send(self, worker: str, address: str, message: Message) -> None:
        waiting = self._queues.get(worker)
        if waiting is None:
            waiting = self._queues[worker] = queue.SimpleQueue()
            in_thread(f"outbox-{worker}", lambda waiting=waiting: self._send_all(worker, waiting))  # type: ignore[misc]
        waiting.put((address, message))

    def _send_all(self, worker: str, waiting: queue.SimpleQueue[tuple[str, Message]]) -> None:
        while True:
            address, message = waiting.get()
            messages = [message]
            while not waiting.empty():
                other, message = waiting.get()
                if other != address:
                    self._deliver(worker, address, messages)
                    address, messages = other, []
                messages.append(message)
            self._deliver(worker, address, messages)

    def _deliver(self, worker: str, address: str, messages: list[Message]) -> None:
        try:
            self._client.run(deliver, messages, workers=[address])
        except Exception as error:  # whatever Dask raises for a worker that is gone, or going
            _log.info("a message to worker %s was not delivered: %s", worker, error)
            for message in messages:
                self._undelivered(worker, message)
