"""One sample of one request on its way through the engine: the only mutable type that is scheduled.

Responsible for: the state that the scheduler keeps of a sequence. Not for: decisions (`scheduler`), blocks
(`block_manager`), text (the engine). A sequence is owned by one scheduler from `add` until it is handed back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from typing import Any

from batchinfer.scheduling.prefix_index import PrefixChain
from batchinfer.types.request import FinishReason, SamplingParams, TokenLogprobs
from batchinfer.types.rows import RowError
from batchinfer.types.step import BlockCopy

NEVER = sys.maxsize
"""A position that no sequence reaches."""


class Status(IntEnum):
    WAITING = 0  # in the queue, owns no blocks
    HELD = 1  # set aside until a running sequence has computed the prefix block that it needs next
    PREFILLING = 2  # owns blocks for all its known tokens, more than one of which may still have to run
    DECODING = 3  # all tokens but the last have run
    FINISHED = 4  # handed back; owns nothing


class Sequence:
    """Token ids and progress of one sample.

    token_ids          prompt, then output
    max_total_tokens   length (prompt and output) at which it ends for length
    min_total_tokens   length up to and including which stop ids do not end it
    stop_ids           ids that end it once sampled; `eos_ids` among them are those that are not a "stop reason"
    reads_cache        False where every prompt position must run, as for prompt logprobs
    num_computed       tokens whose KV is in its blocks:  0 <= num_computed < len(token_ids)
    num_slots          token slots of its blocks (of the group that has fewest)
    run                all token ids, as a run (`branches`), when it last began to wait; empty without a cache
    copies             blocks to be copied before its next chunk; their sources are held until that step is committed
    publish_at         value of num_computed at which a block of some group becomes full; NEVER without a cache
    owner              whatever the engine keeps with it
    """

    __slots__ = (
        "arrival",
        "block_tables",
        "chains",
        "copies",
        "eos_ids",
        "error",
        "finish_reason",
        "logprobs",
        "max_total_tokens",
        "min_total_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_slots",
        "owner",
        "prompt_logprobs",
        "publish_at",
        "reads_cache",
        "run",
        "sample_index",
        "sample_key",
        "sampling",
        "seq_id",
        "status",
        "stop_ids",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        *,
        seq_id: int,
        prompt_token_ids: SequenceOf[int],
        sampling: SamplingParams,
        sample_key: int,
        max_total_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        eos_ids: frozenset[int] = frozenset(),
        sample_index: int = 0,
        owner: Any = None,
        output_token_ids: SequenceOf[int] = (),
    ) -> None:
        self.seq_id = seq_id
        self.sampling = sampling
        self.sample_key = sample_key
        self.sample_index = sample_index
        self.owner = owner
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = num_prompt_tokens = len(self.token_ids)
        self.token_ids += output_token_ids  # like those of a sequence that was pre-empted
        self.max_total_tokens = max_total_tokens
        self.min_total_tokens = num_prompt_tokens + sampling.min_tokens
        self.stop_ids = stop_ids
        self.eos_ids = eos_ids
        self.reads_cache = sampling.prompt_logprobs is None
        # Set by the scheduler.
        self.arrival = -1
        self.status = Status.WAITING
        self.num_computed = 0
        self.num_slots = 0
        self.run = b""
        self.publish_at = NEVER
        self.block_tables: tuple[list[int], ...] = ()
        self.chains: tuple[PrefixChain, ...] = ()
        self.copies: tuple[BlockCopy, ...] = ()
        self.num_published: list[int] = []
        self.num_cached_tokens = -1  # set when it is first admitted
        self.num_preemptions = 0
        # How it ended.
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: RowError | None = None
        self.logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if sampling.prompt_logprobs is None else [None] * num_prompt_tokens
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {self.num_computed} of {len(self.token_ids)} computed, "
            f"prompt of {self.num_prompt_tokens})"
        )
