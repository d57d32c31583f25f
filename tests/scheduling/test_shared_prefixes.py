"""Prefixes are shared token by token, computed once, and kept for those who wait; steps stay full meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.errors import EngineError
from batchinfer.scheduling import Sequence, Status, scheduler
from batchinfer.types.request import SamplingParams
from batchinfer.types.rows import ErrorClass, RowError
from batchinfer.types.step import BlockCopy, Chunk, KVGroup, SequenceSpec, StepPlan, StepResult
from tests.scheduling.conftest import Bench, numbers


def num_common(first: list[int], second: list[int]) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def least_computed(rows: Iterable[list[int]]) -> int:
    """Prompt tokens that must run if everything is shared that can be; the last of each prompt always runs."""
    total = 0
    before: list[int] = []
    for row in sorted(rows):
        total += len(row) - min(num_common(before, row), len(row) - 1)
        before = row
    return total


def num_computed(bench: Bench) -> int:
    return bench.scheduler.num_prompt_tokens - bench.scheduler.num_cached_tokens


# -------------------------------------------------------------------- token by token


@pytest.mark.parametrize("common", [1, 15, 16, 17, 36, 47, 63])
def test_a_prefix_is_shared_to_the_token(common: int) -> None:
    bench = Bench()
    prompt = numbers(64, seed=0)
    bench.add(prompt, max_tokens=1)
    bench.drain()
    second = bench.add([*prompt[:common], 999, *numbers(10, seed=1)], max_tokens=4)
    bench.drain()
    bench.assert_right()
    assert second.num_cached_tokens == common
    assert bench.scheduler.num_copied_tokens == common % 16
    assert bench.runner.num_copies == (1 if common % 16 else 0)


def test_the_child_with_most_in_common_is_copied() -> None:
    bench = Bench(max_num_seqs=256, budget=8192)
    head = numbers(36, seed=0)
    for i in range(200):
        bench.add([*head, *(i >> shift & 1 for shift in range(8)), *numbers(20, seed=i)], max_tokens=1)
    bench.drain()
    late = bench.add([*head, *(77 >> shift & 1 for shift in range(8)), 999], max_tokens=1)
    bench.drain()
    bench.assert_right()
    assert late.num_cached_tokens == 44


def test_the_filled_part_of_a_running_sequences_last_block_is_shared() -> None:
    bench = Bench()
    prompt = numbers(20, seed=0)
    first = bench.add(prompt, max_tokens=100)
    for _ in range(5):
        bench.step()
    second = bench.add(prompt, max_tokens=4)
    plan = bench.step()
    assert plan is not None
    assert [copy.source for copy in plan.copies] == [first.block_tables[0][1]]
    assert second.num_cached_tokens == 19
    bench.drain()
    bench.assert_right()


def test_and_after_it_has_ended() -> None:
    bench = Bench()
    prompt = numbers(20, seed=0)
    bench.add(prompt, max_tokens=3)
    bench.drain()
    second = bench.add([*prompt[:18], 999], max_tokens=3)
    bench.drain()
    bench.assert_right()
    assert second.num_cached_tokens == 18


def test_groups_with_blocks_of_other_sizes_copy_where_their_own_blocks_end() -> None:
    groups = (KVGroup(num_blocks=60, block_size=8), KVGroup(num_blocks=60, block_size=12))
    bench = Bench(groups=groups)
    prompt = numbers(60, seed=0)
    bench.add(prompt, max_tokens=1)
    bench.drain()
    copied = {}
    for common in (24, 32, 36, 41):
        seq = bench.add([*prompt[:common], 999], max_tokens=2)
        plan = bench.step()
        assert plan is not None
        copied[seq.num_cached_tokens] = [copy.group for copy in plan.copies]
        bench.drain()
    bench.assert_right()
    assert copied == {24: [], 32: [1], 36: [0], 41: [0, 1]}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=25),
    block_size=st.sampled_from([1, 3, 4, 16]),
    budget=st.sampled_from([3, 20, 500]),
    max_num_seqs=st.sampled_from([1, 4, 64]),
    in_order=st.booleans(),
)
def test_no_token_is_computed_twice(
    rows: list[list[int]], block_size: int, budget: int, max_num_seqs: int, in_order: bool
) -> None:
    """With room for everything, and where waiting costs nothing, as many tokens run as the tree of prompts has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "STEP_COST_TOKENS", 0)
        bench = Bench(num_blocks=2000, block_size=block_size, budget=budget, max_num_seqs=max_num_seqs)
        for row in sorted(rows) if in_order else rows:
            bench.add(row, max_tokens=2)
        bench.drain()
    bench.assert_right()
    extra = num_computed(bench) - least_computed(rows)
    # Out of order a prompt may come after one that goes on behind it; its last token then runs again.
    assert extra == 0 if in_order else 0 <= extra < len(rows)


# -------------------------------------------------------------------- sources stay what they are


def test_a_source_is_not_evicted_for_others_of_the_same_step() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    prompt = numbers(8, seed=0)
    bench.add(prompt, max_tokens=1)
    bench.drain()  # two idle blocks: the older is the second one, which is going to be the source
    old = bench.add([*prompt[:6], 999], max_tokens=4)
    greedy = bench.add(numbers(28, seed=1), max_tokens=4)  # would take every block that is not in use
    plan = bench.step()
    assert plan is not None and len(plan.copies) == 1
    assert old.num_cached_tokens == 6
    assert greedy.status is Status.WAITING
    bench.drain()
    bench.assert_right()
    assert not any(seq.error for seq in bench.done.values())


@pytest.mark.parametrize("num_others", range(1, 7))
def test_blocks_run_short_in_the_step_of_a_copy(num_others: int) -> None:
    bench = Bench(num_blocks=12, block_size=4)
    prompt = numbers(24, seed=0)
    bench.add(prompt, max_tokens=1)
    bench.drain()
    for i in range(num_others):
        bench.add([*prompt[: 22 - 3 * i], 999, i], max_tokens=6)
        bench.add(numbers(1 + 2 * i, seed=i), max_tokens=6)
    bench.drain()
    bench.assert_right()
    assert bench.runner.num_copies > 0
    assert not any(seq.error for seq in bench.done.values())


def test_one_that_just_fits_does_without_a_copy() -> None:
    bench = Bench(num_blocks=4)
    prompt = numbers(60, seed=0)
    bench.add(prompt, max_tokens=1)
    bench.drain()
    again = bench.add(prompt, max_tokens=1)  # the fourth block would have to be source and destination
    bench.drain()
    bench.assert_right()
    assert again.num_cached_tokens == 48
    assert bench.runner.num_copies == 0


def test_copies_of_a_lost_plan_are_told_again() -> None:
    bench = Bench()
    prompt = numbers(20, seed=0)
    bench.add(prompt, max_tokens=1)
    bench.drain()
    bench.add([*prompt[:18], 999], max_tokens=2)
    lost = bench.scheduler.schedule()
    bench.scheduler.check()
    again = bench.scheduler.schedule()
    assert lost is not None and again is not None
    assert len(lost.copies) == 1 and again.copies == lost.copies
    bench.drain()
    bench.assert_right()


def test_copies_wait_for_their_chunk() -> None:
    """A plan names no copy whose chunk it does not run: that step may fail as a whole and still count as done."""
    bench = Bench(budget=64)
    prompt = numbers(20, seed=0)
    bench.add(numbers(5, seed=1), max_tokens=60)
    bench.add(prompt, max_tokens=1)
    bench.step()
    late = bench.add([*prompt[:18], 999], max_tokens=2)
    lost = bench.scheduler.schedule()
    assert lost is not None and len(lost.copies) == 1
    bench.scheduler.max_num_batched_tokens = 1  # only the decoding sequence has room now
    plan = bench.step()
    assert plan is not None and plan.copies == () and len(plan.chunks) == 1
    bench.scheduler.max_num_batched_tokens = 64
    plan = bench.step()
    assert plan is not None and plan.copies == lost.copies
    bench.drain()
    bench.assert_right()
    assert late.num_cached_tokens == 18


@pytest.mark.parametrize("fault", ["abort", "error", "pre-emption"])
def test_the_source_of_a_copy_that_is_given_up_is_let_go(fault: str) -> None:
    bench = Bench(num_blocks=8)
    prompt = numbers(20, seed=0)
    bench.add(prompt, max_tokens=1)
    bench.drain()
    seq = bench.add([*prompt[:18], 999], max_tokens=2)
    plan = bench.scheduler.schedule()
    assert plan is not None and len(plan.copies) == 1
    if fault == "abort":
        bench.scheduler.abort(seq.seq_id)
    elif fault == "error":
        bench.runner.execute(plan)
        why = RowError(ErrorClass.NON_FINITE_LOGITS, "not a number")
        bench.scheduler.commit(plan, StepResult({}, errors={seq.seq_id: why}))
    else:
        bench.scheduler._preempt(seq)
    bench.scheduler.check()
    assert seq.copies == ()
    assert bench.scheduler.managers[0].num_available == 8
    bench.drain()
    bench.assert_right()


# -------------------------------------------------------------------- who waits


def test_few_tokens_are_not_worth_a_step() -> None:
    bench = Bench()
    head = numbers(10, seed=0)
    for i in range(3):
        bench.add([*head, 300 + i], max_tokens=1)
    plan = bench.step()
    assert plan is not None and len(plan.chunks) == 3
    bench.drain()
    bench.assert_right()
    assert bench.scheduler.num_cached_tokens == 0


def test_few_tokens_of_many_rows_are() -> None:
    bench = Bench()
    head = numbers(10, seed=0)
    for i in range(20):
        bench.add([*head, 300 + i], max_tokens=1)
    bench.drain()
    bench.assert_right()
    assert [len(plan) for plan in bench.plans] == [1, 19]
    assert bench.scheduler.num_cached_tokens == 19 * 10


def test_few_tokens_are_worth_waiting_for_where_others_fill_the_step() -> None:
    bench = Bench(max_num_seqs=2)
    head = numbers(10, seed=0)
    first, second = bench.add([*head, 300], max_tokens=1), bench.add([*head, 301], max_tokens=1)
    other = bench.add(numbers(12, seed=1), max_tokens=1)
    plan = bench.step()
    assert plan is not None
    assert [chunk.seq_id for chunk in plan.chunks] == [first.seq_id, other.seq_id]
    bench.drain()
    bench.assert_right()
    assert second.num_cached_tokens == 10


def test_one_row_computes_and_the_others_wait_for_blocks_and_what_comes_behind_them() -> None:
    bench = Bench()
    head = numbers(20, seed=0)  # a block and 4 tokens
    for i in range(8):
        bench.add([*head, 300 + i, *numbers(15, seed=i)], max_tokens=1)
    bench.drain()
    bench.assert_right()
    assert bench.scheduler.num_cached_tokens == 7 * 20


def test_one_waits_for_a_sequence_that_lags_behind_the_blocks_it_shares() -> None:
    """Two compute the same two blocks. The second has published none when the first has published both, and is then
    about to compute what comes behind them."""
    bench = Bench(block_size=4, budget=24)
    head, more = numbers(8, seed=0), numbers(12, seed=1)
    bench.add([*head, *numbers(14, seed=2)], max_tokens=1)
    lags = bench.add([*head, *more, 999], max_tokens=1, prompt_logprobs=0)  # reads no cache, so waits for nobody
    late = bench.add([*head, *more, 998], max_tokens=1)
    bench.step()
    assert lags.num_computed == 2 and late.status is Status.WAITING
    bench.step()
    bench.drain()
    bench.assert_right()
    assert [len(plan) for plan in bench.plans] == [2, 1, 1]
    assert late.num_cached_tokens == 20


# -------------------------------------------------------------------- what stays


def rows_around_a_head(bench: Bench) -> tuple[Sequence, Sequence, list[Sequence]]:
    """One row behind a head, others that need all blocks one after another, and a last one behind the head."""
    head = numbers(16, seed=0)
    first = bench.add([*head, 1], max_tokens=1)
    others = [bench.add(numbers(24, seed=1 + i), max_tokens=1) for i in range(6)]
    return first, bench.add([*head, 2], max_tokens=1), others


def test_a_prefix_that_waiting_rows_need_is_evicted_last() -> None:
    bench = Bench(num_blocks=12, block_size=4, max_num_seqs=1)
    _, last, _ = rows_around_a_head(bench)
    bench.drain()
    bench.assert_right()
    assert last.num_cached_tokens == 16
    assert bench.scheduler.managers[0].num_evictions >= 20


def test_a_prefix_that_nobody_needs_any_more_is_evicted_like_others() -> None:
    bench = Bench(num_blocks=12, block_size=4, max_num_seqs=1)
    first, last, _ = rows_around_a_head(bench)
    bench.step()
    bench.scheduler.abort(last.seq_id)
    bench.drain()
    again = bench.add(first.token_ids[:17], max_tokens=1)
    bench.drain()
    assert again.num_cached_tokens == 0


def test_a_needed_prefix_gives_way_where_nothing_else_is_left() -> None:
    bench = Bench(num_blocks=8, block_size=4, max_num_seqs=1)
    head = numbers(16, seed=0)
    bench.add([*head, 1], max_tokens=1)
    bench.add(numbers(32, seed=1)[:31], max_tokens=1)  # all eight blocks
    last = bench.add([*head, 2], max_tokens=1)
    bench.drain()
    bench.assert_right()
    assert last.num_cached_tokens < 16
    assert not any(seq.error for seq in bench.done.values())


def test_what_is_known_of_waiting_rows_does_not_grow_with_the_rows_that_have_run() -> None:
    bench = Bench(num_blocks=64, max_num_seqs=4)
    for i in range(1500):
        bench.add(numbers(80, seed=i), max_tokens=1)
        bench.step()
    bench.drain()
    assert len(bench.scheduler._blocks.wanted.last) < 8192


# -------------------------------------------------------------------- whole workloads


def run_workload(
    rows: list[list[int]], *, max_num_seqs: int, num_blocks: int, max_tokens: int = 64
) -> tuple[Bench, list[int]]:
    """Rows in order, fed as an engine's feeder does; returns the numbers of chunks in its steps too."""
    bench = Bench(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=2048, max_model_len=2048)
    todo = iter(rows)
    num_chunks: list[int] = []
    left = True
    while left or bench.scheduler.has_unfinished():
        if left and bench.scheduler.num_unfinished <= max_num_seqs * 3 // 2:
            for _ in range(2 * max_num_seqs - bench.scheduler.num_unfinished):
                row = next(todo, None)
                left = row is not None
                if row is None:
                    break
                bench.add(row, max_tokens=max_tokens)
        plan = bench.scheduler.schedule()
        assert plan is not None
        num_chunks.append(len(plan.chunks))
        for seq in bench.scheduler.commit(plan, bench.runner.execute(plan)):
            bench.done[seq.seq_id] = seq
    assert len(bench.done) == len(rows)
    bench.assert_clean()
    return bench, num_chunks


def documents(num_documents: int, num_questions: int) -> list[list[int]]:
    """Questions about documents behind a system prompt, in the order of their tokens."""
    rng = random.Random(0)
    system = numbers(21, seed=0)
    questions = [numbers(12 + 3 * i, seed=100 + i) for i in range(num_questions)]
    rows = []
    for i in range(num_documents):
        document = numbers(rng.randrange(80, 700), seed=1000 + i)
        rows += [system + document + question for question in questions]
    return sorted(rows)


def one_head(num_rows: int, num_tokens: int) -> list[list[int]]:
    """A head that ends inside a block, and questions of many lengths."""
    rng = random.Random(1)
    head = numbers(num_tokens, seed=0)
    return sorted(head + numbers(rng.randrange(10, 100), seed=1 + i) for i in range(num_rows))


@pytest.mark.parametrize(
    ("rows", "max_num_seqs", "num_blocks"),
    [
        (documents(164, 4), 128, 8192),
        (documents(164, 4), 128, 2048),
        (documents(100, 4), 64, 1024),
        (one_head(400, 1316), 128, 2048),
        (one_head(400, 36), 128, 2048),
        (one_head(400, 20), 256, 2048),
    ],
    ids=["documents", "documents, small pool", "documents, tiny pool", "long head", "short head", "many at once"],
)
def test_sharing_and_occupancy(rows: list[list[int]], max_num_seqs: int, num_blocks: int) -> None:
    bench, num_chunks = run_workload(rows, max_num_seqs=max_num_seqs, num_blocks=num_blocks)
    total, least = sum(map(len, rows)), least_computed(rows)
    assert bench.scheduler.num_prompt_tokens == total
    assert bench.scheduler.num_preemptions == 0
    assert bench.scheduler.num_cached_tokens >= 0.995 * (total - least)
    # All rows have the same length of output: as many waves as the number of sequences allows, each of which has
    # the steps of its output, and a few until its prompts have run.
    num_waves = -(-len(rows) // max_num_seqs)
    assert len(num_chunks) <= num_waves * 64 + 12


# -------------------------------------------------------------------- the fake runner notices


def spec_of(seq_id: int, prompt: list[int]) -> SequenceSpec:
    return SequenceSpec(
        seq_id=seq_id, prompt_token_ids=prompt, sampling=SamplingParams(temperature=0.0), sample_key=seq_id
    )


def after_a_prompt(prompt: list[int]) -> Bench:
    """A runner that has computed the prompt in blocks 0, 1, ... of four tokens."""
    bench = Bench(num_blocks=8, block_size=4)
    table = list(range(-(-len(prompt) // 4)))
    bench.runner.execute(StepPlan(0, (Chunk(0, 0, prompt, (table,), 1),), (spec_of(0, prompt),)))
    return bench


def test_a_right_copy_gives_what_its_absence_gives() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    other = [*prompt[:6], 9]
    bench = after_a_prompt(prompt)
    chunk = Chunk(1, 6, other[6:], ([0, 5],), 1)
    copied = bench.runner.execute(StepPlan(1, (chunk,), (spec_of(1, other),), copies=(BlockCopy(0, 1, 5),)))
    plain = Bench(num_blocks=8, block_size=4).runner
    assert (
        copied.token_ids
        == plain.execute(StepPlan(0, (Chunk(1, 0, other, ([0, 1],), 1),), (spec_of(1, other),))).token_ids
    )


@pytest.mark.parametrize(
    "copies", [(), (BlockCopy(0, 0, 5),), (BlockCopy(0, 1, 6),)], ids=["none", "wrong source", "wrong place"]
)
def test_a_wrong_copy_is_noticed(copies: tuple[BlockCopy, ...]) -> None:
    other = [1, 2, 3, 4, 5, 6, 9]
    bench = after_a_prompt([1, 2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(EngineError, match="sequence 1 attends to other tokens than its own at position 4, in block 5"):
        bench.runner.execute(StepPlan(1, (Chunk(1, 6, other[6:], ([0, 5],), 1),), (spec_of(1, other),), copies=copies))


def test_too_many_shared_tokens_are_noticed() -> None:
    other = [1, 2, 3, 4, 5, 9, 9, 9]  # five in common, six are claimed
    bench = after_a_prompt([1, 2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(EngineError, match="at position 5, in block 5"):
        bench.runner.execute(
            StepPlan(1, (Chunk(1, 6, other[6:], ([0, 5],), 1),), (spec_of(1, other),), copies=(BlockCopy(0, 1, 5),))
        )


@pytest.mark.parametrize("second", [BlockCopy(0, 5, 6), BlockCopy(0, 0, 5)])
def test_copies_that_depend_on_their_order_are_noticed(second: BlockCopy) -> None:
    bench = after_a_prompt([1, 2, 3, 4, 5, 6, 7, 8])
    chunk = Chunk(1, 6, [9], ([0, 5],), 1)
    with pytest.raises(EngineError, match="depend on their order"):
        bench.runner.execute(
            StepPlan(1, (chunk,), (spec_of(1, [1, 2, 3, 4, 5, 6, 9]),), copies=(BlockCopy(0, 1, 5), second))
        )


def test_a_block_that_is_overwritten_while_in_use_is_noticed() -> None:
    prompt = numbers(16, seed=0)
    bench = after_a_prompt(prompt)
    bench.runner.execute(StepPlan(1, (Chunk(1, 0, [7] * 16, ([0, 1, 2, 3],), 1),), (spec_of(1, [7] * 16),)))
    with pytest.raises(EngineError, match="sequence 0 attends to other tokens"):
        bench.runner.execute(StepPlan(2, (Chunk(0, 16, [5], ([0, 1, 2, 3, 4],), 1),)))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["plain", "sampled"])
@pytest.mark.parametrize("changed", ["the slot before", "ends of blocks", "the block", "nothing"])
def test_what_the_next_token_reads_is_looked_at(changed: str, sampling: dict[str, float]) -> None:
    """The last slot, the end of an earlier block, and every slot of a table with another last block."""
    bench = Bench(num_blocks=8, block_size=4)
    seq = bench.add(numbers(10, seed=0), max_tokens=20, **sampling)
    for _ in range(4):  # the next to run is token 13, in the second slot of the fourth block
        bench.step()
    plan = bench.scheduler.schedule()
    assert plan is not None and [chunk.start for chunk in plan.chunks] == [13]
    slots, table = bench.runner._kv[0], seq.block_tables[0]
    if changed == "the slot before":
        slots[table[3] * 4] = -1
    elif changed == "ends of blocks":
        for block in table[:3]:
            slots[block * 4 + 3] = -1
    elif changed == "the block":
        slots[7 * 4] = slots[table[3] * 4]
        slots[table[1] * 4] = -1
        table[3] = 7
    if changed == "nothing":
        bench.runner.execute(plan)
    else:
        with pytest.raises(EngineError, match="sequence 0 attends to other tokens"):
            bench.runner.execute(plan)
