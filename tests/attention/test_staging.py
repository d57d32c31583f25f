"""Host memory that arrays pass through: never written while a copy from it may still run."""

from __future__ import annotations

import torch

from batchinfer.attention.staging import Staging

CPU = torch.device("cpu")


class Queue:
    """Events of a device that has not come so far until somebody waits."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_events = 0

    def new_event(self) -> _Event:
        self.num_events += 1
        return _Event(self.log, self.num_events)


class _Event:
    def __init__(self, log: list[str], number: int) -> None:
        self.log, self.number = log, number

    def record(self) -> None:
        self.log.append(f"copied {self.number}")

    def synchronize(self) -> None:
        self.log.append(f"waited {self.number}")


def test_a_piece_is_written_again_only_when_its_copies_are_over() -> None:
    queue = Queue()
    staging = Staging(CPU, torch.int64, queue.new_event)
    for step in range(4):
        staging.write(5)[:] = step
        queue.log.append(f"written {step}")
        staging.sent()
    assert queue.log == [
        *("written 0", "copied 1"),
        *("written 1", "copied 2"),  # while the first may still be read
        *("waited 1", "written 2", "copied 1"),
        *("waited 2", "written 3", "copied 2"),
    ]
    assert queue.num_events == 2


def test_memory_is_used_again_and_grows() -> None:
    staging = Staging(CPU, torch.int32)
    first, second = staging.write(8), staging.write(6)
    first[:], second[:] = 1, 2
    assert (first.dtype, len(first), len(second)) == (torch.int32, 8, 6)
    assert staging.write(3).data_ptr() == first.data_ptr()
    assert staging.write(6).data_ptr() == second.data_ptr()
    assert first.eq(1).all() and second.eq(2).all()
    assert len(staging.write(1000)) == 1000
    assert staging.write(2).data_ptr() == second.data_ptr()
