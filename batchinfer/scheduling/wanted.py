"""Which prefix blocks somebody who waits will ask for, so that they are evicted last.

Responsible for: an answer by the hash of a block's key. Not for: what is evicted (`block_manager`). Blocks that are
shared in part only are not noted: what is lost with one is less than a block.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from batchinfer.scheduling.sequence import Sequence, Status

MIN_HASHES = 4096


class Wanted:
    """The last sequence that was known to want a block: rows start in the order in which they came, so once it
    runs, those before it run, and hold the block themselves."""

    __slots__ = ("_last", "_limit")

    def __init__(self) -> None:
        self._last: dict[int, Sequence] = {}
        self._limit = MIN_HASHES

    def note(self, seq: Sequence, hashes: SequenceOf[int]) -> None:
        """`seq` waits, and will ask for these."""
        last = self._last
        last.update(dict.fromkeys(hashes, seq))
        if len(last) > self._limit:
            # Those who run or have ended are forgotten now and then, at a cost that is constant for each hash.
            self._last = {value: other for value, other in last.items() if other.status <= Status.HELD}
            self._limit = max(MIN_HASHES, 2 * len(self._last))

    def __contains__(self, value: int | None) -> bool:
        seq = None if value is None else self._last.get(value)
        return seq is not None and seq.status <= Status.HELD
