"""A KV cache in int8: how keys and values are rounded, and attention to them as `native/attention_int8.c` computes it.

A token's key and value of one head have a scale each, symmetric: code = round(x * 127 / max |x|), to nearest even.
Keys, and the queries that meet them, are turned first (`turn`): after rotary embedding a few dimensions of keys are
much larger than the others, and would make the steps of all too coarse. In torch a token's key or value is a row: int8
[D], then its scale's SCALE_BYTES bytes.

Legend as in `reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 127
MOST_WEIGHT = 255
LEAST = 1e-30
SCALE_BYTES = 4


def turn(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of x float32 [..., D], not normalised, in blocks of P dimensions that follow each other:
    P is the largest power of two that divides D. turn(q) . turn(k) = P (q . k)."""
    shape, width = x.shape, 1
    while width < turned_together(shape[-1]):
        pairs = x.reshape(-1, 2, width)
        first, second = pairs[:, 0], pairs[:, 1]
        x = torch.stack((first + second, first - second), dim=1)
        width *= 2
    return x.reshape(shape)


def turned_together(dim: int) -> int:
    return dim & -dim


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x float32 [..., D] as codes int8 [..., D] and steps float32 [...]. Where max |x| is below LEAST codes and step
    are zero; where a number is not finite the step is NaN."""
    most = x.abs().amax(-1)
    finite = torch.isfinite(x).all(-1)
    factors = torch.where(finite & (most >= LEAST), MOST / most, 0)
    # On GPUs torch multiplies by the reciprocal of a number.
    steps = torch.where(most >= LEAST, most / torch.full_like(most, MOST), 0).masked_fill(~finite, torch.nan)
    return (x * factors[..., None]).nan_to_num(0, 0, 0).round().to(torch.int8), steps


def to_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Rows int8 [T, Hk, D + SCALE_BYTES] of k, v [T, Hk, D]. A key's scale is its step / P: undoes the turn's factor.

    A token whose turned key or value is not finite has a key scale of NaN and a value of zero, see
    `reference.kv_write`.
    """
    (keys, key_steps), (values, value_steps) = quantize(turn(k.float())), quantize(v.float())
    sick = key_steps.isnan() | value_steps.isnan()
    key_scales = (key_steps / turned_together(k.shape[-1])).masked_fill(sick, torch.nan)
    values, value_scales = values.masked_fill(sick[..., None], 0), value_steps.masked_fill(sick, 0)
    return _join(keys, key_scales), _join(values, value_scales)


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., D] and scales float32 [...] of rows [..., D + SCALE_BYTES]."""
    dim = rows.shape[-1] - SCALE_BYTES
    return rows[..., :dim], rows[..., dim:].contiguous().view(torch.float32).squeeze(-1)


def numbers(rows: Tensor) -> Tensor:
    """What rows stand for, float32 [..., D]; keys are turned, and divided by P."""
    codes, scales = split_rows(rows)
    return codes.float() * scales[..., None]


def split_attention(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    split: int,
    split_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.split_attention` to caches of rows int8 [B, Hk, S, D + SCALE_BYTES], with rounded queries and weights.

    A query, turned, is quantized as keys are. A weight is multiplied by its value's scale and rounded to a whole number
    of steps of the row's largest such product / 255; the log-sum-exp is of the weights as they were. Both products are
    sums of whole numbers, and exact.
    """
    num_kv_heads, block_size = k_rows.shape[1], k_rows.shape[2]
    at = torch.arange(split * split_size, (split + 1) * split_size)
    blocks = block_table[(at // block_size).clamp(max=block_table.shape[0] - 1)]
    keys, key_scales = split_rows(k_rows[blocks, :, at % block_size])  # [W, Hk, D] and [W, Hk]
    values, value_scales = split_rows(v_rows[blocks, :, at % block_size])
    seen = at[None, :] <= positions[:, None]  # [T, W]
    if window is not None:
        seen &= at[None, :] > positions[:, None] - window
    codes, steps = quantize(turn(q.float()))
    grouped = codes.double().view(q.shape[0], num_kv_heads, -1, q.shape[-1])  # [T, Hk, G, D]
    exact = torch.einsum("tkgd,wkd->tkgw", grouped, keys.double())
    scores = exact.float() * key_scales.T[None, :, None] * (steps * scale).view(grouped.shape[:-1])[..., None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(scores - top)
    scaled = weights * value_scales.T[None, :, None].masked_fill(~seen.any(0), 0)
    most = scaled.amax(-1, keepdim=True)
    whole = (scaled * torch.where(most >= LEAST, MOST_WEIGHT / most, 0)).round()
    sums = torch.einsum("tkgw,wkd->tkgd", whole.double(), values.double()).float()
    out = sums * (most / MOST_WEIGHT / weights.sum(-1, keepdim=True).clamp(min=1e-30))
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _join(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.cat((codes, scales.contiguous().view(torch.int8).view(*scales.shape, SCALE_BYTES)), dim=-1)
