"""Steps planned and launched while the one before is under way: the outcomes of an engine that waits for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from batchinfer.engine import Engine
from batchinfer.errors import ConfigError, EngineError, OutOfMemory
from batchinfer.runner.fake import FakeRunner
from batchinfer.types.request import PartialOutput, Request, RequestOutput
from batchinfer.types.step import UNKNOWN_TOKEN, Chunk, KVGroup, SequenceSpec, StepPlan, StepResult
from tests.engine.test_engine import EOS, engine_of, request

RAISES, SICK = 300, 301  # tokens of prompts
MAX_MODEL_LEN = 96


class Wrong(BaseException):
    """What a plan must not ask for. No Exception: that would be a step which the runner does not take."""


class Launched:
    """A step of a `Slow`; carried out when it is asked for, and never before the ones before it."""

    def __init__(self, runner: Slow, plan: StepPlan) -> None:
        self.runner, self.plan = runner, plan
        # (KV group, block) -> who writes it. The tables are the scheduler's: they are read now.
        self.writes = {
            (group, block): chunk.seq_id
            for chunk in plan.chunks
            for group, table in enumerate(chunk.block_tables)
            for block in table[chunk.start // runner.size : -(-(chunk.start + len(chunk.token_ids)) // runner.size)]
        }

    def result(self) -> StepResult:
        runner = self.runner
        assert runner.under_way[0] is self, "steps are waited for in another order than they were launched in"
        del runner.under_way[0]
        chunks = tuple(
            chunk if chunk.token_ids[0] != UNKNOWN_TOKEN else chunk._replace(token_ids=[runner.last[chunk.seq_id]])
            for chunk in self.plan.chunks
        )
        plan = self.plan
        result = FakeRunner.execute(runner, StepPlan(plan.step, chunks, plan.added, plan.finished, plan.copies))
        # A sequence of which nothing can be sampled is run on with some token: nobody wants to know what comes of it.
        runner.last = {chunk.seq_id: 5 for chunk in chunks} | {i: tokens[-1] for i, tokens in result.token_ids.items()}
        return result


class Slow(FakeRunner):
    """Is given steps and does them when they are waited for. A plan that needs more than can be known is `Wrong`."""

    overlaps = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.size = self.kv_groups[0].block_size
        self.under_way: list[Launched] = []
        self.last: dict[int, int] = {}
        self.specs: dict[int, SequenceSpec] = {}
        self.num_ahead = self.num_unknown = self.num_refused = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert not self.under_way
        assert all(token != UNKNOWN_TOKEN for chunk in plan.chunks for token in chunk.token_ids)
        return super().execute(plan)

    def launch(self, plan: StepPlan) -> Launched:
        self.specs |= {spec.seq_id: spec for spec in plan.added}
        step = Launched(self, copied(plan))
        try:
            self.check(plan)
        except Exception as error:
            raise Wrong(error) from error
        self.refuse(plan.chunks)
        self.num_ahead += bool(self.under_way)
        self.under_way.append(step)
        return step

    def check(self, plan: StepPlan) -> None:
        assert plan.step == self.num_steps + len(self.under_way)
        assert len(self.under_way) < 2
        for chunk in plan.chunks:
            if UNKNOWN_TOKEN in chunk.token_ids:
                self.check_unknown(chunk)
            for under_way in self.under_way:
                for group, table in enumerate(chunk.block_tables):
                    for block in table:
                        writer = under_way.writes.get((group, block), chunk.seq_id)
                        assert writer == chunk.seq_id, f"block {block} is still written by {writer}"

    def check_unknown(self, chunk: Chunk) -> None:
        self.num_unknown += 1
        assert len(chunk.token_ids) == 1
        assert not self.specs[chunk.seq_id].sampling.has_penalties, "its output so far is not known"
        (before,) = [other for other in self.under_way[-1].plan.chunks if other.seq_id == chunk.seq_id]
        assert before.num_logits == 1 and before.start + len(before.token_ids) == chunk.start

    def refuse(self, chunks: Sequence[Chunk]) -> None:
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        raises = any(RAISES in self.specs[chunk.seq_id].prompt_token_ids for chunk in chunks)
        self.num_refused += raises or num_tokens > (self._max_step_tokens or num_tokens)
        if raises:
            raise RuntimeError("not with this row")
        if self._max_step_tokens is not None and num_tokens > self._max_step_tokens:
            raise OutOfMemory(f"{num_tokens} tokens")


def copied(plan: StepPlan) -> StepPlan:
    chunks = tuple(
        chunk._replace(block_tables=tuple(table[:] for table in chunk.block_tables)) for chunk in plan.chunks
    )
    return StepPlan(plan.step, chunks, plan.added, plan.finished, plan.copies)


def engines(**options: Any) -> tuple[Engine, Engine, Slow]:
    """(one that waits, one that does not, its runner), else alike."""
    names = ("eos_rate", "max_step_tokens", "raise_token", "nan_token", "step_delay_ms")
    faults = {name: options.pop(name) for name in names if name in options}
    groups = tuple(
        KVGroup(num_blocks=options["num_blocks"], block_size=options["block_size"], window=window)
        for window in options.pop("windows", [None])
    )
    del options["num_blocks"], options["block_size"]
    options |= {"max_model_len": MAX_MODEL_LEN}
    slow = Slow(kv_groups=groups, eos_token_id=EOS, **faults)
    plain = FakeRunner(kv_groups=groups, eos_token_id=EOS, **faults)
    return engine_of(plain, **options), engine_of(slow, **options), slow


def finish(engine: Engine, outputs: dict[int, RequestOutput] | None = None) -> dict[int, RequestOutput]:
    outputs = {} if outputs is None else outputs
    while engine.has_unfinished():
        take(engine, outputs)
    for manager in engine.scheduler.managers:
        assert manager.num_available == manager.num_blocks, "blocks are held for nobody"
    return outputs


def take(engine: Engine, outputs: dict[int, RequestOutput]) -> None:
    for output in engine.step():
        assert output.request_id not in outputs, "a request has two outcomes"
        outputs[output.request_id] = output
    engine.check()


def told(output: RequestOutput) -> Any:
    """What must be the same. How far a prompt was found in the cache need not be."""
    if output.error is not None:
        return output.error.error_class
    return output.prompt_logprobs, output.outputs


def random_requests(rng: random.Random, count: int, faults: Mapping[str, int]) -> list[Request]:
    heads = [[rng.randrange(256) for _ in range(40)] for _ in range(2)]
    made = []
    for number in range(count):
        prompt = rng.choice([*heads, []])[: rng.choice([0, 5, 16, 17, 40])]
        prompt = prompt + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        if rng.random() < 0.1:
            prompt[rng.randrange(len(prompt))] = rng.choice([*faults.values(), 7])
        sampling: dict[str, Any] = {
            "max_tokens": rng.choice([1, 2, 3, rng.randint(1, 40), None]),
            "temperature": rng.choice([0.0, 0.8]),
            "n": rng.choice([1, 1, 1, 3]),
            "min_tokens": rng.choice([0, 0, 1]),
            "logprobs": rng.choice([None, None, 1]),
            "prompt_logprobs": rng.choice([None, None, None, 1]),
            "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
            "ignore_eos": rng.random() < 0.2,
        }
        if rng.random() < 0.3:
            sampling["stop"] = rng.sample([chr(33 + i) for i in range(94)], 6)
        if rng.random() < 0.2:
            sampling["stop_token_ids"] = rng.sample(range(33, 127), 4)
        made.append(request(number, prompt, **sampling))
    return made


@pytest.mark.parametrize("seed", range(40))
def test_outcomes_are_those_of_steps_one_after_the_other(seed: int) -> None:
    """Rows come while others run, end anywhere and are given up, are pre-empted, fail, and go on in another engine."""
    rng = random.Random(seed)
    faults = rng.choice(
        [{}, {}, {"raise_token": RAISES}, {"nan_token": SICK}, {"raise_token": RAISES, "nan_token": SICK}]
    )
    block_size = rng.choice([1, 4, 16])
    options: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": -(-rng.choice([70, 100, 200, 2000]) // block_size),
        "windows": rng.choice([[None], [None], [None, 8]]),
        "max_num_seqs": rng.choice([1, 2, 5, 32]),
        "max_num_batched_tokens": rng.choice([3, 16, 100, 400]),
        "enable_prefix_caching": rng.random() < 0.7,
        "eos_rate": rng.choice([0.0, 0.05, 0.3]),
        **faults,
    }
    if rng.random() < 0.3:
        options["max_step_tokens"] = rng.choice([1, 4, 30])
    waiting, engine, runner = engines(**options)
    requests = random_requests(rng, rng.choice([2, 10, 30]), faults)
    for one in requests:
        waiting.add_request(one)
    expected = finish(waiting)

    left, outputs, given_up = list(requests), {}, set()
    while left or engine.has_unfinished():
        for _ in left[: rng.choice([0, 1, 5])]:
            engine.add_request(left.pop(0))
        if rng.random() < 0.05 and engine._rows:
            number = rng.choice(list(engine._rows))
            partial = engine.partial_outputs(number)
            assert engine.abort(number) and not engine.abort(number)
            if rng.random() < 0.5:
                engine.add_request(requests[number]._replace(partial_outputs=known(partial)))
            else:
                given_up.add(number)
        take(engine, outputs)
    finish(engine)
    assert not runner.under_way
    assert outputs.keys() | given_up == expected.keys() and not outputs.keys() & given_up
    for number, output in outputs.items():
        assert told(output) == told(expected[number]), number
    if len(outputs) > 5 and options["max_num_seqs"] > 1:
        assert runner.num_ahead > 0
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0


def known(partial: tuple[PartialOutput, ...]) -> list[PartialOutput]:
    assert all(token >= 0 for tokens, _ in partial for token in tokens)
    return list(partial)


def small(**options: Any) -> tuple[Engine, Engine, Slow]:
    return engines(**{"block_size": 4, "num_blocks": 100, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options)


def test_a_step_is_launched_before_the_one_before_it_is_waited_for() -> None:
    _, engine, runner = small()
    for number in range(3):
        engine.add_request(request(number, [1, 2, 3 + number], max_tokens=6))
    assert engine.step() == [] and len(runner.under_way) == 1
    assert engine.stats().num_steps == 0
    for _ in range(4):
        assert engine.step() == [] and len(runner.under_way) == 1
    assert engine.stats().num_steps == 4
    outputs = finish(engine)
    assert [len(outputs[number].outputs[0].token_ids) for number in range(3)] == [6, 6, 6]
    stats = engine.stats()
    assert (stats.num_steps, stats.num_overlapped_steps, stats.num_generated_tokens) == (6, 5, 18)
    # Their lengths are known, so nothing is computed in vain.
    assert stats.num_computed_tokens == 3 * (3 + 5)
    assert runner.num_unknown == 3 * 5


def test_an_end_that_was_not_foreseen_costs_a_token_and_holds_the_blocks_that_long() -> None:
    waiting, engine, runner = small(eos_rate=0.2)
    rows = [request(number, [1, 2, 3, number], max_tokens=60) for number in range(8)]
    for one in rows:
        waiting.add_request(one)
        engine.add_request(one)
    expected = finish(waiting)
    outputs: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        take(engine, outputs)
        ended = [seq for seq in runner.under_way[0].plan.chunks if seq.seq_id in outputs] if runner.under_way else []
        for chunk in ended:
            for block in chunk.block_tables[0]:
                assert engine.scheduler.managers[0].num_idle_among([block]) == 0, "it is written, and free"
    ends = [output.outputs[0].finish_reason for output in expected.values()]
    assert {i: told(output) for i, output in outputs.items()} == {i: told(output) for i, output in expected.items()}
    wasted = engine.stats().num_computed_tokens - waiting.stats().num_computed_tokens
    assert wasted == ends.count("stop") > 0
    assert engine.stats().num_generated_tokens == waiting.stats().num_generated_tokens


def test_rows_with_penalties_are_left_out_of_steps_planned_ahead() -> None:
    _, engine, runner = small()
    rows = [request(number, [1, 2, 3 + number], max_tokens=6) for number in range(2)]
    engine.add_request(request(2, [9, 9], max_tokens=6, presence_penalty=1.0))
    for one in rows:
        engine.add_request(one)
    counts = []
    while engine.has_unfinished():
        engine.step()
        counts += [len(step.plan.chunks) for step in runner.under_way]
    assert counts[:4] == [3, 2, 3, 2]
    assert runner.num_ahead > 0


def test_where_most_would_be_left_out_the_step_is_waited_for() -> None:
    _, engine, runner = small()
    for number in range(3):
        engine.add_request(request(number, [1, 2, 3 + number], max_tokens=6, presence_penalty=float(number > 0)))
    finish(engine)
    assert runner.num_ahead == 0
    assert engine.stats().num_steps == 6


def test_blocks_that_are_lacking_are_found_with_nothing_under_way() -> None:
    waiting, engine, runner = small(num_blocks=12, enable_prefix_caching=False)
    for number in range(4):
        for each in (waiting, engine):
            each.add_request(request(number, [1, 2, 3 + number], max_tokens=20))
    assert {i: told(o) for i, o in finish(engine).items()} == {i: told(o) for i, o in finish(waiting).items()}
    assert engine.stats().num_preemptions > 0
    assert runner.num_ahead > 0


def test_a_step_that_does_not_fit_is_refused_and_cut() -> None:
    waiting, engine, runner = small(max_step_tokens=5)
    for number in range(8):
        for each in (waiting, engine):
            each.add_request(request(number, [1, 2, 3 + number], max_tokens=9))
    assert {i: told(o) for i, o in finish(engine).items()} == {i: told(o) for i, o in finish(waiting).items()}
    assert runner.num_refused > 0
    assert engine.stats().num_cut_steps > 0
    assert engine.stats().max_num_seqs < 8
    assert runner.num_ahead > 0


def test_a_row_that_makes_the_runner_raise_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    waiting, engine, runner = small(raise_token=RAISES)
    for number in range(8):
        for each in (waiting, engine):
            each.add_request(request(number, [1, 2, RAISES if number == 3 else 4], max_tokens=9))
    outputs = finish(engine)
    assert {i: told(o) for i, o in outputs.items()} == {i: told(o) for i, o in finish(waiting).items()}
    assert [i for i, output in outputs.items() if output.error] == [3]
    assert runner.num_refused > 0 and runner.num_ahead > 0
    assert "a step could not be launched" in caplog.text


def test_rows_that_begin_with_a_refused_step_begin_with_the_next() -> None:
    waiting, engine, runner = small(raise_token=RAISES)
    rows = [request(number, [1, 2, RAISES if number == 1 else 4], max_tokens=9) for number in range(3)]
    engine.add_request(rows[0])
    engine.step()
    for one in rows[1:]:
        engine.add_request(one)
    for one in rows:
        waiting.add_request(one)
    outputs = finish(engine)
    assert runner.num_refused == 1
    assert {i: told(o) for i, o in outputs.items()} == {i: told(o) for i, o in finish(waiting).items()}
    assert [i for i, output in outputs.items() if output.error] == [1]


def test_a_call_that_was_interrupted_as_it_waited_loses_nothing() -> None:
    waiting, engine, runner = small()
    for each in (waiting, engine):
        each.add_request(request(0, [1, 2, 3], max_tokens=9))
    engine.step()
    engine.step()
    step = runner.under_way[0]

    def interrupted() -> StepResult:
        raise KeyboardInterrupt

    plain, step.result = step.result, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    step.result = plain  # type: ignore[method-assign]
    assert {i: told(o) for i, o in finish(engine).items()} == {i: told(o) for i, o in finish(waiting).items()}


def interrupted_once(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str, call: Callable[[], Any]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thing, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()


def test_who_ended_is_told_though_the_next_step_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With penalties nothing is planned ahead: the step under way is taken in before the next one is launched."""
    waiting, engine, runner = small()
    for number in range(2):
        for each in (waiting, engine):
            each.add_request(request(number, [1, 2, 3], max_tokens=2 + 3 * number, presence_penalty=1.0))
    engine.step()
    engine.step()
    interrupted_once(monkeypatch, runner, "launch", engine.step)
    assert engine.scheduler.num_unfinished == 1 and not runner.under_way  # row 0 has ended
    outputs: dict[int, RequestOutput] = {}
    for _ in range(10):
        take(engine, outputs)
    assert not engine.has_unfinished()
    assert {i: told(o) for i, o in outputs.items()} == {i: told(o) for i, o in finish(waiting).items()}


def test_steps_go_on_overlapping_where_waiting_for_them_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, engine, runner = small()
    for each in (waiting, engine):
        each.add_request(request(0, [1, 2, 3], max_tokens=9))
    engine.step()

    def wait() -> None:
        with engine.waiting_for_each_step():
            raise AssertionError("it was interrupted before")

    interrupted_once(monkeypatch, runner.under_way[0], "result", wait)
    assert {i: told(o) for i, o in finish(engine).items()} == {i: told(o) for i, o in finish(waiting).items()}
    assert runner.num_ahead == 8


def test_what_is_given_up_before_it_was_handed_out_has_no_outcome() -> None:
    waiting, engine, _ = small()
    engine.add_request(request(0, [1, 2, 3], max_tokens=1))
    engine.step()
    again = request(0, [4, 5], max_tokens=3)
    waiting.add_request(again)
    with engine.waiting_for_each_step():  # it has ended, which nobody was told yet
        assert engine.abort(0)
        engine.add_request(again)
        assert told(finish(engine)[0]) == told(finish(waiting)[0])


def test_time_of_waiting_is_counted_once() -> None:
    _, engine, _ = small(step_delay_ms=20)
    engine.add_request(request(0, [1, 2, 3], max_tokens=3))
    engine.step()
    with engine.waiting_for_each_step():
        stats = engine.stats()
    assert stats.waiting_s >= 0.02 and stats.runner_s >= 0.02
    assert stats.scheduler_s > 0


def test_a_step_that_fails_under_way_is_the_end_of_the_engine() -> None:
    _, engine, runner = small()
    engine.add_request(request(0, [1, 2, 3], max_tokens=9))
    engine.step()

    def broken() -> StepResult:
        raise RuntimeError("an illegal memory access was encountered")

    runner.under_way[0].result = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="failed in a step under way, with RuntimeError: an illegal memory access"):
        engine.step()


def test_it_can_be_turned_off_and_is_off_where_nothing_runs_beside_the_host() -> None:
    options = {"block_size": 4, "num_blocks": 100, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    waiting, engine, runner = engines(**options, async_scheduling=False)
    for each in (waiting, engine):
        each.add_request(request(0, [1, 2, 3], max_tokens=4))
    assert told(finish(engine)[0]) == told(finish(waiting)[0])
    assert runner.num_ahead == engine.stats().num_overlapped_steps == 0
    with pytest.raises(ConfigError, match=r"engine\.async_scheduling: true needs a runner that is still at work"):
        engine_of(FakeRunner(), async_scheduling=True)


def test_each_step_can_be_waited_for_a_while() -> None:
    waiting, engine, runner = small()
    for number in range(2):
        for each in (waiting, engine):
            each.add_request(request(number, [1, 2, 3 + number], max_tokens=3 + 5 * number))
    outputs: dict[int, RequestOutput] = {}
    for _ in range(3):
        take(engine, outputs)
    assert not outputs and runner.under_way
    with engine.waiting_for_each_step():
        assert not runner.under_way  # row 0 has ended with it
        take(engine, outputs)
        assert list(outputs) == [0] and not runner.under_way
        num_ahead = runner.num_ahead
        take(engine, outputs)
        assert runner.num_ahead == num_ahead
    take(engine, outputs)
    assert runner.under_way
    assert {i: told(o) for i, o in finish(engine, outputs).items()} == {i: told(o) for i, o in finish(waiting).items()}
