"""Routers and the order of assignments in the interpreter against the specification."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import experts
from batchinfer_kernels.triton import routing
from torch import Tensor

from tests.kernels.triton.device import ON_GPU


def check_same(found: tuple[Tensor, Tensor], meant: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[1], meant[1])
    rtol = 4e-6 if ON_GPU else 1e-6  # exp2 of GPUs is good to two units
    torch.testing.assert_close(found[0], meant[0], rtol=rtol, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(
    "num_experts, k, num_groups, top_groups",
    [(1, 1, 1, 1), (5, 3, 1, 1), (64, 6, 1, 1), (128, 8, 1, 1), (160, 6, 8, 3), (15, 4, 5, 2), (12, 2, 4, 4)],
)
@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_top_k(num_experts: int, k: int, num_groups: int, top_groups: int, renormalize: bool) -> None:
    torch.manual_seed(num_experts)
    logits = torch.randn(4, num_experts).round(decimals=1)  # so that some are equal
    logits[3] = 0
    settings = {"num_groups": num_groups, "top_groups": top_groups, "renormalize": renormalize, "scale": 1.5}
    found = routing.softmax_top_k(logits, k, **settings)
    check_same(found, experts.softmax_top_k(logits, k, **settings))


@pytest.mark.parametrize(
    "num_experts, k, num_groups, top_groups", [(1, 1, 1, 1), (48, 5, 1, 1), (64, 8, 8, 4), (36, 6, 3, 2), (12, 2, 4, 4)]
)
@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid_top_k(num_experts: int, k: int, num_groups: int, top_groups: int, renormalize: bool) -> None:
    torch.manual_seed(num_experts + num_groups)
    logits, bias = torch.randn(4, num_experts), torch.randn(num_experts) / 4
    settings = {"num_groups": num_groups, "top_groups": top_groups, "renormalize": renormalize, "scale": 2.5}
    found = routing.sigmoid_top_k(logits, bias, k, **settings)
    check_same(found, experts.sigmoid_top_k(logits, bias, k, **settings))


@pytest.mark.parametrize("top_groups", [1, 3])
def test_a_sick_token_has_experts_that_exist_and_no_weights(top_groups: int) -> None:
    logits = torch.randn(4, 9)
    logits[1, 7], logits[2], logits[3, 0] = torch.nan, torch.nan, -torch.inf
    settings = {"num_groups": 3, "top_groups": top_groups, "renormalize": True}
    check_same(routing.softmax_top_k(logits, 3, **settings), experts.softmax_top_k(logits, 3, **settings))
    bias = torch.zeros(9)
    found = routing.sigmoid_top_k(logits, bias, 3, **settings)
    check_same(found, experts.sigmoid_top_k(logits, bias, 3, **settings))
    assert found[0][1:3].isnan().all() and found[0][[0, 3]].isfinite().all()


def ids_of(kind: str) -> Tensor:
    torch.manual_seed(7)
    return {
        "one token": torch.tensor([[4, 0, 9]]),
        "all to one": torch.full((40, 2), 3),
        "many chunks": torch.randint(10, (300, 2)),
        "absent": torch.randint(-3, 10, (150, 4)).clamp(min=-1),
        "none at all": torch.full((5, 2), -1),
        "one of each": torch.arange(10)[:, None],
        "no tokens": torch.empty(0, 2),
    }[kind].to(torch.int32)


@pytest.mark.parametrize(
    "kind", ["one token", "all to one", "many chunks", "absent", "none at all", "one of each", "no tokens"]
)
@pytest.mark.parametrize("size", [16, 64])
def test_align(kind: str, size: int) -> None:
    found, meant = (align(ids_of(kind), 10, size) for align in (routing.align, experts.align))
    assert torch.equal(found.experts, meant.experts) and torch.equal(found.slots, meant.slots)
    assert (found.size, found.num_slots) == (meant.size, meant.num_slots)


def test_more_experts_than_there_are_places_at_a_time() -> None:
    ids = torch.randint(200, (70, 4), dtype=torch.int32)
    assert torch.equal(routing.align(ids, 200, 32).slots, experts.align(ids, 200, 32).slots)
