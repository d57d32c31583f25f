"""Latent attention over a paged cache in fixed splits, and the store into it; `batchinfer_kernels.mla` specifies both.

The tiles of `attention`, whose one KV head is the cache [B, S, C + R]: a block of latents is read once, and serves as
keys and as values. `merge` does the rest. Legend as in `batchinfer_kernels.mla`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.triton.attention import (
    LOG2_E,
    TilePlan,
    add_block,
    check_partial,
    finish,
    first_block,
    plan_arguments,
    store_rows,
    tile_rows,
)
from batchinfer_kernels.triton.kv_store import is_finite, prepared
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.triton_outlook import MOST_LATENT, MOST_ROTATED, unfit_latents
from batchinfer_kernels.tuning import CAPABILITIES, Config, config
from batchinfer_kernels.turning import Turning

KIND = "latent_attention"
# From sm_90 on too few rows for the instructions of warpgroups and of tensor memory. 64 rows, with sums of 512 numbers
# each, spill registers on sm_90 (8 or 16 warps, 32 or 64 keys, values whole or in halves) unless a program has only
# half of the values, and two compute the same scores; on sm_100 they do for 16 heads, and 128 rows need more tensor
# memory than there is.
DEFAULTS = {
    80: {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2},
    90: {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2},
    100: {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2},
}
STORE_DEFAULTS = {capability: {"BLOCK_T": 4, "num_warps": 4, "num_stages": 1} for capability in CAPABILITIES}


def launch_config(device: torch.device) -> Config:
    """Its BLOCK_M // H, or 1, is how many queries a tile may have."""
    return config(KIND, DEFAULTS, device)


@triton.jit(do_not_specialize=["table_width"])  # which differs from step to step
def _latent_attention(
    q_ptr,  # [T, H, C + R]
    cache_ptr,  # [B, S, C + R]
    out_ptr,  # [T, H, C]
    partial_ptr,  # float32 [E, H, C]
    log_sums_ptr,  # float32 [E, H]
    start_ptr,  # [N], and so on, as in attention.TileGroup
    count_ptr,
    chunk_ptr,
    begin_ptr,
    end_ptr,
    members_ptr,  # [M], and so on, as in attention.TilePlan
    positions_ptr,
    entries_ptr,
    tables_ptr,  # [chunks, table_width]
    table_width,
    scale,  # in units of log 2
    HEADS: tl.constexpr,  # H
    RANK: tl.constexpr,  # C, a power of two
    TURNED: tl.constexpr,  # R, a power of two
    SLOTS: tl.constexpr,  # S
    SPLIT: tl.constexpr,  # W
    ROW_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row_block = tl.program_id(0) % ROW_BLOCKS
    tile = tl.program_id(0) // ROW_BLOCKS
    count = tl.load(count_ptr + tile)
    if row_block * BLOCK_M >= count * HEADS:
        return
    start = tl.load(start_ptr + tile)
    begin = tl.load(begin_ptr + tile)
    end = tl.load(end_ptr + tile)
    table_ptr = tables_ptr + tl.load(chunk_ptr + tile).to(tl.int64) * table_width
    width: tl.constexpr = RANK + TURNED

    is_row, member, head, token, position = tile_rows(
        row_block, start, count, members_ptr, positions_ptr, HEADS, BLOCK_M
    )
    dim = tl.arange(0, RANK)
    turned_dim = tl.arange(0, TURNED)
    query = q_ptr + ((token * HEADS + head) * width)[:, None]
    q = tl.load(query + dim, mask=is_row[:, None], other=0.0)
    q_turned = tl.load(query + RANK + turned_dim, mask=is_row[:, None], other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, RANK], tl.float32)
    for first in range(first_block(begin, SPLIT, BLOCK_N), end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        is_key = (at >= begin) & (at < end)
        block = tl.load(table_ptr + at // SLOTS, mask=is_key, other=0).to(tl.int64)
        rows = cache_ptr + ((block * SLOTS + at % SLOTS) * width)[:, None]
        latent = tl.load(rows + dim, mask=is_key[:, None], other=0.0)
        turned = tl.load(rows + RANK + turned_dim, mask=is_key[:, None], other=0.0)
        scores = tl.dot(q, latent.T, input_precision="ieee")
        scores = tl.dot(q_turned, turned.T, scores, input_precision="ieee") * scale
        seen = is_key & (at <= position[:, None])
        weights, shrink, top, total = add_block(scores, seen, top, total)
        sums = tl.dot(weights.to(latent.dtype), latent, sums * shrink[:, None], input_precision="ieee")

    entry = tl.load(entries_ptr + member, mask=is_row, other=-2)
    factor, log_sum = finish(top, total, tl.full([BLOCK_M], float("-inf"), tl.float32))
    result = sums * factor[:, None]
    store_rows(result, log_sum, entry, token, head, out_ptr, partial_ptr, log_sums_ptr, HEADS, RANK, RANK)


def attend(
    q: Tensor,
    cache: Tensor,
    plan: TilePlan,
    out: Tensor,
    partial: Tensor,
    log_sums: Tensor,
    *,
    scale: float,
) -> None:
    """Attention of absorbed queries q [T, H, C + R] to each split of cache [B, S, C + R] of q's dtype, into out
    [T, H, C], partial float32 [E, H, C] and log_sums float32 [E, H], as in `attention.attend`."""
    heads, rank = out.shape[1:]
    width = q.shape[2]
    assert q.is_contiguous() and cache.is_contiguous() and out.is_contiguous() and q.dtype == cache.dtype
    assert q.shape[:2] == out.shape[:2] and cache.shape[2] == width
    assert unfit_latents(rank, width - rank) is None
    check_partial(plan, partial, log_sums, heads, rank)
    launch: dict[str, Any] = dict(launch_config(q.device))
    for tiles in plan.groups:
        row_blocks = triton.cdiv(tiles.most * heads, launch["BLOCK_M"])
        programs = len(tiles.start) * row_blocks
        if programs:
            _latent_attention[(programs,)](
                q,
                cache,
                out,
                partial,
                log_sums,
                *plan_arguments(tiles, plan),
                scale * LOG2_E,
                heads,
                rank,
                width - rank,
                cache.shape[1],
                plan.split_size,
                row_blocks,
                **launch,
            )


@triton.jit(do_not_specialize=["num_tokens"])  # one compiled kernel for any number of them
def _store_latents(
    latents_ptr,  # [T, C], tokens latents_stride apart
    rotated_ptr,  # [T, R], likewise
    cache_ptr,  # [B, S, C + R]
    weight_ptr,  # [C]
    cos_ptr,  # [T, R / 2]
    sin_ptr,
    slots_ptr,  # [T]
    fresh_blocks_ptr,  # [F]
    fresh_from_ptr,
    num_tokens,
    latents_stride,
    rotated_stride,
    eps,
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    width: tl.constexpr = RANK + TURNED
    half: tl.constexpr = TURNED // 2 if HAS_ROPE else 0
    dim = tl.arange(0, RANK)
    turned_dim = tl.arange(0, TURNED)
    fresh = tl.program_id(0) - (num_tokens + BLOCK_T - 1) // BLOCK_T
    if fresh >= 0:  # a block whose other values are to be zero
        slot = tl.arange(0, BLOCK_S)[:, None]
        is_left = (slot >= tl.load(fresh_from_ptr + fresh)) & (slot < SLOTS)
        rows = cache_ptr + (tl.load(fresh_blocks_ptr + fresh).to(tl.int64) * SLOTS + slot) * width
        zeros = tl.zeros([BLOCK_S, RANK], tl.float32).to(cache_ptr.dtype.element_ty)
        tl.store(rows + dim, zeros, mask=is_left)
        zeros = tl.zeros([BLOCK_S, TURNED], tl.float32).to(cache_ptr.dtype.element_ty)
        tl.store(rows + RANK + turned_dim, zeros, mask=is_left)
        return

    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    is_token = token < num_tokens
    latents = latents_ptr + token * latents_stride
    latent = prepared(latents, is_token, weight_ptr, cos_ptr, sin_ptr, eps, RANK, 0, HAS_NORM, RANK)
    rotated = rotated_ptr + token * rotated_stride
    cos_row = cos_ptr + token * half
    sin_row = sin_ptr + token * half
    turned = prepared(rotated, is_token, weight_ptr, cos_row, sin_row, eps, TURNED, half, False, TURNED)
    # In what the cache holds, where too large a number is infinite.
    latent = latent.to(cache_ptr.dtype.element_ty)
    turned = turned.to(cache_ptr.dtype.element_ty)
    is_well = (is_finite(latent.to(tl.float32)) & is_finite(turned.to(tl.float32)))[:, None]
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int64)
    rows = cache_ptr + slot * width
    tl.store(rows + dim, tl.where(is_well, latent, 0.0).to(latent.dtype), mask=slot >= 0)
    tl.store(rows + RANK + turned_dim, tl.where(is_well, turned, float("nan")).to(turned.dtype), mask=slot >= 0)


def store(latents: Tensor, rotated: Tensor, cache: Tensor, plan: TilePlan, turning: Turning | None = None) -> None:
    """Stores latents [T, C], normed with turning.k_weight [C], and rotated [T, R], turned by turning.cos and sin, in
    plan.slots of cache [B, S, C + R], those of slot -1 nowhere. Tokens may lie apart (parts of a wider product)."""
    tokens, rank = latents.shape
    turned = rotated.shape[1]
    at = turning or Turning()
    assert latents.stride(1) == rotated.stride(1) == 1 and latents.dtype == rotated.dtype
    assert cache.is_contiguous() and cache.shape[2] == rank + turned and len(plan.slots) == tokens == len(rotated)
    assert unfit_latents(rank, turned) is None
    assert at.k_weight is None or (at.k_weight.dtype == latents.dtype and at.k_weight.shape == (rank,))
    for table in (at.cos, at.sin):
        assert table is None or (table.is_contiguous() and table.shape == (tokens, turned // 2))
    launch: dict[str, Any] = dict(config("latent_store", STORE_DEFAULTS, cache.device))
    programs = triton.cdiv(tokens, launch["BLOCK_T"]) + len(plan.fresh_blocks)
    if programs:
        _store_latents[(programs,)](
            latents,
            rotated,
            cache,
            latents if at.k_weight is None else at.k_weight,
            latents if at.cos is None else at.cos,
            latents if at.sin is None else at.sin,
            plan.slots,
            plan.fresh_blocks,
            plan.fresh_from,
            tokens,
            latents.stride(0),
            rotated.stride(0),
            at.eps,
            rank,
            turned,
            cache.shape[1],
            at.k_weight is not None,
            at.cos is not None,
            triton.next_power_of_2(cache.shape[1]),
            **launch,
        )


def variants() -> Iterator[Variant]:
    ints = ("start", "count", "chunk", "begin", "end", "members", "positions", "entries", "tables")
    # DeepSeek-V3's, V2-Lite's, and the largest that are taken.
    for heads, turned in ((128, 64), (16, 64), (128, MOST_ROTATED)):
        yield Variant(
            name=f"latent_attention.{heads}" + ".widest" * (turned == MOST_ROTATED),
            kernel=_latent_attention,
            signature={
                **dict.fromkeys(("q_ptr", "cache_ptr", "out_ptr"), "*bf16"),
                **dict.fromkeys(("partial_ptr", "log_sums_ptr"), "*fp32"),
                **{f"{name}_ptr": "*i32" for name in ints},
                "table_width": "i32",
                "scale": "fp32",
            },
            constants={
                "HEADS": heads,
                "RANK": MOST_LATENT,
                "TURNED": turned,
                "SLOTS": 16,
                "SPLIT": 256,
                "ROW_BLOCKS": 4 if heads == 128 else 1,
            },
            configs=DEFAULTS,
            unaligned=frozenset({"table_width"}),
            is_default=heads == 128 and turned == 64,
            is_product=True,
            has_few_rows=True,
        )
    for is_turned in (True, False):
        yield Variant(
            name="latent_store" + ".norm.rope" * is_turned,
            kernel=_store_latents,
            signature={
                **dict.fromkeys(("latents_ptr", "rotated_ptr", "cache_ptr", "weight_ptr"), "*bf16"),
                **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
                **dict.fromkeys(("slots_ptr", "fresh_blocks_ptr", "fresh_from_ptr"), "*i32"),
                **dict.fromkeys(("num_tokens", "latents_stride", "rotated_stride"), "i32"),
                "eps": "fp32",
            },
            constants={
                "RANK": 512,
                "TURNED": 64,
                "SLOTS": 16,
                "HAS_NORM": is_turned,
                "HAS_ROPE": is_turned,
                "BLOCK_S": 16,
            },
            configs=STORE_DEFAULTS,
            unaligned=frozenset({"num_tokens"}),
            is_default=is_turned,
        )
