"""The sampler against hand-written rules, one row at a time; its draws against their distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from batchinfer_kernels.cpu import finite_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.runner.logprobs import token_logprobs
from batchinfer.runner.sampler import Sampler, SampleRow, _kth_largest, adjust
from batchinfer.runner.sequence_state import SequenceState
from batchinfer.runner.streams import uniform as uniforms
from batchinfer.types.request import SamplingParams
from batchinfer.types.step import Chunk, SequenceSpec
from batchinfer.types.streams import MASK64, row_key, sample_key, uniform

VOCAB = 50


def row(
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    key: int = 1,
    stop: list[int] | None = None,
    **params: Any,
) -> SampleRow:
    """A sequence whose next token is to be chosen."""
    prompt, output = prompt or [1, 2], output or []
    spec = SequenceSpec(
        seq_id=0,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**params),
        sample_key=key,
        stop_token_ids=frozenset(stop or []),
    )
    state = SequenceState(spec, 1)
    state.record(Chunk(0, 0, prompt + output, ([0],), 1))
    return SampleRow(state, len(output))


def logits_of(seed: int, rows: int = 1, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def expected_weights(logits: Tensor, r: SampleRow) -> list[float]:
    """The distribution over tokens, by the book, in Python floats."""
    p, state = r.state.spec.sampling, r.state
    x = [float(v) for v in logits]
    output = [int(t) for t in state.output_before(r.output_position)]
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(state.spec.prompt_token_ids) | set(output):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if r.output_position < p.min_tokens:
        for token in state.spec.stop_token_ids:
            x[token] = -math.inf
    x = [v / p.temperature for v in x]
    top = max(x)
    weights = [math.exp(v - top) for v in x]
    weights = [w if w >= p.min_p else 0.0 for w in weights]
    if p.top_k > 0:
        smallest = sorted(weights, reverse=True)[min(p.top_k, len(weights)) - 1]
        weights = [w if w >= smallest else 0.0 for w in weights]
    if p.top_p < 1:
        order = sorted(range(len(weights)), key=lambda t: (-weights[t], t))
        kept, mass, total = set(), 0.0, sum(weights)
        for token in order:
            if mass >= p.top_p * total:
                break
            kept.add(token)
            mass += weights[token]
        weights = [w if t in kept else 0.0 for t, w in enumerate(weights)]
    return weights


def expected_token(logits: Tensor, r: SampleRow) -> int:
    weights = expected_weights(logits, r)
    target = uniform(r.state.spec.sample_key, r.output_position) * sum(weights)
    running = 0.0
    for token, weight in enumerate(weights):
        running += weight
        if running > target:
            return token
    raise AssertionError


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.1, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, -1, 2, 5, 49, 50, 999]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    bias=st.sampled_from([None, {3: 5.0, 7: -100.0}]),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    min_tokens=st.sampled_from([0, 4]),
)
def test_draws_equal_the_rules_by_the_book(
    seed: int, bias: dict[int, float] | None, output: list[int], min_tokens: int, **params: Any
) -> None:
    r = row(
        prompt=[1, 2, 2, 9],
        output=output,
        key=seed * 7919,
        stop=[0, 11],
        logit_bias=bias,
        min_tokens=min_tokens,
        **params,
    )
    logits = logits_of(seed)
    if r.state.spec.sampling.greedy:
        return
    assert Sampler(VOCAB, torch.device("cpu")).sample(logits.clone(), [r]) == [expected_token(logits[0], r)]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 900, 999])
def test_kth_largest_of_many_weights(k: int) -> None:
    weights = np.random.default_rng(k).random(1000) ** 8
    weights[::3] = weights[1]
    assert _kth_largest(weights, k) == sorted(weights, reverse=True)[k - 1]


@pytest.mark.parametrize("scale", [0.1, 2.0, 6.0])
def test_large_vocabularies_are_cut_by_the_book(scale: float) -> None:
    vocab = 2000
    sampler = Sampler(vocab, torch.device("cpu"))
    for i, params in enumerate(({"top_p": 0.9}, {"top_k": 3}, {"top_k": 40, "top_p": 0.7}, {"top_p": 0.999})):
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(i)) * scale
        rows = [row(key=key, temperature=0.9, **params) for key in range(20)]
        expected = [expected_token(logits[0], r) for r in rows]
        assert sampler.sample(logits.repeat(20, 1), rows) == expected


def test_rows_do_not_depend_on_their_batch() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 7},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "top_k": 1},
    ]
    rows = [row(key=i, output=[i % 5] * (i % 4), **kinds[i % len(kinds)]) for i in range(40)]
    vocab = 1003
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(5)) * 3
    sampler = Sampler(vocab, torch.device("cpu"))
    together = sampler.sample(logits.clone(), rows)
    assert together == [sampler.sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(40)]
    back = sampler.sample(logits.flip(0).clone(), rows[::-1])
    assert together == back[::-1]


def test_weights_have_the_same_bits_alone_and_in_a_batch() -> None:
    vocab = 49152
    sampler = Sampler(vocab, torch.device("cpu"))
    rows = [row(key=i, temperature=0.8) for i in range(8)]
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(5)) * 3
    sampler.sample(logits.clone(), rows)
    together = sampler._weights.clone()
    for i in range(8):
        sampler.sample(logits[i : i + 1].clone(), [rows[i]])
        assert torch.equal(sampler._weights[0], together[i])


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [9, 4, 30]] = 5.0
    logits[1, [49, 7]] = 2.0
    rows = [row(temperature=0.0), row(temperature=1.0, top_k=1), row(temperature=0.0)]
    assert Sampler(VOCAB, torch.device("cpu")).sample(logits, rows) == [4, 7, 0]


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.5}])
def test_samples_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-square over 6,000 draws from streams of different rows."""
    draws, vocab = 6_000, 12
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(vocab, torch.device("cpu"))
    shared = row(**{"temperature": 1.0} | params)
    states = []
    for i in range(draws):
        state = SequenceState.__new__(SequenceState)
        state.spec = SequenceSpec(
            seq_id=i,
            prompt_token_ids=(),
            sampling=shared.state.spec.sampling,
            sample_key=sample_key(row_key(7, "a.parquet", i), 0),
        )
        state.stop_ids = np.zeros(0, dtype=np.int64)
        states.append(SampleRow(state, i % 3))
    tokens = sampler.sample(logits.expand(draws, vocab).clone(), states)
    observed = np.bincount(tokens, minlength=vocab)
    weights = np.array(expected_weights(logits[0], shared))
    expected = weights / weights.sum() * draws
    kept = expected > 0
    assert not observed[~kept].any()
    chi_square = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 40  # 11 degrees of freedom: p < 4e-5


def test_uniform_has_the_bits_of_its_specification() -> None:
    keys = [0, 1, MASK64, 0x9E3779B97F4A7C15, *(row_key(3, "x", i) for i in range(50))]
    for position in (0, 1, 2, 1000, 2**31):
        got = uniforms(np.array(keys, dtype=np.uint64), np.full(len(keys), position, dtype=np.int64))
        assert got.tolist() == [uniform(key, position) for key in keys]
        assert ((got >= 0) & (got < 1)).all()


def test_a_draw_depends_on_the_position_in_the_output() -> None:
    tokens = set()
    for n in range(30):
        r = row(output=[3] * n, temperature=1.0)
        tokens.add(Sampler(VOCAB, torch.device("cpu")).sample(torch.zeros(1, VOCAB), [r])[0])
    assert len(tokens) > 15


def test_the_largest_uniform_gives_the_last_token_with_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinfer.runner.sampler.uniform", lambda keys, positions: np.full(len(keys), 1 - 2.0**-53))
    vocab = 700
    logits = torch.full((1, vocab), -torch.inf)
    logits[0, :300] = torch.randn(300, generator=torch.Generator().manual_seed(0))
    assert Sampler(vocab, torch.device("cpu")).sample(logits, [row(temperature=1.0)]) == [299]
    monkeypatch.setattr("batchinfer.runner.sampler.uniform", lambda keys, positions: np.zeros(len(keys)))
    logits = torch.full((1, vocab), -torch.inf)
    logits[0, 400:] = 0.0
    assert Sampler(vocab, torch.device("cpu")).sample(logits, [row(temperature=1.0)]) == [400]


def test_min_tokens_masks_stop_ids_and_nothing_else() -> None:
    """Counted over the output only, whatever the prompt's length; no id stands in for a missing EOS."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 8, VOCAB - 1]] = torch.tensor([9.0, 8.0, 7.0])

    def choose(length: int, stop: list[int]) -> int:
        r = row(prompt=[1] * 100, output=[3] * length, stop=stop, temperature=0.0, min_tokens=10, max_tokens=20)
        return sampler.sample(logits.clone(), [r])[0]

    assert [choose(n, [5]) for n in (0, 9, 10)] == [8, 8, 5]
    assert [choose(n, [5, 8]) for n in (0, 9, 10)] == [VOCAB - 1, VOCAB - 1, 5]
    assert choose(0, []) == 5
    assert choose(0, [VOCAB + 7]) == 5


def test_penalties_count_prompt_and_output_as_defined() -> None:
    """Repetition sees prompt and output, presence and frequency the output; signs; rows without any."""
    sampler = Sampler(VOCAB, torch.device("cpu"))
    base = torch.zeros(VOCAB)
    base[3], base[4], base[5] = 3.0, 2.9, 2.0

    def choose(**options: Any) -> int:
        plain = row(temperature=0.0)
        return sampler.sample(torch.stack([base, base]), [row(temperature=0.0, **options), plain])[0]

    assert choose(prompt=[3], repetition_penalty=1.3) == 4
    assert choose(prompt=[3], presence_penalty=2.0, frequency_penalty=2.0) == 3
    assert choose(output=[3], presence_penalty=0.5) == 4
    assert choose(output=[3, 3, 4], frequency_penalty=0.5) == 4
    assert choose(output=[3] * 3 + [4] * 2, frequency_penalty=0.5) == 5
    negative = torch.full((1, VOCAB), -2.0)
    negative[0, 3] = -1.9
    assert sampler.sample(negative, [row(prompt=[3], temperature=0.0, repetition_penalty=1.3)]) == [0]


def test_output_recorded_again_after_preemption_counts_once() -> None:
    r = row(prompt=[1, 2], output=[5, 6], frequency_penalty=1.0)
    r.state.record(Chunk(0, 0, [1, 2, 5], ([0],), 0))
    r.state.record(Chunk(0, 3, [6, 7], ([0],), 1))
    assert r.state.output_before(3).tolist() == [5, 6, 7]
    r.state.record(Chunk(0, 4, [9], ([0],), 1))
    assert r.state.output_before(3).tolist() == [5, 6, 9]


def test_logprobs_are_of_raw_logits_with_the_sampled_token_and_its_rank() -> None:
    logits = logits_of(3, rows=2)
    expected = logits.double().log_softmax(-1)
    order = logits.argsort(-1, descending=True)
    first, second = token_logprobs(logits, [int(order[0, 6]), int(order[1, 0])], [5, 0])
    assert (first.token_id, first.rank, second.rank, second.top) == (int(order[0, 6]), 7, 1, ())
    assert first.logprob == pytest.approx(float(expected[0, first.token_id]), abs=1e-9)
    assert [t for t, _ in first.top] == order[0, :5].tolist()
    assert [v for _, v in first.top] == pytest.approx(expected[0, order[0, :5]].tolist(), abs=1e-9)


def test_logprobs_ask_for_more_than_there_are() -> None:
    [entry] = token_logprobs(torch.tensor([[1.0, 2.0, 2.0]]), [0], [20])
    assert [t for t, _ in entry.top] == [1, 2, 0]
    assert entry.rank == 3


@pytest.mark.parametrize("count", [1, 2, 5, 19])
def test_equal_logprobs_are_told_by_id_whatever_other_rows_ask_for(count: int) -> None:
    """Logits in narrow types are often equal: which of them are told must not follow from a batch-mate."""
    logits = torch.stack([logits_of(seed)[0].round() for seed in range(4)])
    assert len(set(logits[0].tolist())) < VOCAB / 2
    by_id = sorted(range(VOCAB), key=lambda token: (-float(logits[0, token]), token))
    for beside in (0, 3, 20):
        entry = token_logprobs(logits, [1] * 4, [count, beside, beside, 1])[0]
        assert [token for token, _ in entry.top] == by_id[:count]
        assert token_logprobs(logits[:1], [1], [count]) == [entry]


@pytest.mark.parametrize("temperature", [1e-310, 5e-324, 1e-30])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = logits_of(5, rows=9)
    rows = [row(key=i, temperature=temperature) for i in range(9)]
    assert Sampler(VOCAB, torch.device("cpu")).sample(logits.clone(), rows) == logits.argmax(-1).tolist()


def test_the_largest_biases_and_penalties_are_finite() -> None:
    sampler = Sampler(VOCAB, torch.device("cpu"))

    def choose(**options: Any) -> set[int]:
        rows = [row(prompt=[3, 4], key=i, **options) for i in range(40)]
        return set(sampler.sample(torch.stack([logits_of(6)[0]] * 40), rows))

    assert choose(logit_bias={5: 1e308, 9: 1e308}) == {5, 9}
    assert choose(logit_bias={5: 1e308}) == {5}
    assert not choose(logit_bias=dict.fromkeys(range(40), -1e308)) & set(range(40))
    for penalty in (1e-300, 1e300):
        logits = logits_of(6)
        adjust(logits, [row(prompt=list(range(VOCAB)), repetition_penalty=penalty)])
        assert logits.isfinite().all()


def test_non_finite_rows_are_found_and_large_ones_are_not() -> None:
    logits = logits_of(0, rows=6)
    logits[1, 7], logits[2, 0], logits[3, 49] = torch.nan, torch.inf, -torch.inf
    logits[4] = 3e38  # finite, but their sum is not
    assert finite_rows(logits).tolist() == [True, False, False, False, True, True]


def test_logprobs_do_not_depend_on_other_rows_and_threads() -> None:
    """A row of a real vocabulary is long enough for a sum to be split over threads, if it is alone."""
    before = torch.get_num_threads()
    try:
        for seed in range(40):
            logits = torch.randn(3, 49152, generator=torch.Generator().manual_seed(seed)) * 4
            torch.set_num_threads(1)
            together = token_logprobs(logits, [7, 8, 9], [2, 0, 1])
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                alone = [token_logprobs(logits[[r]], [7 + r], [(2, 0, 1)[r]])[0] for r in range(3)]
                assert alone == together, (seed, threads)
    finally:
        torch.set_num_threads(before)
