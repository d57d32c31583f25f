"""Host memory through which a step's arrays reach a device: written while the device is still at work on the last step.

Not for what is copied back, nor for where arrays lie on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """As torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """Two pieces of host memory that take turns, pinned for a GPU; a piece is handed out again when all copies from it
    are over. Neither is made anew unless more is asked for.

    new_event   makes what a device's queue is asked by; None, for the CPU: copies are over when they return
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, new_event: Callable[[], Event] | None = None) -> None:
        self._pinned = device.type == "cuda"
        self._new_event = torch.cuda.Event if new_event is None and self._pinned else new_event
        self._pieces = [torch.empty(0, dtype=dtype, device="cpu")] * 2
        self._events: list[Event | None] = [None, None]
        self._turn = 0

    def write(self, size: int) -> Tensor:
        """[size], to be written, copied from (`non_blocking`), and then `sent`."""
        self._turn = 1 - self._turn
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        piece = self._pieces[self._turn]
        if piece.numel() < size:
            piece = torch.empty(size + size // 4, dtype=piece.dtype, device="cpu", pin_memory=self._pinned)
            self._pieces[self._turn] = piece
        return piece[:size]

    def sent(self) -> None:
        """All copies from what was written last are in the device's queue."""
        if self._new_event is None:
            return
        event = self._events[self._turn] or self._new_event()
        event.record()
        self._events[self._turn] = event
