"""Latent attention (MLA, DeepSeek-V2): absorbed projections, a cache of latents, and attention to it.

A token has one row of C + R numbers in a layer's cache, for all heads: its latent c (after its norm), and the rotated
part r of its key. A head's key is [U c, r] and its value V c, for the head's parts U and V of the up-projection. With
q' = [U^T q_plain, q_rotated] a score is q' . [c, r], and attention gives the sum of weighted latents, of which V makes
the head's result: all heads then attend to one KV head, whose values are the first C numbers of its keys.

Rotation is in half-split order, as everywhere here; rotated parts in pairs, as DeepSeek's projections give them, are
put in this one (`halves`). Legend as in `reference`; C the latent's width, R that of the rotated part, P that of the
plain part of a head's query, V of its value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels import reference
from batchinfer_kernels.probe import RowRule, product


def halves(rotated: Tensor) -> Tensor:
    """[..., R] with the two numbers of each pair next to each other, as (first ones, second ones)."""
    return torch.unflatten(rotated, -1, (-1, 2)).transpose(-1, -2).flatten(-2)


def turn(rotated: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> Tensor:
    """Rotated parts [T, heads, R], in halves, of those that are not turned yet (`pairs`: and are in pairs)."""
    return reference.rotate(halves(rotated) if pairs else rotated, cos, sin)


class Absorb(Protocol):
    def __call__(self, q: Tensor, up: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentOps:
    """One implementation of what stands around latent attention: see the functions of these names."""

    absorb: Absorb
    expand: Callable[[Tensor, Tensor], Tensor]


def absorb(
    q: Tensor,
    up: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    pairs: bool,
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> Tensor:
    """Queries [T, H, C + R] for rows of latents, from those of heads q [T, H, P + R], whose last R numbers are not
    turned yet (`pairs`: and are in pairs), and up [H, C, P]: up_h q_plain, then q_rotated.

    cos, sin float32 [T, R / 2], as `reference.rope` has them.
    """
    plain, turned = q.split_with_sizes([up.shape[2], q.shape[2] - up.shape[2]], dim=-1)
    return torch.cat((_by_head(plain, up, linear), turn(turned, cos, sin, pairs=pairs)), dim=-1)


def expand(latents: Tensor, down: Tensor, *, linear: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Tensor:
    """Heads' results [T, H, V], from weighted latents [T, H, C] and down [H, V, C]: down_h latents_h."""
    return _by_head(latents, down, linear)


def _by_head(x: Tensor, weights: Tensor, linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[T, H, N] of x [T, H, K] and weights [H, N, K]."""
    by_head = zip(x.transpose(0, 1).contiguous(), weights, strict=True)
    return torch.stack([linear(rows, weight) for rows, weight in by_head], dim=1)


def make_latent_ops(rule: RowRule) -> LatentOps:
    """The same, giving a row the same bytes in every batch."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight, None, rule)

    return LatentOps(absorb=partial(absorb, linear=linear), expand=partial(expand, linear=linear))


def write(latents: Tensor, rotated: Tensor, cache: Tensor, slots: Tensor, fresh_blocks: Tensor) -> None:
    """Stores latents [T, C] and rotated [T, R] in cache [B, S, C + R], token t in block slots[t] // S.

    First sets `fresh_blocks` to zero. A token that is not finite gets a latent of zero and a rotated part of NaN: see
    `reference.kv_write`, which says why.
    """
    latents, rotated = latents.to(cache.dtype), rotated.to(cache.dtype)
    sick = ~(torch.isfinite(latents).all(-1, keepdim=True) & torch.isfinite(rotated).all(-1, keepdim=True))
    cache[fresh_blocks] = 0
    rows = torch.cat((latents.masked_fill(sick, 0), rotated.masked_fill(sick, torch.nan)), dim=-1)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def split_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    rank: int,
    split: int,
    split_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`reference.split_attention` of absorbed queries q [T, H, C + R] to cache [B, S, C + R], with rank C: weighted
    latents float32 [T, H, C], and log-sum-exps float32 [T, H]."""
    head = cache.unsqueeze(1)
    out, lse = reference.split_attention(
        q, head, head, block_table, positions, split=split, split_size=split_size, scale=scale
    )
    return out[..., :rank], lse
