"""What one engine step is: the scheduler's StepPlan, the runner's StepResult.

A step is a list of chunks `(sequence, start, length)`. Prefill, chunked prefill, decode, prefix-cache hits and
draft verification differ only in `start` and `length`. A plan is complete in itself but for the specs of
sequences, which are sent once (`added`) and kept by the runner until `finished` names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batchinfer.types.request import SamplingParams, TokenLogprobs
from batchinfer.types.rows import RowError

UNKNOWN_TOKEN = -1
"""In a chunk: the token that the step launched just before this one samples for the sequence. Nobody on the host knows
it when the step is planned; the runner puts it in where it lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with equal KV layout share block tables. A runner says what it has.

    num_blocks * block_size token slots; `window` is the sliding window in tokens or None.
    """

    num_blocks: int
    block_size: int
    window: int | None = None


class SequenceSpec(NamedTuple):
    """What a runner must know of a sequence to sample for it. Sent once, in the step that first runs it.

    sample_key        64-bit key of this sample's random stream (`types.streams.sample_key`)
    stop_token_ids    EOS and user stop ids that are masked before `sampling.min_tokens` output tokens
    output_token_ids  what it brings of its output from another engine: chunks may begin behind them

    A named tuple, as are `Chunk` and `BlockCopy`: one or more are made for every row, and a frozen dataclass takes
    three times as long.
    """

    seq_id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    sample_key: int
    stop_token_ids: frozenset[int] = frozenset()
    output_token_ids: Sequence[int] = ()


class Chunk(NamedTuple):
    """Tokens `start .. start + len(token_ids)` of a sequence, to be run through the model in this step.

    token_ids     known, or UNKNOWN_TOKEN alone where the step is launched while the one before it is under way
    block_tables  one per KV group: physical block of each logical block, covering at least the chunk's end.
                  The lists are the scheduler's own: a runner reads them during `execute` (or `launch`) and keeps no
                  reference.
    num_logits    how many of the chunk's last positions are sampled: 0 for an inner prefill chunk, 1 for the
                  chunk that reaches the sequence's end, 1 + k to verify k drafted tokens.
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    block_tables: tuple[Sequence[int], ...]
    num_logits: int


class BlockCopy(NamedTuple):
    """A block of one KV group to be copied into another before a step's chunks run.

    So a prefix that ends inside a block is shared: the chunk that starts there attends to the copied slots before
    its start and writes those after it. What the source holds in later slots is of no meaning.
    """

    group: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `step` counts from 0 without a gap; `finished` frees what a runner keeps of those sequences.

    `copies` come before anything is written. No block is the source of one and the destination of another, and no
    destination comes twice. Copying again is harmless as long as none of the step's chunks has been executed.

    A step whose execution or launch raised did not happen: the next plan has its number, and tells again what it added
    and finished. So `added` may name a sequence that a runner has heard of, and `finished` one that it has not.
    """

    step: int
    chunks: tuple[Chunk, ...]
    added: tuple[SequenceSpec, ...] = ()
    finished: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of a step.

    token_ids        by seq_id, for each chunk with num_logits > 0: the tokens sampled at its last positions
    logprobs         by seq_id, where asked for: one entry per sampled token
    prompt_logprobs  by seq_id, where asked for: entries for prompt positions start+1 .. start+len of this chunk
                     that are still inside the prompt (the logprob of the token at that position)
    errors           by seq_id: the sequence can't go on (non-finite logits); it has no entry in token_ids
    """

    token_ids: Mapping[int, Sequence[int]]
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    errors: Mapping[int, RowError] = field(default_factory=dict)
