"""Messages from the driver to workers: in order for each worker, never in the way of the driver's loop.

A worker that hangs holds up only its own thread here. What can't be delivered is reported by `undelivered`; whether
it arrived after all does not matter, since everything a lease does can be done twice.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

from batchinfer.cluster.lifecycle import in_thread
from batchinfer.cluster.wire import Message, deliver

_log = logging.getLogger("batchinfer.cluster")


class Outbox:
    """One queue and one thread for each address: Dask tries for a minute or more to reach a worker that is gone, and
    the worker that comes in its place must not wait for that. All calls from one thread."""

    def __init__(self, client: Any, undelivered: Callable[[str, Message], None]) -> None:
        self._client = client
        self._undelivered = undelivered
        self._queues: dict[str, queue.SimpleQueue[Message | None]] = {}

    def send(self, worker: str, address: str, message: Message) -> None:
        waiting = self._queues.get(address)
        if waiting is None:
            waiting = self._queues[address] = queue.SimpleQueue()
            in_thread(f"outbox-{worker}", lambda waiting=waiting: self._send_all(worker, address, waiting))  # type: ignore[misc]
        waiting.put(message)

    def forget(self, address: str) -> None:
        """Nothing more is sent there."""
        waiting = self._queues.pop(address, None)
        if waiting is not None:
            waiting.put(None)

    def _send_all(self, worker: str, address: str, waiting: queue.SimpleQueue[Message | None]) -> None:
        message = waiting.get()
        while message is not None:
            messages = []
            while message is not None:
                messages.append(message)
                if waiting.empty():
                    break
                message = waiting.get()
            self._deliver(worker, address, messages)
            if message is not None:
                message = waiting.get()

    def _deliver(self, worker: str, address: str, messages: list[Message]) -> None:
        try:
            self._client.run(deliver, messages, workers=[address])
        except Exception as error:  # whatever Dask raises for a worker that is gone, or going
            _log.info("a message to worker %s was not delivered: %s", worker, error)
            for message in messages:
                self._undelivered(worker, message)
