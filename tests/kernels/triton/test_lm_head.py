"""The LM head in the interpreter against its specification."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import head
from batchinfer_kernels.triton import lm_head
from batchinfer_kernels.tuning import CAPABILITIES
from torch import Tensor

from tests.kernels.triton.accuracy import check_close
from tests.kernels.triton.device import ON_GPU, PRODUCTS, WIDE


def operands(rows: int, vocab: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows * vocab + width)
    return torch.randn(rows, width).to(dtype), (torch.randn(vocab, width) / width**0.5).to(dtype)


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("rows, vocab, width", [(1, 1, 64), (1, 300, 100), (3, 128, 128), (65, 257, 72)])
def test_logits(rows: int, vocab: int, width: int, dtype: torch.dtype) -> None:
    x, weight = operands(rows, vocab, width, dtype)
    # Matrix units cut off where they add, which float32 results show.
    least = 4.0 if ON_GPU else 1.0
    check_close(lm_head.logits(x, weight), lambda as_type: head.logits(as_type(x), as_type(weight)), ulps=least)


@pytest.mark.parametrize("rows, vocab, width", [(1, 1, 64), (2, 300, 100), (65, 257, 64)])
def test_argmax_is_that_of_the_logits(rows: int, vocab: int, width: int) -> None:
    x, weight = operands(rows, vocab, width, torch.float16)
    weight[vocab // 2 :] = weight[: vocab - vocab // 2].clone()  # equal ones, also in different tiles
    tokens, finite = lm_head.argmax(x, weight)
    assert torch.equal(tokens, lm_head.logits(x, weight).argmax(-1)) and finite.all()
    assert (tokens < max(vocab // 2, 1)).all(), "of equal ones the lowest"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's
def test_more_tiles_than_a_block_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {c: {"BLOCK": 2, "num_warps": 4, "num_stages": 1} for c in CAPABILITIES}
    monkeypatch.setattr(lm_head, "FINISH_DEFAULTS", small)
    x, weight = operands(4, 700, 64, torch.float16)
    weight[600] = torch.nan
    tokens, finite = lm_head.argmax(x, weight)
    assert not finite.any()
    weight[600] = 0
    tokens, finite = lm_head.argmax(x, weight)
    assert torch.equal(tokens, lm_head.logits(x, weight).argmax(-1)) and finite.all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's
def test_a_row_that_is_no_number_harms_no_other() -> None:
    x, weight = operands(4, 200, 64, torch.float16)
    healthy, _ = lm_head.argmax(x, weight)
    x[1, 3] = torch.nan
    x[2] = 65504  # sums of products are infinite in float16, not in float32
    x[3, 0] = -torch.inf
    tokens, finite = lm_head.argmax(x, weight)
    assert finite.tolist() == [True, False, True, False] and tokens[0] == healthy[0]
    assert ((tokens >= 0) & (tokens < 200)).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = operands(70, 140, 96, WIDE)
    whole, (tokens, _) = lm_head.logits(x, weight), lm_head.argmax(x, weight)
    for i in (0, 1, 63, 64, 69):
        assert torch.equal(whole[i : i + 1], lm_head.logits(x[i : i + 1], weight))
        assert tokens[i] == lm_head.argmax(x[i : i + 1], weight)[0]


def test_no_rows() -> None:
    x, weight = operands(0, 30, 16, torch.float16)
    assert lm_head.logits(x, weight).shape == (0, 30)
    assert lm_head.argmax(x, weight)[0].shape == (0,)
