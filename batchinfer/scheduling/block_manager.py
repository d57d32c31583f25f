"""The KV blocks of one group of layers: who uses them, which are free, which hold a prefix worth keeping.

Responsible for: reference counts, the free list, eviction of unreferenced cached blocks. Not for: keys
(`prefix_index`), nor when to allocate, publish or release (`scheduler`). Every block is in one of three states:

    free    no reference, no key        taken first
    idle    no reference, has a key     can be matched, is evicted when no block is free or MAX_IDLE are idle
    used    referenced by 1 or more sequences or copies under way, with or without a key

Idle blocks are evicted least recently used first, but those that somebody who waits will ask for (`wanted`) after
all others: they are set apart when their turn comes, so that each costs one look.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from batchinfer.scheduling.prefix_index import PrefixChain, PrefixIndex
from batchinfer.scheduling.wanted import Wanted
from batchinfer.types.step import KVGroup

# Beyond so many idle blocks the oldest that nobody waits for is taken before one that was never used: on a host, memory
# that is touched for the first time costs more than the cache of a prefix that is done with is worth.
MAX_IDLE = 1024


class BlockManager:
    """Blocks 0 .. num_blocks-1 of one KV group."""

    __slots__ = (
        "_free",
        "_idle",
        "_index",
        "_kept",
        "_key_of",
        "_num_refs",
        "_wanted",
        "block_size",
        "caching",
        "num_blocks",
        "num_evictions",
    )

    def __init__(self, group: KVGroup, *, enable_prefix_caching: bool = True, wanted: Wanted | None = None) -> None:
        self.num_blocks = group.num_blocks
        self.block_size = group.block_size
        self.caching = enable_prefix_caching
        self.num_evictions = 0
        self._free = list(range(group.num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._kept: OrderedDict[int, None] = OrderedDict()  # idle too, but wanted when their turn came
        self._wanted = Wanted() if wanted is None else wanted
        self._num_refs = [0] * group.num_blocks
        self._index = PrefixIndex(group.num_blocks, group.block_size)
        self._key_of = self._index.key_of

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._idle) + len(self._kept)

    def match(self, chain: PrefixChain, max_blocks: int) -> list[int]:
        """Blocks that hold the longest published prefix of the chain. Takes no reference: see `acquire`."""
        return self._index.match(chain, max_blocks)

    def match_part(self, parent: int, run: bytes) -> tuple[int, int | None]:
        """(leading tokens, the block that has most of them behind this parent), or (0, None): to be copied."""
        return self._index.match_part(parent, run)

    def num_idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks stop being available once they are acquired."""
        num_refs = self._num_refs
        count = 0
        for block in blocks:
            if num_refs[block] == 0:
                count += 1
        return count

    def is_private(self, block: int) -> bool:
        """Whether one sequence alone uses the block and nobody can find it."""
        return self._num_refs[block] == 1 and self._key_of[block] is None

    def acquire(self, blocks: Iterable[int]) -> None:
        """Takes a reference to each of these published blocks."""
        num_refs = self._num_refs
        for block in blocks:
            if num_refs[block] == 0:
                if block in self._idle:
                    del self._idle[block]
                else:
                    del self._kept[block]
            num_refs[block] += 1

    def allocate(self, count: int, table: list[int]) -> None:
        """Appends `count` blocks without a key to the table; the caller made sure that they are available."""
        free, num_refs = self._free, self._num_refs
        blocks: list[int] = []
        if len(free) < count or len(self._idle) > MAX_IDLE:
            self._evict(count, blocks)
        while len(blocks) < count:
            blocks.append(free.pop())
        for block in blocks:
            num_refs[block] = 1
        table += blocks

    def _evict(self, count: int, blocks: list[int]) -> None:
        """Takes idle blocks, oldest first, while it must: while too many are idle, or none is free."""
        idle, kept, key_of = self._idle, self._kept, self._key_of
        last, waiting = self._wanted.last, self._wanted.waiting
        must = count - len(self._free)
        while idle and len(blocks) < count and (len(idle) > MAX_IDLE or len(blocks) < must):
            block = idle.popitem(last=False)[0]
            if last.get(hash(key_of[block])) in waiting:  # see `Wanted`
                kept[block] = None
            else:
                blocks.append(block)
        while len(blocks) < must:
            blocks.append(kept.popitem(last=False)[0])
        self.num_evictions += len(blocks)
        self._index.drop(blocks)

    def publish(self, table: list[int], chain: PrefixChain, start: int, stop: int) -> None:
        """Makes blocks `start .. stop` of a sequence, all of whose tokens have been computed, available to others."""
        self._index.publish(table[start:stop], chain.keys[start:stop])

    def publish_tail(self, block: int, parent: int, run: bytes) -> None:
        """Makes the filled part of a block available for copying; its sequence may write behind it."""
        self._index.publish_tail(block, (parent, run))

    def release(self, table: list[int]) -> None:
        """Gives a sequence's references back and empties its table. Later blocks are evicted before earlier
        ones: a prefix without its tail is of use, a tail without its prefix is not."""
        num_refs, free, idle, key_of = self._num_refs, self._free, self._idle, self._key_of
        for block in reversed(table):
            count = num_refs[block] - 1
            num_refs[block] = count
            if count == 0:
                if key_of[block] is not None:
                    idle[block] = None
                else:
                    free.append(block)
            else:
                assert count > 0, f"block {block} is released more often than it was taken"
        table.clear()

    def check(self, tables: Iterable[list[int]] | None = None) -> None:
        """Asserts the states above and, given the tables of all sequences and the sources of copies under way, that
        reference counts are theirs."""
        free, idle = set(self._free), set(self._idle) | set(self._kept)
        assert len(idle) == len(self._idle) + len(self._kept), "a block is idle twice"
        used = {block for block, count in enumerate(self._num_refs) if count > 0}
        assert min(self._num_refs, default=0) >= 0, "a reference count is negative"
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & idle and not free & used and not idle & used, "a block is in two states"
        assert len(free) + len(idle) + len(used) == self.num_blocks, "a block is lost"
        holding = [block for block, key in enumerate(self._key_of) if key is not None]
        assert idle <= set(holding), "an idle block has no key"
        assert not free.intersection(holding), "a free block has a key"
        assert self.caching or not holding, "a block is published though prefix caching is off"
        self._index.check()
        if tables is not None:
            counts = Counter(block for table in tables for block in table)
            for block, count in enumerate(self._num_refs):
                assert counts[block] == count, f"block {block}: {count} references, {counts[block]} users"
