"""Steps planned and launched while the one before is under way: the outcomes of an engine that waits for each of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from batchinfer.engine import Engine
from batchinfer.errors import ConfigError, EngineError, OutOfMemory
from batchinfer.runner.fake import FakeRunner
from batchinfer.types.request import PartialOutput, Request, RequestOutput, SamplingParams
from batchinfer.types.rows import ErrorClass
from batchinfer.types.step import UNKNOWN_TOKEN, Chunk, KVGroup, SequenceSpec, StepPlan, StepResult
from tests.engine.test_engine import EOS, engine_of, request

RAISES, SICK = 300, 301  # tokens of prompts
MAX_MODEL_LEN = 96


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
    """Is given steps and does them when they are waited for. Asserts that no step is given more than can be known."""

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
        assert plan.step == self.num_steps + len(self.under_way)
        assert len(self.under_way) < 2
        self.specs |= {spec.seq_id: spec for spec in plan.added}
        self.refuse(plan.chunks)
        step = Launched(self, copied(plan))
        for chunk in plan.chunks:
            self.check(chunk)
        for under_way in self.under_way:
            for chunk in plan.chunks:
                for group, table in enumerate(chunk.block_tables):
                    for block in table:
                        writer = under_way.writes.get((group, block), chunk.seq_id)
                        assert writer == chunk.seq_id, f"block {block} is still written by {writer}"
        self.num_ahead += bool(self.under_way)
        self.under_way.append(step)
        return step

    def check(self, chunk: Chunk) -> None:
        if UNKNOWN_TOKEN not in chunk.token_ids:
            return
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
    names = ("eos_rate", "max_step_tokens", "raise_token", "nan_token")
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


@pytest.mark.parametrize("seed", range(80))
def test_outcomes_are_those_of_steps_one_after_the_other(seed: int) -> None:
    """Rows come while others run, end anywhere and are given up, are pre-empted, fail, and go on in another engine."""
    rng = random.Random(seed)
    faults = rng.choice([{}, {}, {"raise_token": RAISES}, {"nan_token": SICK}, {"raise_token": RAISES, "nan_token": SICK}])
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
        for one in left[: rng.choice([0, 1, 5])]:
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
