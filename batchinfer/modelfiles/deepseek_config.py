"""Configs of DeepSeek's models with latent attention (V2, V2-Lite, V3), resolved and checked. No torch: planning a job
refuses what `models.deepseek` would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinfer.errors import ModelError
from batchinfer.modelfiles.config_fields import MOST_LAYERS, flag, real, whole
from batchinfer.modelfiles.experts_config import MOST_EXPERTS, ExpertsConfig
from batchinfer.modelfiles.rope_config import RopeConfig

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config has latent attention here."""
    names = config.get("architectures")
    return isinstance(names, list) and any(name in ARCHITECTURES for name in names if isinstance(name, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """A model's config.json, resolved and checked.

    q_rank        of the latents of queries; None: queries are projected as they are
    rank          of the latents of keys and values
    plain_dim, rotated_dim, value_dim   of a head: its query and key have a plain and a rotated part
    pairs         the rotated parts' numbers that turn together stand next to each other
    scale         scores are q.k * scale
    experts       of each layer; None: it has one MLP, of intermediate_size
    num_stored_layers   of the checkpoint: those beyond num_layers predict further tokens, and are not run
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_stored_layers: int
    num_heads: int
    q_rank: int | None
    rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    pairs: bool
    scale: float
    experts: tuple[ExpertsConfig | None, ...]

    @property
    def row_size(self) -> int:
        """Numbers of a token in a layer's cache."""
        return self.rank + self.rotated_dim

    def product_shapes(self) -> list[tuple[int, int]]:
        """[N, K] of the weights of products, each head's own among them; the head's is left out."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size = self.num_heads * (self.plain_dim + self.rotated_dim)
        shapes = [(2 * inner, hidden), (hidden, inner), (hidden, self.num_heads * self.value_dim)]
        shapes.append(((self.q_rank or q_size) + self.row_size, hidden))
        if self.q_rank is not None:
            shapes.append((q_size, self.q_rank))
        shapes += [(self.rank, self.plain_dim), (self.value_dim, self.rank)]
        for experts in dict.fromkeys(experts for experts in self.experts if experts is not None):
            for inner in filter(None, (experts.intermediate_size, experts.shared_size)):
                shapes += [(2 * inner, hidden), (hidden, inner)]
        return shapes

    def router_shapes(self) -> list[tuple[int, int]]:
        """[N, K] of weights that are multiplied in float32; of N what decides how they are."""
        return [(64, self.hidden_size)] if any(self.experts) else []

    @classmethod
    def from_config(cls, architecture: str, config: Mapping[str, Any]) -> DeepseekConfig:
        num_heads = whole(config, "num_attention_heads")
        num_layers = whole(config, "num_hidden_layers", most=MOST_LAYERS)
        if whole(config, "num_key_value_heads", default=num_heads) != num_heads:
            raise ModelError(
                f"num_key_value_heads in the model's config is not num_attention_heads {num_heads}, which is not "
                f"supported for {architecture}"
            )
        if "q_lora_rank" not in config:
            raise ModelError("q_lora_rank is missing in the model's config; it must be null or a positive integer")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ModelError(f"hidden_act {activation!r} is not supported in this family; silu is")
        for key in ("attention_bias", "mlp_bias"):
            if flag(config, key):
                raise ModelError(f"{key} in the model's config is not supported for {architecture}")
        plain_dim, rotated_dim = whole(config, "qk_nope_head_dim"), whole(config, "qk_rope_head_dim")
        rope = RopeConfig.from_config(
            config, head_dim=rotated_dim, max_position_embeddings=whole(config, "max_position_embeddings")
        )
        if rope.rotary_dim != rotated_dim:
            raise ModelError(
                f"partial_rotary_factor in the model's config rotates {rope.rotary_dim} of qk_rope_head_dim "
                f"{rotated_dim} dimensions, which is not supported for {architecture}"
            )
        if architecture == "DeepseekV3ForCausalLM" and config.get("rope_interleave") is not None:
            pairs = flag(config, "rope_interleave")
        else:
            pairs = True
        return cls(
            hidden_size=whole(config, "hidden_size"),
            intermediate_size=whole(config, "intermediate_size"),
            num_layers=num_layers,
            num_stored_layers=num_layers + whole(config, "num_nextn_predict_layers", default=0, least=0, most=100),
            num_heads=num_heads,
            q_rank=None if config["q_lora_rank"] is None else whole(config, "q_lora_rank"),
            rank=whole(config, "kv_lora_rank"),
            plain_dim=plain_dim,
            rotated_dim=rotated_dim,
            value_dim=whole(config, "v_head_dim"),
            vocab_size=whole(config, "vocab_size"),
            rms_norm_eps=real(config, "rms_norm_eps", default=1e-6, zero=True),
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            rope=rope,
            pairs=pairs,
            scale=(plain_dim + rotated_dim) ** -0.5 * _temperature(rope) ** 2,
            experts=_experts(architecture, config, num_layers),
        )


def _temperature(rope: RopeConfig) -> float:
    """By which YaRN sharpens scores, for query and key each, beside what it does to the rotated parts: those get
    mscale's temperature over mscale_all_dim's (`layers.rope`), which is 1 where both are equal."""
    if rope.kind != "yarn":
        return 1.0
    scaling = rope.scaling
    if "attention_factor" in scaling:
        # Programs differ in whether it takes the place of mscale's.
        raise ModelError(
            "RoPE scaling 'yarn': attention_factor in the model's config is not supported in this family; mscale and "
            "mscale_all_dim are"
        )
    both = [real(scaling, key, default=0.0, zero=True) for key in ("mscale", "mscale_all_dim")]
    if all(both) or (not both[1] and both[0] in (0.0, 1.0)):
        weight = both[1]
    else:
        # Programs differ in what they take for the other one.
        raise ModelError(
            f"RoPE scaling 'yarn': mscale {both[0]} and mscale_all_dim {both[1]} (in the model's config) are not "
            "supported; both are needed, or mscale 1 alone"
        )
    if not weight:
        return 1.0
    original = int(scaling.get("original_max_position_embeddings", rope.max_position_embeddings))
    factor = float(scaling.get("factor", rope.max_position_embeddings / original))
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _experts(architecture: str, config: Mapping[str, Any], num_layers: int) -> tuple[ExpertsConfig | None, ...]:
    """Of each layer."""
    if config.get("n_routed_experts") is None:
        return (None,) * num_layers
    num_dense = whole(config, "first_k_dense_replace", least=0)
    if whole(config, "moe_layer_freq", default=1) != 1:
        raise ModelError(f"moe_layer_freq {config['moe_layer_freq']} in the model's config is not supported; 1 is")
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if is_v3 else "softmax"
    methods = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    for key, known in (("scoring_func", (scoring,)), ("topk_method", methods)):
        value = config.get(key)
        if value is not None and value not in known:
            words = ", ".join(known)
            raise ModelError(
                f"{key} {value!r} in the model's config is not supported for {architecture}; supported: {words}"
            )
    # Without groups whatever n_group says.
    limited = is_v3 or config.get("topk_method") == "group_limited_greedy"
    if is_v3:
        for key in ("norm_topk_prob", "routed_scaling_factor"):
            if config.get(key) is None:  # programs take other values then than for V2
                raise ModelError(f"{key} is missing in the model's config")
    inner = whole(config, "moe_intermediate_size")
    renormalize, scale = flag(config, "norm_topk_prob"), real(config, "routed_scaling_factor", default=1.0)
    if renormalize and scale != 1 and not is_v3:
        # Programs differ in whether they scale weights that were made to add up to 1.
        raise ModelError(
            f"norm_topk_prob with routed_scaling_factor {scale} in the model's config is not supported for "
            f"{architecture}"
        )
    experts = ExpertsConfig(
        num_experts=whole(config, "n_routed_experts", most=MOST_EXPERTS),
        top_k=whole(config, "num_experts_per_tok", most=MOST_EXPERTS),
        intermediate_size=inner,
        wide_logits=True,
        scoring=scoring,
        correction_bias=is_v3,
        renormalize=renormalize,
        scale=scale,
        num_groups=whole(config, "n_group") if limited else 1,
        top_groups=whole(config, "topk_group") if limited else 1,
        shared_size=whole(config, "n_shared_experts", default=0, least=0, most=MOST_EXPERTS) * inner,
    )
    return tuple(None if i < num_dense else experts for i in range(num_layers))
