"""Each head's own product around latent attention; `batchinfer_kernels.mla.absorb` and `expand` are the specification.

A program has one head's outputs of some tokens, summed over blocks of BLOCK_K inputs in ascending order, in one
configuration for any number of tokens. What of a query is not absorbed is turned by programs of the same launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import Config, config

KIND = "latent_heads"
DEFAULTS: dict[int, Config] = {
    80: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 4},
    90: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    100: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
}


@triton.jit(do_not_specialize=["num_tokens"])  # one compiled kernel for any number of them
def _latent_heads(
    x_ptr,  # [T, H, K + R], tokens x_stride apart
    weight_ptr,  # [H, N, K]
    cos_ptr,  # [T, R / 2]
    sin_ptr,
    out_ptr,  # [T, H, N + R]
    num_tokens,
    x_stride,
    HEADS: tl.constexpr,  # H
    DEPTH: tl.constexpr,  # K
    OUTPUTS: tl.constexpr,  # N
    TURNED: tl.constexpr,  # R, 0 or a power of two
    PAIRS: tl.constexpr,  # whether numbers that turn together stand next to each other
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = token < num_tokens
    # Tokens and outputs that are not there are read as the last one, and not stored: the loop needs no masks for them.
    read = tl.minimum(token, num_tokens - 1)
    x = x_ptr + read * x_stride + head * (DEPTH + TURNED)
    out = out_ptr + (token * HEADS + head) * (OUTPUTS + TURNED)

    if TURNED > 0:  # noqa: SIM102 (the compiler leaves the rest out)
        if tl.program_id(2) == tl.cdiv(OUTPUTS, BLOCK_N):
            half: tl.constexpr = TURNED // 2
            i = tl.arange(0, half)
            first = tl.load(x[:, None] + (DEPTH + (2 * i if PAIRS else i))[None, :]).to(tl.float32)
            second = tl.load(x[:, None] + (DEPTH + (2 * i + 1 if PAIRS else half + i))[None, :]).to(tl.float32)
            cos = tl.load(cos_ptr + read[:, None] * half + i[None, :])
            sin = tl.load(sin_ptr + read[:, None] * half + i[None, :])
            turned = out[:, None] + OUTPUTS + i[None, :]
            tl.store(turned, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=is_token[:, None])
            tl.store(turned + half, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=is_token[:, None])
            return

    output = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    x_at = x[:, None] + at[None, :]
    row = head.to(tl.int64) * OUTPUTS + tl.minimum(output, OUTPUTS - 1)
    weight_at = weight_ptr + row[None, :] * DEPTH + at[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            part = tl.load(x_at)
            weight = tl.load(weight_at)
        else:
            there = at < DEPTH - k
            part = tl.load(x_at, mask=there[None, :], other=0.0)
            weight = tl.load(weight_at, mask=there[:, None], other=0.0)
        total = tl.dot(part, weight, total, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    there = is_token[:, None] & (output < OUTPUTS)[None, :]
    tl.store(out[:, None] + output[None, :], total.to(out_ptr.dtype.element_ty), mask=there)


def absorb(q: Tensor, up: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> Tensor:
    """`mla.absorb`: queries [T, H, C + R] of q [T, H, P + R], whose tokens may lie apart, and up [H, C, P] of its
    type; cos, sin float32 [T, R / 2], R a power of two."""
    turned = q.shape[2] - up.shape[2]
    assert turned >= 2 and turned == triton.next_power_of_2(turned)
    for table in (cos, sin):
        assert table.is_contiguous() and table.shape == (len(q), turned // 2) and table.dtype == torch.float32
    return _launch(q, up, cos, sin, turned, pairs)


def expand(latents: Tensor, down: Tensor) -> Tensor:
    """`mla.expand`: [T, H, V] of latents [T, H, C], whose tokens may lie apart, and down [H, V, C] of its type."""
    assert latents.shape[2] == down.shape[2]
    return _launch(latents, down, latents, latents, 0, False)


def _launch(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, turned: int, pairs: bool) -> Tensor:
    heads, outputs, depth = weight.shape
    assert x.shape[1] == heads and x.stride(2) == 1 and x.stride(1) == x.shape[2]
    assert weight.is_contiguous() and weight.dtype == x.dtype
    out = torch.empty(len(x), heads, outputs + turned, dtype=x.dtype, device=x.device)
    launch: dict[str, Any] = dict(config(KIND, DEFAULTS, x.device))
    column_blocks = triton.cdiv(outputs, launch["BLOCK_N"]) + (turned > 0)
    if len(x):
        _latent_heads[(triton.cdiv(len(x), launch["BLOCK_M"]), heads, column_blocks)](
            x,
            weight,
            cos,
            sin,
            out,
            len(x),
            x.stride(0),
            HEADS=heads,
            DEPTH=depth,
            OUTPUTS=outputs,
            TURNED=turned,
            PAIRS=pairs,
            **launch,
        )
    return out


def variants() -> Iterator[Variant]:
    """Of DeepSeek-V3's heads, and V2-Lite's."""
    for heads in (128, 16):
        for name, depth, outputs, turned in (("absorb", 128, 512, 64), ("expand", 512, 128, 0)):
            yield Variant(
                name=f"{KIND}.{name}.{heads}",
                kernel=_latent_heads,
                signature={
                    **dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16"),
                    **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32" if turned else "*bf16"),
                    **dict.fromkeys(("num_tokens", "x_stride"), "i32"),
                },
                constants={
                    "HEADS": heads,
                    "DEPTH": depth,
                    "OUTPUTS": outputs,
                    "TURNED": turned,
                    "PAIRS": turned > 0,
                },
                configs=DEFAULTS,
                unaligned=frozenset({"num_tokens"}),
                is_default=heads == 128,
                is_product=True,
            )
