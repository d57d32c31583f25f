"""The LM head by tiles of the vocabulary; `head` is the specification.

For rows that take the largest logit each tile leaves its largest, where it is, and whether all were finite: logits are
never stored. Rows that need logits get the same numbers, by the same tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES, config

NO_TOKEN = tl.constexpr(2**31 - 1)

# The same for any number of rows.
DEFAULTS = {
    capability: {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    for capability in CAPABILITIES
}
FINISH_DEFAULTS = {capability: {"BLOCK": 1024, "num_warps": 4, "num_stages": 1} for capability in CAPABILITIES}


@triton.jit
def _tile(
    x_ptr,
    weight_ptr,
    row,
    token,
    rows,
    vocab,
    width,
    EVEN_K: tl.constexpr,  # whether width is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N]: logits of rows `row` and tokens `token`, 0 where there are none."""
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row.to(tl.int64)[:, None] * width + k[None, :]
    weight_at = weight_ptr + token.to(tl.int64)[None, :] * width + k[:, None]
    there_m, there_n = (row < rows)[:, None], (token < vocab)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at, mask=there_m, other=0.0)
            weight = tl.load(weight_at, mask=there_n, other=0.0)
        else:
            x = tl.load(x_at, mask=there_m & (start + k < width)[None, :], other=0.0)
            weight = tl.load(weight_at, mask=there_n & (start + k < width)[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    return total


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for any number of them
def _logits(
    x_ptr,  # [T, H]
    weight_ptr,  # [V, H]
    out_ptr,  # float32 [T, V]
    rows,
    vocab,
    width,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Programs that follow each other share a tile of weights.
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    found = _tile(x_ptr, weight_ptr, row, token, rows, vocab, width, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
    out_at = out_ptr + row.to(tl.int64)[:, None] * vocab + token[None, :]
    tl.store(out_at, found, mask=(row < rows)[:, None] & (token < vocab)[None, :])


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for any number of them
def _argmax(
    x_ptr,  # [T, H]
    weight_ptr,  # [V, H]
    values_ptr,  # float32 [T, tiles]: a tile's largest logit
    tokens_ptr,  # int32 [T, tiles]: the lowest token that has it
    finite_ptr,  # int8 [T, tiles]
    rows,
    vocab,
    width,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    found = _tile(x_ptr, weight_ptr, row, token, rows, vocab, width, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
    sick = tl.max(((tl.abs(found) < float("inf")) == 0).to(tl.int32), 1)
    found = tl.where((token < vocab)[None, :], found, float("-inf"))
    best = tl.max(found, 1)
    best_token = tl.min(tl.where(found == best[:, None], token[None, :], NO_TOKEN), 1)
    at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(values_ptr + at, best, mask=row < rows)
    tl.store(tokens_ptr + at, best_token, mask=row < rows)
    tl.store(finite_ptr + at, (sick == 0).to(tl.int8), mask=row < rows)


@triton.jit
def _finish(
    values_ptr,  # float32 [T, tiles]
    tokens_ptr,  # int32 [T, tiles]
    finite_ptr,  # int8 [T, tiles]
    out_tokens_ptr,  # int64 [T]
    out_finite_ptr,  # int8 [T]
    tiles,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    finite = tl.full((BLOCK,), 1, tl.int8)
    for start in range(0, tiles, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < tiles
        value = tl.load(values_ptr + row * tiles + at, mask=there, other=float("-inf"))
        better = value > best  # of equal ones the earlier tile
        best = tl.where(better, value, best)
        token = tl.where(better, tl.load(tokens_ptr + row * tiles + at, mask=there, other=0), token)
        finite &= tl.load(finite_ptr + row * tiles + at, mask=there, other=1)
    first = tl.min(tl.where(best == tl.max(best, 0), token, NO_TOKEN), 0)
    tl.store(out_tokens_ptr + row, tl.where(first < vocab, first, 0))
    tl.store(out_finite_ptr + row, tl.min(finite.to(tl.int32), 0))


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """`head.logits` of the rows x [T, H] that need them; weight [V, H]; both contiguous, of one dtype."""
    rows, vocab, width = _sizes(x, weight)
    out = torch.empty(rows, vocab, device=x.device)
    if rows:
        launch = config("lm_head", DEFAULTS, x.device)
        grid = (triton.cdiv(rows, launch["BLOCK_M"]), triton.cdiv(vocab, launch["BLOCK_N"]))
        _logits[grid](x, weight, out, rows, vocab, width, width % launch["BLOCK_K"] == 0, **launch)
    return out


def argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`head.argmax`; the token of a row that is not finite is any."""
    rows, vocab, width = _sizes(x, weight)
    tokens = torch.empty(rows, dtype=torch.int64, device=x.device)
    finite = torch.empty(rows, dtype=torch.bool, device=x.device)
    if rows:
        launch = config("lm_head", DEFAULTS, x.device)
        tiles = triton.cdiv(vocab, launch["BLOCK_N"])
        values = torch.empty(rows, tiles, device=x.device)
        parts = torch.empty(rows, tiles, dtype=torch.int32, device=x.device)
        all_finite = torch.empty(rows, tiles, dtype=torch.int8, device=x.device)
        grid = (triton.cdiv(rows, launch["BLOCK_M"]), tiles)
        even = width % launch["BLOCK_K"] == 0
        _argmax[grid](x, weight, values, parts, all_finite, rows, vocab, width, even, **launch)
        finish = config("lm_head.finish", FINISH_DEFAULTS, x.device)
        _finish[(rows,)](values, parts, all_finite, tokens, finite.view(torch.int8), tiles, vocab, **finish)
    return tokens, finite


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype and x.shape[1] == weight.shape[1]
    return x.shape[0], weight.shape[0], x.shape[1]


def variants() -> Iterator[Variant]:
    sizes = {"rows": "i32", "vocab": "i32", "width": "i32"}
    unaligned = frozenset(["rows", "tiles"])
    for even in (True, False):
        for name, kernel, outs in (
            ("argmax", _argmax, {"values_ptr": "*fp32", "tokens_ptr": "*i32", "finite_ptr": "*i8"}),
            ("logits", _logits, {"out_ptr": "*fp32"}),
        ):
            yield Variant(
                name=f"lm_head.{name}" + (".even" if even else ""),
                kernel=kernel,
                signature={"x_ptr": "*bf16", "weight_ptr": "*bf16", **outs, **sizes},
                constants={"EVEN_K": even},
                configs=DEFAULTS,
                unaligned=unaligned & set(sizes),
                is_default=even and name == "argmax",
                is_product=True,
            )
    yield Variant(
        name="lm_head.finish",
        kernel=_finish,
        signature={
            "values_ptr": "*fp32",
            "tokens_ptr": "*i32",
            "finite_ptr": "*i8",
            "out_tokens_ptr": "*i64",
            "out_finite_ptr": "*i8",
            "tiles": "i32",
            "vocab": "i32",
        },
        constants={},
        configs=FINISH_DEFAULTS,
        unaligned=unaligned,
    )
