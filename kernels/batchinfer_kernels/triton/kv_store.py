"""Keys and values into the caches, and before that, fused with it, norms of heads and rotary embedding.

Specification: `reference.rms_norm` of each head of q and k, `reference.rope`, then `reference.kv_write`, with
`kv_fp8.to_codes` or `kv8.to_rows` where the caches are of those formats. Each rounds where the reference does.

Caches: [B, Hk, S, D], or in int8 [B, Hk, S * (D + 4)], codes [S, D] and S float32 scales. A block's heads follow each
other, a head's tokens too: what a program of `attention` reads of one block is one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels import kv8
from batchinfer_kernels.triton.attention import FP8, INT8, PLAIN, TilePlan, format_of, scale_arguments
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.triton_outlook import unfit_heads, unfit_int8_blocks
from batchinfer_kernels.tuning import CAPABILITIES, Config, config
from batchinfer_kernels.turning import Turning

DEFAULTS = {capability: {"BLOCK_T": 4, "num_warps": 4, "num_stages": 1} for capability in CAPABILITIES}
# Into float8, heads of up to 128 dimensions: 4 tokens at a time need a stack from sm_90 on.
FP8_DEFAULTS = {**DEFAULTS, **{capability: {**DEFAULTS[capability], "BLOCK_T": 8} for capability in (90, 100)}}
MOST_NUMBERS = 8192  # of queries, that a program has at a time


def defaults_of(cache_format: int, head_dim: int) -> tuple[str, dict[int, dict[str, int]]]:
    """The name of a store's configurations, and the defaults by capability."""
    return ("kv_store_fp8", FP8_DEFAULTS) if cache_format == FP8 and head_dim <= 128 else ("kv_store", DEFAULTS)


def fitting(launch: Config, group: int, head_dim: int) -> dict[str, int]:
    """The configuration with fewer tokens, where their heads in a group of so many are more than registers hold."""
    numbers = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    return {**launch, "BLOCK_T": min(launch["BLOCK_T"], max(1, MOST_NUMBERS // numbers))}


@triton.jit
def hadamard(x, dim, TOGETHER: tl.constexpr):
    """`kv8.turn` of x float32 [R, D], D up to 256, with the same sums."""
    for bit in tl.static_range(8):
        if (1 << bit) < TOGETHER:
            other = tl.gather(x, tl.broadcast_to((dim ^ (1 << bit))[None, :], x.shape), 1)
            x = tl.where((dim & (1 << bit)) != 0, other - x, x + other)
    return x


@triton.jit
def prepared(
    row_ptr,  # [R, 1]: where each row begins
    is_row,  # [R, 1]
    weight_ptr,
    cos_row,  # [R, 1]: where each row's begin
    sin_row,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows of q or k [R, BLOCK_D] after norm and rotation, in their dtype."""
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < DIM
    x = tl.load(row_ptr + dim, mask=is_row & is_dim, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / DIM + eps)
        x = (wide * scale[:, None]).to(x.dtype) * tl.load(weight_ptr + dim, mask=is_dim, other=0.0)
    if HALF > 0:
        # A number's partner in the rotation is read again, and normed again.
        is_first = dim < HALF
        is_turned = dim < 2 * HALF
        partner = tl.where(is_first, dim + HALF, tl.where(is_turned, dim - HALF, dim))
        other = tl.load(row_ptr + partner, mask=is_row & is_dim, other=0.0)
        if HAS_NORM:
            weight = tl.load(weight_ptr + partner, mask=is_dim, other=0.0)
            other = (other.to(tl.float32) * scale[:, None]).to(x.dtype) * weight
        angle = tl.where(is_first, dim, dim - HALF)
        cos = tl.load(cos_row + angle, mask=is_row & is_turned, other=1.0)
        sin = tl.load(sin_row + angle, mask=is_row & is_turned, other=0.0)
        sin = tl.where(is_first, -sin, sin)
        turned = x.to(tl.float32) * cos + other.to(tl.float32) * sin
        x = tl.where(is_turned, turned.to(x.dtype), x)
    return x


@triton.jit
def is_finite(x):
    """Whether all of each row of x float32 [R, D] are."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1) == 0


@triton.jit
def int8_codes(x):
    """`kv8.quantize` of x float32 [R, D], of finite rows: codes as float32, and steps [R]."""
    most = tl.max(tl.abs(x), 1)
    is_some = most >= 1e-30
    factor = tl.where(is_some, tl.div_rn(127.0, tl.where(is_some, most, 1.0)), 0.0)
    # Added and taken away, 1.5 * 2^23 leaves whole numbers, rounded to nearest even.
    codes = (x * factor[:, None] + 12582912.0) - 12582912.0
    return codes, tl.where(is_some, tl.div_rn(most, 127.0), 0.0)


@triton.jit
def fp8_code(x):
    """Of x float32, |x| <= 448, the code of the nearest number of float8_e4m3fn, to even, as uint8. In whole numbers:
    GPUs before sm_89 have no instruction for it."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    # 1.5 * 2^23 of x's steps, of which there are 8 in each power of two, and none smaller than 2^-9.
    magic = (((tl.maximum(bits >> 23, 121) + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (tl.abs(x) + magic) - magic
    normal = (rounded.to(tl.int32, bitcast=True) >> 20) - ((127 - 7) << 3)
    code = tl.where(rounded < 0.015625, (rounded * 512).to(tl.int32), normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return (code + sign).to(tl.uint8)


@triton.jit(do_not_specialize=["num_tokens"])  # one compiled kernel for any number of them
def _store(
    q_ptr,  # [T, Hq, D], tokens q_stride apart, their heads side by side
    k_ptr,  # [T, Hk, D], likewise
    v_ptr,
    q_out_ptr,  # [T, Hq, D]
    k_cache_ptr,  # the caches; as uint8 under FP8
    v_cache_ptr,
    k_scales_ptr,  # as in attention
    v_scales_ptr,
    q_weight_ptr,  # [D]
    k_weight_ptr,
    cos_ptr,  # [T, HALF]
    sin_ptr,
    slots_ptr,  # [T]
    fresh_blocks_ptr,  # [F]
    fresh_from_ptr,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    eps,
    HEADS: tl.constexpr,  # Hk
    GROUP: tl.constexpr,  # G
    DIM: tl.constexpr,  # D
    HALF: tl.constexpr,  # R / 2, or 0: no rotation
    SLOTS: tl.constexpr,  # S
    FORMAT: tl.constexpr,
    TOGETHER: tl.constexpr,  # P, see kv8.turn
    HAS_NORM: tl.constexpr,
    WRITES_Q: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    item = tl.program_id(0) // HEADS
    head_size: tl.constexpr = SLOTS * DIM if FORMAT != 2 else SLOTS * (DIM + 4)
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < DIM
    fresh = item - (num_tokens + BLOCK_T - 1) // BLOCK_T
    if fresh >= 0:  # a block whose other values are to be zero
        slot = tl.arange(0, BLOCK_S)
        is_left = (slot >= tl.load(fresh_from_ptr + fresh)) & (slot < SLOTS)
        at = (tl.load(fresh_blocks_ptr + fresh).to(tl.int64) * HEADS + head) * head_size
        zeros = tl.zeros([BLOCK_S, BLOCK_D], tl.float32).to(v_cache_ptr.dtype.element_ty)
        tl.store(v_cache_ptr + at + slot[:, None] * DIM + dim, zeros, mask=is_left[:, None] & is_dim)
        if FORMAT == 2:
            scales_ptr = v_scales_ptr + at // 4 + SLOTS * DIM // 4
            tl.store(scales_ptr + slot, tl.zeros([BLOCK_S], tl.float32), mask=is_left)
        return

    if WRITES_Q:
        row = tl.arange(0, BLOCK_T * BLOCK_G)[:, None]
        token = item.to(tl.int64) * BLOCK_T + row // BLOCK_G
        is_row = (token < num_tokens) & (row % BLOCK_G < GROUP)
        query_head = head * GROUP + row % BLOCK_G
        query = q_ptr + token * q_stride + query_head * DIM
        cos_row = cos_ptr + token * HALF
        sin_row = sin_ptr + token * HALF
        q = prepared(query, is_row, q_weight_ptr, cos_row, sin_row, eps, DIM, HALF, HAS_NORM, BLOCK_D)
        if FORMAT == 2:
            q = hadamard(q.to(tl.float32), dim, TOGETHER).to(q_out_ptr.dtype.element_ty)
        tl.store(q_out_ptr + (token * HEADS * GROUP + query_head) * DIM + dim, q, mask=is_row & is_dim)

    token = item.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    row = token[:, None]
    is_row = is_token[:, None]
    is_number = is_row & is_dim
    key = k_ptr + row * k_stride + head * DIM
    cos_row = cos_ptr + row * HALF
    sin_row = sin_ptr + row * HALF
    k = prepared(key, is_row, k_weight_ptr, cos_row, sin_row, eps, DIM, HALF, HAS_NORM, BLOCK_D).to(tl.float32)
    v = tl.load(v_ptr + row * v_stride + head * DIM + dim, mask=is_number, other=0.0).to(tl.float32)
    if FORMAT == 0:  # in what the cache holds, where too large a number is infinite
        k = k.to(k_cache_ptr.dtype.element_ty).to(tl.float32)
        v = v.to(v_cache_ptr.dtype.element_ty).to(tl.float32)
    if FORMAT == 2:
        k = hadamard(k, dim, TOGETHER)
    # Whoever sees a sick token gets NaN of its key, and nobody anything of its value.
    is_well = is_finite(k) & is_finite(v)
    k = tl.where(is_well[:, None], k, 0.0)
    v = tl.where(is_well[:, None], v, 0.0)
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int64)
    is_stored = slot >= 0
    at = (slot // SLOTS * HEADS + head) * head_size
    kv_at = (at + slot % SLOTS * DIM)[:, None] + dim
    if FORMAT == 0:
        k = tl.where(is_well[:, None], k, float("nan")).to(k_cache_ptr.dtype.element_ty)
        v = v.to(v_cache_ptr.dtype.element_ty)
    elif FORMAT == 1:
        k = k * tl.div_rn(1.0, tl.load(k_scales_ptr + head))
        v = v * tl.div_rn(1.0, tl.load(v_scales_ptr + head))
        k = fp8_code(tl.minimum(tl.maximum(k, -448.0), 448.0))
        k = tl.where(is_well[:, None], k, 127).to(tl.uint8)  # NaN
        v = fp8_code(tl.minimum(tl.maximum(v, -448.0), 448.0))
    else:
        k, k_step = int8_codes(k)
        v, v_step = int8_codes(v)
        scale_at = at // 4 + SLOTS * DIM // 4 + slot % SLOTS
        tl.store(k_scales_ptr + scale_at, tl.where(is_well, k_step / TOGETHER, float("nan")), mask=is_stored)
        tl.store(v_scales_ptr + scale_at, v_step, mask=is_stored)
        k = k.to(tl.int8)
        v = v.to(tl.int8)
    tl.store(k_cache_ptr + kv_at, k, mask=is_stored[:, None] & is_dim)
    tl.store(v_cache_ptr + kv_at, v, mask=is_stored[:, None] & is_dim)


def new_caches(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Caches of one layer, not initialised."""
    size = block_size * (head_dim + kv8.SCALE_BYTES)
    shape = (size,) if dtype == torch.int8 else (block_size, head_dim)
    k_cache = torch.empty(num_blocks, num_kv_heads, *shape, dtype=dtype, device=device)
    return k_cache, torch.empty_like(k_cache)


def int8_parts(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of an int8 cache: codes [B, Hk, S, D] and scales float32 [B, Hk, S]."""
    block_size = cache.shape[2] // (head_dim + kv8.SCALE_BYTES)
    codes = cache[..., : block_size * head_dim].unflatten(-1, (block_size, head_dim))
    return codes, cache[..., block_size * head_dim :].view(torch.float32)


def store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TilePlan,
    *,
    block_size: int,
    turning: Turning | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Stores k, v [T, Hk, D] in plan.slots, after `turning`; the queries [T, Hq, D] after it, and for int8 turned as
    keys are, contiguous. Tokens of q, k and v may lie apart (parts of a wider product), each one's heads may not.

    k_scales, v_scales: float32 [Hk], for float8 only.
    """
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert all(x.stride(2) == 1 and x.stride(1) == head_dim for x in (q, k, v)) and k.shape == v.shape
    assert q.dtype == k.dtype == v.dtype and len(plan.slots) == tokens == len(k)
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape[1] == num_kv_heads
    at = turning or Turning()
    assert (at.cos is None) == (at.sin is None) and (at.q_weight is None) == (at.k_weight is None)
    half = 0 if at.cos is None else at.cos.shape[1]
    for table in (at.cos, at.sin):
        assert table is None or (table.is_contiguous() and table.dtype == torch.float32 and len(table) == tokens)
    for weight in (at.q_weight, at.k_weight):
        assert weight is None or (weight.dtype == q.dtype and weight.shape == (head_dim,))
    cache_format = format_of(k_cache.dtype)
    assert cache_format != INT8 or unfit_int8_blocks(head_dim, block_size) is None
    assert 2 * half <= head_dim and unfit_heads(head_dim) is None
    writes_q = half > 0 or at.q_weight is not None or cache_format == INT8
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if writes_q else q.contiguous()
    launch: dict[str, Any] = fitting(
        config(*defaults_of(cache_format, head_dim), q.device), num_heads // num_kv_heads, head_dim
    )
    programs = (triton.cdiv(tokens, launch["BLOCK_T"]) + len(plan.fresh_blocks)) * num_kv_heads
    if programs:
        _store[(programs,)](
            q,
            k,
            v,
            q_out,
            k_cache.view(torch.uint8) if cache_format == FP8 else k_cache,
            v_cache.view(torch.uint8) if cache_format == FP8 else v_cache,
            *scale_arguments(k_cache, v_cache, k_scales, v_scales),
            q if at.q_weight is None else at.q_weight,
            k if at.k_weight is None else at.k_weight,
            q if at.cos is None else at.cos,
            q if at.sin is None else at.sin,
            plan.slots,
            plan.fresh_blocks,
            plan.fresh_from,
            tokens,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            at.eps,
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            half,
            block_size,
            cache_format,
            kv8.turned_together(head_dim),
            at.q_weight is not None,
            writes_q,
            triton.next_power_of_2(num_heads // num_kv_heads),
            triton.next_power_of_2(block_size),
            triton.next_power_of_2(head_dim),
            **launch,
        )
    return q_out


def variants() -> Iterator[Variant]:
    inputs = ("q_ptr", "k_ptr", "v_ptr", "q_out_ptr", "q_weight_ptr", "k_weight_ptr")
    signature = {
        **dict.fromkeys(inputs, "*bf16"),
        **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
        **dict.fromkeys(("slots_ptr", "fresh_blocks_ptr", "fresh_from_ptr"), "*i32"),
        **dict.fromkeys(("num_tokens", "q_stride", "k_stride", "v_stride"), "i32"),
        "eps": "fp32",
    }
    formats = {"bf16": (PLAIN, "*bf16", "*bf16"), "fp8": (FP8, "*u8", "*fp32"), "int8": (INT8, "*i8", "*fp32")}
    for cache, (number, cache_type, scales_type) in formats.items():
        caches = dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache_type)
        scales = dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), scales_type)
        for dim, half, has_norm, group in (
            (128, 64, True, 4),
            (64, 32, False, 4),
            (80, 16, False, 4),
            (256, 128, True, 4),
            (96, 0, False, 4),
            *((128, 64, True, group) for group in (1, 7, 8, 16)),
        ):
            yield Variant(
                name=f"kv_store.{dim}.{cache}"
                + ".rope" * (half > 0)
                + ".norm" * has_norm
                + f".group{group}" * (group != 4),
                kernel=_store,
                signature={**signature, **caches, **scales},
                constants={
                    "HEADS": 8,
                    "GROUP": group,
                    "DIM": dim,
                    "HALF": half,
                    "SLOTS": 16,
                    "FORMAT": number,
                    "TOGETHER": kv8.turned_together(dim),
                    "HAS_NORM": has_norm,
                    "WRITES_Q": half > 0 or number == INT8,
                    "BLOCK_G": triton.next_power_of_2(group),
                    "BLOCK_S": 16,
                    "BLOCK_D": triton.next_power_of_2(dim),
                },
                configs={c: fitting(launch, group, dim) for c, launch in defaults_of(number, dim)[1].items()},
                unaligned=frozenset({"num_tokens"}),
                is_default=dim == 128 and group == 4 and number != FP8,
            )
