"""Which prefix blocks somebody who waits will ask for, so that they are evicted last.

Responsible for: what is known of them, by the hash of a block's key. Not for: what is evicted (`block_manager`).
Blocks that are shared in part only are not noted: what is lost with one is less than a block.
"""

from __future__ import annotations

from collections.abc import Iterable

MIN_HASHES = 4096


class Wanted:
    """For each block the last sequence that was known to want it: rows start in the order in which they came, so once
    it runs, those before it run, and hold the block themselves. Sequences are numbers here: an object would be kept
    alive by the blocks that it once wanted.

    A block is wanted while the `last` of its hash is in `waiting`. `block_manager` asks so in its loop: a call
    for each block would be a tenth of its eviction.
    """

    __slots__ = ("_limit", "last", "waiting")

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.waiting: set[int] = set()
        self._limit = MIN_HASHES

    def note(self, seq_id: int, hashes: Iterable[int]) -> None:
        """The sequence waits, and will ask for these."""
        last, waiting = self.last, self.waiting
        waiting.add(seq_id)
        last.update(dict.fromkeys(hashes, seq_id))
        if len(last) > self._limit:
            # What others wanted is forgotten now and then, at a cost that is constant for each hash.
            self.last = {value: other for value, other in last.items() if other in waiting}
            self._limit = max(MIN_HASHES, 2 * len(self.last))

    def forget(self, seq_id: int) -> None:
        """The sequence waits no longer."""
        self.waiting.discard(seq_id)

    def check(self, seq_ids: Iterable[int]) -> None:
        """Asserts that these, at most, are those who wait."""
        assert self.waiting <= set(seq_ids), "blocks are kept for a sequence that does not wait"
