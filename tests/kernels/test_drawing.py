"""The specification of drawing on a device draws what the engine's sampler draws."""

from __future__ import annotations

import random

import pytest
import torch
from batchinfer_kernels import sampling

from batchinfer.runner.sampler import Sampler
from batchinfer.types.streams import MASK64, uniform
from tests.kernels.triton.drawing import CASES, drawing, sample_row


def test_uniform_numbers_are_those_of_the_streams() -> None:
    random.seed(0)
    keys = [0, 1, MASK64, 1 << 63, *(random.getrandbits(64) for _ in range(200))]
    positions = [0, 1, 2**31, 2**40, *range(200)]
    rows = drawing([sample_row(key, position) for key, position in zip(keys, positions, strict=True)])
    found = sampling.uniform(rows.keys, rows.positions)
    assert found.tolist() == [uniform(key, position) for key, position in zip(keys, positions, strict=True)]


@pytest.mark.parametrize("vocab", [5, 1000])
@pytest.mark.parametrize("kind", ["apart", "equal", "few", "masked"])
def test_it_draws_what_the_sampler_draws(vocab: int, kind: str) -> None:
    torch.manual_seed(vocab)
    rows = [sample_row(31 * i + 5, i, **params) for i in range(20) for params in CASES]
    logits = 3 * torch.randn(len(rows), vocab)
    if kind == "equal":
        logits[:] = 1.5
    elif kind == "few":  # many ties
        logits = logits.round()
    elif kind == "masked":
        logits[torch.rand(len(rows), vocab) < 0.7] = -torch.inf
        logits[:, 3] = 0
    wanted = Sampler(vocab, torch.device("cpu")).sample(logits.clone(), rows)
    assert sampling.sample(logits, drawing(rows)).tolist() == wanted


def test_greedy() -> None:
    logits = torch.zeros(4, 10)
    logits[0, 3] = logits[0, 7] = 1
    logits[1, 9], logits[2, 0], logits[3, 5] = torch.nan, torch.inf, -torch.inf
    tokens, finite = sampling.greedy(logits)
    assert tokens[0] == 3 and finite.tolist() == [True, False, False, False]
