"""LocalRunner: one model in this process. Turns a step's plan into tensors, runs the model, samples.

`load` builds one from a model's files; `batch` makes the tensors, `sampler` and `logprobs` work on logits,
`attention` on the KV cache.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from batchinfer_kernels.cpu import finite_rows
from batchinfer_kernels.sampling import SamplingOps
from torch import Tensor

from batchinfer.attention.backend import AttentionBackend
from batchinfer.attention.context import LayerCache, PagedContext
from batchinfer.attention.staging import Staging
from batchinfer.errors import EngineError, OutOfMemory
from batchinfer.models import CausalLM
from batchinfer.runner.base import LaunchedStep
from batchinfer.runner.batch import Sampled, StepBatches, make_step_batches, rows_read
from batchinfer.runner.block_copies import copy_blocks
from batchinfer.runner.device_sampler import DeviceSampler, Drawn
from batchinfer.runner.fresh_blocks import FreshBlocks
from batchinfer.runner.logprobs import token_logprobs
from batchinfer.runner.sampler import Sampler, SampleRow, split_rows
from batchinfer.runner.sequence_state import Ints, SequenceState
from batchinfer.types.request import TokenLogprobs
from batchinfer.types.rows import ErrorClass, RowError
from batchinfer.types.step import KVGroup, StepPlan, StepResult

if TYPE_CHECKING:
    from batchinfer.runner.graphs import DecodeGraphs  # imports triton, which need not be there

# Rows of logits that exist at a time: 128 rows of a vocabulary of 128k are 64 MB.
LOGITS_ROWS = 128
# In what torch says on the CPU, and what CUDA says of memory that torch does not give out.
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "CUDA error: out of memory")

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fact:
    """A resolved setting and where it came from."""

    value: str | int | float | bool
    source: str


class LocalRunner:
    """A ModelRunner. `max_num_seqs` and `max_num_batched_tokens` are resolved limits for the scheduler.

    sampling   the kernel table's; where there is such a thing, a step can be launched while another is under way
    graphs     what runs steps in which every chunk is one token, where there is such a thing
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        layers: tuple[LayerCache, ...],
        kv_groups: tuple[KVGroup, ...],
        backends: tuple[AttentionBackend, ...],
        device: torch.device,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        facts: Mapping[str, Fact],
        sampling: SamplingOps | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._model: CausalLM | None = model
        self._layers = layers
        self._fresh_blocks = FreshBlocks(layers, kv_groups)
        self._kv_groups = kv_groups
        self._backends = backends
        self._device = device
        self._facts = dict(facts)
        self._states: dict[int, SequenceState] = {}
        self._sampler = Sampler(model.facts.vocab_size, device)
        self._device_sampler = None if sampling is None else DeviceSampler(sampling, device, part_rows=LOGITS_ROWS)
        self._graphs = graphs
        self._staging = Staging(device, torch.int64)
        self._next_step = 0
        self._last: Sampled | None = None  # of the last step, where it was launched

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return self._kv_groups

    @property
    def overlaps(self) -> bool:
        """Whether tokens are chosen where the logits lie, so that the next step can begin before the host has them."""
        return self._device_sampler is not None

    def facts(self) -> dict[str, Fact]:
        """Resolved settings by name."""
        return dict(self._facts)

    def close(self) -> None:
        """Frees the model and the caches. The runner can't be used again."""
        self._model = None
        self._layers = ()
        self._fresh_blocks = FreshBlocks((), ())
        self._graphs = None
        self._states.clear()

    def execute(self, plan: StepPlan) -> StepResult:
        return self._guarded(plan, self._execute)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """An OverlappingRunner's. Log-probabilities are worked out with the host's help, so a step with some of them is
        over when this returns."""
        return self._guarded(plan, self._launch)

    def _guarded(self, plan: StepPlan, run: Callable[[CausalLM, StepPlan], _T]) -> _T:
        if self._model is None:
            raise EngineError("this runner was closed")
        if plan.step != self._next_step:
            raise EngineError(f"step {plan.step} was planned, but this runner is at step {self._next_step}")
        try:
            with torch.inference_mode():
                result = run(self._model, plan)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _out_of_memory(plan, error) from error
        except RuntimeError as error:
            if any(said in str(error) for said in _OUT_OF_MEMORY):
                raise _out_of_memory(plan, error) from error
            raise
        self._next_step += 1
        return result

    def _execute(self, model: CausalLM, plan: StepPlan) -> StepResult:
        self._last = None
        return self._begin(model, plan).result()

    def _launch(self, model: CausalLM, plan: StepPlan) -> RunnerStep:
        step = self._begin(model, plan)
        self._last = step.send()
        return step

    def _begin(self, model: CausalLM, plan: StepPlan) -> RunnerStep:
        for seq_id in plan.finished:
            self._states.pop(seq_id, None)
        for spec in plan.added:
            self._states[spec.seq_id] = SequenceState(spec, len(self._kv_groups))
        step = RunnerStep()
        if not plan.chunks:
            return step
        self._fresh_blocks.expect(plan.chunks)
        if plan.copies:
            copy_blocks(self._layers, plan.copies)
        states = [self._states[chunk.seq_id] for chunk in plan.chunks]
        for state, chunk in zip(states, plan.chunks, strict=True):
            if state.has_penalties:
                state.record(chunk)
        batches = make_step_batches(plan.chunks, states, self._last)
        ends, wanted = rows_read(plan.chunks, states)
        if self._graphs is not None and wanted is None and self._graphs.takes(batches):
            hidden = self._graphs.run(batches)
        else:
            hidden = self._forward(model, batches, wanted)
        self._prompt_logprobs(model, hidden, plan, states, ends, step)
        self._sample(model, hidden, plan, states, ends, step)
        return step

    def _forward(self, model: CausalLM, batches: StepBatches, wanted: Ints | None) -> Tensor:
        """Hidden states of the tokens that are wanted, or of all."""
        token_ids, positions, *rest = self._moved(
            batches.token_ids, batches.positions, *(() if wanted is None else (wanted,))
        )
        ctx = PagedContext(
            num_tokens=len(batches.positions),
            positions=positions,
            layers=self._layers,
            backends=self._backends,
            plans=[backend.plan(batch) for backend, batch in zip(self._backends, batches.by_group, strict=True)],
            wanted=rest[0] if rest else None,
        )
        return model.forward(batches.known(token_ids), positions, ctx)

    def _moved(self, *arrays: Ints) -> list[Tensor]:
        """On the device, in one copy where it is one."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        sizes = [len(array) for array in arrays]
        host = self._staging.write(sum(sizes))
        np.concatenate(arrays, out=host.numpy())
        moved = host.to(self._device, non_blocking=True)
        self._staging.sent()
        return list(moved.split_with_sizes(sizes))

    def _sample(
        self,
        model: CausalLM,
        hidden: Tensor,
        plan: StepPlan,
        states: list[SequenceState],
        ends: list[int],
        step: RunnerStep,
    ) -> None:
        rows, seq_ids = step.rows, step.seq_ids
        at: list[int] = []
        for (seq_id, start, token_ids, _, num_logits), state, end in zip(plan.chunks, states, ends, strict=True):
            # A token's position in the output follows from where its chunk stands, so that what is computed again after
            # pre-emption draws the same number.
            behind = start + len(token_ids) + 1 - state.num_prompt_tokens
            for back in range(num_logits, 0, -1):
                rows.append(SampleRow(state, behind - back))
                seq_ids.append(seq_id)
                at.append(end - back)
        if self._device_sampler is not None:
            step.drawn = self._device_sampler.sample(model, hidden, rows, at)
            for r, entry in step.drawn.logprobs.items():
                step.logprobs.setdefault(seq_ids[r], []).append(entry)
        else:
            step.tokens = self._sample_on_host(model, hidden, step, at)

    def _sample_on_host(
        self,
        model: CausalLM,
        hidden: Tensor,
        step: RunnerStep,
        at: Sequence[int],
    ) -> dict[int, int]:
        """Tokens by row, of those whose logits are all finite. Log-probabilities go into `step`."""
        rows = step.rows
        tokens: dict[int, int] = {}
        plain, others = split_rows(rows)
        if plain:
            if len(plain) < len(hidden):
                states = hidden.index_select(0, self._indices([at[r] for r in plain]))
            else:  # all of them, in their order
                states = hidden
            best, finite = model.greedy(states)
            for r, token, good in zip(plain, best.tolist(), finite.tolist(), strict=True):
                if good:
                    tokens[r] = token
        for begin in range(0, len(others), LOGITS_ROWS):
            part = others[begin : begin + LOGITS_ROWS]
            logits = model.compute_logits(hidden.index_select(0, self._indices([at[r] for r in part])))
            tokens |= self._sample_rows(logits, {r: rows[r] for r in part}, step)
        return tokens

    def _indices(self, at: list[int]) -> Tensor:
        return torch.from_numpy(np.array(at, dtype=np.int64)).to(
            self._device
        )  # (torch.tensor takes four times as long)

    def _sample_rows(self, logits: Tensor, rows: Mapping[int, SampleRow], step: RunnerStep) -> dict[int, int]:
        """Tokens of the rows, one for each row of logits, that have only finite logits; their log-probabilities go
        into `step`. `rows` and what is returned are by the number of the row in the step."""
        finite = finite_rows(logits).tolist()
        kept = [r for r, good in zip(rows, finite, strict=True) if good]
        if not kept:
            return {}
        if len(kept) < len(rows):
            logits = logits[[i for i, good in enumerate(finite) if good]]
        reported = [i for i, r in enumerate(kept) if rows[r].state.spec.sampling.logprobs is not None]
        raw = logits[reported] if reported else logits[:0]  # a copy: sampling overwrites logits
        tokens = self._sampler.sample(logits, [rows[r] for r in kept])
        if reported:
            num_top = [rows[kept[i]].state.spec.sampling.logprobs or 0 for i in reported]
            entries = token_logprobs(raw, [tokens[i] for i in reported], num_top)
            for i, entry in zip(reported, entries, strict=True):
                step.logprobs.setdefault(step.seq_ids[kept[i]], []).append(entry)
        return dict(zip(kept, tokens, strict=True))

    def _prompt_logprobs(
        self,
        model: CausalLM,
        hidden: Tensor,
        plan: StepPlan,
        states: list[SequenceState],
        ends: list[int],
        step: RunnerStep,
    ) -> None:
        for chunk, state, end in zip(plan.chunks, states, ends, strict=True):
            if not state.reads_prompt:
                continue
            num_top = state.spec.sampling.prompt_logprobs or 0
            targets = list(state.spec.prompt_token_ids[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)])
            entries: list[TokenLogprobs] = []
            for first in range(0, len(targets), LOGITS_ROWS):
                wanted = targets[first : first + LOGITS_ROWS]
                begin = end - len(chunk.token_ids) + first
                logits = model.compute_logits(hidden[begin : begin + len(wanted)])
                if not bool(finite_rows(logits).all()):
                    step.errors[chunk.seq_id] = _non_finite(f"the prompt after position {chunk.start + first}")
                    break
                entries.extend(token_logprobs(logits, wanted, [num_top] * len(wanted)))
            if targets:
                step.prompt_logprobs[chunk.seq_id] = entries


class RunnerStep:
    """A LaunchedStep: what has come of it so far, by seq_id, and the tokens of `rows`, which belong to `seq_ids`.

    drawn    where they lie on a device
    tokens   else: by row, of those whose logits are all finite
    """

    __slots__ = ("drawn", "errors", "logprobs", "prompt_logprobs", "rows", "seq_ids", "tokens")

    def __init__(self) -> None:
        self.rows: list[SampleRow] = []
        self.seq_ids: list[int] = []
        self.drawn: Drawn | None = None
        self.tokens: dict[int, int] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.errors: dict[int, RowError] = {}

    def send(self) -> Sampled | None:
        """Begins to fetch the tokens; returns them as they lie on the device, for the next step."""
        if self.drawn is None:
            return None
        self.drawn.send()
        rows, seq_ids = self.rows, self.seq_ids
        places = {
            (seq_ids[r], rows[r].state.num_prompt_tokens + rows[r].output_position): place
            for place, r in enumerate(self.drawn.order)
        }
        return Sampled(self.drawn.tokens, places)

    def result(self) -> StepResult:
        tokens = self.tokens if self.drawn is None else self.drawn.by_row()
        token_ids: dict[int, list[int]] = {}
        errors = self.errors
        for r, (row, seq_id) in enumerate(zip(self.rows, self.seq_ids, strict=True)):
            if r in tokens:
                token_ids.setdefault(seq_id, []).append(tokens[r])
            else:
                errors[seq_id] = _non_finite(f"output position {row.output_position}")
        for seq_id in errors:
            token_ids.pop(seq_id, None)
            self.logprobs.pop(seq_id, None)
        return StepResult(token_ids, self.logprobs, self.prompt_logprobs, errors)


def _non_finite(where: str) -> RowError:
    return RowError(
        ErrorClass.NON_FINITE_LOGITS,
        f"the model gave NaN or infinite logits at {where}; a wider model.dtype (float32) may help",
    )


def _out_of_memory(plan: StepPlan, error: Exception) -> OutOfMemory:
    """Lets go of what had been made when memory ended: the exception would keep it, and a smaller step needs it."""
    traceback.clear_frames(error.__traceback__)
    num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
    return OutOfMemory(f"a step of {num_tokens} tokens does not fit in memory: {error}")
