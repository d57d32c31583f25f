"""Decides which tokens of which sequences run in a step, and takes in what came out.

Responsible for: admission, the token budget, blocks for every scheduled token, pre-emption, the end of a sequence
by stop id or length. Pure: no I/O, no clock, no tensors. Not for: stop strings, text, samples of one request (the
engine), execution (the runner). See `sequence` for states, `block_manager` for blocks.

A step takes, until its budget of tokens is spent: one token of every decoding sequence, oldest first; then the
rest of prompts under way; then new sequences in the order in which they were given. A sequence is admitted once
all blocks for its known tokens are there, so that only decoding can run out of blocks; then the youngest sequence
gives its blocks back and will be recomputed (with the prefix cache's help). The oldest always goes on, therefore
no order of arrivals deadlocks; a sequence that does not fit though it is alone ends with an error of its own.

A new sequence begins behind the longest prefix that has been computed, token by token: whole blocks are shared, and
where the prefix ends inside a block, the block that has most of it is copied (`StepPlan.copies`). One whose prefix a
running sequence is about to compute further waits for that (`holdback`) while others run in its place: for a block or
more always; for less if others fill the step, or if that saves more than an emptier step costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from batchinfer.errors import ConfigError
from batchinfer.scheduling.block_manager import BlockManager
from batchinfer.scheduling.invariants import check_blocks
from batchinfer.scheduling.kv_blocks import NO_MATCH, KVBlocks, PrefixMatch
from batchinfer.scheduling.queues import Queues, insert
from batchinfer.scheduling.sequence import Sequence, Status
from batchinfer.types.rows import ErrorClass, RowError
from batchinfer.types.step import BlockCopy, Chunk, KVGroup, SequenceSpec, StepPlan, StepResult

MAX_EXAMINED_PER_STEP = 512
"""How far a step looks past sequences that are held back; what it does not reach, the next step does."""

STEP_COST_TOKENS = 32
"""What a step costs beside its tokens, mostly for reading the weights, in tokens computed. Sequences that are left out
of a step cost their share of it, and must save more."""


class Scheduler:
    """The scheduler of one engine. `schedule` and `commit` alternate; `add` and `abort` come between steps.

    max_num_seqs              sequences that own blocks at the same time
    max_num_batched_tokens    tokens in a step
    enable_chunked_prefill    False: a prompt runs whole in one step or waits
    """

    def __init__(
        self,
        kv_groups: SequenceOf[KVGroup],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ConfigError(f"engine.{name} must be at least 1, got {value}")
        if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"engine.max_num_batched_tokens ({max_num_batched_tokens}) is less than max_model_len "
                f"({max_model_len}): without chunked prefill a prompt must fit into one step. Raise the first or "
                "lower the second"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.enable_chunked_prefill = enable_chunked_prefill
        self._blocks = KVBlocks(kv_groups, enable_prefix_caching=enable_prefix_caching)

        self._queues = queues = Queues()
        self._waiting, self._holdback = queues.waiting, queues.holdback
        self._prefilling, self._decoding = queues.prefilling, queues.decoding
        self._seqs: dict[int, Sequence] = {}

        self._step = 0
        self._arrivals = 0
        self._specs: list[SequenceSpec] = []  # admitted for the first time, not yet in a committed plan
        self._finished_ids: list[int] = []  # known to the runner, not yet in a committed plan
        self._scheduled: list[Sequence] = []
        self._num_decodes = 0
        self._done: list[Sequence] = []

        self.num_preemptions = 0
        self.num_computed_tokens = 0  # run through the model, of prompts and of outputs
        self.num_generated_tokens = 0
        # Of sequences that have begun, each counted once. What is not cached was computed.
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_copied_tokens = 0  # cached, but copied from the middle of a block of the first group
        self.num_recomputed_tokens = 0  # lost to pre-emption, or of another engine, and not found in the cache

    # ---------------------------------------------------------------- between steps

    def add(self, seq: Sequence) -> None:
        """Takes a sequence in, behind those that wait. `1 <= prompt and output < max_total_tokens <= max_model_len`."""
        assert 0 < seq.num_prompt_tokens <= len(seq.token_ids) < seq.max_total_tokens <= self.max_model_len, seq
        assert seq.seq_id not in self._seqs, seq
        seq.arrival = self._arrivals
        self._arrivals += 1
        self._blocks.register(seq)
        self._seqs[seq.seq_id] = seq
        self._waiting.append(seq)
        self._blocks.note_wanted(seq)

    def abort(self, seq_id: int) -> Sequence | None:
        """Takes a sequence out; None where it is gone already. It is not among those that `commit` hands back."""
        seq = self._seqs.get(seq_id)
        if seq is None:
            return None
        self._queues.take_out(seq)
        self._retire(seq)
        return seq

    def end(self, seq: Sequence) -> None:
        """Ends a running sequence whose finish_reason or error the caller has set (a stop string, say)."""
        if seq.status is not Status.FINISHED:
            self._queues.take_out(seq)
            self._retire(seq)

    @property
    def managers(self) -> tuple[BlockManager, ...]:
        """One for each KV group, to look at."""
        return self._blocks.managers

    def has_unfinished(self) -> bool:
        return bool(self._seqs) or bool(self._done)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._holdback.num_held

    @property
    def num_unfinished(self) -> int:
        return len(self._seqs)

    def shrink(self, max_num_seqs: int) -> None:
        """Lowers max_num_seqs at once: the youngest sequences above it are pre-empted."""
        self.max_num_seqs = max(1, max_num_seqs)
        while self.num_running > self.max_num_seqs:
            self._preempt(self._queues.youngest())

    # ---------------------------------------------------------------- a step

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run. Calling it again without `commit` makes a new plan in
        place of the last one, which then did not happen: what it added and finished is told again."""
        chunks: list[Chunk] = []
        scheduled: list[Sequence] = []
        budget = self.max_num_batched_tokens
        for seq in self._decoding:
            if budget == 0:
                break
            position = seq.num_computed
            if position >= seq.num_slots and not self._grow(seq, bool(chunks)):
                break  # it was the youngest: there is none after it
            chunks.append(Chunk(seq.seq_id, position, (seq.token_ids[-1],), seq.block_tables, 1))
            scheduled.append(seq)
            budget -= 1
        self._num_decodes = len(chunks)

        for seq in self._prefilling:
            if budget == 0:
                break
            budget -= self._take_prefill(seq, seq.num_computed, budget, chunks, scheduled)
        if budget > 0 and self._waiting:
            self._admit(budget, chunks, scheduled)
        self._scheduled = scheduled
        if not chunks:
            return None
        copies: tuple[BlockCopy, ...] = ()
        if len(chunks) > self._num_decodes:
            # Told with the sequence's chunk, not before: whose chunk is executed has its copy, whatever else fails.
            copies = tuple(copy for seq in scheduled[self._num_decodes :] for copy in seq.copies)
        return StepPlan(self._step, tuple(chunks), tuple(self._specs), tuple(self._finished_ids), copies)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Takes in the step's tokens; returns the sequences that ended, also those that `schedule` gave up."""
        assert plan.step == self._step, f"step {plan.step} is committed, step {self._step} was expected"
        self._step += 1
        self._specs.clear()
        self._finished_ids.clear()
        if result.errors:
            self._take_errors(result)
        if result.logprobs or result.prompt_logprobs:
            self._take_logprobs(plan, result)

        token_ids_of = result.token_ids
        scheduled, num_decodes = self._scheduled, self._num_decodes
        done = self._done
        num_done = len(done)
        decoding = Status.DECODING
        for seq in scheduled[:num_decodes]:
            if seq.status is not decoding:
                continue  # its error was taken above
            tokens = seq.token_ids
            token = token_ids_of[seq.seq_id][0]
            seq.num_computed = computed = len(tokens)
            tokens.append(token)
            if token in seq.stop_ids and computed >= seq.min_total_tokens:
                self._end_by_stop_id(seq, token)
            elif computed + 1 >= seq.max_total_tokens:
                seq.finish_reason = "length"
                done.append(seq)
        self.num_computed_tokens += num_decodes
        self.num_generated_tokens += num_decodes
        if len(scheduled) > num_decodes:
            self._commit_prefills(plan, token_ids_of)
        if len(done) > num_done:
            for seq in done[num_done:]:
                self._retire(seq)
            self._decoding[:] = [seq for seq in self._decoding if seq.status is decoding]
        self._scheduled = []
        return self.take_done()

    def take_done(self) -> list[Sequence]:
        """Sequences that ended since the last call, for when `schedule` returned None."""
        done, self._done = self._done, []
        return done

    # ---------------------------------------------------------------- schedule: parts

    def _take_prefill(
        self, seq: Sequence, start: int, budget: int, chunks: list[Chunk], scheduled: list[Sequence]
    ) -> int:
        """Puts its known tokens from `start` on into the step, as far as they fit; returns how many."""
        tokens = seq.token_ids
        length = len(tokens) - start
        if length <= budget:
            chunks.append(Chunk(seq.seq_id, start, tokens[start:], seq.block_tables, 1))
        elif self.enable_chunked_prefill:
            length = budget
            chunks.append(Chunk(seq.seq_id, start, tokens[start : start + length], seq.block_tables, 0))
        else:
            return 0
        scheduled.append(seq)
        return length

    def _admit(self, budget: int, chunks: list[Chunk], scheduled: list[Sequence]) -> None:
        waiting, blocks, holdback = self._waiting, self._blocks, self._holdback
        block_size = blocks.sizes[0]
        deferred: list[Sequence] = []  # would save less than a block by waiting a step
        gains: list[int] = []
        lacks_blocks = False
        examined = 0
        num_left = self.max_num_seqs - self.num_running
        while budget > 0 and waiting and num_left > 0 and examined < MAX_EXAMINED_PER_STEP:
            seq = waiting[0]
            if len(seq.token_ids) > blocks.max_tokens:
                never = blocks.never_fits(seq)
                assert never is not None
                waiting.popleft()
                self._fail(seq, never)
                continue
            match = NO_MATCH
            if self.enable_prefix_caching and seq.reads_cache:
                match = blocks.match(seq)
                if holdback:
                    reach = holdback.reach(seq, match.num_tokens)
                    gain = reach - match.num_tokens
                    if gain:
                        waiting.popleft()
                        examined += 1
                        if gain >= block_size:
                            holdback.hold(seq, reach)
                        else:
                            deferred.append(seq)
                            gains.append(gain)
                        continue
            if not self._begin(seq, match, budget):
                lacks_blocks = True
                break
            waiting.popleft()
            num_left -= 1
            budget -= self._take_prefill(seq, seq.num_computed, budget, chunks, scheduled)
        if deferred:
            if budget > 0 and not lacks_blocks and not self._is_worth_waiting(gains):
                self._admit_deferred(deferred, budget, chunks, scheduled)
            waiting.extendleft(reversed(deferred))

    def _is_worth_waiting(self, gains: list[int]) -> bool:
        """Whether it pays to leave out for a step those who then save so many tokens: without them the step has that
        much less to spread its fixed costs over."""
        num_left = self.max_num_seqs - self.num_running
        gains = gains[:num_left]
        return sum(gains) * (self.num_running + len(gains)) >= STEP_COST_TOKENS * len(gains)

    def _admit_deferred(
        self, deferred: list[Sequence], budget: int, chunks: list[Chunk], scheduled: list[Sequence]
    ) -> None:
        """The step has room left: those begin now that would have waited for little. Takes them out of the list."""
        num_begun = 0
        for seq in deferred:
            if budget == 0 or self.num_running == self.max_num_seqs:
                break
            # Matched again: what was found for it may have been evicted for others since.
            if not self._begin(seq, self._blocks.match(seq), budget):
                break
            budget -= self._take_prefill(seq, seq.num_computed, budget, chunks, scheduled)
            num_begun += 1
        del deferred[:num_begun]

    def _begin(self, seq: Sequence, match: PrefixMatch, budget: int) -> bool:
        """Gives a waiting sequence its blocks. False if the step or the pool has no room for it."""
        if len(seq.token_ids) - match.num_tokens > budget and not self.enable_chunked_prefill:
            return False
        if not self._blocks.allocate(seq, match, keep_reserve=self.num_running > 0):
            return False
        self._start(seq)
        return True

    def _start(self, seq: Sequence) -> None:
        """Counts and tells of a sequence that has its blocks."""
        matched = seq.num_computed
        if seq.num_cached_tokens >= 0:
            self.num_recomputed_tokens -= matched
        else:
            tokens, num_prompt = seq.token_ids, seq.num_prompt_tokens
            seq.num_cached_tokens = cached = min(matched, num_prompt)
            self.num_prompt_tokens += num_prompt
            self.num_cached_tokens += cached
            self.num_recomputed_tokens += len(tokens) - num_prompt - (matched - cached)
            if seq.copies:
                self.num_copied_tokens += max(0, cached - matched + matched % self._blocks.sizes[0])
            self._specs.append(
                SequenceSpec(
                    seq.seq_id,
                    tokens[:num_prompt],
                    seq.sampling,
                    seq.sample_key,
                    seq.stop_ids,
                    tokens[num_prompt:],
                )
            )
        if self.enable_prefix_caching:
            self._holdback.begin(seq)
        seq.status = Status.PREFILLING
        insert(self._prefilling, seq)

    def _grow(self, seq: Sequence, others_scheduled: bool) -> bool:
        """Blocks for a decoding sequence's next token, at the cost of younger ones. False if it lost its own place."""
        while not self._blocks.grow(seq, len(seq.token_ids)):
            victim = self._queues.youngest()
            if victim is not seq:
                self._preempt(victim)
            elif others_scheduled or self.num_running > 1:
                self._preempt(seq)
                return False
            else:
                self._queues.take_out(seq)
                never = self._blocks.never_fits(seq)
                assert never is not None, f"{seq} is alone and lacks blocks, but would fit"
                self._fail(seq, never)
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._queues.take_out(seq)
        self.num_recomputed_tokens += seq.num_computed
        self._release(seq)
        seq.status = Status.WAITING
        self._blocks.note_wanted(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(seq)

    def _fail(self, seq: Sequence, why: str) -> None:
        """Ends a sequence that is in no queue any more and does not fit."""
        seq.error = RowError(ErrorClass.OUT_OF_MEMORY, why)
        self._retire(seq)
        self._done.append(seq)

    # ---------------------------------------------------------------- commit: parts

    def _commit_prefills(self, plan: StepPlan, token_ids_of: Mapping[int, SequenceOf[int]]) -> None:
        """Counts the computed tokens of prompts; sequences whose tokens have all run take their first new one, and
        decode from now on."""
        moved = False
        prefilling, caching, done = Status.PREFILLING, self.enable_prefix_caching, self._done
        for chunk, seq in zip(plan.chunks[self._num_decodes :], self._scheduled[self._num_decodes :], strict=True):
            if seq.status is not prefilling:
                continue
            length = len(chunk.token_ids)
            self.num_computed_tokens += length
            seq.num_computed = computed = seq.num_computed + length
            if seq.copies:
                self._blocks.copied(seq)
            if not chunk.num_logits:
                if computed >= seq.publish_at:
                    self._publish(seq)
                continue
            if caching:
                self._queues.let_wait_no_longer(self._holdback.end(seq))
                if computed >= seq.publish_at:
                    self._publish(seq)
                self._blocks.publish_tail(seq)
            self.num_generated_tokens += 1
            seq.status = Status.DECODING
            insert(self._decoding, seq)
            moved = True
            token = token_ids_of[seq.seq_id][0]
            seq.token_ids.append(token)
            if token in seq.stop_ids and computed >= seq.min_total_tokens:
                self._end_by_stop_id(seq, token)
            elif computed + 1 >= seq.max_total_tokens:
                seq.finish_reason = "length"
                done.append(seq)
        if moved:
            self._prefilling[:] = [seq for seq in self._prefilling if seq.status is Status.PREFILLING]

    def _end_by_stop_id(self, seq: Sequence, token: int) -> None:
        seq.finish_reason = "stop"
        if token not in seq.eos_ids:
            seq.stop_reason = token
        self._done.append(seq)

    def _take_errors(self, result: StepResult) -> None:
        for seq_id, error in result.errors.items():
            if (seq := self._seqs.get(seq_id)) is None:
                continue  # it ended while the step was under way
            seq.error = error
            self._queues.take_out(seq)
            self._retire(seq)
            self._done.append(seq)

    def _take_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for seq_id, entries in result.logprobs.items():
            seq = self._seqs.get(seq_id)
            if seq is not None and seq.logprobs is not None:
                seq.logprobs.extend(entries)
        if result.prompt_logprobs:
            starts = {chunk.seq_id: chunk.start for chunk in plan.chunks}
            for seq_id, entries in result.prompt_logprobs.items():
                seq = self._seqs.get(seq_id)
                if seq is not None and seq.prompt_logprobs is not None:
                    first = starts[seq_id] + 1
                    seq.prompt_logprobs[first : first + len(entries)] = entries

    def _publish(self, seq: Sequence) -> None:
        before = self._blocks.publish(seq)
        if self._holdback:
            self._queues.let_wait_no_longer(self._holdback.go_on(seq, before))

    # ---------------------------------------------------------------- small parts

    def _release(self, seq: Sequence) -> None:
        """Gives all blocks back. Those that its output has filled are made findable now, in one go: hardly anybody
        asks for them before."""
        if seq.num_computed >= seq.publish_at:
            self._blocks.publish(seq)
        if seq.status is Status.PREFILLING and self.enable_prefix_caching:
            self._queues.let_wait_no_longer(self._holdback.end(seq))
        self._blocks.release(seq)

    def _retire(self, seq: Sequence) -> None:
        """Ends a sequence that is in no queue any more, or in `decoding` where `commit` filters it out."""
        self._release(seq)
        seq.status = Status.FINISHED
        del self._seqs[seq.seq_id]
        if seq.num_cached_tokens >= 0:
            self._finished_ids.append(seq.seq_id)
            if self._specs:  # told in a step that did not happen
                self._specs = [spec for spec in self._specs if spec.seq_id != seq.seq_id]

    def check(self, held: SequenceOf[tuple[int, list[int]]] = ()) -> None:
        """Asserts what must hold between steps; for tests. held: blocks, by KV group, kept for what has ended."""
        self._queues.check(self._seqs)
        not_running = [*self._waiting, *self._holdback.held()]
        check_blocks(self._prefilling + self._decoding, not_running, self._blocks.managers, held)
        self._holdback.check(self._prefilling if self.enable_prefix_caching else [])
        self._blocks.wanted.check(seq.seq_id for seq in not_running)
