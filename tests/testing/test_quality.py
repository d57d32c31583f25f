"""The quality gate's numbers: against transformers, and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import batchinfer
from batchinfer.errors import BatchinferError
from batchinfer.testing.oracle import Oracle
from batchinfer.testing.quality import REFERENCE, Quality, compare, continue_greedily, force, measure
from batchinfer.testing.tiny import make_tiny
from batchinfer.types.request import TokenLogprobs

PROMPTS = ["the question is", "write a list of two words", "name one number or three"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "llama"))


def test_what_an_engine_says_is_what_transformers_says(model: str) -> None:
    llm = batchinfer.LLM(model, **REFERENCE)
    texts = continue_greedily(llm, PROMPTS, max_tokens=8, chat=False)
    said = force(llm, texts)
    oracle = Oracle(model)
    for text, entries in zip(texts, said, strict=True):
        assert [entry.token_id for entry in entries] == list(text.continuation)
        logprobs = oracle.logits([*text.prompt, *text.continuation]).double().log_softmax(-1)[len(text.prompt) - 1 :]
        for entry, token, expected in zip(entries, text.continuation, logprobs, strict=False):
            assert entry.rank == 1
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-3)
    same = compare(said, said)
    assert (same.agreement, same.perplexity_ratio, same.rows_agreeing) == (1.0, 1.0, len(PROMPTS))
    assert same.divergence == pytest.approx(0.0, abs=1e-9)


def test_a_narrower_dtype_is_seen_and_what_is_worse_is_seen_to_be(model: str, tmp_path: Path) -> None:
    narrow, facts = measure(model, PROMPTS, {"dtype": "bfloat16"}, max_tokens=16, chat=True)
    assert facts["dtype"] == "bfloat16"
    assert 0 < narrow.divergence < 0.1
    assert narrow.num_tokens <= 16 * len(PROMPTS)
    # Another model's weights stand for an arithmetic that spoils everything.
    other = batchinfer.LLM(str(make_tiny(tmp_path / "other", seed=1)), **REFERENCE)
    llm = batchinfer.LLM(model, **REFERENCE)
    texts = continue_greedily(llm, PROMPTS, max_tokens=16, chat=True)
    spoilt = compare(force(llm, texts), force(other, texts))
    assert spoilt.agreement < 0.5
    assert spoilt.perplexity_ratio > 2
    assert spoilt.divergence > 10 * narrow.divergence
    assert len(spoilt.problems(min_agreement=0.97, max_perplexity_ratio=1.02)) == 2


def entry(chosen: int, probabilities: dict[int, float], rank: int = 1) -> TokenLogprobs:
    top = tuple((token, math.log(p)) for token, p in probabilities.items())
    return TokenLogprobs(chosen, math.log(probabilities[chosen]), rank, top)


def test_sums_by_hand() -> None:
    reference = [[entry(1, {1: 0.5, 2: 0.25}), entry(2, {2: 0.8, 1: 0.2})]]
    candidate = [[entry(1, {1: 0.25, 2: 0.5}, rank=2), entry(2, {2: 0.8, 1: 0.2})]]
    found = compare(reference, candidate)
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5) + 0.25 * math.log(1)
    assert found.agreement == 0.5
    assert found.rows_agreeing == 0
    assert found.divergence == pytest.approx(first / 2)
    assert found.perplexity_ratio == pytest.approx(math.sqrt(2))
    assert found.reference_perplexity == pytest.approx(math.sqrt(1 / 0.4))
    with pytest.raises(BatchinferError, match="no tokens to compare"):
        compare([[]], [[]])


def test_limits() -> None:
    def quality(agreement: float, ratio: float) -> Quality:
        return Quality(
            num_rows=1,
            num_tokens=1,
            agreement=agreement,
            perplexity_ratio=ratio,
            divergence=0.0,
            rows_agreeing=0,
            reference_perplexity=2.0,
        )

    limits = {"min_agreement": 0.97, "max_perplexity_ratio": 1.02}
    assert quality(0.97, 1.02).problems(**limits) == []
    assert quality(0.9699, 1.0).problems(**limits) == ["top-1 agreement 96.99% is below 97.00%"]
    assert quality(1.0, math.nan).problems(**limits) == ["perplexity ratio nan is above 1.0200"]
