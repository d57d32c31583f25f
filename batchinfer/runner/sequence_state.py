"""What a runner keeps of each sequence between steps: its spec, its block table as an array, its output so far."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchinfer.types.step import Chunk, SequenceSpec

Ints = npt.NDArray[np.int64]


class BlockRow:
    """A block table as an array that grows: only what is new is converted.

    A sequence that was pre-empted comes back with other blocks, so what is known is compared, not trusted; lists of
    the same small integers compare at a few nanoseconds an entry.
    """

    __slots__ = ("_known", "_row", "array")

    def __init__(self) -> None:
        self._known: list[int] = []
        self.array: Ints = np.zeros(0, dtype=np.int64)
        self._row = self.array

    def update(self, table: Sequence[int]) -> Ints:
        table = table if isinstance(table, list) else list(table)
        if table == self._known:
            return self._row
        known = len(self._known)
        if table[:known] != self._known:
            known = 0
        if len(table) > len(self.array):
            grown = np.zeros(max(16, 2 * len(table)), dtype=np.int64)
            grown[:known] = self.array[:known]
            self.array = grown
        self.array[known : len(table)] = table[known:]
        self._known = table[:]
        self._row = self.array[: len(table)]
        return self._row


class SequenceState:
    """A sequence from the step that adds it to the one that names it finished. What is asked of every row in every step
    stands ready:

    argmax_from      output position from which on the token is the one with the largest raw logit, and nothing else is
                     asked of the logits
    has_penalties    tokens are to be recorded
    reads_prompt     log-probabilities of the prompt are asked for
    """

    __slots__ = (
        "_output",
        "_prompt_unique",
        "argmax_from",
        "block_rows",
        "has_penalties",
        "num_prompt_tokens",
        "reads_prompt",
        "spec",
        "stop_ids",
    )

    def __init__(self, spec: SequenceSpec, num_groups: int) -> None:
        self.spec = spec
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.block_rows = tuple(BlockRow() for _ in range(num_groups))
        self.stop_ids: Ints = np.array(sorted(spec.stop_token_ids), dtype=np.int64)
        self._output: Ints = np.array(spec.output_token_ids, dtype=np.int64)
        self._prompt_unique: Ints | None = None
        sampling = spec.sampling
        self.reads_prompt = sampling.prompt_logprobs is not None
        self.has_penalties = sampling.has_penalties
        self.argmax_from = sys.maxsize
        if sampling.greedy and sampling.logprobs is None and not sampling.logit_bias and not self.has_penalties:
            self.argmax_from = sampling.min_tokens if spec.stop_token_ids else -sys.maxsize

    def record(self, chunk: Chunk) -> None:
        """Remembers the chunk's tokens that are output, for penalties to count.

        After pre-emption the same tokens come again and are written to the same places; tokens that a prefix hit
        skips were recorded when they first came, or stand in the spec. Of a sequence whose tokens count for the next,
        all are known.
        """
        begin = chunk.start - self.num_prompt_tokens
        skip = max(0, -begin)
        tokens = chunk.token_ids[skip:]
        if not len(tokens):
            return
        begin += skip
        end = begin + len(tokens)
        if end > len(self._output):
            grown = np.zeros(max(64, 2 * end), dtype=np.int64)
            grown[: len(self._output)] = self._output
            self._output = grown
        self._output[begin:end] = tokens

    def output_before(self, output_position: int) -> Ints:
        """Output tokens at positions 0 .. output_position - 1."""
        return self._output[:output_position]

    @property
    def prompt_unique(self) -> Ints:
        """The distinct token ids of the prompt."""
        if self._prompt_unique is None:
            self._prompt_unique = np.unique(np.asarray(self.spec.prompt_token_ids, dtype=np.int64))
        return self._prompt_unique
