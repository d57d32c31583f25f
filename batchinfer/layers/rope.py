"""Rotary position embedding: frequencies of every scaling kind, and the cos/sin tables.

Responsible for: reading `rope_parameters`, `rope_scaling` (`rope_type` or the older `type`) and `rope_theta` of a
config, strictly; the tables. The rotation itself is `ops.rope`. Formulas: Su et al. 2021 (RoPE), Peng et al. 2023
(YaRN), the Llama 3.1 release (llama3). A scaled model's limit is its max_position_embeddings, which the factor
does not multiply again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchinfer.errors import ModelError

_SCALE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
        }
    ),
    "freq_factors": frozenset({"freq_factors"}),
}
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "freq_factors": ("freq_factors",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """rotary_dim of the head's dimensions are rotated; `scaling` holds the kind's own numbers."""

    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    scaling: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int) -> RopeConfig:
        """From config.json's words. Raises ModelError on an unknown kind, unknown or missing numbers."""
        merged: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = config.get(key)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ModelError(f"{key} must be a JSON object, got {value!r}")
            merged.update(value)
        kind = merged.pop("rope_type", None)
        older = merged.pop("type", None)
        kind = kind or older or "default"
        if kind not in _SCALE_KEYS:
            raise ModelError(f"RoPE scaling of type {kind!r} is not supported; supported are {', '.join(_SCALE_KEYS)}")
        theta = merged.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        partial = merged.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        scaling = {key: value for key, value in merged.items() if value is not None}
        original = config.get("original_max_position_embeddings")
        if original is not None and "original_max_position_embeddings" in _SCALE_KEYS[kind]:
            scaling["original_max_position_embeddings"] = original  # beside the others it wins, as in transformers
        unknown = sorted(set(scaling) - _SCALE_KEYS[kind] - ({"factor"} if kind == "default" else set()))
        if unknown:
            raise ModelError(
                f"RoPE scaling {kind!r}: unknown keys {', '.join(unknown)}; they can't be left out of account"
            )
        missing = [key for key in _NEEDED.get(kind, ()) if key not in scaling]
        if missing:
            raise ModelError(f"RoPE scaling {kind!r}: {', '.join(missing)} is missing in the model's config")
        rotary_dim = int(head_dim * partial)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ModelError(f"RoPE over {rotary_dim} of {head_dim} dimensions (partial_rotary_factor {partial})")
        return cls(
            kind=kind,
            theta=float(theta),
            rotary_dim=rotary_dim,
            max_position_embeddings=max_position_embeddings,
            scaling=scaling,
        )


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
        return self.cos[positions], self.sin[positions]
