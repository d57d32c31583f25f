"""The specification of every operation in `table.Ops`, in plain torch, one row at a time in spirit.

Written to be read and to be compared with, not to be fast; `cpu` holds the fast versions of the same formulas.
Legend: T tokens, H hidden, N outputs, D head size, Hq query heads, Hk KV heads, G = Hq / Hk, B KV blocks, S tokens
in a block, W tokens in a split.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    """x in what is computed in: float32, or float64 where a test asks for the exact result."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """y[T, N] = x[T, H] weight[N, H]^T + bias[N], or residual + y, for which residual [T, N] may be overwritten."""
    y = F.linear(x, weight, bias)
    return y if residual is None else residual.add_(y)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """linear(x, weight) as float32 [T, V]. (Where products are not rounded to x's type in between: `head.logits`.)"""
    return linear(x, weight).float()


def linear_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits(x, weight): (int64 [T], the index of each row's largest value, of equal ones the lowest; bool
    [T], whether all of the row are finite)."""
    y = linear(x, weight)
    return y.argmax(-1), y.isfinite().all(-1)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight[V, H] at token_ids int64 [T]."""
    return F.embedding(token_ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32 (Zhang, Sennrich 2019)."""
    x_f = _wide(x)
    scale = torch.rsqrt((x_f * x_f).mean(-1, keepdim=True) + eps)
    return (x_f * scale).to(x.dtype) * weight


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021) in the half-split order of the Hugging Face llama family.

    q [T, Hq, D], k [T, Hk, D]; cos, sin float32 [T, R / 2] are the rows for these tokens' positions (gathered once
    per step by the model, not per layer); R <= D, what is beyond R passes unchanged. May overwrite q and k: use only
    what is returned.
    """
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` of x [T, heads, D] alone."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = _wide(x[..., :half]), _wide(x[..., half : 2 * half])
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2 I] = [gate | up]; [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up for gate_up [T, 2 I] = [gate | up], in gelu's tanh form (Hendrycks, Gimpel 2016); [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss's gate * sigmoid(alpha * gate) * (up + 1) for gate_up [T, 2 I] = [gate | up], with gate at most `limit`
    and up within +-limit; [T, I]. (In its checkpoints gates and ups alternate: whoever loads them sorts the rows.)"""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, fresh_blocks: Tensor) -> None:
    """Stores k, v [T, Hk, D] in the caches [B, Hk, S, D]; token t and head h at rows[t * Hk + h], int64, that is
    (block * Hk + h) * S + offset.

    First sets v_cache to zero in `fresh_blocks`: blocks that a sequence starts in this step and does not fill. A
    slot that was never written for its sequence then holds a finite value, so that the weight 0 which attention
    gives it is really nothing, whatever an earlier owner of the block (perhaps a NaN) left there.

    For the same reason a token whose key or value is not finite is stored with a value of zero under a key of NaN. Who
    sees it gets NaN through its score; who does not, because it comes later in the sequence, gets nothing of it. Else
    a sick token would spoil those before it in its split, and with them a prefix that other sequences share.
    (In rows of int8 `kv8.to_rows` has seen to that.)
    """
    if k.is_floating_point():
        sick = ~(torch.isfinite(k) & torch.isfinite(v)).all(-1, keepdim=True)
        k, v = k.masked_fill(sick, torch.nan), v.masked_fill(sick, 0)
    num_heads, block_size = k_cache.shape[1:3]
    at = rows.view(-1, num_heads)
    block, head, offset = at // (num_heads * block_size), at // block_size % num_heads, at % block_size
    v_cache[fresh_blocks] = 0
    k_cache[block, head, offset] = k
    v_cache[block, head, offset] = v


def split_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    split: int,
    split_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of one sequence's queries q [T, Hq, D] at `positions` [T] to one split of its KV.

    The split is positions split * W .. (split + 1) * W of the sequence, found through block_table int64 [blocks].
    A query sees keys at positions up to its own and, under `window`, fewer than `window` behind. Returns the
    softmax-weighted values float32 [T, Hq, D] and the log-sum-exp of the scores float32 [T, Hq]: zero and -inf
    where a query sees nothing of the split.
    """
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    keys_at = torch.arange(split * split_size, (split + 1) * split_size)
    last_block = block_table.shape[0] - 1
    blocks = block_table[(keys_at // block_size).clamp(max=last_block)]
    keys = _wide(k_cache[blocks, :, keys_at % block_size])  # [W, Hk, D]
    values = _wide(v_cache[blocks, :, keys_at % block_size])
    seen = keys_at[None, :] <= positions[:, None]  # [T, W]
    if window is not None:
        seen &= keys_at[None, :] > positions[:, None] - window
    grouped = _wide(q).view(q.shape[0], num_kv_heads, -1, q.shape[-1])  # [T, Hk, G, D]
    scores = torch.einsum("tkgd,wkd->tkgw", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.clamp(min=-1e30)[..., None])
    values = values.masked_fill(~seen.any(0)[:, None, None], 0)
    out = torch.einsum("tkgw,wkd->tkgd", weights, values)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def merge_splits(outs: list[Tensor], lses: list[Tensor], sinks: Tensor | None = None) -> Tensor:
    """Attention over all splits from each split's result and log-sum-exp, added in the order of the splits.

    sinks [Hq]: logits that take their share of each head's weights, once, and add no value (gpt-oss).
    """
    top = torch.stack(lses).amax(0).clamp(min=-1e30)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    total = torch.zeros_like(outs[0])
    weight_sum = torch.zeros_like(lses[0])
    for out, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - top)
        total = total + out * weight[..., None]
        weight_sum = weight_sum + weight
    if sinks is not None:
        weight_sum = weight_sum + torch.exp(sinks - top)
    return total / weight_sum[..., None]
