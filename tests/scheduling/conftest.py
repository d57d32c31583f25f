"""A scheduler on a fake runner, for all tests of this room."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from batchinfer.scheduling import Scheduler, Sequence
from batchinfer.testing import FakeRunner, expected_output
from batchinfer.types.request import SamplingParams
from batchinfer.types.step import KVGroup, StepPlan

EOS = 257
WAYS = [(cache, chunked) for cache in (True, False) for chunked in (True, False)]
four_ways = pytest.mark.parametrize(("cache", "chunked"), WAYS)


@dataclass
class Bench:
    """A scheduler and a fake runner; `drain` runs everything and checks after every step."""

    cache: bool = True
    chunked: bool = True
    num_blocks: int = 256
    block_size: int = 16
    max_num_seqs: int = 64
    budget: int = 512
    max_model_len: int = 512
    eos_rate: float = 0.0
    groups: tuple[KVGroup, ...] = ()
    done: dict[int, Sequence] = field(default_factory=dict)
    max_running: int = 0
    plans: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups = self.groups or (KVGroup(num_blocks=self.num_blocks, block_size=self.block_size),)
        self.runner = FakeRunner(kv_groups=groups, eos_token_id=EOS, eos_rate=self.eos_rate)
        self.scheduler = Scheduler(
            groups,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget if self.chunked else max(self.budget, self.max_model_len),
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.cache,
            enable_chunked_prefill=self.chunked,
        )
        self.seqs: dict[int, Sequence] = {}

    def add(self, prompt: list[int], max_tokens: int = 8, **sampling: object) -> Sequence:
        seq = Sequence(
            seq_id=len(self.seqs),
            prompt_token_ids=prompt,
            sampling=SamplingParams(**{"temperature": 0.0, **sampling}),  # type: ignore[arg-type]
            sample_key=1000 + len(self.seqs),
            max_total_tokens=min(len(prompt) + max_tokens, self.max_model_len),
            stop_ids=frozenset({EOS}),
            eos_ids=frozenset({EOS}),
        )
        self.seqs[seq.seq_id] = seq
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            ended = self.scheduler.take_done()
        else:
            num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
            assert num_tokens <= self.scheduler.max_num_batched_tokens
            assert self.scheduler.num_running <= self.scheduler.max_num_seqs
            self.max_running = max(self.max_running, self.scheduler.num_running)
            self.plans.append([(c.seq_id, c.start, len(c.token_ids)) for c in plan.chunks])
            ended = self.scheduler.commit(plan, self.runner.execute(plan))
        self.scheduler.check()
        for seq in ended:
            assert seq.seq_id not in self.done, "a sequence ended twice"
            self.done[seq.seq_id] = seq
        return plan

    def drain(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                break
            before = len(self.done)
            assert self.step() is not None or len(self.done) > before, "nothing runs, yet sequences are left"
        assert not self.scheduler.has_unfinished()
        self.assert_clean()

    def assert_clean(self) -> None:
        for manager in self.scheduler.managers:
            assert manager.num_available == manager.num_blocks, "a finished job holds blocks"
            manager.check([])
        assert not self.scheduler._holdback
        assert not self.scheduler._holdback.held()

    def assert_right(self) -> None:
        """Every sequence that ended without an error has the tokens of a run without blocks."""
        for seq in self.done.values():
            if seq.error is None:
                prompt = seq.token_ids[: seq.num_prompt_tokens]
                room = seq.max_total_tokens - seq.num_prompt_tokens
                assert seq.output_token_ids == expected_output(
                    self.runner, prompt, seq.sampling, seq.sample_key, room
                ), seq


def numbers(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]
