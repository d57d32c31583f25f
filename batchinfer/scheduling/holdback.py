"""Prefix blocks that are being computed right now, and the sequences that had better wait for them.

Responsible for: holding a sequence back while a running one computes the very block that it needs next, so that a
shared prefix is computed once even if all its rows arrive at once. Not for: blocks that are computed already
(`prefix_index`), nor who runs (`scheduler`). It is a saving only: who is let go too early computes the prefix again.

No deadlock: a block is noted only while a running sequence owns the memory to compute it, and whatever ends that
(it was published, its sequence ended, failed or was pre-empted) lets those who wait go.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from batchinfer.scheduling.sequence import Sequence, Status


class Holdback:
    """Notes by the hash of a block's key, for the first KV group: all groups compute the same tokens."""

    __slots__ = ("_computing", "_held", "num_held")

    def __init__(self) -> None:
        self._computing: dict[int, Sequence] = {}
        self._held: dict[int, list[Sequence]] = {}
        self.num_held = 0

    def __bool__(self) -> bool:
        return bool(self._computing)

    def begin(self, seq: Sequence, hashes: SequenceOf[int]) -> None:
        """`seq` is going to compute these blocks."""
        setdefault = self._computing.setdefault
        for value in hashes:
            setdefault(value, seq)

    def hold(self, seq: Sequence, hashes: SequenceOf[int], first: int, limit: int) -> bool:
        """Holds `seq` back if its block `first` is being computed; blocks from `limit` on are of no use to it."""
        computing = self._computing
        last = first
        while last < limit and hashes[last] in computing:
            last += 1
        if last == first:
            return False
        # Nearly always one sequence computes all of these: waiting for the last is waiting once.
        seq.status = Status.HELD
        self._held.setdefault(hashes[last - 1], []).append(seq)
        self.num_held += 1
        return True

    def end(self, seq: Sequence, hashes: SequenceOf[int]) -> list[Sequence]:
        """`seq` has published these blocks or never will; returns who waited for one, in order of arrival."""
        computing, held = self._computing, self._held
        released: list[Sequence] = []
        for value in hashes:
            if computing.get(value) is seq:
                del computing[value]
                if held and value in held:
                    released += held.pop(value)
        if released:
            self.num_held -= len(released)
            released.sort(key=attrgetter("arrival"))
            for other in released:
                other.status = Status.WAITING
        return released

    def remove(self, seq: Sequence) -> None:
        """Takes a held sequence out."""
        for value, others in self._held.items():
            if seq in others:
                others.remove(seq)
                self.num_held -= 1
                if not others:
                    del self._held[value]
                return
        raise AssertionError(f"{seq} is not held")

    def held(self) -> list[Sequence]:
        return [seq for others in self._held.values() for seq in others]

    def check(self) -> None:
        """Asserts that everybody waits for something that a running sequence is about to publish."""
        assert set(self._held) <= set(self._computing), "a sequence is held back for what nobody computes"
        assert all(self._held.values()), "an empty list of waiters was kept"
        assert self.num_held == len(self.held()), "the number of held sequences is wrong"
        for seq in self._computing.values():
            assert seq.status is Status.PREFILLING, f"{seq} is said to compute a prefix"
