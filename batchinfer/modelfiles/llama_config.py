"""Configs of the llama family: Llama 2 and 3, SmolLM, Mistral, Mixtral, Qwen2, Qwen3 and their mixtures of experts,
resolved and checked. No torch: planning a job refuses what `models.llama` would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinfer.errors import ModelError
from batchinfer.modelfiles.config_fields import MOST_LAYERS, flag, real, whole
from batchinfer.modelfiles.experts_config import ExpertsConfig, mixtral_experts, qwen_experts
from batchinfer.modelfiles.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How members of the family differ where their config doesn't say it.

    attention_bias   "config": on q, k, v and o, as attention_bias says; "qkv": always, on q, k and v; "qkv_bias": on
                     those unless qkv_bias is false
    qk_norm          RMS norm over each head of q and k, before rotation
    window           "config": sliding_window holds wherever it is set; "flag": only under use_sliding_window;
                     "none": there is no such thing; "refused": use_sliding_window is, since its readers differ in what
                     layers it is for
    experts          how its config speaks of experts; None: it has none
    default_head_dim, default_window   of a config that has no such key
    """

    attention_bias: Literal["none", "config", "qkv", "qkv_bias"] = "none"
    mlp_bias: bool = False
    qk_norm: bool = False
    window: Literal["none", "config", "flag", "refused"] = "none"
    experts: Literal["mixtral", "qwen2", "qwen3"] | None = None
    default_head_dim: int | None = None
    default_window: int | None = None


ARCHITECTURES: Mapping[str, Variant] = {
    "LlamaForCausalLM": Variant(attention_bias="config", mlp_bias=True),
    "MistralForCausalLM": Variant(window="config", default_window=4096),
    "MixtralForCausalLM": Variant(window="config", experts="mixtral"),
    "Qwen2ForCausalLM": Variant(attention_bias="qkv", window="flag"),
    "Qwen2MoeForCausalLM": Variant(attention_bias="qkv_bias", window="refused", experts="qwen2"),
    "Qwen3ForCausalLM": Variant(attention_bias="config", qk_norm=True, window="flag", default_head_dim=128),
    "Qwen3MoeForCausalLM": Variant(attention_bias="config", qk_norm=True, window="refused", experts="qwen3"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """A member's config.json, resolved and checked."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # one per layer
    rope: RopeConfig
    experts: tuple[ExpertsConfig | None, ...]  # one per layer; None: one MLP

    def product_shapes(self) -> list[tuple[int, int]]:
        """[N, K] of the weights of products, of N what decides how they are; the head's is left out."""
        hidden, inner, results = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        shapes = [(2 * inner, hidden), (hidden, inner)] + [(hidden, results)] * (results != hidden)
        for experts in dict.fromkeys(experts for experts in self.experts if experts is not None):
            shapes.append((64, hidden))  # of routers
            for inner in filter(None, (experts.intermediate_size, experts.shared_size)):
                shapes += [(2 * inner, hidden), (hidden, inner)]
        return shapes

    @classmethod
    def from_config(cls, architecture: str, config: Mapping[str, Any]) -> LlamaConfig:
        variant = ARCHITECTURES[architecture]
        hidden_size, num_heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
        num_layers = whole(config, "num_hidden_layers", most=MOST_LAYERS)
        num_kv_heads = whole(config, "num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
        if config.get("head_dim") is not None:
            head_dim = whole(config, "head_dim")
        elif "head_dim" not in config and variant.default_head_dim is not None:
            head_dim = variant.default_head_dim
        else:
            if hidden_size % num_heads:
                raise ModelError(
                    f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                    "and the config gives no head_dim"
                )
            head_dim = hidden_size // num_heads
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ModelError(f"hidden_act {activation!r} is not supported in this family; silu is")
        max_positions = whole(config, "max_position_embeddings")
        has_bias = flag(config, "attention_bias") and variant.attention_bias == "config"
        qkv_bias = variant.attention_bias == "qkv" or (
            variant.attention_bias == "qkv_bias" and (config.get("qkv_bias") is None or flag(config, "qkv_bias"))
        )
        rope = RopeConfig.from_config(config, head_dim=head_dim, max_position_embeddings=max_positions)
        if rope.rotary_dim != head_dim and config.get("rope_dimension_count") is None:
            # transformers rotates whole heads in this family whatever the config says, other engines a part of them.
            raise ModelError(
                f"partial_rotary_factor in the model's config rotates {rope.rotary_dim} of {head_dim} dimensions, "
                f"which is not supported for {architecture}"
            )
        return cls(
            hidden_size=hidden_size,
            intermediate_size=whole(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=whole(config, "vocab_size"),
            rms_norm_eps=real(config, "rms_norm_eps", default=1e-6, zero=True),
            qkv_bias=has_bias or qkv_bias,
            o_bias=has_bias,
            mlp_bias=flag(config, "mlp_bias") and variant.mlp_bias,
            qk_norm=variant.qk_norm,
            tie_word_embeddings=flag(config, "tie_word_embeddings"),
            windows=_windows(variant, config, num_layers),
            rope=rope,
            experts=_experts(variant, config, num_layers),
        )


def _experts(variant: Variant, config: Mapping[str, Any], num_layers: int) -> tuple[ExpertsConfig | None, ...]:
    if variant.experts is None:
        return (None,) * num_layers
    if variant.experts == "mixtral":
        return mixtral_experts(config, num_layers)
    return qwen_experts(config, num_layers, shared=variant.experts == "qwen2")


def _windows(variant: Variant, config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where it sees everything."""
    if variant.window == "refused" and flag(config, "use_sliding_window"):
        raise ModelError("use_sliding_window in the model's config is not supported for this architecture")
    window = config.get("sliding_window", variant.default_window)
    in_use = variant.window == "config" or (variant.window == "flag" and flag(config, "use_sliding_window"))
    if not in_use or window is None:
        return (None,) * num_layers
    window = whole({"sliding_window": window}, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = whole(config, "max_window_layers", default=28, least=0) if variant.window == "flag" else 0
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelError(f"layer_types in the model's config is not understood: {kinds!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
