"""The blocks of a sequence in all KV groups at once.

Responsible for: keeping the groups in step (a prefix counts as far as every group has it, an allocation succeeds in
all groups or in none), and a sequence's own counters of slots and published blocks. Not for: one group's blocks
(`block_manager`), nor who gets blocks and who gives them back (`scheduler`). A group's window is not made use of:
blocks that have left it are kept until the sequence ends, which costs memory and makes prefix hits simple.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from math import lcm

from batchinfer.scheduling.block_manager import BlockManager
from batchinfer.scheduling.prefix_index import PrefixChain
from batchinfer.scheduling.sequence import NEVER, Sequence
from batchinfer.types.step import KVGroup


class KVBlocks:
    """One block manager for each group; `sizes` are their block sizes."""

    __slots__ = ("_caching", "_match_unit", "_reserves", "managers", "sizes")

    def __init__(self, groups: SequenceOf[KVGroup], *, enable_prefix_caching: bool) -> None:
        self.managers = tuple(BlockManager(g, enable_prefix_caching=enable_prefix_caching) for g in groups)
        self.sizes = tuple(m.block_size for m in self.managers)
        self._caching = enable_prefix_caching
        self._match_unit = lcm(*self.sizes)  # a matched prefix ends at a block's edge in every group
        self._reserves = tuple(m.num_blocks // 100 for m in self.managers)

    def register(self, seq: Sequence) -> None:
        """Gives a new sequence its empty block tables and chains of keys."""
        sizes = self.sizes
        if len(sizes) == 1:
            seq.block_tables = ([],)
            if self._caching:
                seq.chains = (PrefixChain(sizes[0]),)
        else:
            seq.block_tables = tuple([] for _ in sizes)
            if self._caching:
                chains = {size: PrefixChain(size) for size in sizes}
                seq.chains = tuple(chains[size] for size in sizes)

    def never_fits(self, seq: Sequence) -> str | None:
        """Why the known tokens can't be held even by an empty engine; None if they can."""
        num_tokens = len(seq.token_ids)
        for manager in self.managers:
            if num_tokens > manager.num_blocks * manager.block_size:
                return (
                    f"the row alone needs more KV memory than the engine has: {num_tokens} tokens take "
                    f"{-(-num_tokens // manager.block_size)} blocks of {manager.block_size}, there are "
                    f"{manager.num_blocks}; raise engine.kv_cache_memory or lower engine.max_model_len"
                )
        return None

    def match(self, seq: Sequence) -> tuple[int, int]:
        """(tokens of the prefix that every group has, most tokens that it may have). The last token always runs."""
        tokens, unit = seq.token_ids, self._match_unit
        num_tokens = len(tokens)
        for chain in seq.chains:
            chain.extend(tokens, num_tokens // chain.block_size)
        if not seq.reads_cache:
            return 0, 0
        matched = limit = (num_tokens - 1) // unit * unit
        for manager, size, chain in zip(self.managers, self.sizes, seq.chains, strict=True):
            matched = len(manager.match(chain, matched // size)) * size // unit * unit
            if not matched:
                break
        return matched, limit

    def allocate(self, seq: Sequence, matched: int, *, keep_reserve: bool) -> bool:
        """Blocks for all known tokens, the first `matched` of which are cached. False, and nothing done, if there
        are too few. With `keep_reserve`, some are left to those who are decoding, lest they throw `seq` out again."""
        num_tokens = len(seq.token_ids)
        prefixes: list[list[int]] = []
        counts: list[int] = []
        for group, manager in enumerate(self.managers):
            size = manager.block_size
            prefix = manager.match(seq.chains[group], matched // size) if matched else []
            count = -(-num_tokens // size) - len(prefix)
            available = manager.num_available - manager.num_idle_among(prefix)
            if count > available - (self._reserves[group] if keep_reserve else 0):
                return False
            prefixes.append(prefix)
            counts.append(count)
        for manager, table, prefix, count in zip(self.managers, seq.block_tables, prefixes, counts, strict=True):
            if prefix:
                manager.acquire(prefix)
                table.extend(prefix)
            manager.allocate(count, table)
        seq.num_computed = matched
        self._update_slots(seq)
        if self._caching:
            seq.num_published = [len(prefix) for prefix in prefixes]
            self._set_publish_at(seq)
        return True

    def grow(self, seq: Sequence) -> bool:
        """A block more in each group whose blocks the known tokens outgrow. False if some group has none left; what
        the others gave stays with the sequence."""
        num_tokens = len(seq.token_ids)
        for manager, size, table in zip(self.managers, self.sizes, seq.block_tables, strict=True):
            if len(table) * size < num_tokens:
                if not manager.num_available:
                    return False
                manager.allocate(1, table)
        self._update_slots(seq)
        return True

    def publish(self, seq: Sequence) -> int:
        """Makes every block findable whose tokens have now all been computed; returns how many of the first group's
        were findable before."""
        tokens, computed, before = seq.token_ids, seq.num_computed, seq.num_published[0]
        for group, manager in enumerate(self.managers):
            chain = seq.chains[group]
            full = computed // manager.block_size
            chain.extend(tokens, full)
            manager.publish(seq.block_tables[group], chain, seq.num_published[group], full)
            seq.num_published[group] = full
        self._set_publish_at(seq)
        return before

    def release(self, seq: Sequence) -> None:
        """Gives all blocks back: nothing of the sequence counts as computed any more."""
        for manager, table in zip(self.managers, seq.block_tables, strict=True):
            manager.release(table)
        seq.num_published = []
        seq.num_computed = 0
        seq.num_slots = 0
        seq.publish_at = NEVER

    # Written out, since both run once or more for every row.

    def _set_publish_at(self, seq: Sequence) -> None:
        nearest = NEVER
        for published, size in zip(seq.num_published, self.sizes, strict=True):
            end = (published + 1) * size
            if end < nearest:
                nearest = end
        seq.publish_at = nearest

    def _update_slots(self, seq: Sequence) -> None:
        fewest = NEVER
        for table, size in zip(seq.block_tables, self.sizes, strict=True):
            slots = len(table) * size
            if slots < fewest:
                fewest = slots
        seq.num_slots = fewest
