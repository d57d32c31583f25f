"""Layers of experts: the specification against what its words say, counted out."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import cpu, experts
from torch import Tensor


def test_blocks_are_enough() -> None:
    for num_slots, num_experts, size in ((1, 4, 16), (7, 4, 2), (64, 3, 16), (5, 8, 4)):
        ids = [[min(slot, num_experts - 1)] for slot in range(num_slots)]
        busy = experts.align(torch.tensor(ids), num_experts, size).experts.ge(0).sum()
        assert busy <= experts.num_blocks(num_slots, num_experts, size)
    assert experts.num_blocks(7, 4, 2) == 5  # 1, 1, 1 and 4 need 1 + 1 + 1 + 2
    assert experts.num_blocks(9, 2, 4) == 3  # 1 and 8, or 4 and 5


def test_aligned() -> None:
    ids = torch.tensor([[2, 0], [2, -1], [0, 2]])
    found = experts.align(ids, 4, 2)
    assert found.slots.tolist() == [1, 4, 0, 2, 5, 6, *[6] * 2 * (len(found.experts) - 3)]
    assert found.experts.tolist() == [0, 2, 2, *[-1] * (len(found.experts) - 3)]
    assert found.num_slots == 6 and found.size == 2


def test_softmax_top_k() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]], dtype=torch.float64)
    weights, ids = experts.softmax_top_k(logits, 3, renormalize=False)
    assert ids.tolist() == [[1, 3, 2]]  # of equal ones the lowest first
    torch.testing.assert_close(weights, torch.softmax(logits, 1)[:, [1, 3, 2]])
    weights, _ = experts.softmax_top_k(logits, 3, renormalize=True, scale=2.5)
    torch.testing.assert_close(weights, 2.5 * torch.softmax(logits[:, [1, 3, 2]], 1))


def test_sigmoid_top_k() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 3.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 1.0, -1.0])
    weights, ids = experts.sigmoid_top_k(logits, bias, 2, renormalize=False)
    assert ids.tolist() == [[2, 0]]  # 0.73, 0.5, 1.27, -0.05 with the bias
    torch.testing.assert_close(weights, torch.sigmoid(logits)[:, [2, 0]])  # and without it
    normal, _ = experts.sigmoid_top_k(logits, bias, 2, renormalize=True, scale=2.5)
    torch.testing.assert_close(normal, 2.5 * weights / weights.sum())


def test_only_the_best_groups_count() -> None:
    # Sums of the two best: 1.2, 1.0, 1.1. The single best is in the group that is left out.
    choice = torch.tensor([[0.6, 0.6, 0.1, 0.9, 0.1, 0.1, 0.7, 0.4, 0.0]], dtype=torch.float64)
    weights, ids = experts.sigmoid_top_k(
        torch.logit(choice), torch.zeros(9), 3, num_groups=3, top_groups=2, renormalize=False
    )
    assert ids.tolist() == [[6, 0, 1]]
    torch.testing.assert_close(weights, choice[:, [6, 0, 1]])


def test_a_softmax_counts_the_groups_with_the_best_expert() -> None:
    # The best of each: 0.4, 0.3, 0.2. Their sums would leave out the first.
    shares = torch.tensor([[0.4, 0.01, 0.3, 0.05, 0.2, 0.04]], dtype=torch.float64)
    weights, ids = experts.softmax_top_k(shares.log(), 3, num_groups=3, top_groups=2, renormalize=False, scale=2.0)
    assert ids.tolist() == [[0, 2, 3]]
    torch.testing.assert_close(weights, 2 * shares[:, [0, 2, 3]])


@pytest.mark.parametrize("top_groups", [1, 2])
def test_a_sick_token_has_experts_that_exist_and_no_weights(top_groups: int) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2], logits[2] = torch.nan, torch.nan
    soft = experts.softmax_top_k(logits, 2, renormalize=True)
    sigmoid = experts.sigmoid_top_k(logits, torch.zeros(4), 2, num_groups=2, top_groups=top_groups, renormalize=True)
    for weights, ids in (soft, sigmoid):
        assert weights[0].isfinite().all() and weights[1:].isnan().all()
        assert ids.ge(0).all() and ids.lt(4).all() and (ids[:, 0] != ids[:, 1]).all()


def test_a_layer_is_the_sum_of_its_tokens_experts() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 6, dtype=torch.float64), torch.randn(4, 3, 6, dtype=torch.float64)
    ids, weights = torch.tensor([[0, 3], [1, 0], [-1, 2], [3, 1], [-1, -1]]), torch.rand(5, 2)
    residual = torch.randn(5, 3, dtype=torch.float64)
    out = torch.full((10, 3), torch.nan, dtype=torch.float64)
    y = experts.linear(ids, lambda rows, expert: x[rows] @ weight[expert].T, out, per_slot=False)
    found = experts.combine(y, weights, ids, residual)
    for token in range(5):
        meant = residual[token].clone()
        for expert, share in zip(ids[token], weights[token], strict=True):
            if expert >= 0:
                meant += share * (weight[expert] @ x[token])
        torch.testing.assert_close(found[token], meant)
    again = experts.linear(
        ids, lambda rows, expert: x.repeat_interleave(2, 0)[rows] @ weight[expert].T, out.clone(), per_slot=True
    )
    torch.testing.assert_close(again, y, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_on_the_cpu(dtype: torch.dtype) -> None:
    """As the specification, to the last bit where products are: tokens go to their experts in the same order."""
    torch.manual_seed(0)
    x, weight = torch.randn(9, 6).to(dtype), torch.randn(5, 4, 6).to(dtype)
    ids = torch.stack([torch.randperm(4)[:3] for _ in range(9)]).to(torch.int32)  # the last expert gets nothing
    weights, residual = torch.rand(9, 3), torch.randn(9, 4).to(dtype)
    seen: list[tuple[int, int]] = []

    def expert(i: int, rows: Tensor) -> Tensor:
        seen.append((i, len(rows)))
        return (rows[:, None] * weight[i]).sum(-1)

    meant = experts.mix(x, weights, ids, expert, residual.clone())
    of_reference, seen = seen, []
    found = cpu.mix(x, weights, ids, expert, residual.clone())
    assert found.dtype == dtype and torch.equal(found, meant)
    assert seen == of_reference and sum(count for _, count in seen) == 27
    assert cpu.mix(x[:0], weights[:0], ids[:0], expert, residual[:0]).shape == (0, 4)


def test_a_sigmoid_is_the_same_wherever_it_stands() -> None:
    x = torch.randn(40, 7) * 5
    every = experts.sigmoid(x)
    torch.testing.assert_close(every, torch.sigmoid(x))
    assert all(torch.equal(experts.sigmoid(x[i : i + n]), every[i : i + n]) for i in range(0, 40, 3) for n in (1, 2, 5))
    far = experts.sigmoid(torch.tensor([-1e30, -torch.inf, torch.inf, 1e30, torch.nan]))
    assert far[:4].tolist() == [0, 0, 1, 1] and far[4].isnan()
