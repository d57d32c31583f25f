"""How much a model loses by a narrower arithmetic: next-token choices and probabilities along the same texts.

A reference engine (float32, unquantized) continues prompts greedily. Then each engine is forced along these
continuations, token by token, and asked for its probabilities: what differs is the arithmetic alone, and one changed
token does not change what comes after it. Used by `scripts/quality_gate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import batchinfer
from batchinfer.errors import BatchinferError
from batchinfer.types.request import MAX_LOGPROBS, TokenLogprobs

REFERENCE: dict[str, Any] = {"dtype": "float32", "quantization": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Over all tokens of all continuations.

    agreement          share of the tokens that are the most likely one under the candidate too
    perplexity_ratio   the candidate's perplexity of the continuations by the reference's
    divergence         mean KL(reference || candidate), nats a token, from below: over the tokens that both name among
                       their most likely 20, and all others together
    rows_agreeing      rows in which every token agrees
    """

    num_rows: int
    num_tokens: int
    agreement: float
    perplexity_ratio: float
    divergence: float
    rows_agreeing: int
    reference_perplexity: float

    def problems(self, *, min_agreement: float, max_perplexity_ratio: float) -> list[str]:
        """What is beyond a limit; empty where the candidate is good enough."""
        found = []
        if not self.agreement >= min_agreement:
            found.append(f"top-1 agreement {self.agreement:.2%} is below {min_agreement:.2%}")
        if not self.perplexity_ratio <= max_perplexity_ratio:
            found.append(f"perplexity ratio {self.perplexity_ratio:.4f} is above {max_perplexity_ratio:.4f}")
        return found


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the reference's greedy continuation, token ids."""

    prompt: Sequence[int]
    continuation: Sequence[int]


def continue_greedily(llm: batchinfer.LLM, prompts: Sequence[Any], *, max_tokens: int, chat: bool) -> list[Text]:
    """Texts of the prompts that can be completed, with room for one more token; `chat`: each is a user's message."""
    sampling = batchinfer.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    if chat:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling)
    else:
        outputs = llm.generate(list(prompts), sampling)
    texts = [Text(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs if o.error is None]
    return [text for text in texts if len(text.prompt) + len(text.continuation) < llm.engine.max_model_len]


def force(llm: batchinfer.LLM, texts: Sequence[Text]) -> list[list[TokenLogprobs]]:
    """What an engine says of each token of each continuation, given all tokens before it."""
    sampling = batchinfer.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
    outputs = llm.generate([[*text.prompt, *text.continuation] for text in texts], sampling)
    said = []
    for text, output in zip(texts, outputs, strict=True):
        if output.error is not None:
            raise BatchinferError(f"a text could not be scored: {output.error.message}")
        assert output.prompt_logprobs is not None
        entries = output.prompt_logprobs[len(text.prompt) :]
        said.append([entry for entry in entries if entry is not None])
    return said


def compare(reference: Sequence[Sequence[TokenLogprobs]], candidate: Sequence[Sequence[TokenLogprobs]]) -> Quality:
    """From what two engines said of the same texts."""
    agreeing = rows_agreeing = num_tokens = 0
    reference_nll = candidate_nll = divergence = 0.0
    for ours, theirs in zip(reference, candidate, strict=True):
        same = 0
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_id == other.token_id
            same += other.rank == 1
            reference_nll -= one.logprob
            candidate_nll -= other.logprob
            divergence += _divergence(dict(one.top), dict(other.top))
        num_tokens += len(ours)
        agreeing += same
        rows_agreeing += same == len(ours)
    if not num_tokens:
        raise BatchinferError("there are no tokens to compare: no prompt was continued")
    return Quality(
        num_rows=len(reference),
        num_tokens=num_tokens,
        agreement=agreeing / num_tokens,
        perplexity_ratio=math.exp((candidate_nll - reference_nll) / num_tokens),
        divergence=divergence / num_tokens,
        rows_agreeing=rows_agreeing,
        reference_perplexity=math.exp(reference_nll / num_tokens),
    )


def _divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """KL(p || q) of log-probabilities, tokens that one of them does not name taken together."""
    total = 0.0
    p_rest = q_rest = 1.0
    for token in p.keys() & q.keys():
        p_token, q_token = math.exp(p[token]), math.exp(q[token])
        total += p_token * (p[token] - q[token])
        p_rest -= p_token
        q_rest -= q_token
    # What is left over may be nothing but rounding.
    if p_rest > 1e-9 and q_rest > 1e-9:
        total += p_rest * math.log(p_rest / q_rest)
    return total


def measure(
    model: str, prompts: Sequence[Any], candidate: Mapping[str, Any], *, max_tokens: int, chat: bool
) -> tuple[Quality, dict[str, Any]]:
    """The quality of `candidate` (options of `LLM`) against the reference, and what the candidate's engine resolved."""
    llm = batchinfer.LLM(model, **REFERENCE)
    texts = continue_greedily(llm, prompts, max_tokens=max_tokens, chat=chat)
    reference = force(llm, texts)
    llm.close()
    llm = batchinfer.LLM(model, **candidate)
    said = force(llm, texts)
    facts = {name: value for name, (value, _) in llm.engine.facts.items()}
    llm.close()
    return compare(reference, said), facts
