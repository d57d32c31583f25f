"""Executes a step's plan, and goes on where the runner can't.

Responsible for: finding the row that makes a runner raise, by running the step again in halves; steps that are
too large for memory; the step numbers that the runner sees. Not for: rows that the runner itself gives up on
(`StepResult.errors`), nor a process that dies (the job layer bisects units).

The chunks of a step are independent of each other, and what a runner has half done it does again with the same
result, so cutting a step changes no token. A step that raised counts as not executed: the next has the same number.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from batchinfer.errors import EngineError, OutOfMemory
from batchinfer.runner.base import LaunchedStep, ModelRunner, OverlappingRunner
from batchinfer.types.request import TokenLogprobs
from batchinfer.types.rows import ErrorClass, RowError
from batchinfer.types.step import BlockCopy, Chunk, SequenceSpec, StepPlan, StepResult

MAX_FAILURES_IN_A_ROW = 4
"""So many rows that fail while no row of the same steps gets through are the engine's fault, not theirs."""

MAX_LOGGED_FAILURES = 3
"""Later ones are told in their rows only."""

_log = logging.getLogger(__name__)


class StepExecutor:
    """Runs plans on one runner. `num_cut_steps` counts steps that had to be cut, `num_failed_rows` rows given up."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        # Looked at once: what a protocol has is looked up by name, each time.
        self._overlapping = runner if isinstance(runner, OverlappingRunner) else None
        self._next_step = 0
        self._added: tuple[SequenceSpec, ...] = ()  # not yet told to the runner
        self._finished: tuple[int, ...] = ()
        self._copies: tuple[BlockCopy, ...] = ()  # of the plan, not yet executed
        self._failures_in_a_row = 0
        self.num_cut_steps = 0
        self.num_failed_rows = 0
        self.ran_out_of_memory = False  # in the last plan
        self.row_ran_out_of_memory = False  # a single token of the last plan did not fit

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises EngineError when the runner is broken as a whole."""
        plan = self._told(plan)
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            self._added, self._finished, self._copies = plan.added, plan.finished, plan.copies
            return self._execute_in_parts(plan.chunks, error)
        self._executed()
        return result

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """On a runner that overlaps. What that raises is raised here, and then the step did not happen."""
        assert self._overlapping is not None
        launched = self._overlapping.launch(self._told(plan))
        self._executed()
        return launched

    def wait_for(self, launched: LaunchedStep) -> StepResult:
        """Raises EngineError when the runner is broken as a whole, as it is if a step fails that it had taken."""
        try:
            return launched.result()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"the model runner failed in a step under way, with {type(error).__name__}: {error}"
            ) from error

    def _told(self, plan: StepPlan) -> StepPlan:
        """The plan with the runner's step number, and what the runner has not been told yet."""
        self.ran_out_of_memory = self.row_ran_out_of_memory = False
        if not (self._added or self._finished or plan.step != self._next_step):
            return plan
        gone = set(plan.finished)
        added = tuple(spec for spec in self._added if spec.seq_id not in gone) + plan.added
        return StepPlan(self._next_step, plan.chunks, added, self._finished + plan.finished, plan.copies)

    def _executed(self) -> None:
        self._next_step += 1
        self._added, self._finished, self._copies = (), (), ()
        self._failures_in_a_row = 0

    def _execute_in_parts(self, chunks: Sequence[Chunk], error: Exception) -> StepResult:
        self.num_cut_steps += 1
        first_step = self._next_step
        token_ids: dict[int, Sequence[int]] = {}
        logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, RowError] = {}
        todo = list(reversed(self._parts(chunks, error, errors)))
        while todo:
            part = [chunk for chunk in todo.pop() if chunk.seq_id not in errors]
            if not part:
                continue
            try:
                result = self._runner.execute(
                    StepPlan(self._next_step, tuple(part), self._added, self._finished, self._copies)
                )
            except Exception as again:
                error = again
                todo.extend(reversed(self._parts(part, again, errors)))
                continue
            self._executed()
            token_ids.update(result.token_ids)
            logprobs.update(result.logprobs)
            errors.update(result.errors)
            for seq_id, entries in result.prompt_logprobs.items():
                prompt_logprobs.setdefault(seq_id, []).extend(entries)
        if self._next_step > first_step:
            self._failures_in_a_row = 0
        elif self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineError(
                f"the model runner failed for each of the last {self._failures_in_a_row} rows, the last time with "
                f"{type(error).__name__}: {error}"
            ) from error
        return StepResult(token_ids, logprobs, prompt_logprobs, errors)

    def _parts(self, chunks: Sequence[Chunk], error: Exception, errors: dict[int, RowError]) -> list[Sequence[Chunk]]:
        """What to run instead of `chunks`, in order; a row that can't be cut any more gets its error."""
        out_of_memory = isinstance(error, (OutOfMemory, MemoryError))
        if isinstance(error, EngineError) and not out_of_memory:
            raise error
        self.ran_out_of_memory |= out_of_memory
        if len(chunks) > 1:
            half = len(chunks) // 2
            return [chunks[:half], chunks[half:]]
        chunk = chunks[0]
        half = len(chunk.token_ids) // 2
        if out_of_memory and half:
            first, second = chunk.token_ids[:half], chunk.token_ids[half:]
            return [
                [Chunk(chunk.seq_id, chunk.start, first, chunk.block_tables, 0)],
                [Chunk(chunk.seq_id, chunk.start + half, second, chunk.block_tables, chunk.num_logits)],
            ]
        self._failures_in_a_row += 1
        self.num_failed_rows += 1
        if out_of_memory:
            self.row_ran_out_of_memory = True
            row_error = RowError(
                ErrorClass.OUT_OF_MEMORY,
                f"the row alone does not fit into memory at token {chunk.start}: {error}; lower "
                "engine.kv_cache_memory or engine.max_model_len",
            )
        else:
            row_error = RowError(
                ErrorClass.INTERNAL,
                f"the model runner raised {type(error).__name__} for this row alone: {error}",
            )
            if self.num_failed_rows <= MAX_LOGGED_FAILURES:
                _log.error("a row makes the model runner raise", exc_info=error)
        errors[chunk.seq_id] = row_error
        return []
