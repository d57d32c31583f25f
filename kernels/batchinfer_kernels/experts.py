"""Layers of experts, of which each token takes a few: routers, the order in which tokens are multiplied, products and
their sum: what the kernel table has of them, and the specification in plain torch.

Legend: T tokens, k experts of a token, A = T k assignments (assignment t k + j is token t's j-th expert), E experts,
K inputs, N output features, H hidden. Expert ids below zero are no assignment: of padding, or of another machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchinfer_kernels import head
from batchinfer_kernels.w4 import Packed

# Of a sum of weights that could be zero.
LEAST = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """Assignments in the order in which they are multiplied: blocks of one expert each.

    slots        int32 [blocks * size]: assignments, by expert and ascending; `num_slots` where there is none
    experts      int32 [blocks]: of each block; -1 for those that are left over, at the end
    size         rows in a block
    num_slots    A
    """

    slots: Tensor
    experts: Tensor
    size: int
    num_slots: int


class SoftmaxTopK(Protocol):
    def __call__(
        self,
        logits: Tensor,
        k: int,
        *,
        num_groups: int = 1,
        top_groups: int = 1,
        renormalize: bool,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]: ...


class SigmoidTopK(Protocol):
    def __call__(
        self,
        logits: Tensor,
        bias: Tensor,
        k: int,
        *,
        num_groups: int = 1,
        top_groups: int = 1,
        renormalize: bool,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]: ...


Expert = Callable[[int, Tensor], Tensor]


class GroupedInt8(Protocol):
    def __call__(
        self,
        x: Tensor,
        x_scales: Tensor,
        weight: Tensor,
        scales: Tensor,
        aligned: Aligned,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
    ) -> Tensor: ...


class GroupedFp8(Protocol):
    def __call__(
        self,
        x: Tensor,
        x_scales: Tensor | None,
        weight: Tensor,
        scales: Tensor,
        aligned: Aligned,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedOps:
    """Products of all experts at once, with the weights of all in one tensor: `linear` in each format. They take x
    [T, K] or [A, K] and give y [A, N].

    block_size   of a format, "plain", "int8", "fp8" or "w4": rows in a block, to align with
    """

    block_size: Callable[[str], int]
    align: Callable[[Tensor, int, int], Aligned]
    combine: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    linear: Callable[[Tensor, Tensor, Aligned], Tensor]
    linear_int8: GroupedInt8
    linear_fp8: GroupedFp8
    linear_w4: Callable[[Tensor, Packed, Aligned], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOps:
    """One implementation.

    logits    float32 [T, E] of x [T, H] and weight [E, H], multiplied in float32: `head.logits`
    wide_weights   whether it takes a weight in float32 whatever x is; else one of x's type
    softmax_top_k, sigmoid_top_k   routers
    grouped   products of all experts at once; None where those go one by one
    mix       `mix`; None where `grouped` is there
    """

    logits: Callable[[Tensor, Tensor], Tensor]
    wide_weights: bool
    softmax_top_k: SoftmaxTopK
    sigmoid_top_k: SigmoidTopK
    grouped: GroupedOps | None = None
    mix: Callable[[Tensor, Tensor, Tensor, Expert, Tensor], Tensor] | None = None


def num_blocks(num_slots: int, num_experts: int, size: int) -> int:
    """Blocks that are enough for any ids: an expert with assignments has one that is not full, at most."""
    busy = min(num_slots, num_experts)
    return busy + (num_slots - busy) // size


def align(ids: Tensor, num_experts: int, size: int) -> Aligned:
    """Expert ids integers [T, k] in order; see `Aligned`."""
    flat = ids.flatten().tolist()
    blocks: list[tuple[int, list[int]]] = []
    for expert in range(num_experts):
        mine = [slot for slot, other in enumerate(flat) if other == expert]
        blocks += [(expert, mine[start : start + size]) for start in range(0, len(mine), size)]
    blocks += [(-1, [])] * (num_blocks(len(flat), num_experts, size) - len(blocks))
    slots = [block + [len(flat)] * (size - len(block)) for _, block in blocks]
    return Aligned(
        slots=torch.tensor(slots, dtype=torch.int32, device=ids.device).flatten(),
        experts=torch.tensor([expert for expert, _ in blocks], dtype=torch.int32, device=ids.device),
        size=size,
        num_slots=len(flat),
    )


def softmax_top_k(
    logits: Tensor,
    k: int,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, k], ids int32 [T, k]) of each token's k largest of logits [T, E], in descending order, of
    equal ones the lowest first.

    Weights are the softmax over all experts; with `renormalize` divided by their sum, which makes them the softmax over
    the k; then times `scale`. A token with a logit that is NaN has weights of NaN, and ids that exist.

    Experts come in `num_groups` of equal size; only those of the `top_groups` groups count whose best is largest
    (DeepSeek-V2, arXiv:2405.04434, section 2.2).
    """
    every = torch.softmax(_wide(logits), dim=-1)
    choice = _sound(_wide(logits))
    if top_groups < num_groups:
        grouped = torch.unflatten(choice, -1, (num_groups, -1))
        choice = _limited(grouped, grouped.amax(-1), top_groups)
    ids = _largest(choice, k)
    weights = every.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, ids.to(torch.int32)


def sigmoid_top_k(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The router of DeepSeek-V3 (arXiv:2412.19437, section 2.1): as `softmax_top_k`, but that weights are sigmoids of
    the logits, and those are chosen whose sigmoid + bias [E] is largest.

    Experts come in `num_groups` of equal size; only those of the `top_groups` groups count whose two best add up to
    most.
    """
    every = sigmoid(_wide(logits)).masked_fill(logits.isnan().any(-1, keepdim=True), torch.nan)
    choice = _sound(every + bias.to(every.dtype))
    if top_groups < num_groups:
        grouped = torch.unflatten(choice, -1, (num_groups, -1))
        choice = _limited(grouped, grouped.topk(2).values.sum(-1), top_groups)
    ids = _largest(choice, k)
    weights = every.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST)
    return weights * scale, ids.to(torch.int32)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). torch's own computes the last elements of a tensor in another way than the others, so that it
    would depend on the number of rows; a softmax of two is the same everywhere."""
    finite = x.clamp(max=torch.finfo(x.dtype).max)  # a softmax of infinity is none
    return torch.softmax(torch.stack((finite, torch.zeros_like(x)), dim=-1), dim=-1)[..., 0]


def linear(ids: Tensor, product: Callable[[Tensor, int], Tensor], out: Tensor, *, per_slot: bool) -> Tensor:
    """Fills out [A, N] with each assignment's row of its expert's product; rows without an expert stay as they are.

    product(rows, expert) multiplies those rows int64 [n] of x by the expert's weights: [n, N]. x has one row for each
    token, or with `per_slot` one for each assignment.
    """
    flat = ids.flatten().long()
    for expert in sorted(set(flat[flat >= 0].tolist())):
        slots = (flat == expert).nonzero()[:, 0]
        out[slots] = product(slots if per_slot else slots // ids.shape[1], expert).to(out.dtype)
    return out


def combine(y: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None = None) -> Tensor:
    """Sum over j, ascending, of weights [T, k] times y [A, H], + residual [T, H]; float32, rounded once. Assignments
    without an expert count for nothing, whatever y has for them."""
    wide = torch.unflatten(_wide(y), 0, ids.shape).masked_fill((ids < 0)[..., None], 0)
    total = torch.zeros_like(wide[:, 0])
    for j in range(ids.shape[1]):
        weight = weights[:, j].masked_fill(ids[:, j] < 0, 0)
        total = total + wide[:, j] * weight[:, None].to(wide.dtype)
    if residual is not None:
        total = total + residual.to(total.dtype)
    return total.to(y.dtype)


def mix(x: Tensor, weights: Tensor, ids: Tensor, expert: Expert, residual: Tensor) -> Tensor:
    """residual [T, H] + the sum of each token's experts, times weights [T, k]: `linear` and `combine`.

    expert(i, rows) is what the i-th makes of rows [n, K] of x [T, K]: [n, H]. `residual` may be overwritten.
    """
    out = residual.new_empty(ids.numel(), residual.shape[1])
    y = linear(ids, lambda rows, i: expert(i, x[rows]), out, per_slot=False)
    return combine(y, weights, ids, residual)


def _limited(grouped: Tensor, of_groups: Tensor, top_groups: int) -> Tensor:
    """Scores [T, groups, size] as [T, E], with -inf for those outside the groups whose scores [T, groups] are
    largest."""
    left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, _largest(of_groups, top_groups), False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)


def _largest(scores: Tensor, k: int) -> Tensor:
    """int64 [T, k]: the largest of sound scores [T, E], in descending order, of equal ones the lowest first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _sound(scores: Tensor) -> Tensor:
    """Scores with a very low number for NaN and below, of which two can be added."""
    return scores.nan_to_num(nan=-1e38, posinf=torch.inf).clamp(min=-1e38)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


REFERENCE = ExpertOps(
    logits=head.logits, wide_weights=True, softmax_top_k=softmax_top_k, sigmoid_top_k=sigmoid_top_k, mix=mix
)
