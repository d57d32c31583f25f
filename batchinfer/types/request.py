"""What the engine is asked for and what it answers. Names follow vLLM's SamplingParams and RequestOutput."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from batchinfer.errors import ConfigError
from batchinfer.types.rows import RowError

FinishReason = Literal["stop", "length"]
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises ConfigError (a ValueError) on values out of range.

    temperature     0 is greedy
    top_k           0 or -1 keeps all
    repetition_penalty   > 0; divides positive and multiplies negative logits of every token in prompt or output
    presence_penalty, frequency_penalty   subtracted for tokens in the output only (the OpenAI definition)
    max_tokens      None is "up to the end of the context"
    logprobs        None, or how many of the most likely tokens to report beside the sampled one (0 to 20);
                    raw model log-probabilities, before temperature, penalties and truncation
    prompt_logprobs same for prompt tokens
    seed            None takes the stream of the row; a number replaces the job's or engine's seed
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()  # given as a text, a list or None; kept as a tuple, as are the ids
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"sampling.{name} must be {rule}, got {getattr(self, name)!r}")

        def is_int(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def is_number(value: Any) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        for name, rule in (("stop", "a text or a list of texts"), ("stop_token_ids", "a list of token ids")):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                value = () if value is None else (value,)
            need(isinstance(value, Iterable) and not isinstance(value, bytes), name, rule)
            object.__setattr__(self, name, tuple(value))
        need(is_int(self.n) and self.n >= 1, "n", "an integer of at least 1")
        need(
            is_number(self.temperature) and self.temperature >= 0,
            "temperature",
            "a finite number of at least 0",
        )
        need(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer of at least -1 (0 and -1 keep all)")
        need(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        need(
            is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            need(is_number(value) and -2 <= value <= 2, name, "between -2 and 2")
        if self.logit_bias is not None:
            ok = isinstance(self.logit_bias, Mapping) and all(
                is_int(t) and t >= 0 and is_number(b) for t, b in self.logit_bias.items()
            )
            need(ok, "logit_bias", "a mapping from token ids to finite numbers")
        need(self.seed is None or is_int(self.seed), "seed", "an integer or null")
        need(
            self.max_tokens is None or (is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "at least 1, or null",
        )
        need(is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"sampling.min_tokens ({self.min_tokens}) is larger than sampling.max_tokens ({self.max_tokens})"
            )
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "a list of non-empty strings")
        need(all(is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", "a list of token ids")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            need(
                value is None or (is_int(value) and 0 <= value <= MAX_LOGPROBS),
                name,
                f"0 to {MAX_LOGPROBS}, or null",
            )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            need(isinstance(getattr(self, name), bool), name, "true or false")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


SAMPLING_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(SamplingParams))


class Request(NamedTuple):
    """One prompt for the engine. (A named tuple is made in a third of the time that a frozen dataclass takes.)

    stream_key       64-bit key of the row's random stream (`types.streams`)
    eos_token_ids    the model's end tokens, from all sources; ignored under `sampling.ignore_eos`
    partial_outputs  what another engine had generated of the same request, by sample (`Engine.partial_outputs`): it
                     goes on from there, and its outcome is what it would have been. Empty: it begins
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stream_key: int
    eos_token_ids: frozenset[int] = frozenset()
    partial_outputs: Sequence[PartialOutput] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, its rank (1 is most likely), and the top ones."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class PartialOutput(NamedTuple):
    """A sample of which some tokens have been generated, with as many log-probabilities where these were asked for.
    Everything else of it follows from them."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample. `token_ids` holds every generated token, also those that a stop string cut from `text`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id (not EOS) or stop string that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The outcome of a request: either `error` is set and `outputs` is empty, or there are `n` outputs."""

    request_id: int
    prompt_token_ids: Sequence[int]
    outputs: tuple[CompletionOutput, ...] = ()
    error: RowError | None = None
    prompt: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # first entry None, as in vLLM
    num_cached_tokens: int = 0
