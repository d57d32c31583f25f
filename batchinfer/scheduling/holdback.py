"""Prefixes that are being computed right now, and the sequences that had better wait for them.

Responsible for: how much of a sequence's prefix running sequences are about to compute, token by token; and holding
it back until they have, so that a shared prefix is computed once even if all its rows arrive at once. Not for: blocks
that are computed already (`prefix_index`), who is held back (`scheduler`). It is a saving only: who is let go too
early computes the prefix again.

A sequence that computes its prompt has one note: what comes behind its last published block, all of it. No deadlock:
it is noted only while it owns the memory to compute that, and whatever ends it (it was published, its sequence ended,
failed or was pre-empted) lets those who wait go.
"""

from __future__ import annotations

from operator import attrgetter

from batchinfer.scheduling.branches import TOKEN_BYTES, Branches
from batchinfer.scheduling.prefix_index import ROOT_HASH
from batchinfer.scheduling.sequence import Sequence, Status


class Holdback:
    """Notes for the first KV group: all groups compute the same tokens."""

    __slots__ = ("_computing", "_held", "_notes", "num_held")

    def __init__(self) -> None:
        self._computing = Branches()
        self._notes: dict[Sequence, tuple[int, bytes]] = {}  # (parent, run): each sequence's part of `_computing`
        self._held: dict[int, list[Sequence]] = {}  # by the hash of the full block that they wait for
        self.num_held = 0

    def __bool__(self) -> bool:
        return bool(self._notes)

    def begin(self, seq: Sequence) -> None:
        """`seq` is going to compute its known tokens from its first block that is not published."""
        chain, first = seq.chains[0], seq.num_published[0]
        self._notes[seq] = parent, run = chain.parent_of(first), seq.run[first * chain.block_bytes :]
        self._computing.add(parent, run)

    def go_on(self, seq: Sequence, start: int) -> list[Sequence]:
        """`seq` has published its blocks from `start` on; returns who waited for one, in order of arrival."""
        note = self._notes.get(seq)
        if note is not None:
            self._computing.remove(*note)
            self.begin(seq)
        return self._let_go(seq, start, seq.num_published[0])

    def end(self, seq: Sequence) -> list[Sequence]:
        """`seq` has computed all of its prompt, or never will; returns who waited for what is not published of it, in
        order of arrival."""
        self._computing.remove(*self._notes.pop(seq))
        return self._let_go(seq, seq.num_published[0], len(seq.chains[0].hashes))

    def reach(self, seq: Sequence, matched: int) -> int:
        """Tokens of the prefix that will be computed once what is under way has been; the first `matched` are."""
        chain, run, computing = seq.chains[0], seq.run, self._computing
        after, size = computing.after, chain.block_size
        limit = (len(seq.token_ids) - 1) * TOKEN_BYTES
        last = matched // size
        reach = matched
        parent = ROOT_HASH
        for place in range(last + 1):
            if parent in after:
                start = place * chain.block_bytes
                # Those behind an earlier block than the last that is matched are seldom this one's.
                if place == last or computing.any_begins_with(parent, run[start : last * chain.block_bytes]):
                    reach = max(reach, place * size + computing.longest(parent, run[start:limit])[0])
            if place < last:
                parent = chain.hashes[place]
        return reach

    def hold(self, seq: Sequence, reach: int) -> None:
        """Holds `seq` back until the last full block before `reach`, which is being computed, is there. Nearly always
        one sequence computes all of what it waits for: waiting for the last is waiting once."""
        chain = seq.chains[0]
        seq.status = Status.HELD
        self._held.setdefault(chain.hashes[reach // chain.block_size - 1], []).append(seq)
        self.num_held += 1

    def _let_go(self, seq: Sequence, start: int, stop: int) -> list[Sequence]:
        held = self._held
        released: list[Sequence] = []
        if held:
            for value in seq.chains[0].hashes[start:stop]:
                if value in held:
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

    def check(self, prefilling: list[Sequence]) -> None:
        """Asserts that these alone are noted, as they are, and all wait for what one of them is about to publish."""
        assert set(self._notes) == set(prefilling), "those who compute a prefix are not those who are noted"
        awaited: set[int] = set()
        for seq, (parent, run) in self._notes.items():
            chain, first = seq.chains[0], seq.num_published[0]
            assert parent == chain.parent_of(first), f"{seq} is noted behind another block than its last"
            assert run == seq.run[first * chain.block_bytes :], f"{seq} is noted with other tokens than its own"
            awaited.update(chain.hashes[first:])
        assert sorted(self._computing) == sorted(self._notes.values()), "what is computed is not what is noted"
        assert set(self._held) <= awaited, "a sequence is held back for what nobody computes"
        assert all(self._held.values()), "an empty list of waiters was kept"
        assert self.num_held == len(self.held()), "the number of held sequences is wrong"
        self._computing.check()
