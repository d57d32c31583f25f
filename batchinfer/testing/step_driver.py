"""Drives a ModelRunner by hand, without a scheduler: which sequence runs how many tokens in a step is up to the test.

Blocks are given out in random order, so that a runner which mixes up logical and physical blocks is found out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from batchinfer.runner.base import ModelRunner
from batchinfer.types.request import SamplingParams
from batchinfer.types.step import Chunk, SequenceSpec, StepPlan, StepResult

GREEDY = SamplingParams(temperature=0.0)


class StepDriver:
    """Sequences on one runner. `tokens` and `num_computed` are by sequence id; errors end a sequence."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0, next_step: int = 0) -> None:
        self.runner = runner
        self.tokens: dict[int, list[int]] = {}
        self.num_prompt: dict[int, int] = {}
        self.num_computed: dict[int, int] = {}
        self.results: list[StepResult] = []
        self.next_step = next_step
        self._random = random.Random(seed)
        self._free = [self._random.sample(range(g.num_blocks), g.num_blocks) for g in runner.kv_groups]
        self._tables: dict[int, tuple[list[int], ...]] = {}
        self._added: list[SequenceSpec] = []
        self._finished: list[int] = []
        self._next_id = 0

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        sample_key: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> int:
        """A new sequence; its id."""
        seq_id, self._next_id = self._next_id, self._next_id + 1
        spec = SequenceSpec(
            seq_id=seq_id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            sample_key=sample_key,
            stop_token_ids=frozenset(stop_token_ids),
        )
        self._added.append(spec)
        self.tokens[seq_id] = list(prompt)
        self.num_prompt[seq_id] = len(prompt)
        self.num_computed[seq_id] = 0
        self._tables[seq_id] = tuple([] for _ in self._free)
        return seq_id

    def step(self, lengths: Mapping[int, int], *, num_logits: int | None = None) -> StepResult:
        """Runs the next `lengths[seq_id]` tokens of each sequence, at most those it has; new tokens are appended.

        num_logits  positions to sample of each chunk; None: one where the chunk reaches the sequence's end
        """
        chunks = []
        for seq_id, length in lengths.items():
            start, tokens = self.num_computed[seq_id], self.tokens[seq_id]
            end = min(start + length, len(tokens))
            for group, table, free in zip(self.runner.kv_groups, self._tables[seq_id], self._free, strict=True):
                while len(table) * group.block_size < end:
                    table.append(free.pop())
            wanted = int(end == len(tokens)) if num_logits is None else num_logits
            chunks.append(Chunk(seq_id, start, tokens[start:end], self._tables[seq_id], wanted))
        result = self.runner.execute(StepPlan(self.next_step, tuple(chunks), tuple(self._added), tuple(self._finished)))
        self.next_step += 1
        self._added, self._finished = [], []
        for chunk in chunks:
            self.num_computed[chunk.seq_id] = chunk.start + len(chunk.token_ids)
            if num_logits is None and chunk.seq_id in result.token_ids:
                self.tokens[chunk.seq_id].extend(result.token_ids[chunk.seq_id])
        self.results.append(result)
        return result

    def generate(self, seq_ids: Sequence[int], max_tokens: int, *, chunk: int = 1 << 30) -> list[list[int]]:
        """Runs all to max_tokens new tokens, prompts in chunks of at most `chunk` tokens; their outputs."""
        ends = {s: self.num_prompt[s] + max_tokens for s in seq_ids}
        while True:
            lengths = {s: chunk for s in seq_ids if s in self.tokens and len(self.tokens[s]) < ends[s]}
            if not lengths:
                break
            for seq_id in self.step(lengths).errors:
                self.finish(seq_id)
        return [self.output(s) if s in self.tokens else [] for s in seq_ids]

    def output(self, seq_id: int) -> list[int]:
        """The new tokens of a sequence."""
        return self.tokens[seq_id][self.num_prompt[seq_id] :]

    def preempt(self, seq_id: int) -> None:
        """Takes a sequence's blocks away; its tokens are computed again."""
        for free, table in zip(self._free, self._tables[seq_id], strict=True):
            free.extend(table)
            self._random.shuffle(free)
            table.clear()
        self.num_computed[seq_id] = 0

    def finish(self, seq_id: int) -> None:
        """Ends a sequence; the runner is told in the next step."""
        self.preempt(seq_id)
        del self.tokens[seq_id], self._tables[seq_id]
        self._finished.append(seq_id)
