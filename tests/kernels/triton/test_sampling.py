"""Drawing in the interpreter: the tokens of the specification, and of the engine's sampler."""

from __future__ import annotations

import random

import pytest
import torch
from batchinfer_kernels import sampling as specification
from batchinfer_kernels.sampling import Drawing
from batchinfer_kernels.triton import sampling
from batchinfer_kernels.tuning import CAPABILITIES
from torch import Tensor

from batchinfer.runner.sampler import Sampler, SampleRow
from batchinfer.types.streams import MASK64
from tests.kernels.triton.device import HOST
from tests.kernels.triton.drawing import CASES, drawing, sample_row

# What numpy says of infinities, NaN, and temperatures that make everything else too small.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several of them in a small vocabulary."""
    small = {c: {"BLOCK": 128, "num_warps": 4, "num_stages": 1} for c in CAPABILITIES}
    monkeypatch.setattr(sampling, "DEFAULTS", small)


def by_the_engine(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    """What its sampler draws on the host."""
    with HOST:
        return Sampler(logits.shape[1], HOST).sample(logits.to(HOST, copy=True), rows)


def test_uniform_numbers_have_the_bits_of_the_streams() -> None:
    random.seed(1)
    keys = [0, 1, MASK64, 1 << 63, *(random.getrandbits(64) for _ in range(200))]
    rows = drawing([sample_row(key, 7 * i) for i, key in enumerate(keys)])
    assert torch.equal(sampling.uniform(rows.keys, rows.positions), specification.uniform(rows.keys, rows.positions))
    assert sampling.uniform(rows.keys[:0], rows.positions[:0]).shape == (0,)


@pytest.mark.parametrize("vocab", [1, 100, 4096, 5000])
def test_greedy(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab).round()
    logits[1] = -0.0
    logits[2, -1], logits[3, vocab // 2], logits[4, 0] = torch.nan, torch.inf, -torch.inf
    tokens, finite = sampling.greedy(logits)
    wanted_tokens, wanted_finite = specification.greedy(logits)
    assert torch.equal(finite, wanted_finite) and finite.tolist() == [True, True, False, False, False, True]
    assert torch.equal(tokens[finite], wanted_tokens[finite])
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert sampling.greedy(logits[:0])[0].shape == (0,)


@pytest.mark.parametrize("kind", ["apart", "few", "masked", "equal"])
def test_it_draws_what_the_engines_sampler_draws(kind: str) -> None:
    vocab = 200
    torch.manual_seed(3)
    rows = [sample_row(97 * i + 5, i, **params) for i, params in enumerate(CASES)]
    logits = 3 * torch.randn(len(rows), vocab)
    if kind == "equal":
        logits[:] = -2.5
    elif kind == "few":
        logits = logits.round()
    elif kind == "masked":
        logits[torch.rand(len(rows), vocab) < 0.7] = -torch.inf
        logits[:, 3] = 0
    wanted = by_the_engine(logits, rows)
    assert sampling.sample(logits, drawing(rows)).tolist() == wanted


def test_many_seeds() -> None:
    """The same logits, so that the numbers of the stream decide."""
    logits = torch.linspace(-4, 4, 40)[torch.randperm(40)].repeat(40, 1)
    rows = [sample_row(i, i % 3) for i in range(40)]
    found = sampling.sample(logits, drawing(rows)).tolist()
    assert found == by_the_engine(logits, rows)
    assert len(set(found)) > 5


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = [sample_row(i, 2, temperature=0.8, top_k=30, top_p=0.7, min_p=0.01) for i in range(2)]
    logits, drawn = torch.randn(2, 200), drawing(rows)
    fields = ("keys", "positions", "temperature", "top_k", "top_p", "min_p")
    alone = Drawing(**{name: getattr(drawn, name)[1:] for name in fields})
    assert sampling.sample(logits[1:], alone) == sampling.sample(logits, drawn)[1]


def test_rows_that_are_no_numbers_end_at_a_token() -> None:
    logits = torch.randn(4, 50)
    logits[0] = torch.nan
    logits[1, 4], logits[2, 5] = torch.nan, torch.inf
    logits[3] = -torch.inf
    drawn = drawing([sample_row(i, 0, top_k=5, top_p=0.5) for i in range(4)])
    tokens = sampling.sample(logits, drawn)
    assert ((tokens >= 0) & (tokens < 50)).all()
