"""A scheduler that plans a step while the one before it is under way, and its tokens are not known yet.

Responsible for: what can be said of a step before the last one's outcome; blocks that a launched step may still write.
Not for: launching and waiting (the engine's `overlap`).

What is known of a step under way is how far it gets, not what it samples. So `schedule_ahead` looks at each sequence as
it will be once that step is committed: a token longer, or behind its chunk. Nothing of it is changed for that but the
number of its blocks, so `commit` finds everything as it does without looking ahead. Left out of a step planned ahead
are sequences that will have their full length, and those whose next token follows from more than what lies on the
device (penalties count tokens on the host). Nobody is pre-empted for it: where blocks are lacking, the step under way
is committed first, and `schedule` decides.

A sequence that turns out to have ended when a step is committed may be in the next one already. What that samples for
it is dropped, and its blocks are nobody else's until that is over too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

from batchinfer.scheduling.scheduler import Scheduler
from batchinfer.scheduling.sequence import Sequence, Status
from batchinfer.types.step import UNKNOWN_TOKEN, Chunk, StepPlan, StepResult


class _Launched:
    """A plan under way, and the blocks of it whose sequences have ended since: (KV group, blocks)."""

    __slots__ = ("chunk_of", "held", "num_decodes", "plan", "scheduled")

    def __init__(self, plan: StepPlan, scheduled: list[Sequence], num_decodes: int) -> None:
        self.plan = plan
        self.scheduled = scheduled
        self.num_decodes = num_decodes
        self.chunk_of = {chunk.seq_id: chunk for chunk in plan.chunks}
        self.held: list[tuple[int, list[int]]] = []


class LookaheadScheduler(Scheduler):
    """A Scheduler that is told which plans were `launched`. While one is, `schedule_ahead` makes the next, which may be
    launched too before the first is committed; then that must come. A plan that is not launched did not happen, as one
    of `schedule`. `schedule` and `shrink` are for when nothing is under way, `add`, `abort` and `end` for any time.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._under_way: deque[_Launched] = deque()  # two at most

    def launched(self, plan: StepPlan) -> None:
        """The plan that was made last is under way: what it adds and finishes has been told."""
        self._under_way.append(_Launched(plan, self._scheduled, self._num_decodes))
        self._specs.clear()
        self._finished_ids.clear()

    def schedule(self) -> StepPlan | None:
        assert not self._under_way, "a step is under way: see schedule_ahead"
        return super().schedule()

    def schedule_ahead(self) -> StepPlan | None:
        """The step after the one under way. None where that had better be committed first: nothing else can run, blocks
        are lacking, or more sequences would be left out that decode than taken."""
        (under_way,) = self._under_way
        chunk_of = under_way.chunk_of
        chunks: list[Chunk] = []
        scheduled: list[Sequence] = []
        budget = self.max_num_batched_tokens
        num_left_out = 0
        for seq in self._decoding + [seq for seq in self._prefilling if self._is_last_chunk(chunk_of.get(seq.seq_id))]:
            if budget == 0:
                break
            chunk = chunk_of.get(seq.seq_id)
            if chunk is None:
                position, token = seq.num_computed, seq.token_ids[-1]
            else:
                position, token = chunk.start + len(chunk.token_ids), UNKNOWN_TOKEN
                if position + 1 >= seq.max_total_tokens:
                    continue
                if seq.sampling.has_penalties:
                    num_left_out += 1
                    continue
            if position >= seq.num_slots and not self._blocks.grow(seq, position + 1):
                return None
            chunks.append(Chunk(seq.seq_id, position, (token,), seq.block_tables, 1))
            scheduled.append(seq)
            budget -= 1
        num_decodes = len(chunks)
        if num_left_out > num_decodes:
            return None
        for seq in self._prefilling:
            if budget == 0:
                break
            chunk = chunk_of.get(seq.seq_id)
            if not self._is_last_chunk(chunk):
                start = seq.num_computed if chunk is None else chunk.start + len(chunk.token_ids)
                budget -= self._take_prefill(seq, start, budget, chunks, scheduled)
        if budget > 0 and self._waiting:
            self._admit(budget, chunks, scheduled)
        self._scheduled, self._num_decodes = scheduled, num_decodes
        if not chunks:
            return None
        # A copy that is under way must not be done again over what is written behind it.
        begun = (seq for seq in scheduled[num_decodes:] if seq.seq_id not in chunk_of)
        copies = tuple(copy for seq in begun for copy in seq.copies)
        return StepPlan(self._step + 1, tuple(chunks), tuple(self._specs), tuple(self._finished_ids), copies)

    @staticmethod
    def _is_last_chunk(chunk: Chunk | None) -> bool:
        return chunk is not None and chunk.num_logits > 0

    def commit(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        if not self._under_way:
            return super().commit(plan, result)
        launched = self._under_way.popleft()
        assert plan is launched.plan, f"step {plan.step} is committed, step {launched.plan.step} was launched before it"
        self._scheduled, self._num_decodes = launched.scheduled, launched.num_decodes
        # What has come up since it was launched is told with the next plan.
        specs, finished_ids = self._specs, self._finished_ids
        self._specs, self._finished_ids = [], []
        # They are counted as computed, which they were, but nothing was generated.
        self.num_generated_tokens -= sum(
            seq.status is Status.FINISHED for seq in launched.scheduled[: launched.num_decodes]
        )
        done = super().commit(plan, result)
        self._specs, self._finished_ids = specs, finished_ids + self._finished_ids
        self._blocks.let_go(launched.held)
        return done

    def abort(self, seq_id: int) -> Sequence | None:
        if self._done:  # handed out again, and not yet taken
            self._done = [seq for seq in self._done if seq.seq_id != seq_id]
        return super().abort(seq_id)

    def hand_out(self, done: list[Sequence]) -> None:
        """Sequences that have ended already: they come with those that end with the next commit."""
        self._done += done

    def _release(self, seq: Sequence) -> None:
        for launched in reversed(self._under_way):
            if seq.seq_id in launched.chunk_of:
                launched.held += self._blocks.hold(seq)
                break  # those before it are over sooner
        super()._release(seq)

    def shrink(self, max_num_seqs: int) -> None:
        assert not self._under_way, "nobody is pre-empted while a step is under way"
        super().shrink(max_num_seqs)

    def check(self, held: SequenceOf[tuple[int, list[int]]] = ()) -> None:
        super().check([*held, *(held for launched in self._under_way for held in launched.held)])
