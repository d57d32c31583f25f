"""A KV cache in float8_e4m3fn: how keys and values are rounded. Attention to it is attention to `numbers`.

Each KV head of a layer has one scale for its keys and one for its values, float32, that the checkpoint gives (one for
all heads is given as equal ones, and none as ones). Scales that are known before the step cost a factor per head, no
memory, and one rounding whatever the token; e4m3 has exponents enough that a scale for each token would gain little.

Legend as in `reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 448.0


def to_codes(k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of k, v [T, Hk, D]: x / scale rounded to nearest even, no further than MOST, for scales [Hk].

    A token whose key or value is not finite has a key of NaN and a value of zero, see `reference.kv_write`.
    """
    sick = ~(torch.isfinite(k) & torch.isfinite(v)).all(-1, keepdim=True)
    keys, values = _round(k, k_scales), _round(v, v_scales)
    keys = keys.masked_fill(sick, torch.nan).to(torch.float8_e4m3fn)
    return keys, values.masked_fill(sick, 0).to(torch.float8_e4m3fn)


def numbers(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes [B, Hk, S, D] of a cache stand for, in the scales' dtype."""
    return codes.to(scales.dtype) * scales[:, None, None]


def _round(x: Tensor, scales: Tensor) -> Tensor:
    return (x.float() * (1 / scales.float())[:, None]).clamp(-MOST, MOST)
