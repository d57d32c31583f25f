"""Choosing tokens from logits without the host: greedy, and drawn; `sampling` is the specification.

Nothing is sorted. The k-th largest logit, and the one at which the largest have top_p of the weight, are found by their
bits, four at a time from the highest: as ordered integers, with the count or the weight of what begins with each of
sixteen continuations. One program has a row, and adds in an order that follows from the size of the vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels import sampling
from batchinfer_kernels.sampling import Drawing
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES, config

GOLDEN = tl.constexpr(sampling.GOLDEN)
FIRST = tl.constexpr(sampling.FIRST)
SECOND = tl.constexpr(sampling.SECOND)
NO_TOKEN = tl.constexpr(2**31 - 1)

DEFAULTS = {capability: {"BLOCK": 512, "num_warps": 8, "num_stages": 2} for capability in CAPABILITIES}
GREEDY_DEFAULTS = {capability: {"BLOCK": 4096, "num_warps": 8, "num_stages": 2} for capability in CAPABILITIES}
UNIFORM_DEFAULTS = {capability: {"BLOCK": 128, "num_warps": 4, "num_stages": 1} for capability in CAPABILITIES}


@triton.jit(do_not_specialize=["rows"])  # one compiled kernel for any number of them
def _uniform(
    keys_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    out_ptr,  # float64 [R]
    rows,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < rows
    key = tl.load(keys_ptr + at, mask=there, other=0).to(tl.uint64)
    position = tl.load(positions_ptr + at, mask=there, other=0).to(tl.uint64)
    z = key + (position + 1) * GOLDEN
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    z = z ^ (z >> 31)
    tl.store(out_ptr + at, (z >> 11).to(tl.float64) * (1.0 / 9007199254740992.0), mask=there)


@triton.jit
def _greedy(
    logits_ptr,  # float32 [R, V]
    tokens_ptr,  # int64 [R]
    finite_ptr,  # int8 [R]
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    sick = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
        sick |= ((at < vocab) & ((tl.abs(logit) < float("inf")) == 0)).to(tl.int32)
        better = logit > best
        best, best_at = tl.where(better, logit, best), tl.where(better, at, best_at)
    token = tl.min(tl.where(best == tl.max(best, 0), best_at, NO_TOKEN), 0)
    tl.store(tokens_ptr + row, tl.where(token < vocab, token, 0))
    tl.store(finite_ptr + row, tl.max(sick, 0) == 0)


@triton.jit
def _weight(logit, largest, temperature):
    """float64. In this order no temperature is too small: 0 stays 0, and what overflows has weight 0."""
    return tl.exp((logit.to(tl.float64) - largest) / temperature)


@triton.jit
def _ordered(logit):
    """uint32 in the order of logits."""
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _logit(ordered):
    """Of `_ordered`."""
    bits = ordered.to(tl.int32, bitcast=True)
    return (bits ^ ((~bits >> 31) | -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _largest_that_have(
    logits_ptr, vocab, target, largest, temperature, least, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest logit such that it and all larger ones have at least `target`: of their number, or of the weights
    that are not below `least`."""
    digits = tl.arange(0, 16)
    prefix = tl.full((), 0, tl.uint32)
    above = tl.full((), 0.0, tl.float64)  # of what is larger than all that begins with prefix
    shift = tl.full((), 32, tl.uint32)
    for _ in range(8):
        shift -= 4
        sums = tl.zeros((BLOCK, 16), tl.float64)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logit = tl.load(logits_ptr + at, mask=at < vocab, other=0.0)
            key = _ordered(logit)
            inside = (at < vocab) & (((key ^ prefix) >> shift) < 16)
            if tl.max(inside.to(tl.int32), 0) > 0:
                if COUNT:
                    weight = tl.full((BLOCK,), 1.0, tl.float64)
                else:
                    weight = _weight(logit, largest, temperature)
                    inside = inside & (weight >= least)
                digit = ((key >> shift) & 15).to(tl.int32)
                sums += tl.where(inside[:, None] & (digit[:, None] == digits[None, :]), weight[:, None], 0.0)
        mass = tl.sum(sums, 0)
        reached = above + tl.cumsum(mass, 0, reverse=True) >= target
        # Never reached where rounding makes the target more than all there is: then it is the smallest.
        chosen = tl.max(tl.where(reached, digits, -1), 0)
        chosen = tl.where(chosen < 0, tl.min(tl.where(mass > 0, digits, 15), 0), chosen)
        above += tl.sum(tl.where(digits > chosen, mass, 0.0), 0)
        prefix = prefix | (chosen.to(tl.uint32) << shift)
    return _logit(prefix)


@triton.jit
def _kept(weight, at, least, threshold, last_equal):
    """Weights that are kept; others become 0."""
    return tl.where((weight > threshold) | ((weight == threshold) & (at <= last_equal)), weight, 0.0) * (
        weight >= least
    ).to(tl.float64)


@triton.jit
def _sample(
    logits_ptr,  # float32 [R, V]
    draws_ptr,  # float64 [R]
    temperature_ptr,  # float64 [R]
    top_k_ptr,  # int32 [R]
    top_p_ptr,  # float64 [R]
    min_p_ptr,  # float64 [R]
    tokens_ptr,  # int64 [R]
    vocab,
    NUM_BLOCKS: tl.constexpr,  # of the vocabulary, rounded up to a power of two
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
        better = logit > best
        best, best_at = tl.where(better, logit, best), tl.where(better, at, best_at)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, best_at, NO_TOKEN), 0)
    if (temperature != 0) & (top_k != 1):
        largest = top.to(tl.float64)
        least = tl.load(min_p_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            kth = _largest_that_have(logits_ptr, vocab, top_k.to(tl.float64), largest, temperature, least, True, BLOCK)
            least = tl.maximum(least, _weight(kth, largest, temperature))
        top_p = tl.load(top_p_ptr + row)
        threshold = tl.full((), -1.0, tl.float64)  # weights above it are kept, of equal ones the first `num_equal`
        num_equal = tl.full((), 0, tl.int32)
        if top_p < 1:
            sums = tl.zeros((BLOCK,), tl.float64)
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                logit = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
                weight = _weight(logit, largest, temperature)
                sums += tl.where(weight >= least, weight, 0.0)
            target = top_p * tl.sum(sums, 0)
            smallest = _largest_that_have(logits_ptr, vocab, target, largest, temperature, least, False, BLOCK)
            threshold = _weight(smallest, largest, temperature)
            sums = tl.zeros((BLOCK,), tl.float64)
            for start in range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                logit = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
                weight = _weight(logit, largest, temperature)
                sums += tl.where((weight >= least) & (weight > threshold), weight, 0.0)
            above = tl.sum(sums, 0)
            num_equal = tl.ceil(tl.minimum((target - above) / threshold, 1e9)).to(tl.int32)
            num_equal -= (above + (num_equal - 1).to(tl.float64) * threshold >= target).to(tl.int32)
            num_equal = tl.maximum(num_equal, 1)
        # The sums of the blocks of what is kept.
        blocks = tl.arange(0, NUM_BLOCKS)
        masses = tl.zeros((NUM_BLOCKS,), tl.float64)
        last_equal = tl.full((), -1, tl.int32)  # the id of the last of equal ones that is kept
        seen = tl.full((), 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logit = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
            weight = _weight(logit, largest, temperature)
            equal = ((weight == threshold) & (at < vocab)).to(tl.int32)
            first = (equal > 0) & (seen + tl.cumsum(equal, 0) <= num_equal)
            last_equal = tl.maximum(last_equal, tl.max(tl.where(first, at, -1), 0))
            seen += tl.sum(equal, 0)
            mass = tl.sum(_kept(weight, at, least, threshold, last_equal), 0)
            masses = tl.where(blocks == start // BLOCK, mass, masses)
        ends = tl.cumsum(masses, 0)
        aim = tl.load(draws_ptr + row) * tl.sum(tl.where(blocks == NUM_BLOCKS - 1, ends, 0.0), 0)
        # Sums in parallel may fall by a rounding where nothing is added: only what has weight is looked at.
        block = tl.min(tl.where((masses > 0) & (ends > aim), blocks, NUM_BLOCKS), 0)
        block = tl.where(block < NUM_BLOCKS, block, tl.max(tl.where(masses > 0, blocks, 0), 0))
        before = tl.sum(tl.where(blocks == block - 1, ends, 0.0), 0)
        at = block * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
        kept = _kept(_weight(logit, largest, temperature), at, least, threshold, last_equal)
        ends_inside = before + tl.cumsum(kept, 0)
        token = tl.min(tl.where((kept > 0) & (ends_inside > aim), at, NO_TOKEN), 0)
        token = tl.where(token < vocab, token, tl.max(tl.where(kept > 0, at, 0), 0))
    tl.store(tokens_ptr + row, tl.where(token < vocab, token, 0))


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """`sampling.uniform`, with equal bits."""
    assert keys.dtype == positions.dtype == torch.int64 and keys.shape == positions.shape
    assert keys.is_contiguous() and positions.is_contiguous()
    out = torch.empty(keys.shape, dtype=torch.float64, device=keys.device)
    rows = keys.numel()
    if rows:
        launch = config("sampling.uniform", UNIFORM_DEFAULTS, keys.device)
        _uniform[(triton.cdiv(rows, launch["BLOCK"]),)](keys, positions, out, rows, **launch)
    return out


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`sampling.greedy`; the token of a row that is not finite is any."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        launch = config("sampling.greedy", GREEDY_DEFAULTS, logits.device)
        _greedy[(rows,)](logits, tokens, finite.view(torch.int8), vocab, **launch)
    return tokens, finite


def sample(logits: Tensor, rows: Drawing) -> Tensor:
    """`sampling.sample`; the token of a row with a logit that is NaN or infinite is any."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    params = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    assert all(param.shape == (num_rows,) and param.is_contiguous() for param in params)
    assert rows.top_k.dtype == torch.int32
    assert rows.temperature.dtype == rows.top_p.dtype == rows.min_p.dtype == torch.float64
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        launch = config("sampling.sample", DEFAULTS, logits.device)
        num_blocks = triton.next_power_of_2(triton.cdiv(vocab, launch["BLOCK"]))
        draws = uniform(rows.keys, rows.positions)
        _sample[(num_rows,)](logits, draws, *params, tokens, vocab, num_blocks, **launch)
    return tokens


def variants() -> Iterator[Variant]:
    yield Variant(
        name="sampling.uniform",
        kernel=_uniform,
        signature={"keys_ptr": "*i64", "positions_ptr": "*i64", "out_ptr": "*fp64", "rows": "i32"},
        constants={},
        configs=UNIFORM_DEFAULTS,
        unaligned=frozenset(["rows"]),
    )
    yield Variant(
        name="sampling.greedy",
        kernel=_greedy,
        signature={"logits_ptr": "*fp32", "tokens_ptr": "*i64", "finite_ptr": "*i8", "vocab": "i32"},
        constants={},
        configs=GREEDY_DEFAULTS,
    )
    for vocab in (32_768, 151_936, 262_144):
        yield Variant(
            name=f"sampling.sample.{vocab}",
            kernel=_sample,
            signature={
                "logits_ptr": "*fp32",
                **dict.fromkeys(("draws_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp64"),
                "top_k_ptr": "*i32",
                "tokens_ptr": "*i64",
                "vocab": "i32",
            },
            constants={"NUM_BLOCKS": triton.next_power_of_2(triton.cdiv(vocab, DEFAULTS[90]["BLOCK"]))},
            configs=DEFAULTS,
            is_default=vocab == 151_936,
        )
