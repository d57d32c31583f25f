"""Every sequence ends with the tokens that its prefix decides, whatever the scheduler did to it on the way.

The fake runner knows what each slot of a block must hold for the sequence that reads it, and raises where it does not.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchinfer.errors import ConfigError
from batchinfer.scheduling import Scheduler, Status
from batchinfer.types.rows import ErrorClass, RowError
from batchinfer.types.step import KVGroup, StepResult
from tests.scheduling.conftest import EOS, WAYS, Bench, four_ways, numbers

# -------------------------------------------------------------------- prefixes


@four_ways
@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_the_same_prompt_after_and_beside_itself(length: int, budget: int, cache: bool, chunked: bool) -> None:
    bench = Bench(cache=cache, chunked=chunked, budget=budget)
    prompt = numbers(length, seed=length)
    first = bench.add(prompt)
    bench.drain()
    later = [bench.add(prompt) for _ in range(3)]
    bench.drain()
    bench.assert_right()
    assert all(seq.output_token_ids == first.output_token_ids for seq in later)
    expected = length - 1 if cache else 0
    assert [seq.num_cached_tokens for seq in later] == [expected] * 3


@four_ways
@pytest.mark.parametrize("num_blocks", [256, 40])
def test_identical_and_overlapping_prompts_in_flight(cache: bool, chunked: bool, num_blocks: int) -> None:
    bench = Bench(cache=cache, chunked=chunked, num_blocks=num_blocks, budget=64)
    prompt = numbers(300, seed=0)

    def add_all() -> None:
        for _ in range(8):
            bench.add(prompt)
        for i in range(8):
            bench.add(prompt[:160] + numbers(50, seed=100 + i))

    add_all()
    bench.drain()
    for i in range(200):  # evict all of it
        bench.add(numbers(70, seed=1000 + i), max_tokens=2)
    bench.drain()
    add_all()
    bench.drain()
    bench.assert_right()
    assert len(bench.done) == 232
    assert all(manager.num_evictions > 0 for manager in bench.scheduler.managers) or not cache


@pytest.mark.parametrize("budget", [16, 64, 4096])
def test_a_prefix_shared_by_all_is_computed_once_even_if_all_come_at_once(budget: int) -> None:
    bench = Bench(budget=budget)
    head = numbers(160, seed=0)
    for i in range(20):
        bench.add(head + numbers(10, seed=i), max_tokens=1)
    bench.drain()
    bench.assert_right()
    assert bench.scheduler.num_computed_tokens == 160 + 20 * 10
    assert bench.scheduler.num_cached_tokens == 19 * 160


def test_those_who_wait_for_a_prefix_let_others_pass() -> None:
    bench = Bench(budget=400)
    head = numbers(320, seed=0)
    for i in range(5):
        bench.add([*head, i], max_tokens=1)
    other = bench.add(numbers(20, seed=9), max_tokens=1)
    bench.step()
    assert bench.plans == [[(0, 0, 321), (other.seq_id, 0, 20)]]
    assert bench.scheduler.num_waiting == 4
    bench.drain()
    bench.assert_right()
    assert bench.scheduler.num_cached_tokens == 4 * 320


@pytest.mark.parametrize("fault", ["abort", "error", "pre-emption"])
def test_a_prefix_that_is_given_up_is_computed_by_the_next(fault: str) -> None:
    bench = Bench(budget=400)
    head = numbers(320, seed=0)
    seqs = [bench.add([*head, i], max_tokens=1) for i in range(4)]
    plan = bench.scheduler.schedule()
    assert plan is not None
    assert [seq.status for seq in seqs] == [Status.PREFILLING] + [Status.HELD] * 3
    bench.scheduler.check()
    if fault == "abort":
        bench.scheduler.abort(seqs[0].seq_id)
    elif fault == "error":
        error = RowError(ErrorClass.NON_FINITE_LOGITS, "not a number")
        bench.runner.execute(plan)
        bench.scheduler.commit(plan, StepResult({}, errors={0: error}))
    else:
        bench.scheduler._preempt(seqs[0])
    bench.scheduler.check()
    assert [seq.status for seq in seqs[1:]] == [Status.WAITING] * 3
    bench.drain()
    bench.assert_right()
    assert len(bench.done) == (4 if fault == "pre-emption" else 3)
    assert bench.scheduler.num_computed_tokens == 320 + len(bench.done)


def test_one_that_is_held_back_can_be_aborted() -> None:
    bench = Bench(budget=400)
    seqs = [bench.add([*numbers(320, seed=0), i], max_tokens=1) for i in range(3)]
    bench.scheduler.schedule()
    assert seqs[1].status is Status.HELD
    bench.scheduler.abort(seqs[1].seq_id)
    bench.scheduler.check()
    bench.drain()
    assert sorted(bench.done) == [0, 2]


def test_output_is_cached_too() -> None:
    bench = Bench()
    first = bench.add(numbers(16, seed=0), max_tokens=40)
    bench.drain()
    second = bench.add(first.token_ids[:50], max_tokens=4)
    bench.drain()
    bench.assert_right()
    assert second.num_cached_tokens == 48


def test_without_a_cache_nothing_is_shared() -> None:
    bench = Bench(cache=False)
    for _ in range(4):
        bench.add(numbers(100, seed=0), max_tokens=1)
    bench.drain()
    assert bench.scheduler.num_computed_tokens == 400


def test_prompt_logprobs_run_every_position_and_leave_the_cache_to_others() -> None:
    bench = Bench()
    prompt = numbers(64, seed=0)
    bench.add(prompt, max_tokens=1)
    bench.drain()
    asked = bench.add(prompt, max_tokens=2, prompt_logprobs=2, logprobs=1)
    bench.drain()
    assert asked.num_cached_tokens == 0
    assert asked.prompt_logprobs is not None
    assert asked.logprobs is not None
    assert [None if entry is None else entry.token_id for entry in asked.prompt_logprobs] == [None, *prompt[1:]]
    assert [entry.token_id for entry in asked.logprobs] == asked.output_token_ids


@pytest.mark.parametrize("sizes", [(8, 12), (12, 8), (16, 16)])
@pytest.mark.parametrize("num_tokens", [1600, 160])
def test_groups_of_layers_with_tables_of_their_own(num_tokens: int, sizes: tuple[int, int]) -> None:
    """Groups match together, also where blocks differ in size or one group has a window (whose blocks are kept)."""
    groups = tuple(
        KVGroup(num_blocks=num_tokens // size, block_size=size, window=window)
        for size, window in zip(sizes, (None, 8), strict=True)
    )
    bench = Bench(groups=groups, budget=20, max_num_seqs=6)
    head = numbers(50, seed=0)
    for i in range(30):
        bench.add(head[: 10 * (i % 6)] + numbers(1 + i, seed=i), max_tokens=20)
    bench.drain()
    bench.assert_right()
    assert not any(seq.error for seq in bench.done.values())
    assert bench.scheduler.num_cached_tokens > 0


# -------------------------------------------------------------------- budget and order


@four_ways
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
def test_everything_ends_within_the_limits(cache: bool, chunked: bool, max_num_seqs: int) -> None:
    bench = Bench(cache=cache, chunked=chunked, max_num_seqs=max_num_seqs, budget=16, eos_rate=0.05)
    for i in range(40):
        bench.add(numbers(1 + 3 * i, seed=i % 7), max_tokens=1 + i % 13)
    bench.drain()
    bench.assert_right()
    assert len(bench.done) == 40
    assert bench.max_running <= max_num_seqs
    reasons = {seq.finish_reason for seq in bench.done.values()}
    assert reasons == {"stop", "length"}


def test_decoding_goes_before_prefill_and_shares_the_step_with_it() -> None:
    bench = Bench(budget=32)
    short = bench.add(numbers(8, seed=0), max_tokens=20)
    bench.step()
    long = bench.add(numbers(100, seed=1), max_tokens=2)
    bench.step()
    assert bench.plans[1] == [(short.seq_id, 8, 1), (long.seq_id, 0, 31)]
    bench.step()
    assert bench.plans[2] == [(short.seq_id, 9, 1), (long.seq_id, 31, 31)]


def test_sequences_start_in_the_order_in_which_they_were_given() -> None:
    bench = Bench(max_num_seqs=3, budget=64)
    for i in range(12):
        bench.add(numbers(10, seed=i), max_tokens=3)
    bench.drain()
    starts = [seq_id for plan in bench.plans for seq_id, start, _ in plan if start == 0]
    assert starts == sorted(starts)


def test_without_chunked_prefill_a_prompt_runs_whole() -> None:
    bench = Bench(chunked=False, max_model_len=64, budget=64, max_num_seqs=8)
    for i in range(10):
        bench.add(numbers(40, seed=i), max_tokens=4)
    bench.drain()
    bench.assert_right()
    assert all(length in (1, 40) for plan in bench.plans for _, _, length in plan)


def test_without_chunked_prefill_the_budget_must_hold_a_prompt() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        Scheduler(
            [KVGroup(num_blocks=8, block_size=16)],
            max_num_seqs=1,
            max_num_batched_tokens=16,
            max_model_len=64,
            enable_chunked_prefill=False,
        )


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_limits_below_one_are_refused(name: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, name: 0}
    with pytest.raises(ConfigError, match=name):
        Scheduler([KVGroup(num_blocks=8, block_size=16)], max_model_len=64, **limits)


# -------------------------------------------------------------------- memory


@four_ways
def test_pre_emption_changes_no_token(cache: bool, chunked: bool) -> None:
    bench = Bench(cache=cache, chunked=chunked, num_blocks=24, block_size=4, max_num_seqs=16, budget=48)
    for i in range(60):
        temperature = 0.8 if i % 2 else 0.0
        bench.add(numbers(1 + i % 20, seed=i % 9), max_tokens=30, temperature=temperature)
    bench.drain()
    bench.assert_right()
    assert not any(seq.error for seq in bench.done.values())
    assert bench.scheduler.num_preemptions >= 50


def test_the_youngest_gives_way() -> None:
    bench = Bench(num_blocks=5, block_size=4)
    old, young = bench.add(numbers(8, seed=0), max_tokens=8), bench.add(numbers(8, seed=1), max_tokens=8)
    bench.drain()
    bench.assert_right()
    assert old.num_preemptions == 0
    assert young.num_preemptions > 0


def test_the_youngest_gives_way_to_an_older_prompt_under_way() -> None:
    bench = Bench(num_blocks=20, block_size=4, budget=37)
    head = numbers(32, seed=0)
    bench.add(head, max_tokens=1)
    old = bench.add(head + numbers(40, seed=1), max_tokens=1)  # waits for the head, then takes 18 blocks
    young = bench.add(numbers(4, seed=2), max_tokens=20)  # passes it
    bench.step()
    bench.scheduler.max_num_batched_tokens = 9
    bench.step()
    assert (old.status, young.status) == (Status.PREFILLING, Status.DECODING)
    bench.drain()
    bench.assert_right()
    assert young.error is None
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)


def test_a_newcomer_leaves_some_blocks_to_those_who_run() -> None:
    bench = Bench(num_blocks=100, block_size=4, budget=512)
    first = bench.add(numbers(98 * 4, seed=0), max_tokens=2)
    second = bench.add(numbers(8, seed=1), max_tokens=2)  # the last two blocks: one of them is kept back
    bench.step()
    assert (first.status, second.status) == (Status.DECODING, Status.WAITING)
    bench.drain()
    bench.assert_right()
    alone = bench.add(numbers(100 * 4, seed=2), max_tokens=1)  # nobody runs: all blocks may be taken
    bench.drain()
    assert alone.error is None


def test_recomputing_finds_what_is_still_cached() -> None:
    results = {}
    for cache in (True, False):
        bench = Bench(cache=cache, num_blocks=20, block_size=4)
        for i in range(4):
            bench.add(numbers(16, seed=i), max_tokens=30)
        bench.drain()
        assert bench.scheduler.num_preemptions > 0
        results[cache] = bench.scheduler.num_computed_tokens
    assert results[True] < results[False]


@four_ways
def test_a_row_that_never_fits_is_an_error_of_its_own(cache: bool, chunked: bool) -> None:
    bench = Bench(cache=cache, chunked=chunked, num_blocks=4, max_model_len=500)
    for i in range(5):
        bench.add(numbers(20, seed=i), max_tokens=3)
    big = bench.add(numbers(65, seed=9), max_tokens=1)  # five blocks
    grows = bench.add(numbers(60, seed=10), max_tokens=20)  # four blocks, and then a fifth
    just = bench.add(numbers(60, seed=11), max_tokens=5)  # its last token needs no slot
    for i in range(5):
        bench.add(numbers(20, seed=20 + i), max_tokens=3)
    bench.drain()
    bench.assert_right()
    failed = {seq.seq_id for seq in bench.done.values() if seq.error}
    assert failed == {big.seq_id, grows.seq_id}
    assert just.finish_reason == "length"
    for seq in (big, grows):
        assert seq.error is not None
        assert seq.error.error_class is ErrorClass.OUT_OF_MEMORY
        assert "5 blocks of 16, there are 4" in seq.error.message
    assert len(bench.done) == 13


def test_many_rows_that_never_fit_end_too() -> None:
    bench = Bench(num_blocks=2)
    for i in range(1500):
        bench.add(numbers(40, seed=i % 3))
    bench.drain()
    assert all(seq.error for seq in bench.done.values())
    assert len(bench.done) == 1500


def test_shrinking_pre_empts_at_once() -> None:
    bench = Bench(max_num_seqs=8)
    for i in range(8):
        bench.add(numbers(10, seed=i), max_tokens=10)
    bench.step()
    assert bench.scheduler.num_running == 8
    bench.scheduler.shrink(2)
    bench.scheduler.check()
    assert bench.scheduler.num_running == 2
    bench.drain()
    bench.assert_right()
    assert len(bench.done) == 8


# -------------------------------------------------------------------- ends


def test_a_plan_without_commit_did_not_happen() -> None:
    bench = Bench()
    for i in range(3):
        bench.add(numbers(10, seed=i), max_tokens=3)
    lost = bench.scheduler.schedule()
    again = bench.scheduler.schedule()
    assert lost is not None and again is not None
    assert again.step == lost.step
    assert [spec.seq_id for spec in again.added] == [0, 1, 2]
    bench.drain()
    bench.assert_right()


def test_what_is_given_up_after_a_lost_plan_is_not_told_as_new() -> None:
    bench = Bench()
    bench.add([1, 2, 3])
    bench.add([4, 5, 6])
    bench.scheduler.schedule()
    bench.scheduler.abort(0)
    plan = bench.step()
    assert plan is not None
    assert [spec.seq_id for spec in plan.added] == [1]
    assert plan.finished == (0,)  # a runner may have heard of it, or not


def test_the_runner_hears_of_each_sequence_once_when_it_comes_and_once_when_it_goes() -> None:
    bench = Bench(num_blocks=12, block_size=4, max_num_seqs=8)
    added: list[int] = []
    finished: list[int] = []
    for i in range(20):
        bench.add(numbers(5, seed=i), max_tokens=20)
    while bench.scheduler.has_unfinished():
        plan = bench.step()
        assert plan is not None
        added += [spec.seq_id for spec in plan.added]
        finished += plan.finished
    bench.add([1, 2, 3])
    plan = bench.step()
    assert plan is not None
    finished += plan.finished
    assert sorted(added) == list(range(20))
    assert sorted(finished) == list(range(20))
    assert bench.scheduler.num_preemptions > 0


def test_an_error_of_the_runner_ends_its_sequence_alone() -> None:
    bench = Bench(budget=16)
    seqs = [bench.add(numbers(40, seed=0), max_tokens=4) for _ in range(4)]
    plan = bench.scheduler.schedule()
    assert plan is not None
    error = RowError(ErrorClass.NON_FINITE_LOGITS, "not a number")
    bench.runner.execute(plan)
    ended = bench.scheduler.commit(plan, StepResult({}, errors={seqs[0].seq_id: error}))
    assert ended == [seqs[0]]
    assert seqs[0].error == error
    bench.scheduler.check()
    bench.drain()
    bench.assert_right()
    assert len(bench.done) == 3


@pytest.mark.parametrize("min_tokens", [0, 5, 8])
def test_min_tokens_count_output_only(min_tokens: int) -> None:
    bench = Bench(eos_rate=1.0)
    seq = bench.add(numbers(100, seed=0), max_tokens=8, min_tokens=min_tokens)
    bench.drain()
    assert seq.num_tokens - 100 == min(min_tokens + 1, 8)
    assert EOS not in seq.output_token_ids[:min_tokens]
    assert seq.finish_reason == ("stop" if min_tokens < 8 else "length")
    assert seq.stop_reason is None


# -------------------------------------------------------------------- all of it at once


class Machine(RuleBasedStateMachine):
    """Sequences come and go in any order, through any limits; checked after every step."""

    bench: Bench

    @initialize(
        way=st.sampled_from(WAYS),
        num_blocks=st.integers(6, 40),
        block_size=st.sampled_from([1, 3, 4, 16]),
        max_num_seqs=st.integers(1, 12),
        budget=st.integers(1, 60),
        eos_rate=st.sampled_from([0.0, 0.1]),
    )
    def begin(
        self,
        way: tuple[bool, bool],
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        eos_rate: float,
    ) -> None:
        cache, chunked = way
        self.bench = Bench(
            cache=cache,
            chunked=chunked,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=budget,
            max_model_len=80,
            eos_rate=eos_rate,
        )
        self.aborted: set[int] = set()

    @rule(
        head=st.integers(0, 3),
        head_length=st.sampled_from([0, 3, 5, 16, 17, 30, 32, 47, 48]),
        tail=st.integers(0, 40),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 25),
        temperature=st.sampled_from([0.0, 0.8]),
        copies=st.integers(1, 4),
        logprobs=st.booleans(),
        fork=st.integers(0, 6),
    )
    def add(
        self,
        head: int,
        head_length: int,
        tail: int,
        length: int,
        max_tokens: int,
        temperature: float,
        copies: int,
        logprobs: bool,
        fork: int,
    ) -> None:
        # Tails fork once more, so that blocks part in the middle; what they part into comes again and again.
        prompt = numbers(head_length, seed=head) + numbers(fork, seed=50 + head) + numbers(length, seed=100 + tail)
        for _ in range(copies):
            asked = 0 if logprobs else None
            self.bench.add(prompt, max_tokens=max_tokens, temperature=temperature, prompt_logprobs=asked)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @rule()
    def lose_a_plan(self) -> None:
        self.bench.scheduler.schedule()

    @precondition(lambda self: self.bench.scheduler.num_unfinished)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        live = list(self.bench.scheduler._seqs)
        seq = self.bench.scheduler.abort(live[which % len(live)])
        assert seq is not None
        self.aborted.add(seq.seq_id)

    @rule(count=st.integers(1, 12))
    def shrink(self, count: int) -> None:
        self.bench.scheduler.shrink(count)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.drain()
        self.bench.assert_right()
        assert set(self.bench.done) | self.aborted == set(self.bench.seqs)
        assert not set(self.bench.done) & self.aborted
        for seq in self.bench.done.values():
            if seq.error is not None:
                manager = self.bench.scheduler.managers[0]
                assert seq.num_tokens > manager.num_blocks * manager.block_size, "it would have fitted"
            elif seq.prompt_logprobs is not None:
                told = [entry and entry.token_id for entry in seq.prompt_logprobs]
                assert told == [None, *seq.token_ids[1 : seq.num_prompt_tokens]]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
