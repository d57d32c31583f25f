"""What a config says of rotary position embedding: `rope_parameters`, `rope_scaling` (`rope_type` or the older `type`),
`rope_theta`, read strictly. The frequencies and tables are `layers.rope`. A scaled model's limit is its
max_position_embeddings, which the factor does not multiply again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.modelfiles.config_fields import flag, real, whole

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
        place = "rope_scaling"
        for key in ("rope_scaling", "rope_parameters"):
            value = config.get(key)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ModelError(f"{key} must be a JSON object, got {value!r}")
            merged.update(value)
            place = key
        kind = merged.pop("rope_type", None)
        older = merged.pop("type", None)
        kind = kind or older or "default"
        if not isinstance(kind, str) or kind not in _SCALE_KEYS:
            raise ModelError(
                f"RoPE scaling of type {kind!r} is not supported; supported are {', '.join(_SCALE_KEYS)} "
                f"({place} in the model's config)"
            )
        theta, partial = (
            real(merged, key, default=real(config, key, default=default))
            for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0))
        )
        for key in ("rope_theta", "partial_rotary_factor"):
            merged.pop(key, None)
        scaling = {key: value for key, value in merged.items() if value is not None}
        original = config.get("original_max_position_embeddings")
        if original is not None and "original_max_position_embeddings" in _SCALE_KEYS[kind]:
            scaling["original_max_position_embeddings"] = original  # beside the others it wins, as in transformers
        unknown = sorted(set(scaling) - _SCALE_KEYS[kind] - ({"factor"} if kind == "default" else set()))
        if unknown:
            raise ModelError(
                f"RoPE scaling {kind!r}: unknown keys {', '.join(unknown)}; they can't be left out of account "
                f"({place} in the model's config)"
            )
        missing = [key for key in _NEEDED.get(kind, ()) if key not in scaling]
        if missing:
            raise ModelError(f"RoPE scaling {kind!r}: {', '.join(missing)} is missing in the model's config ({place})")
        _check(kind, scaling)
        # The key is GGUF's own; folders have none (`huggingface`).
        rotary_dim = whole(config, "rope_dimension_count", default=int(head_dim * min(partial, 2.0)), least=0)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ModelError(f"RoPE over {rotary_dim} of {head_dim} dimensions (partial_rotary_factor {partial})")
        return cls(
            kind=kind,
            theta=theta,
            rotary_dim=rotary_dim,
            max_position_embeddings=max_position_embeddings,
            scaling=scaling,
        )


def _check(kind: str, scaling: Mapping[str, Any]) -> None:
    """Raises ModelError where a number of the scaling can't be one."""
    if kind == "freq_factors":
        return  # read from a tensor
    for key in scaling:
        if key == "original_max_position_embeddings":
            whole(scaling, key)
        elif key == "truncate":
            flag(scaling, key)
        else:
            real(scaling, key, default=0.0, zero=key in ("mscale", "mscale_all_dim"))
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ModelError(
            f"high_freq_factor in the model's config must be above low_freq_factor, "
            f"got {scaling['high_freq_factor']!r} and {scaling['low_freq_factor']!r}"
        )
