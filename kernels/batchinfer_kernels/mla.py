"""Latent attention (MLA, DeepSeek-V2): a cache of latents, and attention to it with absorbed projections.

A token has one row of C + R numbers in a layer's cache, for all heads: its latent c (after its norm), and the rotated
part r of its key. A head's key is [U c, r] and its value V c, for the head's parts U and V of the up-projection. With
q' = [U^T q_plain, q_rotated] a score is q' . [c, r], and attention gives the sum of weighted latents, of which V makes
the head's result: all heads then attend to one KV head, whose values are the first C numbers of its keys.

Rotation is in half-split order, as everywhere here; rows of projections in another order are put in this one when they
are loaded. Legend as in `reference`; C the latent's width, R that of the rotated part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels import reference


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
