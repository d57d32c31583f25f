"""Rotary position embedding: frequencies of every scaling kind, and the cos/sin tables.

What a config says is read by `modelfiles.rope_config`; the rotation itself is `ops.rope`. Formulas: arXiv:2104.09864
(RoPE), arXiv:2309.00071 (YaRN), the Llama 3.1 release (llama3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from batchinfer.errors import ModelError
from batchinfer.modelfiles.rope_config import RopeConfig


def frequencies(rope: RopeConfig) -> tuple[Tensor, float]:
    """(radians per position, float32 [rotary_dim / 2]; factor on cos and sin)."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / float(rope.scaling["factor"]), 1.0
    if rope.kind == "freq_factors":
        return _divided(plain, rope.scaling["freq_factors"]), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    # "dynamic" stretches only sequences longer than max_position_embeddings, which are never run.
    return plain, 1.0


def _divided(plain: Tensor, factors: list[float]) -> Tensor:
    if len(factors) != plain.numel():
        raise ModelError(f"RoPE: {len(factors)} frequency factors for {plain.numel()} frequencies")
    return plain / torch.tensor(factors, dtype=torch.float32)


def _original_length(rope: RopeConfig) -> int:
    """The context that the model had before it was stretched."""
    return int(rope.scaling.get("original_max_position_embeddings", rope.max_position_embeddings))


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by `factor`, short ones stay, those between are blended linearly in turns."""
    factor, low, high = (float(rope.scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    # Turns that a frequency makes within the original context: below `low` is a long wave, above `high` a short one.
    turns = _original_length(rope) * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / factor + share * plain


def _yarn(plain: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    scaling = rope.scaling
    original = _original_length(rope)
    factor = float(scaling.get("factor", rope.max_position_embeddings / original))

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in scaling:
        attention_factor = float(scaling["attention_factor"])
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention_factor = temperature(float(scaling["mscale"])) / temperature(float(scaling["mscale_all_dim"]))
    else:
        attention_factor = temperature(1.0)

    def dimension_of(turns: float) -> float:
        """The (fractional) index of the frequency that makes so many turns within the original context."""
        return rope.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = dimension_of(float(scaling.get("beta_fast", 32)))
    last = dimension_of(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(plain.numel(), dtype=torch.float32) - first) / (last - first)
    stretched = ramp.clamp(0, 1)
    return plain / factor * stretched + plain * (1 - stretched), attention_factor


class Rope(nn.Module):
    """cos and sin, float32 [positions, rotary_dim / 2], for positions below `max_model_len`."""

    def __init__(self, rope: RopeConfig, *, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        per_position, factor = frequencies(rope)
        # Angles are float32 products, as models were trained with; cos and sin are taken in float64 and rounded,
        # so that a table does not depend on how torch vectorises or splits it over threads.
        angles = (torch.arange(max_model_len, dtype=torch.float32)[:, None] * per_position).double()
        self.cos = (angles.cos() * factor).float().to(device)
        self.sin = (angles.sin() * factor).float().to(device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of cos and sin at positions int64 [T]; gathered once per step for all layers."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)
