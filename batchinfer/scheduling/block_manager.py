"""The KV blocks of one group of layers: who uses them, which are free, which hold a prefix worth keeping.

Responsible for: reference counts, the free list, eviction of unreferenced cached blocks. Not for: keys
(`prefix_index`), nor when to allocate, publish or release (`scheduler`). Every block is in one of three states:

    free    no reference, no key        taken first
    idle    no reference, has a key     can be matched, is evicted when no block is free or too many are idle
    used    referenced by 1 or more sequences or copies under way, with or without a key

Idle blocks are evicted least recently used first, but those that somebody who waits will ask for (`wanted`) after
all others: they are set apart when their turn comes. Blocks that one sequence let go stand together, in its order:
who wants a block wants those before it, so one look at the first says that nobody wants any, and they go in one piece.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from batchinfer.scheduling.prefix_index import PrefixChain, PrefixIndex
from batchinfer.scheduling.wanted import Wanted
from batchinfer.types.step import KVGroup

# Beyond so many idle blocks the oldest that nobody waits for is taken before one that was never used: on a host, memory
# that is touched for the first time costs more than the cache of a prefix that is done with is worth. While others
# wait, what they want is known, and what nobody wants is hardly worth anything.
MAX_IDLE = 1024
MAX_IDLE_IN_QUEUE = 64

# This part of all blocks may be evicted before it is needed, so that most allocations find free ones.
EVICTED_AT_ONCE = 1 / 256


class BlockManager:
    """Blocks 0 .. num_blocks-1 of one KV group."""

    __slots__ = (
        "_at_once",
        "_free",
        "_group_of",
        "_idle",
        "_index",
        "_kept",
        "_key_of",
        "_num_groups",
        "_num_idle",
        "_num_kept",
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
        self._at_once = max(1, int(group.num_blocks * EVICTED_AT_ONCE))
        self._free = list(range(group.num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        # By number, least recently used first: blocks of one sequence, never none, in its order.
        self._idle: OrderedDict[int, list[int]] = OrderedDict()
        self._kept: OrderedDict[int, list[int]] = OrderedDict()  # idle too, but wanted when their turn came
        self._num_idle = self._num_kept = 0  # blocks in them
        self._num_groups = 0
        self._group_of = [0] * group.num_blocks  # of an idle block: the number of what it stands in
        self._wanted = Wanted() if wanted is None else wanted
        self._num_refs = [0] * group.num_blocks
        self._index = PrefixIndex(group.num_blocks, group.block_size)
        self._key_of = self._index.key_of

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + self._num_idle + self._num_kept

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
                self._take_idle(block)
            num_refs[block] += 1

    def _take_idle(self, block: int) -> None:
        """Takes a block out of its group; nearly always the first, since a prefix is taken from its beginning."""
        number = self._group_of[block]
        if number in self._idle:
            groups = self._idle
            self._num_idle -= 1
        else:
            groups = self._kept
            self._num_kept -= 1
        group = groups[number]
        group.remove(block)
        if not group:
            del groups[number]

    def allocate(self, count: int, table: list[int]) -> None:
        """Appends `count` blocks without a key to the table; the caller made sure that they are available."""
        free, num_refs = self._free, self._num_refs
        most_idle = MAX_IDLE_IN_QUEUE if self._wanted.waiting else MAX_IDLE
        if len(free) < count or self._num_idle > most_idle:
            self._evict(count, most_idle)
        for _ in range(count):
            block = free.pop()
            num_refs[block] = 1
            table.append(block)

    def _evict(self, count: int, most_idle: int) -> None:
        """Frees idle blocks, oldest first, while it must: while more than `most_idle` are idle that nobody is known to
        want, or less than `count` are free."""
        idle, kept, key_of = self._idle, self._kept, self._key_of
        last, waiting = self._wanted.last, self._wanted.waiting
        must = count - len(self._free)
        most = max(count, self._at_once) if must > 0 else count
        evicted: list[int] = []
        while idle and len(evicted) < count and (len(evicted) < must or self._num_idle > most_idle):
            number = next(iter(idle))
            group = idle[number]
            size = stop = len(group)
            least = max(0, size - (most - len(evicted)))
            if last.get(hash(key_of[group[0]])) not in waiting:  # see `Wanted`
                stop = least
            else:
                while stop > least and last.get(hash(key_of[group[stop - 1]])) not in waiting:
                    stop -= 1
            evicted += group[stop:]
            del group[stop:]
            self._num_idle -= size - stop
            if stop > least or not stop:
                del idle[number]
                if stop:
                    kept[number] = group
                    self._num_idle -= stop
                    self._num_kept += stop
        while len(evicted) < must:
            number = next(iter(kept))
            group = kept[number]
            evicted.append(group.pop())
            self._num_kept -= 1
            if not group:
                del kept[number]
        self.num_evictions += len(evicted)
        self._index.drop(evicted)
        self._free += evicted

    def publish(self, table: list[int], chain: PrefixChain, start: int, stop: int) -> None:
        """Makes blocks `start .. stop` of a sequence, all of whose tokens have been computed, available to others."""
        self._index.publish(table[start:stop], chain.keys[start:stop])

    def publish_tail(self, block: int, parent: int, run: bytes) -> None:
        """Makes the filled part of a block available for copying; its sequence may write behind it."""
        self._index.publish_tail(block, (parent, run))

    def release(self, table: list[int]) -> None:
        """Gives a sequence's references back and empties its table. Later blocks are evicted before earlier
        ones: a prefix without its tail is of use, a tail without its prefix is not."""
        num_refs, free, key_of, group_of = self._num_refs, self._free, self._key_of, self._group_of
        number = self._num_groups
        group: list[int] = []
        for block in table:
            count = num_refs[block] - 1
            num_refs[block] = count
            if count == 0:
                if key_of[block] is not None:
                    group_of[block] = number
                    group.append(block)
                else:
                    free.append(block)
            else:
                assert count > 0, f"block {block} is released more often than it was taken"
        if group:
            self._idle[number] = group
            self._num_idle += len(group)
            self._num_groups += 1
        table.clear()

    def check(self, tables: Iterable[list[int]] | None = None) -> None:
        """Asserts the states above and, given the tables of all sequences and the sources of copies under way, that
        reference counts are theirs."""
        groups = {**self._idle, **self._kept}
        free, idle = set(self._free), {block for group in groups.values() for block in group}
        assert all(groups.values()) and len(groups) == len(self._idle) + len(self._kept), "a group is empty, or twice"
        assert all(self._group_of[block] == number for number, group in groups.items() for block in group)
        assert sum(map(len, self._idle.values())) == self._num_idle, "the number of idle blocks is wrong"
        assert sum(map(len, self._kept.values())) == self._num_kept, "the number of blocks that are kept is wrong"
        assert len(idle) == self._num_idle + self._num_kept, "a block is idle twice"
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
