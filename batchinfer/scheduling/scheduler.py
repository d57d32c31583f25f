"""Decides which tokens of which sequences run in a step, and takes in what came out.

Responsible for: admission, the token budget, blocks for every scheduled token, pre-emption, the end of a sequence
by stop id or length. Pure: no I/O, no clock, no tensors. Not for: stop strings, text, samples of one request (the
engine), execution (the runner). See `sequence` for states, `block_manager` for blocks.

A step takes, until its budget of tokens is spent: one token of every decoding sequence, oldest first; then the
rest of prompts under way; then new sequences in the order in which they were given. A sequence is admitted once
all blocks for its known tokens are there, so that only decoding can run out of blocks; then the youngest sequence
gives its blocks back and will be recomputed (with the prefix cache's help). The oldest always goes on, therefore
no order of arrivals deadlocks; a sequence that does not fit though it is alone ends with an error of its own.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence as SequenceOf
from math import lcm
from operator import attrgetter

from batchinfer.errors import ConfigError
from batchinfer.scheduling.block_manager import BlockManager
from batchinfer.scheduling.holdback import Holdback
from batchinfer.scheduling.invariants import check_blocks, check_queues
from batchinfer.scheduling.prefix_index import PrefixChain
from batchinfer.scheduling.sequence import NEVER, Sequence, Status
from batchinfer.types.rows import ErrorClass, RowError
from batchinfer.types.step import Chunk, KVGroup, SequenceSpec, StepPlan, StepResult

MAX_EXAMINED_PER_STEP = 512
"""How far a step looks past sequences that are held back; what it does not reach, the next step does."""

_arrival = attrgetter("arrival")


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
        self.managers = tuple(BlockManager(g, enable_prefix_caching=enable_prefix_caching) for g in kv_groups)
        self._sizes = tuple(m.block_size for m in self.managers)
        # A matched prefix ends at a block's edge in every group.
        self._match_unit = lcm(*self._sizes)
        # Admission leaves some blocks to those who are decoding, lest the newcomer is thrown out at once.
        self._watermarks = tuple(m.num_blocks // 100 for m in self.managers)

        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []  # by arrival
        self._decoding: list[Sequence] = []  # by arrival
        self._seqs: dict[int, Sequence] = {}
        self._holdback = Holdback()

        self._step = 0
        self._arrivals = 0
        self._specs: list[SequenceSpec] = []  # admitted for the first time, not yet in a committed plan
        self._finished_ids: list[int] = []  # known to the runner, not yet in a committed plan
        self._scheduled: list[Sequence] = []
        self._num_decodes = 0
        self._done: list[Sequence] = []

        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

    # ---------------------------------------------------------------- between steps

    def add(self, seq: Sequence) -> None:
        """Takes a sequence in, behind those that wait. `1 <= prompt < max_total_tokens <= max_model_len`."""
        assert 0 < seq.num_prompt_tokens < seq.max_total_tokens <= self.max_model_len, seq
        assert seq.seq_id not in self._seqs, seq
        seq.arrival = self._arrivals
        self._arrivals += 1
        sizes = self._sizes
        if len(sizes) == 1:
            seq.block_tables = ([],)
            if self.enable_prefix_caching:
                seq.chains = (PrefixChain(sizes[0]),)
        else:
            seq.block_tables = tuple([] for _ in sizes)
            if self.enable_prefix_caching:
                chains = {size: PrefixChain(size) for size in sizes}
                seq.chains = tuple(chains[size] for size in sizes)
        self._seqs[seq.seq_id] = seq
        self._waiting.append(seq)

    def abort(self, seq_id: int) -> Sequence | None:
        """Takes a sequence out; None where it is gone already. It is not among those that `commit` hands back."""
        seq = self._seqs.get(seq_id)
        if seq is None:
            return None
        self._remove_from_queues(seq)
        self._retire(seq)
        return seq

    def end(self, seq: Sequence) -> None:
        """Ends a running sequence whose finish_reason or error the caller has set (a stop string, say)."""
        if seq.status is not Status.FINISHED:
            self._remove_from_queues(seq)
            self._retire(seq)

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
            self._preempt(self._youngest())

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
            budget -= self._take_prefill(seq, budget, chunks, scheduled)
        if budget > 0 and self._waiting:
            self._admit(budget, chunks, scheduled)
        self._scheduled = scheduled
        if not chunks:
            return None
        return StepPlan(self._step, tuple(chunks), tuple(self._specs), tuple(self._finished_ids))

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
            if computed >= seq.publish_at:
                self._publish(seq)
            tokens.append(token)
            if token in seq.stop_ids and computed >= seq.min_total_tokens:
                self._end_by_stop_id(seq, token)
            elif computed + 1 >= seq.max_total_tokens:
                seq.finish_reason = "length"
                done.append(seq)
        self.num_computed_tokens += num_decodes
        self.num_generated_tokens += num_decodes
        if len(scheduled) > num_decodes:
            self._commit_prefills(plan)
            for chunk, seq in zip(plan.chunks[num_decodes:], scheduled[num_decodes:], strict=True):
                if chunk.num_logits and seq.status is decoding:
                    tokens = seq.token_ids
                    token = token_ids_of[seq.seq_id][0]
                    tokens.append(token)
                    if token in seq.stop_ids and len(tokens) > seq.min_total_tokens:
                        self._end_by_stop_id(seq, token)
                    elif len(tokens) >= seq.max_total_tokens:
                        seq.finish_reason = "length"
                        done.append(seq)
        if len(done) > num_done:
            for seq in done[num_done:]:
                self._retire(seq)
            self._decoding = [seq for seq in self._decoding if seq.status is decoding]
        self._scheduled = []
        return self.take_done()

    def take_done(self) -> list[Sequence]:
        """Sequences that ended since the last call, for when `schedule` returned None."""
        done, self._done = self._done, []
        return done

    # ---------------------------------------------------------------- schedule: parts

    def _take_prefill(self, seq: Sequence, budget: int, chunks: list[Chunk], scheduled: list[Sequence]) -> int:
        start = seq.num_computed
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
        waiting = self._waiting
        examined = 0
        while budget > 0 and waiting and self.num_running < self.max_num_seqs:
            if examined == MAX_EXAMINED_PER_STEP:
                return
            seq = waiting[0]
            matched = self._find_prefix(seq)
            if matched is None:
                waiting.popleft()
                examined += 1
                continue
            length = len(seq.token_ids) - matched
            if length > budget and not self.enable_chunked_prefill:
                return
            verdict = self._allocate(seq, matched)
            if verdict is False:
                return
            waiting.popleft()
            if verdict is None:
                continue
            budget -= self._take_prefill(seq, budget, chunks, scheduled)

    def _find_prefix(self, seq: Sequence) -> int | None:
        """Tokens of `seq` that are in the cache in every group; None if it is held back instead."""
        if not self.enable_prefix_caching:
            return 0
        tokens = seq.token_ids
        num_tokens = len(tokens)
        for chain in seq.chains:
            chain.extend(tokens, num_tokens // chain.block_size)
        if not seq.reads_cache:
            return 0
        # At least the last token runs, for its logits.
        unit = self._match_unit
        limit = (num_tokens - 1) // unit * unit
        matched = limit
        for manager, chain in zip(self.managers, seq.chains, strict=True):
            size = manager.block_size
            matched = len(manager.match(chain, matched // size)) * size // unit * unit
            if not matched:
                break
        if matched < limit and self._holdback:
            size = self._sizes[0]
            if self._holdback.hold(seq, seq.chains[0].hashes, matched // size, limit // size):
                return None
        return matched

    def _allocate(self, seq: Sequence, matched: int) -> bool | None:
        """Blocks for all tokens of `seq`. False: not now. None: it never fits, and has ended with an error."""
        num_tokens = len(seq.token_ids)
        running = self._prefilling or self._decoding
        prefixes: list[list[int]] = []
        counts: list[int] = []
        for group, manager in enumerate(self.managers):
            size = manager.block_size
            total = -(-num_tokens // size)
            if total > manager.num_blocks:
                self._fail_oversized(seq, total, manager)
                return None
            prefix = manager.match(seq.chains[group], matched // size) if matched else []
            count = total - len(prefix)
            available = manager.num_available - manager.num_idle_among(prefix)
            if count > available or (running and count > available - self._watermarks[group]):
                return False
            prefixes.append(prefix)
            counts.append(count)
        for manager, table, prefix, count in zip(self.managers, seq.block_tables, prefixes, counts, strict=True):
            if prefix:
                manager.acquire(prefix)
                table.extend(prefix)
            manager.allocate(count, table)
        seq.num_computed = matched
        self._update_slots(seq)
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = matched
            self.num_cached_tokens += matched
            self._specs.append(
                SequenceSpec(
                    seq_id=seq.seq_id,
                    prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
                    sampling=seq.sampling,
                    sample_key=seq.sample_key,
                    stop_token_ids=seq.stop_ids,
                )
            )
        if self.enable_prefix_caching:
            seq.num_published = [len(prefix) for prefix in prefixes]
            self._set_publish_at(seq)
            self._holdback.begin(seq, seq.chains[0].hashes[len(prefixes[0]) :])
        seq.status = Status.PREFILLING
        _insert(self._prefilling, seq)
        return True

    def _grow(self, seq: Sequence, others_scheduled: bool) -> bool:
        """A block more for a decoding sequence, in each group that needs one. False if it lost its place."""
        num_tokens = len(seq.token_ids)
        for manager, table in zip(self.managers, seq.block_tables, strict=True):
            while len(table) * manager.block_size < num_tokens:
                if manager.num_available:
                    manager.allocate(1, table)
                    continue
                victim = self._youngest()
                if victim is not seq:
                    self._preempt(victim)
                elif others_scheduled or self.num_running > 1:
                    self._preempt(seq)
                    return False
                else:
                    self._remove_from_queues(seq)
                    self._fail_oversized(seq, len(table) + 1, manager)
                    return False
        self._update_slots(seq)
        return True

    def _youngest(self) -> Sequence:
        prefilling, decoding = self._prefilling, self._decoding
        if not prefilling:
            return decoding[-1]
        if not decoding or prefilling[-1].arrival > decoding[-1].arrival:
            return prefilling[-1]
        return decoding[-1]

    def _preempt(self, seq: Sequence) -> None:
        self._remove_from_queues(seq)
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(seq)

    def _fail_oversized(self, seq: Sequence, num_blocks: int, manager: BlockManager) -> None:
        seq.error = RowError(
            ErrorClass.OUT_OF_MEMORY,
            f"the row alone needs more KV memory than the engine has: {len(seq.token_ids)} tokens take {num_blocks} "
            f"blocks of {manager.block_size}, there are {manager.num_blocks}; raise engine.kv_cache_memory or "
            "lower engine.max_model_len",
        )
        self._retire(seq)
        self._done.append(seq)

    # ---------------------------------------------------------------- commit: parts

    def _commit_prefills(self, plan: StepPlan) -> None:
        """Counts the computed tokens of prompts and moves sequences whose tokens have all run to decoding."""
        moved = False
        for chunk, seq in zip(plan.chunks[self._num_decodes :], self._scheduled[self._num_decodes :], strict=True):
            if seq.status is not Status.PREFILLING:
                continue
            length = len(chunk.token_ids)
            self.num_computed_tokens += length
            seq.num_computed += length
            if seq.num_computed >= seq.publish_at:
                self._publish(seq)
            if chunk.num_logits:
                self.num_generated_tokens += 1
                seq.status = Status.DECODING
                _insert(self._decoding, seq)
                moved = True
        if moved:
            self._prefilling = [seq for seq in self._prefilling if seq.status is Status.PREFILLING]

    def _end_by_stop_id(self, seq: Sequence, token: int) -> None:
        seq.finish_reason = "stop"
        if token not in seq.eos_ids:
            seq.stop_reason = token
        self._done.append(seq)

    def _take_errors(self, result: StepResult) -> None:
        for seq_id, error in result.errors.items():
            seq = self._seqs[seq_id]
            seq.error = error
            self._remove_from_queues(seq)
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
        """Files every block whose tokens have now all been computed."""
        tokens, computed = seq.token_ids, seq.num_computed
        for group, manager in enumerate(self.managers):
            chain, table = seq.chains[group], seq.block_tables[group]
            full = computed // manager.block_size
            chain.extend(tokens, full)
            manager.publish(table, chain, seq.num_published[group], full)
            if group == 0 and self._holdback:
                self._end_holdback(seq, full)
            seq.num_published[group] = full
        self._set_publish_at(seq)

    # ---------------------------------------------------------------- small parts

    # Written out, since both run once or more for every row.

    def _set_publish_at(self, seq: Sequence) -> None:
        nearest = NEVER
        for published, size in zip(seq.num_published, self._sizes, strict=True):
            end = (published + 1) * size
            if end < nearest:
                nearest = end
        seq.publish_at = nearest

    def _update_slots(self, seq: Sequence) -> None:
        fewest = NEVER
        for table, size in zip(seq.block_tables, self._sizes, strict=True):
            slots = len(table) * size
            if slots < fewest:
                fewest = slots
        seq.num_slots = fewest

    def _end_holdback(self, seq: Sequence, stop: int) -> None:
        """Blocks up to `stop` are published, or given up: whoever waits for one of them is looked at again."""
        released = self._holdback.end(seq, seq.chains[0].hashes[seq.num_published[0] : stop])
        if released:
            self._waiting.extendleft(reversed(released))

    def _release(self, seq: Sequence) -> None:
        """Gives all blocks back."""
        if seq.num_published:
            if self._holdback:
                self._end_holdback(seq, len(seq.chains[0].hashes))
            seq.num_published = []
        for manager, table in zip(self.managers, seq.block_tables, strict=True):
            manager.release(table)
        seq.num_computed = 0
        seq.num_slots = 0
        seq.publish_at = NEVER

    def _retire(self, seq: Sequence) -> None:
        """Ends a sequence that is in no queue any more, or in `decoding` where `commit` filters it out."""
        self._release(seq)
        seq.status = Status.FINISHED
        del self._seqs[seq.seq_id]
        if seq.num_cached_tokens >= 0:
            self._finished_ids.append(seq.seq_id)
            if self._specs:  # told in a step that did not happen
                self._specs = [spec for spec in self._specs if spec.seq_id != seq.seq_id]

    def _remove_from_queues(self, seq: Sequence) -> None:
        if seq.status is Status.DECODING:
            self._decoding.remove(seq)
        elif seq.status is Status.PREFILLING:
            self._prefilling.remove(seq)
        elif seq.status is Status.WAITING:
            self._waiting.remove(seq)
        elif seq.status is Status.HELD:
            self._holdback.remove(seq)

    # ---------------------------------------------------------------- invariants

    def check(self) -> None:
        """Asserts what must hold between steps; for tests, since it walks everything."""
        held, waiting = self._holdback.held(), list(self._waiting)
        queues = [
            (self._prefilling, Status.PREFILLING),
            (self._decoding, Status.DECODING),
            (held, Status.HELD),
            (waiting, Status.WAITING),
        ]
        check_queues(queues, self._seqs)
        check_blocks(self._prefilling + self._decoding, waiting + held, self.managers)
        self._holdback.check()


def _insert(queue: list[Sequence], seq: Sequence) -> None:
    """Keeps a queue in order of arrival; nearly always that is its end."""
    if not queue or queue[-1].arrival < seq.arrival:
        queue.append(seq)
    else:
        insort(queue, seq, key=_arrival)
