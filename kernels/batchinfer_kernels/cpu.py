"""Fast versions of `reference` in few, large torch calls. Batch-invariant under a `probe.RowRule`.

Attention runs over tiles: a few queries of one sequence against one split of its KV, for one KV head. All tiles of
one shape go through one batched product. The products give a row the same bytes for any number of rows from four
on and for any width of the split that covers its filled slots, because a slot that is masked adds exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels import experts, kv8, reference
from batchinfer_kernels.probe import RowRule, product

# A product whose output is wider than this (a language model's head) runs in tiles of this many columns: the rate
# of MKL falls by a third when its output does not stay in the caches.
HEAD_TILE = 2048
SUM_WIDTH = 64
# What torch gives a thread of an elementwise operation at least (at::internal::GRAIN_SIZE).
GRAIN = 32_768


def make_linear(rule: RowRule) -> Callable[..., Tensor]:
    """`reference.linear` that gives a row the same bytes in every batch."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        tiles = _output_tiles(weight)
        if len(tiles) == 1:
            y = product(x, weight, bias, rule)
        else:
            y = x.new_empty(x.shape[0], weight.shape[0])
            for tile in tiles:
                y[:, tile] = product(x, weight[tile], None if bias is None else bias[tile], rule)
        return y if residual is None else residual.add_(y)

    return linear


def make_logits(rule: RowRule) -> Callable[[Tensor, Tensor], Tensor]:
    """`reference.logits` of the outputs that `make_linear` gives."""
    linear = make_linear(rule)

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).float()

    return logits


def make_linear_argmax(rule: RowRule) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`reference.linear_argmax` of the outputs that `make_linear` gives, of which one tile exists at a time."""

    def linear_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        best = x.new_full(x.shape[:1], -torch.inf)
        at = torch.zeros(x.shape[:1], dtype=torch.int64, device=x.device)
        finite = torch.ones(x.shape[:1], dtype=torch.bool, device=x.device)
        for tile in _output_tiles(weight):
            y = product(x, weight[tile], None, rule)
            finite &= finite_rows(y)
            top = y.amax(-1)
            # Few tiles beat those before them, and to look for the place costs far more than the maximum.
            better = torch.nonzero(top > best)[:, 0]
            if better.shape[0]:
                at[better] = y[better].argmax(-1) + tile.start
            best = torch.maximum(best, top)
        return at, finite

    return linear_argmax


def _output_tiles(weight: Tensor) -> list[slice]:
    """Output features of a weight [N, H] that go into one product."""
    size = HEAD_TILE if weight.shape[0] > 2 * HEAD_TILE else weight.shape[0]
    return [slice(start, start + size) for start in range(0, weight.shape[0], size)]


def finite_rows(y: Tensor) -> Tensor:
    """For each row of [R, V] whether all its values are finite; bool [R]."""
    good = torch.isfinite(y.sum(-1))
    if not bool(good.all()):  # a sum of finite values may overflow too: look again
        doubtful = torch.nonzero(~good)[:, 0]
        good[doubtful] = torch.isfinite(y[doubtful]).all(-1)
    return good


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.rope`; overwrites q and k."""
    if q.dtype != torch.float32:
        return reference.rope(q, k, cos, sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1]
    for x in (q, k):
        first, second = x[..., :half], x[..., half : 2 * half]
        first_sin, second_sin = first * sin, second * sin
        first.mul_(cos).sub_(second_sin)
        second.mul_(cos).add_(first_sin)
    return q, k


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`reference.silu_and_mul` of gate_up [T, 2 I].

    torch shares the elements out evenly, and rounds otherwise where a thread's share ends: rows in which one does are
    computed again, alone.
    """
    rows, half = gate_up.shape[0], gate_up.shape[-1] // 2
    gate = gate_up[:, :half]
    out = F.silu(gate)
    threads = min(torch.get_num_threads(), -(-rows * half // GRAIN)) if gate_up.device.type == "cpu" else 1
    if threads > 1:
        share = -(-rows * half // threads)
        for row in {end // half for end in range(share, rows * half, share) if end % half}:
            for start in range(0, half, GRAIN):  # so little that it is not shared out
                part = row, slice(start, start + GRAIN)
                torch.ops.aten.silu.out(gate[part], out=out[part])
    return out.mul_(gate_up[:, half:])


def mix(x: Tensor, weights: Tensor, ids: Tensor, expert: experts.Expert, residual: Tensor) -> Tensor:
    """`experts.mix`, where all experts are there: one call for each, of its rows in ascending order. What experts give
    is of the residual's type."""
    num_slots, top = ids.numel(), ids.shape[1]
    counts = torch.bincount(ids.flatten()).tolist()
    order = ids.flatten().sort(stable=True).indices
    rows = x.index_select(0, order.div(top, rounding_mode="floor"))
    y = residual.new_empty(num_slots, residual.shape[1])
    start = 0
    for i, count in enumerate(counts):
        if count:
            span = slice(start, start + count)
            y.index_copy_(0, order[span], expert(i, rows[span]))
            start += count
    by_token = torch.unflatten(y, 0, ids.shape)
    # Two operations for each term: fused ones round otherwise where a tensor ends.
    total = by_token[:, 0] * weights[:, :1]
    for j in range(1, top):
        total += by_token[:, j] * weights[:, j : j + 1]
    return total.add_(residual).to(residual.dtype)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, fresh_blocks: Tensor) -> None:
    """`reference.kv_write` by head rows; also of rows int8 (`kv8.to_rows`)."""
    head_dim = k_cache.shape[3]
    if fresh_blocks.shape[0]:
        v_cache.index_fill_(0, fresh_blocks, 0)
    # One look for all tokens: the sum of finite numbers may overflow too, which costs time and changes nothing.
    if not bool(torch.isfinite(k.sum() + v.sum())):
        sick = ~(torch.isfinite(k) & torch.isfinite(v)).all(-1, keepdim=True)
        k, v = k.masked_fill(sick, torch.nan), v.masked_fill(sick, 0)
    k_cache.view(-1, head_dim).index_copy_(0, rows, k.reshape(-1, head_dim))
    v_cache.view(-1, head_dim).index_copy_(0, rows, v.reshape(-1, head_dim))


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_rows: Tensor,
    block_rows: Tensor,
    hidden: Tensor,
    out: Tensor,
    lse: Tensor | None,
    buffer: Tensor,
    *,
    num_tiles: int,
    softcap: float | None = None,
) -> None:
    """Attention of num_tiles tiles, all of one shape, each to one split: `reference.split_attention`.

    Legend: N tiles, Hk KV heads, M query rows of a tile and KV head, Q queries of a tile, W slots covered.
    q           float32 [T * Hq, D], scaled; turned where the caches are int8
    caches      [B, Hk, S, D], or rows int8 [B, Hk, S, R] as in `kv8`; R = D elsewhere. Where both are the same tensor,
                keys are their own values, and gathered once
    query_rows  int64 [N * Hk * M], rows of q
    block_rows  int64 [N * Hk * W / S], block * Hk + head
    hidden      bool [N, 1, Q, 1, W], True where a query may not see a slot
    out, lse    float32 [N * Hk * M, D] and [N * Hk * M], written; lse may be None
    buffer      at least N * Hk * W * R elements of the caches' type, overwritten
    """
    row_size, block_size = k_cache.shape[3], k_cache.shape[2]
    batch = num_tiles * k_cache.shape[1]
    width = block_rows.shape[0] * block_size // batch
    shape = (batch, width, row_size)
    gathered = buffer[: batch * width * row_size].view(-1, block_size * row_size)

    torch.index_select(k_cache.view(-1, block_size * row_size), 0, block_rows, out=gathered)
    queries = q.index_select(0, query_rows).view(batch, -1, q.shape[1])
    rows = _numbers(gathered.view(shape))
    scores = torch.bmm(queries, rows.transpose(1, 2))
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    num_queries = hidden.shape[2]
    scores.view(num_tiles, -1, num_queries, scores.shape[1] // num_queries, width).masked_fill_(hidden, -torch.inf)
    # The clamps only touch rows that see nothing of the split: weights of zero and a log-sum-exp of -inf.
    top = scores.amax(-1, keepdim=True).clamp_(min=-1e30)
    weights = scores.sub_(top).exp_()
    # Summed in pieces of one width, so that the order of additions does not depend on the width. (A split that is no
    # multiple of SUM_WIDTH has one width only, see `attention.tiles`.)
    piece = math.gcd(width, SUM_WIDTH)
    total = weights.view(batch, -1, width // piece, piece).sum(-1).sum(-1, True)
    if v_cache is not k_cache:
        torch.index_select(v_cache.view(-1, block_size * row_size), 0, block_rows, out=gathered)
        rows = _numbers(gathered.view(shape))
    result = torch.bmm(weights, rows)
    torch.div(result, total.clamp(min=1.0), out=out.view(result.shape))
    if lse is not None:
        torch.add(top, total.log_(), out=lse.view(top.shape))


def _numbers(rows: Tensor) -> Tensor:
    return kv8.numbers(rows) if rows.dtype == torch.int8 else rows.float()


def merge_tiles(out: Tensor, lse: Tensor, sources: list[tuple[Tensor | None, Tensor]]) -> Tensor:
    """`reference.merge_splits` for rows with differing numbers of splits.

    sources[j] = (rows, at): result row rows[i] has its j-th split in row at[i] of out and lse; rows is None for
    j = 0, where every result row has one. Returns [rows, D].
    """
    first = sources[0][1]
    top = lse.index_select(0, first)
    for rows, at in sources[1:]:
        assert rows is not None
        top.index_copy_(0, rows, torch.maximum(top.index_select(0, rows), lse.index_select(0, at)))
    top.clamp_(min=-1e30)
    weight = torch.exp(lse.index_select(0, first) - top)
    total = out.index_select(0, first) * weight[:, None]
    for rows, at in sources[1:]:
        assert rows is not None
        more = torch.exp(lse.index_select(0, at) - top.index_select(0, rows))
        weight.index_copy_(0, rows, weight.index_select(0, rows) + more)
        term = out.index_select(0, at) * more[:, None]
        total.index_copy_(0, rows, total.index_select(0, rows) + term)
    return total.div_(weight[:, None])


def make_expert_ops(rule: RowRule) -> experts.ExpertOps:
    """`experts.REFERENCE` that gives a row the same bytes in every batch, where the rule is one for float32 too."""

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        return product(x.float(), weight.float(), None, rule)

    return replace(experts.REFERENCE, logits=logits, mix=mix)
