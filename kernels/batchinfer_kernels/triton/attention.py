"""Attention over a paged KV cache in fixed splits; `reference.split_attention` is the specification.

A tile is some query tokens times the heads that share one KV head, and a part of one split of the KV, found through a
block table; its rows are its tokens with their heads, as many as BLOCK_M at a time. Whose queries a tile holds makes no
difference: a chunk of one sequence's prompt, one token that is decoded, or tokens of many sequences whose split lies in
the same blocks. A row goes through its split's keys in blocks of BLOCK_N, counted from the split's start, and blocks
that it sees nothing of leave it as it is: its bytes depend on BLOCK_M (which decides what instructions multiply), not
on the tile. So one `KIND` of tile is used for all queries where bytes must not depend on the batch, and the others, for
few queries and for many, where they may.

Caches are [B, Hk, S, D] in float16, bfloat16, float32 or float8_e4m3fn (from sm_89 on, with a scale for each KV head,
see `kv_fp8`), or int8 [B, Hk, S * (D + 4)]: the codes [S, D] of `kv8`, then S float32 scales. Attention to int8 is to
the numbers that the codes stand for: queries, which must have been turned, and weights are not rounded to codes as
`kv8` has it.

Legend as in `reference`; N tiles, M members of tiles, E partial results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels import kv8
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.triton_outlook import unfit_heads, unfit_int8_blocks
from batchinfer_kernels.tuning import Config, config

KIND, FEW, MANY = "attention", "attention_few", "attention_many"
LOG2_E = math.log2(math.e)
# What stands in `entries` for a member whose split is the only one that it sees, and for one that sees nothing of it.
WHOLE, NOTHING = -1, -2
# Formats of the caches.
PLAIN, FP8, INT8 = 0, 1, 2

# By kind of tile, for heads of up to 128 dimensions and for wider ones.
DEFAULTS: dict[tuple[str, bool], dict[int, dict[str, int]]] = {
    (KIND, False): {
        80: {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
        90: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
        100: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    },
    (KIND, True): {
        80: {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
        90: {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2},
        100: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    },
    (FEW, False): {
        80: {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
        90: {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
        100: {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    },
    (FEW, True): {
        80: {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
        90: {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
        100: {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    },
    (MANY, False): {
        80: {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
        90: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
        100: {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3},
    },
    (MANY, True): {
        80: {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2},
        90: {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2},
        100: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2},
    },
}


def launch_config(kind: str, head_dim: int, device: torch.device) -> Config:
    """Its BLOCK_M // G, or 1, is how many queries a tile of this kind may have."""
    is_wide = head_dim > 128
    return config(kind + "_wide" * is_wide, DEFAULTS[kind, is_wide], device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGroup:
    """Tiles of one kind; int32 [N] each. A tile of count 0 does nothing.

    start, count  where a tile's queries stand among the plan's members, and how many
    chunk         the row of block_tables at which its sequence's table begins
    begin, end    the positions that one of its queries sees at least: of one split, begin < end
    most          the largest count
    """

    kind: str
    start: Tensor
    count: Tensor
    chunk: Tensor
    begin: Tensor
    end: Tensor
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """A step, as kernels are told of it; tensors are int32.

    members, positions, entries  [M]: tokens, their positions, and the rows of partial results that are theirs (or
                       WHOLE, or NOTHING)
    block_tables       [rows, width], read from `chunk` of a tile on, and only in what tiles cover
    merged, merged_entry, merged_splits   [Q]: tokens that see several splits, their first rows of partial results (the
                       others follow, in order) and how many; 0 does nothing
    num_entries        E
    slots              [T]: block * S + offset, where a token's key and value are stored; -1: nowhere
    fresh_blocks, fresh_from   [F]: blocks that a sequence starts in this step and does not fill, and their first
                       offsets that are not written
    more               further tiles and what is merged of them, one after the other in the same memory for partial
                       results; slots and fresh blocks are of all together
    """

    groups: tuple[TileGroup, ...]
    members: Tensor
    positions: Tensor
    entries: Tensor
    block_tables: Tensor
    merged: Tensor
    merged_entry: Tensor
    merged_splits: Tensor
    num_entries: int
    slots: Tensor
    fresh_blocks: Tensor
    fresh_from: Tensor
    split_size: int
    window: int | None
    more: tuple[TilePlan, ...] = ()


@triton.jit
def add_block(scores, seen, top, total):
    """The online softmax's step over scores [M, N] in units of log 2: (weights [M, N], by what sums so far shrink,
    the new top, the new total). A block of which a row sees nothing leaves it as it is."""
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def finish(top, total, sink):
    """(the factor that makes a row's sums its result, its log-sum-exp in base 2) with a sink's logit in units of log 2,
    or -inf, in the factor only."""
    base = tl.maximum(top, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    shrink = tl.exp2(top - base)
    with_sink = total * shrink + tl.exp2(sink - base)
    factor = shrink / tl.where(with_sink == 0.0, 1.0, with_sink)
    log_sum = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
    return factor, log_sum


@triton.jit
def tile_rows(row_block, start, count, members_ptr, positions_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of rows [BLOCK_M] of a tile, GROUP for each of its queries: (whether there is one, the member, the head within
    the group, the token int64, its position, -1 where there is none)."""
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < count * GROUP
    member = start + row // GROUP
    token = tl.load(members_ptr + member, mask=is_row, other=0).to(tl.int64)
    position = tl.load(positions_ptr + member, mask=is_row, other=-1)
    return is_row, member, row % GROUP, token, position


@triton.jit
def first_block(begin, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the block of keys begins that has position `begin`: blocks count from the split's start."""
    split_start = begin // SPLIT * SPLIT
    return split_start + (begin - split_start) // BLOCK_N * BLOCK_N


@triton.jit
def store_rows(
    result,  # float32 [BLOCK_M, BLOCK_D]
    log_sum,  # float32 [BLOCK_M]
    entry,  # [BLOCK_M], as in TilePlan
    token,  # int64 [BLOCK_M]
    head,  # [BLOCK_M]
    out_ptr,  # [T, HEADS, DIM]
    partial_ptr,  # float32 [E, HEADS, DIM]
    log_sums_ptr,  # float32 [E, HEADS]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < DIM
    is_whole = entry == -1
    out_at = ((token * HEADS + head) * DIM)[:, None] + dim
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=is_whole[:, None] & is_dim)
    is_part = entry >= 0
    part = entry.to(tl.int64) * HEADS + head
    tl.store(partial_ptr + (part * DIM)[:, None] + dim, result, mask=is_part[:, None] & is_dim)
    tl.store(log_sums_ptr + part, log_sum, mask=is_part)


@triton.jit(do_not_specialize=["table_width"])  # which differs from step to step
def _attention(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # the caches
    v_ptr,
    k_scales_ptr,  # float32 [Hk] under FP8; the caches once more, as float32, under INT8
    v_scales_ptr,
    sinks_ptr,  # float32 [Hq]
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # float32 [E, Hq, D]
    log_sums_ptr,  # float32 [E, Hq]
    start_ptr,  # [N], and so on, as in TileGroup
    count_ptr,
    chunk_ptr,
    begin_ptr,
    end_ptr,
    members_ptr,  # [M], and so on, as in TilePlan
    positions_ptr,
    entries_ptr,
    tables_ptr,  # [chunks, table_width]
    table_width,
    window,
    scale,  # in units of log 2; or over softcap, which then is in them
    softcap,
    HEADS: tl.constexpr,  # Hk
    GROUP: tl.constexpr,  # G
    DIM: tl.constexpr,  # D
    SLOTS: tl.constexpr,  # S
    SPLIT: tl.constexpr,  # W
    ROW_BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Heads of a tile run side by side: in the caches they are neighbours.
    program = tl.program_id(0)
    kv_head = program % HEADS
    row_block = program // HEADS % ROW_BLOCKS
    tile = program // (HEADS * ROW_BLOCKS)
    count = tl.load(count_ptr + tile)
    if row_block * BLOCK_M >= count * GROUP:
        return
    start = tl.load(start_ptr + tile)
    begin = tl.load(begin_ptr + tile)
    end = tl.load(end_ptr + tile)
    table_ptr = tables_ptr + tl.load(chunk_ptr + tile).to(tl.int64) * table_width

    is_row, member, head, token, position = tile_rows(
        row_block, start, count, members_ptr, positions_ptr, GROUP, BLOCK_M
    )
    head += kv_head * GROUP
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < DIM
    query_at = ((token * (HEADS * GROUP) + head) * DIM)[:, None]
    q = tl.load(q_ptr + query_at + dim, mask=is_row[:, None] & is_dim, other=0.0)
    if FORMAT == 0:
        q = q.to(k_ptr.dtype.element_ty)
    head_size: tl.constexpr = SLOTS * DIM if FORMAT != 2 else SLOTS * (DIM + 4)
    if FORMAT == 1:
        scale *= tl.load(k_scales_ptr + kv_head)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(first_block(begin, SPLIT, BLOCK_N), end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        # Before `begin` may be blocks that have left the window, and are anybody's.
        is_key = (at >= begin) & (at < end)
        block = tl.load(table_ptr + at // SLOTS, mask=is_key, other=0).to(tl.int64)
        head_at = (block * HEADS + kv_head) * head_size
        kv_at = (head_at + at % SLOTS * DIM)[:, None] + dim
        is_number = is_key[:, None] & is_dim
        k = tl.load(k_ptr + kv_at, mask=is_number, other=0.0).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale
        if FORMAT == 2:
            scale_at = head_at // 4 + SLOTS * DIM // 4 + at % SLOTS
            scores *= tl.load(k_scales_ptr + scale_at, mask=is_key, other=0.0)[None, :]
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (e^2x + 1)
            scores = softcap - 2 * softcap / (tl.exp2(scores * (2 * 1.4426950408889634)) + 1)
        seen = is_key & (at <= position[:, None])
        if HAS_WINDOW:
            seen &= at > position[:, None] - window
        weights, shrink, top, total = add_block(scores, seen, top, total)
        v = tl.load(v_ptr + kv_at, mask=is_number, other=0.0).to(q.dtype)
        if FORMAT == 2:
            weights *= tl.load(v_scales_ptr + scale_at, mask=is_key, other=0.0)[None, :]
        sums = tl.dot(weights.to(q.dtype), v, sums * shrink[:, None], input_precision="ieee")

    entry = tl.load(entries_ptr + member, mask=is_row, other=-2)
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=entry == -1, other=float("-inf")) * 1.4426950408889634
    factor, log_sum = finish(top, total, sink)
    if FORMAT == 1:
        factor *= tl.load(v_scales_ptr + kv_head)
    result = sums * factor[:, None]
    store_rows(result, log_sum, entry, token, head, out_ptr, partial_ptr, log_sums_ptr, HEADS * GROUP, DIM, BLOCK_D)


def format_of(dtype: torch.dtype) -> int:
    """Of a cache."""
    return {torch.int8: INT8, torch.float8_e4m3fn: FP8}.get(dtype, PLAIN)


def scale_arguments(
    k_cache: Tensor, v_cache: Tensor, k_scales: Tensor | None, v_scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What kernels take as scales. k_scales, v_scales: float32 [Hk], for float8 only, where they must be given."""
    if format_of(k_cache.dtype) == INT8:
        return k_cache.view(torch.float32), v_cache.view(torch.float32)
    if format_of(k_cache.dtype) == FP8:
        assert k_scales is not None and v_scales is not None
        for scales in (k_scales, v_scales):
            assert scales.dtype == torch.float32 and scales.shape == k_cache.shape[1:2] and scales.is_contiguous()
        return k_scales, v_scales
    return k_cache, v_cache


def plan_arguments(tiles: TileGroup, plan: TilePlan) -> tuple[Any, ...]:
    """What kernels take of these, in their order."""
    of_tiles = (tiles.start, tiles.count, tiles.chunk, tiles.begin, tiles.end)
    return *of_tiles, plan.members, plan.positions, plan.entries, plan.block_tables, plan.block_tables.shape[1]


def check_partial(plan: TilePlan, partial: Tensor, log_sums: Tensor, heads: int, dim: int) -> None:
    """Asserts that the plan's partial results have a place in partial float32 [E, heads, dim] and log_sums float32
    [E, heads]."""
    assert partial.dtype == log_sums.dtype == torch.float32 and partial.is_contiguous() and log_sums.is_contiguous()
    assert partial.numel() >= plan.num_entries * heads * dim and log_sums.numel() >= plan.num_entries * heads


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TilePlan,
    out: Tensor,
    partial: Tensor,
    log_sums: Tensor,
    *,
    block_size: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Attention of q [T, Hq, D] to each split: of tokens that see one split into out [T, Hq, D], of the others into
    partial float32 [E, Hq, D] and, its log-sum-exp in base 2, log_sums float32 [E, Hq]. See `merge.merge_splits`.

    sinks float32 [Hq] are logits that count in the sum of weights and have no value. Under INT8 q is turned
    (`kv8.turn`). Raises nothing for what plan says: that it fits the caches is the caller's care.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    cache_format = format_of(k_cache.dtype)
    assert q.is_contiguous() and out.is_contiguous() and out.shape == q.shape
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    row = (block_size * (head_dim + kv8.SCALE_BYTES),) if cache_format == INT8 else (block_size, head_dim)
    assert k_cache.shape[2:] == row and v_cache.shape == k_cache.shape and v_cache.dtype == k_cache.dtype
    assert cache_format != INT8 or unfit_int8_blocks(head_dim, block_size) is None
    assert num_heads % num_kv_heads == 0 and unfit_heads(head_dim) is None
    check_partial(plan, partial, log_sums, num_heads, head_dim)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,) and sinks.is_contiguous())
    group = num_heads // num_kv_heads
    for tiles in plan.groups:
        launch: dict[str, Any] = dict(launch_config(tiles.kind, head_dim, q.device))
        row_blocks = triton.cdiv(tiles.most * group, launch["BLOCK_M"])
        programs = len(tiles.start) * num_kv_heads * row_blocks
        if programs:
            _attention[(programs,)](
                q,
                k_cache,
                v_cache,
                *scale_arguments(k_cache, v_cache, k_scales, v_scales),
                log_sums if sinks is None else sinks,
                out,
                partial,
                log_sums,
                *plan_arguments(tiles, plan),
                plan.window or 0,
                scale * LOG2_E if softcap is None else scale / softcap,
                0.0 if softcap is None else softcap * LOG2_E,
                num_kv_heads,
                group,
                head_dim,
                block_size,
                plan.split_size,
                row_blocks,
                cache_format,
                plan.window is not None,
                softcap is not None,
                sinks is not None,
                max(16, triton.next_power_of_2(head_dim)),
                **launch,
            )


def variants() -> Iterator[Variant]:
    ints = ("start", "count", "chunk", "begin", "end", "members", "positions", "entries", "tables")
    floats = ("sinks", "partial", "log_sums")
    signature = {
        "q_ptr": "*bf16",
        "out_ptr": "*bf16",
        **{f"{name}_ptr": "*fp32" for name in floats},
        **{f"{name}_ptr": "*i32" for name in ints},
        "table_width": "i32",
        "window": "i32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    formats = {"bf16": (PLAIN, "*bf16", "*bf16"), "fp8": (FP8, "*fp8e4nv", "*fp32"), "int8": (INT8, "*i8", "*fp32")}
    for kind, head_dim, cache, extras in (
        (KIND, 128, "bf16", ""),
        *((KIND, dim, "bf16", "") for dim in (64, 80, 96, 192, 256)),
        *((KIND, dim, cache, "") for dim in (128, 256) for cache in ("fp8", "int8")),
        *((KIND, dim, "bf16", "window softcap sinks") for dim in (64, 256)),
        *((kind, dim, "bf16", "") for kind in (FEW, MANY) for dim in (128, 256)),
        *((kind, 128, cache, "") for kind in (FEW, MANY) for cache in ("fp8", "int8")),
    ):
        number, cache_type, scales_type = formats[cache]
        caches = {"k_ptr": cache_type, "v_ptr": cache_type, "k_scales_ptr": scales_type, "v_scales_ptr": scales_type}
        # Triton has no float8_e4m3fn below sm_89.
        configs = {c: v for c, v in DEFAULTS[kind, head_dim > 128].items() if cache != "fp8" or c >= 90}
        yield Variant(
            name=f"{kind}.{head_dim}.{cache}" + "".join(f".{extra}" for extra in extras.split()),
            kernel=_attention,
            signature={**signature, **caches},
            constants={
                "HEADS": 8,
                "GROUP": 4,
                "DIM": head_dim,
                "SLOTS": 16,
                "SPLIT": 256,
                "ROW_BLOCKS": 1,
                "FORMAT": number,
                "HAS_WINDOW": "window" in extras,
                "HAS_SOFTCAP": "softcap" in extras,
                "HAS_SINKS": "sinks" in extras,
                "BLOCK_D": triton.next_power_of_2(head_dim),
            },
            configs=configs,
            unaligned=frozenset({"table_width", "window"}),
            is_default=(kind, head_dim, cache, extras) == (KIND, 128, "bf16", ""),
            is_product=True,
            has_few_rows=kind == FEW,
        )
