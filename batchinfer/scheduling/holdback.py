"""Prefix blocks that are being computed right now, and the sequences that had better wait for them.

Responsible for: how much of a sequence's prefix running sequences are about to compute, token by token; and holding
it back until they have, so that a shared prefix is computed once even if all its rows arrive at once. Not for: blocks
that are computed already (`prefix_index`), who is held back (`scheduler`). It is a saving only: who is let go too
early computes the prefix again.

No deadlock: a block is noted only while a running sequence owns the memory to compute it, and whatever ends that
(it was published, its sequence ended, failed or was pre-empted) lets those who wait go.
"""

from __future__ import annotations

from operator import attrgetter

from batchinfer.scheduling.branches import Branches
from batchinfer.scheduling.prefix_index import ROOT_HASH
from batchinfer.scheduling.sequence import Sequence, Status


class Holdback:
    """Notes for the first KV group: all groups compute the same tokens."""

    __slots__ = ("_computing", "_held", "num_held")

    def __init__(self) -> None:
        self._computing: Branches[Sequence] = Branches()  # full blocks and, at prompts' ends, the filled part
        self._held: dict[int, list[Sequence]] = {}  # by the hash of the full block that they wait for
        self.num_held = 0

    def __bool__(self) -> bool:
        return bool(self._computing)

    def begin(self, seq: Sequence) -> None:
        """`seq` is going to compute its known tokens from its first block that is not published."""
        add, chain, first = self._computing.add, seq.chains[0], seq.num_published[0]
        for parent, tokens in chain.keys[first:]:
            add(parent, tokens, seq)
        tail = _tail(seq)
        if tail:
            add(chain.hashes[-1] if chain.hashes else ROOT_HASH, tail, seq)

    def reach(self, seq: Sequence, matched: int) -> int:
        """Tokens of the prefix that will be computed once what is under way has been; the first `matched` are."""
        chain, tokens = seq.chains[0], seq.token_ids
        size, limit = chain.block_size, len(tokens) - 1
        block = matched // size
        parent = chain.hashes[block - 1] if block else ROOT_HASH
        while block * size < limit:
            start = block * size
            following = chain.keys[block][1] if start + size <= limit else tuple(tokens[start:limit])
            count, _ = self._computing.longest(parent, following)
            if count < size:
                return max(matched, start + count)
            parent = chain.hashes[block]
            block += 1
        return max(matched, limit)

    def hold(self, seq: Sequence, reach: int) -> None:
        """Holds `seq` back until the last full block before `reach`, which is being computed, is there. Nearly always
        one sequence computes all of what it waits for: waiting for the last is waiting once."""
        chain = seq.chains[0]
        seq.status = Status.HELD
        self._held.setdefault(chain.hashes[reach // chain.block_size - 1], []).append(seq)
        self.num_held += 1

    def end(self, seq: Sequence, start: int, stop: int) -> list[Sequence]:
        """`seq` has published its blocks start .. stop; returns who waited for one, in order of arrival."""
        chain, remove, held = seq.chains[0], self._computing.remove, self._held
        released: list[Sequence] = []
        for i in range(start, stop):
            parent, tokens = chain.keys[i]
            if remove(parent, tokens, seq) and held:
                released += held.pop(chain.hashes[i], ())
        if released:
            self.num_held -= len(released)
            released.sort(key=attrgetter("arrival"))
            for other in released:
                other.status = Status.WAITING
        return released

    def end_tail(self, seq: Sequence) -> None:
        """`seq` has computed the filled part of its last block, or never will."""
        tail = _tail(seq)
        if tail:
            hashes = seq.chains[0].hashes
            self._computing.remove(hashes[-1] if hashes else ROOT_HASH, tail, seq)

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
        computing = {hash((parent, tokens)) for parent, tokens, _ in self._computing}
        assert set(self._held) <= computing, "a sequence is held back for what nobody computes"
        assert all(self._held.values()), "an empty list of waiters was kept"
        assert self.num_held == len(self.held()), "the number of held sequences is wrong"
        for _, _, seq in self._computing:
            assert seq.status is Status.PREFILLING, f"{seq} is said to compute a prefix"
        self._computing.check()


def _tail(seq: Sequence) -> tuple[int, ...]:
    """Tokens behind the last full block."""
    chain = seq.chains[0]
    return tuple(seq.token_ids[len(chain.keys) * chain.block_size :])
