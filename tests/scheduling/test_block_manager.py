"""Blocks are in one state at a time, and a prefix is found only where it was computed."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchinfer.scheduling import BlockManager, PrefixChain, block_manager
from batchinfer.scheduling.branches import run_of
from batchinfer.scheduling.wanted import Wanted
from batchinfer.types.step import KVGroup

SIZE = 4
MAX_IDLE, MAX_IDLE_IN_QUEUE = block_manager.MAX_IDLE, block_manager.MAX_IDLE_IN_QUEUE


def manager_of(num_blocks: int, wanted: Wanted | None = None) -> BlockManager:
    return BlockManager(KVGroup(num_blocks=num_blocks, block_size=SIZE), wanted=wanted)


def chain_of(tokens: list[int]) -> PrefixChain:
    chain = PrefixChain(SIZE)
    chain.extend(run_of(tokens))
    return chain


def fill(manager: BlockManager, tokens: list[int]) -> list[int]:
    """Allocates, publishes and returns a table for the tokens."""
    table: list[int] = []
    manager.allocate(-(-len(tokens) // SIZE), table)
    chain = chain_of(tokens)
    manager.publish(table, chain, 0, len(chain.keys))
    return table


def test_a_published_prefix_is_found_up_to_the_first_difference() -> None:
    manager = manager_of(8)
    tokens = list(range(12))
    table = fill(manager, tokens)
    assert manager.match(chain_of(tokens), 3) == table
    assert manager.match(chain_of(tokens), 2) == table[:2]
    assert manager.match(chain_of([*tokens[:8], 99, 9, 10, 11]), 3) == table[:2]
    assert manager.match(chain_of([99, *tokens[1:]]), 3) == []
    manager.check([table])


def test_the_same_tokens_behind_another_prefix_are_another_block() -> None:
    manager = manager_of(8)
    fill(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.match(chain_of([5, 6, 7, 8]), 1) == []


def test_a_hit_compares_tokens_and_not_the_hash_alone() -> None:
    manager = manager_of(4)
    table: list[int] = []
    manager.allocate(1, table)
    ours, other = chain_of([1, 2, 3, 4]), chain_of([5, 6, 7, 8])
    manager.publish(table, ours, 0, 1)
    other.hashes[0] = ours.hashes[0]  # two prefixes that collide
    assert manager.match(other, 1) == []
    assert manager.match(ours, 1) == table


def test_released_blocks_stay_until_they_are_needed_and_go_least_recently_used_first() -> None:
    manager = manager_of(4)
    first, second = fill(manager, [1] * 8), fill(manager, [2] * 8)
    blocks_of_first, blocks_of_second = list(first), list(second)
    manager.release(first)
    manager.release(second)
    assert manager.num_available == 4
    assert manager.match(chain_of([1] * 8), 2) == blocks_of_first
    assert manager.match(chain_of([2] * 8), 2) == blocks_of_second
    table: list[int] = []
    manager.allocate(2, table)
    manager.check([table])
    assert manager.num_evictions == 2
    assert manager.match(chain_of([1] * 8), 2) == []
    assert manager.match(chain_of([2] * 8), 2) == blocks_of_second


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    manager = manager_of(3)
    table = fill(manager, list(range(12)))
    head = table[:2]
    manager.release(table)
    manager.allocate(1, table)
    assert manager.match(chain_of(list(range(12))), 3) == head


def test_what_somebody_waits_for_goes_last_and_what_comes_behind_it_first() -> None:
    wanted = Wanted()
    manager = manager_of(8, wanted)
    tokens, others = list(range(24)), [99] * 8
    ours, theirs = fill(manager, tokens), fill(manager, others)
    wanted.note(1, chain_of(tokens[:10]).hashes)
    ours_were = list(ours)
    manager.release(ours)
    manager.release(theirs)
    table: list[int] = []
    for num_left in (5, 4, 3, 2, 2, 2, 1, 0):  # of ours: behind what is wanted, then the others, then what is wanted
        manager.allocate(1, table)
        manager.check([table])
        assert manager.match(chain_of(tokens), 6) == ours_were[:num_left]


def test_a_prefix_that_was_kept_can_be_taken_and_is_evicted_like_others_then() -> None:
    wanted = Wanted()
    manager = manager_of(4, wanted)
    tokens = list(range(8))
    table = fill(manager, tokens)
    wanted.note(1, chain_of(tokens).hashes)
    manager.release(table)
    manager.allocate(3, table)  # the two that were never used, and one of the two that are wanted
    kept = manager.match(chain_of(tokens), 2)
    assert len(kept) == 1
    manager.acquire(kept)
    manager.check([table, list(kept)])
    wanted.forget(1)
    manager.release(kept)
    manager.allocate(1, table)
    manager.check([table])
    assert manager.match(chain_of(tokens), 2) == []


def test_eviction_is_done_for_several_blocks_at_once_in_a_large_pool_only() -> None:
    evicted = []
    for num_blocks in (16, 1024):
        manager = manager_of(num_blocks)
        table = fill(manager, list(range(12 * SIZE)))
        rest: list[int] = []
        manager.allocate(num_blocks - 12, rest)
        manager.release(table)
        for _ in range(4):
            manager.allocate(1, rest)
        manager.check([rest])
        assert len(manager.match(chain_of(list(range(12 * SIZE))), 12)) == 8
        manager.allocate(1, rest)
        evicted.append(manager.num_evictions)
    assert evicted == [5, 8]


def test_a_block_that_is_used_anew_has_lost_its_hash() -> None:
    manager = manager_of(1)
    table = fill(manager, [1, 2, 3, 4])
    manager.release(table)
    manager.allocate(1, table)
    assert manager.match(chain_of([1, 2, 3, 4]), 1) == []
    manager.release(table)
    assert manager.match(chain_of([1, 2, 3, 4]), 1) == []
    manager.check([])


def test_a_second_block_with_the_same_content_stays_private() -> None:
    manager = manager_of(4)
    first, second = fill(manager, [1, 2, 3, 4]), fill(manager, [1, 2, 3, 4])
    assert first != second
    shared = manager.match(chain_of([1, 2, 3, 4]), 1)
    assert shared == first
    manager.release(second)
    manager.check([first])
    manager.acquire(shared)
    manager.check([first, list(shared)])
    manager.release(first)
    assert manager.num_available == 3


@pytest.mark.parametrize("length", range(13))
def test_a_chain_holds_full_blocks_only(length: int) -> None:
    chain = chain_of(list(range(length)))
    assert len(chain.keys) == len(chain.hashes) == length // SIZE


def test_beyond_so_many_idle_blocks_the_oldest_that_nobody_wants_go_before_free_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_manager, "MAX_IDLE_IN_QUEUE", 2)
    wanted = Wanted()
    manager = manager_of(16, wanted)
    kept, oldest, newest = ([n] * (2 * SIZE) for n in (1, 2, 3))
    for filled in [fill(manager, tokens) for tokens in (kept, oldest, newest)]:
        manager.release(filled)
    wanted.note(0, chain_of(kept).hashes)
    assert manager.num_evictions == 0
    table: list[int] = []
    manager.allocate(3, table)
    assert manager.num_evictions == 2
    manager.check([table])
    found = [len(manager.match(chain_of(tokens), 2)) for tokens in (kept, oldest, newest)]
    assert found == [2, 0, 2]


def test_more_may_be_idle_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "MAX_IDLE_IN_QUEUE", 1)
    monkeypatch.setattr(block_manager, "MAX_IDLE", 4)
    wanted = Wanted()
    manager = manager_of(16, wanted)
    for n in range(6):
        manager.release(fill(manager, [n] * SIZE))
    assert manager.num_evictions == 1
    table: list[int] = []
    manager.allocate(1, table)
    assert (manager.num_evictions, manager.num_available) == (2, 15)
    manager.allocate(4, table)
    assert manager.num_evictions == 2, "4 may be idle"
    wanted.note(0, chain_of([99] * SIZE).hashes)
    manager.allocate(2, table)
    assert manager.num_evictions == 4
    wanted.forget(0)
    manager.allocate(1, table)
    assert manager.num_evictions == 4
    manager.check([table])


class Blocks(RuleBasedStateMachine):
    """Sequences over few tokens come, grow, publish and go in any order, over too few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = Wanted()
        self.manager = manager_of(7, self.wanted)
        self.live: list[tuple[list[int], PrefixChain, list[int]]] = []
        self.content: dict[int, list[int]] = {}  # block -> the whole prefix that it was last published with

    @initialize(
        at_once=st.integers(1, 5),
        most_idle=st.sampled_from([0, 1, 3, MAX_IDLE]),
        in_queue=st.sampled_from([0, 2, MAX_IDLE_IN_QUEUE]),
    )
    def evict(self, at_once: int, most_idle: int, in_queue: int) -> None:
        self.manager._at_once = at_once
        block_manager.MAX_IDLE, block_manager.MAX_IDLE_IN_QUEUE = most_idle, in_queue

    def teardown(self) -> None:
        block_manager.MAX_IDLE, block_manager.MAX_IDLE_IN_QUEUE = MAX_IDLE, MAX_IDLE_IN_QUEUE

    @rule(seed=st.integers(0, 6), length=st.integers(1, 16), seq_id=st.integers(0, 3))
    def want(self, seed: int, length: int, seq_id: int) -> None:
        rng = random.Random(seed)
        self.wanted.note(seq_id, chain_of([rng.randrange(2) for _ in range(length)]).hashes)

    @rule(seq_id=st.integers(0, 3))
    def want_no_longer(self, seq_id: int) -> None:
        self.wanted.forget(seq_id)

    @rule(seed=st.integers(0, 6), length=st.integers(1, 16))
    def come(self, seed: int, length: int) -> None:
        rng = random.Random(seed)
        tokens = [rng.randrange(2) for _ in range(length)]
        chain = chain_of(tokens)
        prefix = self.manager.match(chain, (length - 1) // SIZE)
        for i, block in enumerate(prefix):
            assert self.content[block] == tokens[: (i + 1) * SIZE], "a prefix hit on other tokens"
        needed = -(-length // SIZE) - len(prefix)
        if needed > self.manager.num_available - self.manager.num_idle_among(prefix):
            return
        self.manager.acquire(prefix)
        table = list(prefix)
        self.manager.allocate(needed, table)
        assert len(set(table)) == len(table)
        self.live.append((tokens, chain, table))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), upto=st.integers(0, 4))
    def publish(self, which: int, upto: int) -> None:
        tokens, chain, table = self.live[which % len(self.live)]
        for i in range(min(upto, len(chain.keys))):
            if self.manager.match(chain, i + 1)[i:] or self.holds(table[i]):
                continue
            self.manager.publish(table, chain, i, i + 1)
            if self.holds(table[i]):
                self.content[table[i]] = tokens[: (i + 1) * SIZE]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def go(self, which: int) -> None:
        _, _, table = self.live.pop(which % len(self.live))
        self.manager.release(table)
        assert table == []

    def holds(self, block: int) -> bool:
        return self.manager._index.key_of[block] is not None

    @invariant()
    def is_right(self) -> None:
        self.manager.check([table for _, _, table in self.live])


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
