"""What driver and workers share for their messages, without Dask: see `engine_plugin`, which imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
TOPIC = "batchinfer"
NAME = "batchinfer-engine"


def deliver(messages: Sequence[Message], dask_worker: Any = None) -> None:
    """Runs on a worker."""
    dask_worker.plugins[NAME].receive(messages)
