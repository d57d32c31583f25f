"""Choosing tokens from logits where they lie: what is drawn, and its specification in torch, row by row.

A row's weights are exp((logit - largest) / temperature) in float64. min_p keeps weights of at least min_p, top_k the k
largest and all equal to the k-th, top_p the fewest largest that have at least top_p of what is left then (of equal ones
the lower ids). The token is the first, by id, at which the sum of the weights kept exceeds u of their total, where u is
the row's uniform number. Other implementations may add in another order: where u, or top_p of the total, falls within
the rounding of a float64 sum, they may choose a neighbour.

Legend: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How each row is drawn; all [R], contiguous, on the logits' device.

    keys         int64, the bits of a 64-bit key of the row's random stream
    positions    int64, of the token among the row's output, from 0
    temperature  float64; 0 takes the largest logit, of equal ones the lowest id, as top_k 1 does
    top_k        int32; 0, negative and V or more keep all
    top_p        float64; 1 keeps all
    min_p        float64; 0 keeps all
    """

    keys: Tensor
    positions: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOps:
    """`greedy` and `sample` as a backend has them: nothing in them makes the host wait."""

    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]
    sample: Callable[[Tensor, Drawing], Tensor]


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """float64 [R] in [0, 1), with 53 random bits: SplitMix64 (Steele, Lea, Flood 2014) of key + (position + 1) *
    GOLDEN, as a hash of a counter. Keys int64 [R] stand for their bits."""
    z = keys + (positions + 1) * _signed(GOLDEN)  # wraps, as it should
    for shift, factor in ((30, FIRST), (27, SECOND)):
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return _shifted(z ^ _shifted(z, 31), 11).double() * 2.0**-53


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits float32 [R, V]: (int64 [R], the id of each row's largest, of equal ones the lowest; bool [R], whether
    all of the row are finite)."""
    return logits.argmax(-1), logits.isfinite().all(-1)


def sample(logits: Tensor, rows: Drawing) -> Tensor:
    """Tokens int64 [R] of logits float32 [R, V]; -inf is a token that can't be, and some are finite."""
    draws = uniform(rows.keys, rows.positions)
    return torch.stack([_sample(logits[r].double(), rows, r, draws[r]) for r in range(len(logits))])


def _sample(logits: Tensor, rows: Drawing, r: int, draw: Tensor) -> Tensor:
    k, top_p = int(rows.top_k[r]), rows.top_p[r]
    if rows.temperature[r] == 0 or k == 1:
        return logits.argmax()
    weights = ((logits - logits.max()) / rows.temperature[r]).exp()
    weights[weights < rows.min_p[r]] = 0
    if 0 < k < len(weights):
        weights[weights < weights.topk(k).values[-1]] = 0
    if top_p < 1:
        order = weights.argsort(descending=True, stable=True)
        mass = weights[order].cumsum(0)
        weights[order[int(torch.searchsorted(mass, top_p * weights.sum())) + 1 :]] = 0
    ends = weights.cumsum(0)
    kept = weights.nonzero()[:, 0]
    beyond = kept[ends[kept] > draw * ends[-1]]
    return beyond[0] if len(beyond) else kept[-1]  # none where the target was rounded up to the total


def _signed(bits: int) -> int:
    return bits - (1 << 64)


def _shifted(z: Tensor, shift: int) -> Tensor:
    """To the right, zeros coming in."""
    return (z >> shift) & ((1 << (64 - shift)) - 1)
