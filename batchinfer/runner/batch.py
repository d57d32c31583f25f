"""From a step's chunks to arrays: token ids, positions, and for each KV group starts, lengths and block tables; which
tokens' hidden states are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchinfer.attention.tiles import StepBatch, ranges
from batchinfer.errors import EngineError
from batchinfer.runner.sequence_state import Ints, SequenceState
from batchinfer.types.step import UNKNOWN_TOKEN, Chunk


class Sampled(NamedTuple):
    """What a step has sampled: tokens int64 on the device, negative where nothing could be; by (seq_id, position of the
    token in its sequence), the place among them."""

    tokens: Tensor
    places: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """token_ids, positions int64 [T]; one StepBatch per KV group.

    unknown   tokens of the step before, where some of this one's are not known: id -1 - i stands for its token i
    """

    token_ids: Ints
    positions: Ints
    by_group: tuple[StepBatch, ...]
    unknown: Tensor | None = None

    def known(self, token_ids: Tensor) -> Tensor:
        """The token ids on the device, with those put in that are not known here. Where nothing could be sampled, the
        sequence is run on with token 0: nobody reads what comes of it."""
        if self.unknown is None:
            return token_ids
        found = self.unknown.index_select(0, (-1 - token_ids).clamp_min_(0))
        return torch.where(token_ids < 0, found.clamp_min_(0), token_ids)


def make_step_batches(
    chunks: Sequence[Chunk], states: Sequence[SequenceState], last: Sampled | None = None
) -> StepBatches:
    """Arrays of a step with at least one chunk; `states[i]` is the state of `chunks[i]`'s sequence. last: of the step
    before, where that is under way. Raises EngineError where that has not sampled what is not known, as after a launch
    that was interrupted before anybody heard of it."""
    lengths = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    firsts = np.cumsum(lengths) - lengths
    num_tokens = int(lengths.sum())
    token_ids = np.fromiter(
        chain.from_iterable([chunk.token_ids for chunk in chunks]), dtype=np.int64, count=num_tokens
    )
    unknown = None
    if last is not None:
        for first, chunk in zip(firsts.tolist(), chunks, strict=True):
            if chunk.token_ids[0] == UNKNOWN_TOKEN:
                place = last.places.get((chunk.seq_id, chunk.start))
                if place is None:
                    raise EngineError(f"sequence {chunk.seq_id}: nothing was sampled last for position {chunk.start}")
                token_ids[first] = -1 - place
                unknown = last.tokens
    positions = np.arange(num_tokens) + np.repeat(starts - firsts, lengths)
    by_group = []
    for group in range(len(chunks[0].block_tables)):
        rows = [
            state.block_rows[group].update(chunk.block_tables[group])
            for chunk, state in zip(chunks, states, strict=True)
        ]
        tables = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for table, row in zip(tables, rows, strict=True):
            table[: len(row)] = row
        by_group.append(StepBatch(starts=starts, lengths=lengths, block_tables=tables))
    return StepBatches(token_ids=token_ids, positions=positions, by_group=tuple(by_group), unknown=unknown)


def rows_read(chunks: Sequence[Chunk], states: Sequence[SequenceState]) -> tuple[list[int], Ints | None]:
    """(where each chunk's tokens end among those whose hidden states are read; those, int64, None where it is all).

    Read are a chunk's last `num_logits` tokens, or all of it where log-probabilities of the prompt come from it.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    counts = [
        _num_read(chunk, state) if state.reads_prompt else chunk.num_logits
        for chunk, state in zip(chunks, states, strict=True)
    ]
    ends = list(accumulate(counts))
    if counts == lengths:
        return ends, None
    read = np.array(counts, dtype=np.int64)
    return ends, np.repeat(np.cumsum(lengths) - read, read) + ranges(read)


def _num_read(chunk: Chunk, state: SequenceState) -> int:
    return len(chunk.token_ids) if chunk.start + 1 < state.num_prompt_tokens else chunk.num_logits
