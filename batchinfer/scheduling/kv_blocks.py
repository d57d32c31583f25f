"""The blocks of a sequence in all KV groups at once.

Responsible for: keeping the groups in step (a prefix counts as far as every group has it, an allocation succeeds in
all groups or in none), what is copied where a prefix ends inside a block, and a sequence's own counters of slots and
published blocks. Not for: one group's blocks (`block_manager`), nor who gets blocks and who gives them back
(`scheduler`). A group's window is not made use of: blocks that have left it are kept until the sequence ends, which
costs memory and makes prefix hits simple.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from math import lcm
from typing import NamedTuple

from batchinfer.scheduling.block_manager import BlockManager
from batchinfer.scheduling.branches import TOKEN_BYTES, run_of
from batchinfer.scheduling.prefix_index import PrefixChain
from batchinfer.scheduling.sequence import NEVER, Sequence
from batchinfer.scheduling.wanted import Wanted
from batchinfer.types.step import BlockCopy, KVGroup


class PrefixMatch(NamedTuple):
    """A computed prefix: num_tokens, which every group has. For each group the full blocks, and the block whose
    leading slots hold the tokens behind them, if there is one; both may reach further than num_tokens."""

    num_tokens: int
    blocks: tuple[list[int], ...]
    parts: tuple[int | None, ...]


NO_MATCH = PrefixMatch(0, (), ())


class KVBlocks:
    """One block manager for each group; `sizes` are their block sizes."""

    __slots__ = ("_caching", "_match_unit", "_one_group", "_reserves", "managers", "max_tokens", "sizes", "wanted")

    def __init__(self, groups: SequenceOf[KVGroup], *, enable_prefix_caching: bool) -> None:
        self.wanted = Wanted()
        self.managers = tuple(
            BlockManager(g, enable_prefix_caching=enable_prefix_caching, wanted=self.wanted) for g in groups
        )
        self.sizes = tuple(m.block_size for m in self.managers)
        self.max_tokens = min(m.num_blocks * m.block_size for m in self.managers)  # of one sequence
        self._one_group = len(self.sizes) == 1
        self._caching = enable_prefix_caching
        self._match_unit = lcm(*self.sizes)  # a prefix of such a length ends at a block's edge in every group
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

    def note_wanted(self, seq: Sequence) -> None:
        """The sequence waits: blocks of its prefix had better stay."""
        if not seq.chains:
            return
        seq.run = run = run_of(seq.token_ids)
        for chain in seq.chains:
            chain.extend(run[len(chain.keys) * chain.block_bytes :])
            if seq.reads_cache:
                self.wanted.note(seq.seq_id, chain.hashes)

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

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest computed prefix, token by token. The last token always runs. Holds until blocks are taken."""
        if not seq.reads_cache:
            return NO_MATCH
        limit = len(seq.token_ids) - 1
        if self._one_group:
            reach, blocks, part = self._match(0, seq, limit)
            return PrefixMatch(reach, (blocks,), (part,)) if reach else NO_MATCH
        found: list[list[int]] = []
        parts: list[int | None] = []
        for group in range(len(self.managers)):
            limit, blocks, part = self._match(group, seq, limit)
            if not limit:
                return NO_MATCH
            found.append(blocks)
            parts.append(part)
        return PrefixMatch(limit, tuple(found), tuple(parts))

    def _match(self, group: int, seq: Sequence, limit: int) -> tuple[int, list[int], int | None]:
        """What one group has of the first `limit` tokens: (how many, full blocks, the block that goes on from them)."""
        manager, size, chain = self.managers[group], self.sizes[group], seq.chains[group]
        blocks = manager.match(chain, limit // size)
        reach = len(blocks) * size
        if reach == limit:
            return reach, blocks, None
        following = seq.run[reach * TOKEN_BYTES : min(reach + size, limit) * TOKEN_BYTES]
        count, part = manager.match_part(chain.parent_of(len(blocks)), following)
        return reach + count, blocks, part

    def allocate(self, seq: Sequence, match: PrefixMatch, *, keep_reserve: bool) -> bool:
        """Blocks for all known tokens, those of the matched prefix among them; `seq.copies` where it ends inside a
        block. False, and nothing done, if there are too few. With `keep_reserve`, some are left to those who are
        decoding, lest they throw `seq` out again."""
        matched = match.num_tokens
        if self._allocate(seq, match, matched, keep_reserve):
            return True
        # A copy holds its source too: a sequence that just fits must not wait for ever for that block more.
        whole = matched // self._match_unit * self._match_unit
        return whole < matched and self._allocate(seq, match, whole, keep_reserve)

    def _allocate(self, seq: Sequence, match: PrefixMatch, matched: int, keep_reserve: bool) -> bool:
        num_tokens = len(seq.token_ids)
        shares: list[tuple[list[int], list[int], int]] = []  # by group: full blocks, source of the copy, new blocks
        for group, manager in enumerate(self.managers):
            size = manager.block_size
            prefix: list[int] = []
            source: list[int] = []
            if matched:
                full = match.blocks[group]
                num_whole = matched // size
                prefix = full[:num_whole]
                if matched % size:
                    part = full[num_whole] if num_whole < len(full) else match.parts[group]
                    assert part is not None
                    source = [part]
            count = -(-num_tokens // size) - len(prefix)
            spare = manager.num_available - count - (self._reserves[group] if keep_reserve else 0)
            # What is taken from the cache is not available any more; most often there is plenty.
            if spare < len(prefix) + 1 and spare < manager.num_idle_among(prefix) + manager.num_idle_among(source):
                return False
            shares.append((prefix, source, count))
        self.wanted.forget(seq.seq_id)
        copies: list[BlockCopy] = []
        for group, (prefix, source, count) in enumerate(shares):
            manager, table = self.managers[group], seq.block_tables[group]
            if prefix:
                manager.acquire(prefix)
                table += prefix
            if source:
                manager.acquire(source)  # until the copy is done: nobody may write to it before
            manager.allocate(count, table)
            if source:
                copies.append(BlockCopy(group, source[0], table[len(prefix)]))
        if copies:
            seq.copies = tuple(copies)
        seq.num_computed = matched
        self._update_slots(seq)
        if self._caching:
            seq.num_published = [len(prefix) for prefix, _, _ in shares]
            self._set_publish_at(seq)
        return True

    def copied(self, seq: Sequence) -> None:
        """The sequence's copies are done, or not needed any more: their sources are let go."""
        for copy in seq.copies:
            self.managers[copy.group].release([copy.source])
        seq.copies = ()

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """A block more in each group whose blocks so many tokens outgrow. False if some group has none left; what
        the others gave stays with the sequence."""
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
            known = len(chain.keys)
            if known < full:
                chain.extend(run_of(tokens[known * manager.block_size : full * manager.block_size]))
            manager.publish(seq.block_tables[group], chain, seq.num_published[group], full)
            seq.num_published[group] = full
        self._set_publish_at(seq)
        return before

    def publish_tail(self, seq: Sequence) -> None:
        """Makes the last block findable as far as it is filled."""
        tokens, computed = seq.token_ids, seq.num_computed
        for manager, size, chain, table in zip(self.managers, self.sizes, seq.chains, seq.block_tables, strict=True):
            full = computed // size
            if full * size < computed:
                manager.publish_tail(table[full], chain.parent_of(full), run_of(tokens[full * size : computed]))

    def release(self, seq: Sequence) -> None:
        """Gives all blocks back: nothing of the sequence counts as computed any more."""
        self.wanted.forget(seq.seq_id)
        if seq.copies:
            self.copied(seq)
        for manager, table in zip(self.managers, seq.block_tables, strict=True):
            manager.release(table)
        seq.num_published = []
        seq.num_computed = 0
        seq.num_slots = 0
        seq.publish_at = NEVER

    def hold(self, seq: Sequence) -> list[tuple[int, list[int]]]:
        """(group, blocks) that the sequence uses, and what its copies read, referenced once more until `let_go`."""
        held = [(group, table[:]) for group, table in enumerate(seq.block_tables)]
        held += [(copy.group, [copy.source]) for copy in seq.copies]
        for group, blocks in held:
            self.managers[group].acquire(blocks)
        return held

    def let_go(self, held: SequenceOf[tuple[int, list[int]]]) -> None:
        """Ends `hold`."""
        for group, blocks in held:
            self.managers[group].release(blocks)

    # Written out, since both run once or more for every row.

    def _set_publish_at(self, seq: Sequence) -> None:
        if self._one_group:
            seq.publish_at = (seq.num_published[0] + 1) * self.sizes[0]
            return
        nearest = NEVER
        for published, size in zip(seq.num_published, self.sizes, strict=True):
            end = (published + 1) * size
            if end < nearest:
                nearest = end
        seq.publish_at = nearest

    def _update_slots(self, seq: Sequence) -> None:
        if self._one_group:
            seq.num_slots = len(seq.block_tables[0]) * self.sizes[0]
            return
        fewest = NEVER
        for table, size in zip(seq.block_tables, self.sizes, strict=True):
            slots = len(table) * size
            if slots < fewest:
                fewest = slots
        seq.num_slots = fewest
