"""When a sequence ends and what its text is.

Responsible for: limits in tokens, the set of stop ids, stop strings, text of a finished sample, what of an output that
another engine began is to stand. Not for: finding a
stop string in text (text.SequenceDecoder); stop ids and lengths are compared by the scheduler, token by token.

The rules: a stop id (of the model's ends unless `ignore_eos`, or of `stop_token_ids`) ends a sequence after at
least `min_tokens` other tokens. `token_ids` hold it; `text` does not, unless `include_stop_str_in_output`. A stop
string ends it at its earliest occurrence in the generated text; if a token completes it and reaches the length
limit at once, the reason is "stop".
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from batchinfer.scheduling.sequence import Sequence
from batchinfer.types.request import PartialOutput, Request, SamplingParams
from batchinfer.types.rows import ErrorClass, RowError


class TextDecoder(Protocol):
    """What is needed of text.SequenceDecoder."""

    def push(self, token_id: int) -> str | None: ...

    def finish(self) -> str: ...


def refuse(request: Request, *, max_model_len: int, vocab_size: int, has_tokenizer: bool = True) -> RowError | None:
    """Why a request can't run at all; None if it can."""
    prompt = request.prompt_token_ids
    if not prompt:
        return RowError(ErrorClass.INVALID_PROMPT, "the prompt has no tokens, so there is nothing to go on from")
    if len(prompt) >= max_model_len:
        return RowError(
            ErrorClass.PROMPT_TOO_LONG,
            f"the prompt has {len(prompt)} tokens and max_model_len is {max_model_len}, which must also hold at "
            "least one new token; shorten the prompt or raise engine.max_model_len",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(token for token in prompt if not 0 <= token < vocab_size)
        return RowError(
            ErrorClass.INVALID_PROMPT, f"token id {bad} in the prompt; the model's ids are 0 to {vocab_size - 1}"
        )
    sampling = request.sampling
    if request.partial_outputs:
        wrong = partial_problem(request.partial_outputs, sampling, vocab_size=vocab_size)
        if wrong is not None:
            return RowError(ErrorClass.INVALID_PROMPT, f"partial_outputs: {wrong}")
    if sampling.stop and not has_tokenizer:
        return RowError(ErrorClass.INVALID_SAMPLING, "stop strings need a tokenizer, and this engine has none")
    if sampling.logit_bias and max(sampling.logit_bias) >= vocab_size:
        return RowError(
            ErrorClass.INVALID_SAMPLING,
            f"logit_bias names token id {max(sampling.logit_bias)}; the model's ids are 0 to {vocab_size - 1}",
        )
    if sampling.min_tokens and len(stop_ids(request)) >= vocab_size:
        return RowError(
            ErrorClass.INVALID_SAMPLING,
            f"min_tokens is {sampling.min_tokens} and every token of the model is an end or in stop_token_ids: "
            "none is left to begin with",
        )
    return None


def partial_problem(partials: SequenceOf[PartialOutput], sampling: SamplingParams, *, vocab_size: int) -> str | None:
    """Why a request with these settings can't go on from what is said to have been generated; None if it can."""
    if len(partials) > sampling.n:
        return f"there are {len(partials)} samples, and n is {sampling.n}"
    for tokens, logprobs in partials:
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            bad = next(token for token in tokens if not 0 <= token < vocab_size)
            return f"token id {bad}; the model's ids are 0 to {vocab_size - 1}"
        if sampling.logprobs is not None and len(logprobs or ()) != len(tokens):
            return f"there are log-probabilities of {len(logprobs or ())} of {len(tokens)} tokens"
    return None


def num_unended(request: Request, tokens: SequenceOf[int], decoder: TextDecoder | None, *, room: int) -> int:
    """How many of the output tokens, in order, are there before one ends the sequence: that one is sampled again, so
    that there is one way only to end. (None is a stop id before `min_tokens`.) `room`: tokens that the output may have;
    `decoder`: a new one, where stop strings count."""
    stops = stop_ids(request)
    for place, token in enumerate(tokens[: room - 1]):
        if token in stops or (decoder is not None and decoder.push(token) is not None):
            return place
    return min(len(tokens), room - 1)


def end_ids(request: Request) -> frozenset[int]:
    """The model's ends, as far as they count: what ends a sequence without being its stop reason."""
    return frozenset() if request.sampling.ignore_eos else request.eos_token_ids


def stop_ids(request: Request) -> frozenset[int]:
    """All ids that end a sequence."""
    ends, more = end_ids(request), request.sampling.stop_token_ids
    return ends.union(more) if more else ends


def tokens_of_text(seq: Sequence) -> list[int]:
    """The finished sequence's output without the stop id that is not part of its text."""
    tokens = seq.output_token_ids
    if ended_outside_text(seq):
        tokens.pop()
    return tokens


def ended_outside_text(seq: Sequence) -> bool:
    """Whether the last token is a stop id that is not part of the text."""
    ended_by_id = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
    return ended_by_id and not seq.sampling.include_stop_str_in_output


class StopStringWatch:
    """A sequence with stop strings, and how far its output has been read."""

    __slots__ = ("_decoder", "_num_read", "seq")

    def __init__(self, seq: Sequence, decoder: TextDecoder) -> None:
        self.seq = seq
        self._decoder = decoder
        self._num_read = 0

    def read(self) -> bool:
        """Reads new tokens; True if one of them completes a stop string, which is then noted on the sequence."""
        seq = self.seq
        new = seq.token_ids[seq.num_prompt_tokens + self._num_read :]  # not all of the output, token after token
        if ended_outside_text(seq):
            new.pop()
        for token in new:
            self._num_read += 1
            match = self._decoder.push(token)
            if match is not None:
                seq.finish_reason = "stop"
                seq.stop_reason = match
                return True
        return False

    def text(self) -> str:
        return self._decoder.finish()
