"""The loop: takes requests, runs steps, hands out finished rows.

Responsible for: one outcome per request, whatever happens; the samples of a request; memory that runs out; counts.
Not for: choosing what runs (scheduling), running it (runner), building an engine (`build`), prompts as text
(`llm`, or the job's planner). One thread owns an engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from batchinfer.engine.overlap import OverlappedSteps
from batchinfer.engine.recovery import StepExecutor
from batchinfer.engine.stopping import StopStringWatch, end_ids, num_unended, refuse, stop_ids, tokens_of_text
from batchinfer.errors import ConfigError
from batchinfer.modelfiles import ModelFiles
from batchinfer.runner.base import ModelRunner, OverlappingRunner
from batchinfer.scheduling import LookaheadScheduler, Scheduler, Sequence, Status
from batchinfer.text import SequenceDecoder, Tokenizer
from batchinfer.types.request import CompletionOutput, PartialOutput, Request, RequestOutput, SamplingParams
from batchinfer.types.rows import RowError
from batchinfer.types.step import StepPlan, StepResult
from batchinfer.types.streams import sample_key

GROW_AFTER_STEPS = 500
"""Steps without running out of memory after which a shrunken batch may double."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was built; times in seconds.

    num_cached_tokens      prompt tokens found in the prefix cache at first admission, each sample counted
    num_prompt_tokens      of all samples that have begun
    num_copied_tokens      cached ones that were copied out of the middle of a block
    num_recomputed_tokens  computed, lost to pre-emption (or with another engine) and computed again
    num_computed_tokens    run through the model: more than needed where pre-emption made it run them again, and where a
                           sequence had ended when it was in the next step already
    num_overlapped_steps   launched while another was under way
    num_clamped_requests   whose max_tokens did not fit into the context behind the prompt
    waiting_s              of runner_s, where steps overlap: waiting for what the host's work did not cover
    """

    num_steps: int = 0
    num_requests: int = 0
    num_finished: int = 0
    num_errors: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_copied_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_clamped_requests: int = 0
    num_cut_steps: int = 0
    num_overlapped_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    scheduler_s: float = 0.0
    runner_s: float = 0.0
    waiting_s: float = 0.0
    output_s: float = 0.0


class _Row:
    """A request on its way: which samples have ended."""

    __slots__ = ("ended", "first", "num_pending", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_pending = request.sampling.n
        self.first: Sequence | None = None  # sample 0: it carries what is told of the prompt
        self.ended: list[tuple[Sequence, str]] = []


class Engine:
    """Requests in, outcomes out. `add_request` at any time between steps; `step` until nothing is unfinished.

    Every request yields exactly one RequestOutput, with `outputs` or with `error`. Raises EngineError only when the
    runner is broken as a whole; nothing of the engine may be used after that but `close`.

    async_scheduling: whether a step is planned and launched while the one before it is under way; "auto": where the
    runner can. Outcomes are the same, and come a call of `step` later.

    A request that must be given up can go on in another engine of the same model: `partial_outputs` tells what it has,
    and the same request with that (`Request.partial_outputs`) has the outcome that it would have had.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer | Callable[[], Tokenizer] | None = None,
        *,
        max_model_len: int,
        vocab_size: int,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        async_scheduling: bool | Literal["auto"] = "auto",
        model: ModelFiles | None = None,
        facts: Mapping[str, tuple[Any, str]] | None = None,
    ) -> None:
        self.runner = runner
        self.facts = dict(facts or {})  # what "auto" became, and from what
        self._tokenizer = tokenizer
        self.model = model
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        can_overlap = isinstance(runner, OverlappingRunner) and runner.overlaps
        if async_scheduling is True and not can_overlap:
            raise ConfigError(
                "engine.async_scheduling: true needs a runner that is still at work when a step returns, as with "
                "engine.kernels triton; leave it out"
            )
        make_scheduler = LookaheadScheduler if can_overlap and async_scheduling else Scheduler
        self.scheduler: Scheduler = make_scheduler(
            runner.kv_groups,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self._limits = (max_num_seqs, max_num_batched_tokens)
        self._grow_at_step = -1
        self._executor = StepExecutor(runner)
        self._overlapped: OverlappedSteps | None = None
        if isinstance(self.scheduler, LookaheadScheduler):
            self._overlapped = OverlappedSteps(self.scheduler, self._executor, self._take_in)
        self._overlaps = self._overlapped is not None
        self._rows: dict[int, list[Sequence]] = {}
        self._watches: dict[int, StopStringWatch] = {}
        self._refused: dict[int, RequestOutput] = {}
        self._next_seq_id = 0
        self._num_steps = self._num_requests = self._num_finished = self._num_errors = self._num_clamped = 0
        self._scheduler_s = self._runner_s = self._output_s = 0.0

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Built here where it was given as what builds it."""
        if callable(self._tokenizer):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    # ---------------------------------------------------------------- requests

    def add_request(self, request: Request) -> None:
        """Takes a request in. One that can't run is answered with its error by the next step."""
        if request.request_id in self._rows or request.request_id in self._refused:
            raise ConfigError(f"request {request.request_id} is in the engine already")
        self._num_requests += 1
        error = refuse(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            has_tokenizer=self._tokenizer is not None,
        )
        if error is not None:
            self._num_errors += 1
            self._refused[request.request_id] = _failed(request, error)
            return
        sampling = request.sampling
        num_prompt = len(request.prompt_token_ids)
        max_total = self.max_model_len
        if sampling.max_tokens is not None:
            if num_prompt + sampling.max_tokens <= max_total:
                max_total = num_prompt + sampling.max_tokens
            else:
                self._num_clamped += 1
        row = _Row(request)
        stops, ends = stop_ids(request), end_ids(request)
        seqs: list[Sequence] = []
        for index in range(sampling.n):
            known: SequenceOf[int] = ()
            if index < len(request.partial_outputs):
                known = self._going_on(request, request.partial_outputs[index].token_ids, max_total - num_prompt)
            seq = Sequence(
                seq_id=self._next_seq_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=sampling,
                sample_key=sample_key(request.stream_key, index),
                max_total_tokens=max_total,
                stop_ids=stops,
                eos_ids=ends,
                sample_index=index,
                owner=row,
                output_token_ids=known,
            )
            self._next_seq_id += 1
            if known and seq.logprobs is not None:
                seq.logprobs += (request.partial_outputs[index].logprobs or ())[: len(known)]
            if index == 0:
                row.first = seq
                if sampling.prompt_logprobs is not None and sampling.n > 1:
                    sampling = replace(sampling, prompt_logprobs=None)  # once per prompt is enough
            if sampling.stop:
                self._watches[seq.seq_id] = StopStringWatch(seq, self._decoder(sampling))
            seqs.append(seq)
            self.scheduler.add(seq)
        self._rows[request.request_id] = seqs

    def abort(self, request_id: int) -> bool:
        """Drops a request: it yields nothing any more. False if it is not there."""
        seqs = self._rows.pop(request_id, None)
        if seqs is not None:
            self._drop(seqs)
            return True
        return self._refused.pop(request_id, None) is not None

    def partial_outputs(self, request_id: int) -> tuple[PartialOutput, ...]:
        """What has been generated of a request that is in the engine, by sample; between steps. Samples that have ended
        are among them, whole. () where the request is not there."""
        return tuple(
            PartialOutput(tuple(seq.output_token_ids), None if seq.logprobs is None else tuple(seq.logprobs))
            for seq in self._rows.get(request_id, ())
        )

    def has_unfinished(self) -> bool:
        overlapped = self._overlapped
        return bool(self._rows) or bool(self._refused) or (overlapped is not None and overlapped.is_under_way)

    @property
    def num_unfinished(self) -> int:
        """Requests without an outcome; a feeder keeps this above `max_num_seqs`."""
        return len(self._rows) + len(self._refused)

    # ---------------------------------------------------------------- a step

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that ended with it. Does nothing when nothing is there to do."""
        clock = time.perf_counter
        scheduler = self.scheduler
        start = clock()
        if self._overlaps and self._overlapped is not None:
            done = self._overlapped.step()
            planned = executed = start  # the runner's time is told by `stats`
        elif (plan := scheduler.schedule()) is None:
            done = scheduler.take_done()
            planned = executed = clock()
        else:
            planned = clock()
            result = self._executor.execute(plan)
            executed = clock()
            done = self._take_in(plan, result)
        committed = clock()
        outputs = self._collect(done)
        if self._refused:
            outputs += self._refused.values()
            self._refused = {}
        self._scheduler_s += planned - start + committed - executed
        self._runner_s += executed - planned
        self._output_s += clock() - committed
        return outputs

    def run(self) -> list[RequestOutput]:
        """Steps until nothing is unfinished; returns the outcomes in the order in which they came."""
        outputs: list[RequestOutput] = []
        while self.has_unfinished():
            outputs += self.step()
        return outputs

    def stats(self) -> EngineStats:
        scheduler, overlapped = self.scheduler, self._overlapped
        of_runner = 0.0 if overlapped is None else overlapped.launching_s + overlapped.waiting_s
        return EngineStats(
            num_steps=self._num_steps,
            num_requests=self._num_requests,
            num_finished=self._num_finished,
            num_errors=self._num_errors,
            num_computed_tokens=scheduler.num_computed_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_copied_tokens=scheduler.num_copied_tokens,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_clamped_requests=self._num_clamped,
            num_cut_steps=self._executor.num_cut_steps,
            num_overlapped_steps=0 if overlapped is None else overlapped.num_overlapped,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            scheduler_s=self._scheduler_s - of_runner,
            runner_s=self._runner_s + of_runner,
            waiting_s=0.0 if overlapped is None else overlapped.waiting_s,
            output_s=self._output_s,
        )

    def check(self) -> None:
        """Asserts the engine's and the scheduler's invariants; for tests."""
        self.scheduler.check()
        pending = sum(row[0].owner.num_pending for row in self._rows.values())
        assert pending == self.scheduler.num_unfinished, "a sequence belongs to no request, or the reverse"
        live = {seq.seq_id for seqs in self._rows.values() for seq in seqs if seq.status is not Status.FINISHED}
        assert set(self._watches) <= live, "a finished sequence is still watched"

    def close(self) -> None:
        self.runner.close()

    @contextmanager
    def waiting_for_each_step(self) -> Iterator[None]:
        """In here nothing is under way between steps, so that what is in a step can be timed. What ended with the step
        that was under way comes with the next."""
        overlaps = self._overlaps
        start = time.perf_counter()
        if self._overlapped is not None:
            self._overlapped.finish()
        self._scheduler_s += time.perf_counter() - start  # less what `overlapped` counts: see `stats`
        self._overlaps = False
        try:
            yield
        finally:
            self._overlaps = overlaps

    # ---------------------------------------------------------------- parts

    def _decoder(self, sampling: SamplingParams) -> SequenceDecoder:
        assert self.tokenizer is not None
        return SequenceDecoder(
            self.tokenizer,
            stop=tuple(sampling.stop),
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )

    def _going_on(self, request: Request, tokens: SequenceOf[int], room: int) -> SequenceOf[int]:
        """What a sequence of the request begins with of the output that it had elsewhere."""
        decoder = self._decoder(request.sampling) if request.sampling.stop else None
        return tokens[: num_unended(request, tokens, decoder, room=room)]

    def _take_in(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Commits a step; returns who has ended."""
        done = self.scheduler.commit(plan, result)
        self._num_steps += 1
        if self._watches:
            self._read_watched(result.token_ids, done)
        if self._executor.ran_out_of_memory:
            self._after_out_of_memory(len(plan.chunks), sum(len(c.token_ids) for c in plan.chunks))
        elif self._num_steps == self._grow_at_step:
            self._grow_limits()
        return done

    def _read_watched(self, token_ids: Mapping[int, object], done: list[Sequence]) -> None:
        for seq_id in token_ids:
            watch = self._watches.get(seq_id)
            if watch is not None and watch.read() and watch.seq.status is not Status.FINISHED:
                self.scheduler.end(watch.seq)
                done.append(watch.seq)

    def _after_out_of_memory(self, num_chunks: int, num_tokens: int) -> None:
        """Smaller steps from here on; after a row that does not fit alone, which says nothing about the others,
        the limits are what they were."""
        scheduler = self.scheduler
        if self._executor.row_ran_out_of_memory:
            scheduler.max_num_seqs, scheduler.max_num_batched_tokens = self._limits
            return
        self._grow_at_step = self._num_steps + GROW_AFTER_STEPS
        scheduler.shrink(max(1, min(scheduler.max_num_seqs, num_chunks) // 2))
        if scheduler.enable_chunked_prefill:
            scheduler.max_num_batched_tokens = max(
                1, min(scheduler.max_num_batched_tokens, num_tokens) // 2, scheduler.max_num_seqs
            )
        _log.warning(
            "out of memory in a step of %d tokens of %d sequences: going on with max_num_seqs %d and "
            "max_num_batched_tokens %d",
            num_tokens,
            num_chunks,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
        )

    def _grow_limits(self) -> None:
        """Memory may have been short for a while only: back towards the limits that were asked for, by doubling."""
        scheduler = self.scheduler
        most_seqs, most_tokens = self._limits
        scheduler.max_num_seqs = min(most_seqs, 2 * scheduler.max_num_seqs)
        scheduler.max_num_batched_tokens = min(most_tokens, 2 * scheduler.max_num_batched_tokens)
        if (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) != self._limits:
            self._grow_at_step = self._num_steps + GROW_AFTER_STEPS

    def _drop(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._watches.pop(seq.seq_id, None)
            self.scheduler.abort(seq.seq_id)

    def _collect(self, done: list[Sequence]) -> list[RequestOutput]:
        """Outcomes of the requests that these sequences complete, or fail."""
        if not done:
            return []
        outputs: list[RequestOutput] = []
        rows = self._rows
        for seq, text in zip(done, self._texts(done), strict=True):
            row: _Row = seq.owner
            request = row.request
            if request.request_id not in rows:
                continue  # another sample of it has failed in the same step
            if seq.error is not None:
                self._drop(rows.pop(request.request_id))
                self._num_errors += 1
                outputs.append(_failed(request, seq.error))
                continue
            row.ended.append((seq, text))
            row.num_pending -= 1
            if row.num_pending == 0:
                del rows[request.request_id]
                self._num_finished += 1
                outputs.append(_completed(row))
        return outputs

    def _texts(self, done: list[Sequence]) -> list[str]:
        """Text of each sequence; those without stop strings are decoded together."""
        texts = [""] * len(done)
        if self.tokenizer is None:
            return texts
        together: dict[bool, list[int]] = {}
        for i, seq in enumerate(done):
            if seq.error is not None:
                continue
            watch = self._watches.pop(seq.seq_id, None) if self._watches else None
            if watch is not None:
                texts[i] = watch.text()
            else:
                together.setdefault(seq.sampling.skip_special_tokens, []).append(i)
        for skip, places in together.items():
            decoded = self.tokenizer.decode_batch([tokens_of_text(done[i]) for i in places], skip_special_tokens=skip)
            for i, text in zip(places, decoded, strict=True):
                texts[i] = text
        return texts


def _failed(request: Request, error: RowError) -> RequestOutput:
    return RequestOutput(request_id=request.request_id, prompt_token_ids=request.prompt_token_ids, error=error)


def _completed(row: _Row) -> RequestOutput:
    # A row and its sequences hold each other: unless that ends here, only the garbage collector frees them.
    first, row.first = row.first, None
    ended, row.ended = row.ended, []
    assert first is not None
    if len(ended) > 1:
        ended.sort(key=lambda pair: pair[0].sample_index)
    return RequestOutput(
        request_id=row.request.request_id,
        prompt_token_ids=row.request.prompt_token_ids,
        outputs=tuple([_sample(seq, text) for seq, text in ended]),
        prompt_logprobs=None if first.prompt_logprobs is None else tuple(first.prompt_logprobs),
        num_cached_tokens=max(first.num_cached_tokens, 0),
    )


def _sample(seq: Sequence, text: str) -> CompletionOutput:
    assert seq.finish_reason is not None
    logprobs = seq.logprobs
    return CompletionOutput(
        index=seq.sample_index,
        text=text,
        token_ids=tuple(seq.output_token_ids),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        logprobs=None if logprobs is None else tuple(logprobs),
        cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs),
    )
