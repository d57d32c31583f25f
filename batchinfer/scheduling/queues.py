"""The sequences of a scheduler, by what they are at.

Responsible for: which queue a sequence is in, and the order of each. Not for: who moves and when (`scheduler`), nor
what somebody who is held back waits for (`holdback`).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

from batchinfer.scheduling.holdback import Holdback
from batchinfer.scheduling.invariants import check_queues
from batchinfer.scheduling.sequence import Sequence, Status

_arrival = attrgetter("arrival")


class Queues:
    """waiting: who is next first. prefilling, decoding: by arrival. The queues stay the same objects."""

    __slots__ = ("decoding", "holdback", "prefilling", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.holdback = Holdback()

    def youngest(self) -> Sequence:
        """Of those that run; there is one."""
        prefilling, decoding = self.prefilling, self.decoding
        if not prefilling:
            return decoding[-1]
        if not decoding or prefilling[-1].arrival > decoding[-1].arrival:
            return prefilling[-1]
        return decoding[-1]

    def take_out(self, seq: Sequence) -> None:
        """Out of the queue that its status names."""
        if seq.status is Status.DECODING:
            self.decoding.remove(seq)
        elif seq.status is Status.PREFILLING:
            self.prefilling.remove(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq.status is Status.HELD:
            self.holdback.remove(seq)

    def let_wait_no_longer(self, held: list[Sequence]) -> None:
        """What they wait for is published, or given up: they are looked at again."""
        if held:
            self.waiting.extendleft(reversed(held))

    def check(self, known: dict[int, Sequence]) -> None:
        """Asserts that every known sequence is in one queue, the one of its status, and in its place."""
        queues = [
            (self.prefilling, Status.PREFILLING),
            (self.decoding, Status.DECODING),
            (self.holdback.held(), Status.HELD),
            (list(self.waiting), Status.WAITING),
        ]
        check_queues(queues, known)


def insert(queue: list[Sequence], seq: Sequence) -> None:
    """Keeps a queue in order of arrival; nearly always that is its end."""
    if not queue or queue[-1].arrival < seq.arrival:
        queue.append(seq)
    else:
        insort(queue, seq, key=_arrival)
