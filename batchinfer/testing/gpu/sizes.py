"""How large everything is: shapes of real models, and the sizes of benches, whole, quick, and as toys for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from batchinfer.modelfiles.deepseek_config import DeepseekConfig
from batchinfer.modelfiles.experts_config import ExpertsConfig
from batchinfer.modelfiles.llama_config import LlamaConfig
from batchinfer.testing.tiny import tiny_config

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_8B: Mapping[str, Any] = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
SMOLLM2_135M: Mapping[str, Any] = {
    **_LLAMA,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
}
QWEN3_30B_A3B: Mapping[str, Any] = {
    **_LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": False,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
}
# One of its layers with experts, between its embeddings and its head.
DEEPSEEK_V3_LAYER: Mapping[str, Any] = {
    **_LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
    "num_hidden_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LawModel:
    """A model, and how an engine of it is tried: prompts of up to `longest` tokens, `new_tokens` more of each."""

    config: Mapping[str, Any]
    block_size: int
    split_size: int
    longest: int
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """name            as a user says it
    model           config of the dense model whose steps and layers are measured
    sparse_model    config of one with experts in every layer, and latent_model of one with latent attention: steps and
                    layers likewise
    law_models      for the engine's laws, by name
    decode_*        sequences, tokens behind them, steps that are timed
    prefill_*       prompts, tokens of each, steps that are timed
    shared_*        sequences behind a prefix of so many tokens, each with so many of its own
    few_rows, many_rows   of products as decoding and as prompts have them
    offline_*       rows, tokens in, tokens out
    runs            of a kernel that is timed
    """

    name: str
    dtype: torch.dtype
    block_size: int
    split_size: int
    model: Mapping[str, Any]
    law_models: Mapping[str, LawModel]
    sparse_model: Mapping[str, Any]
    latent_model: Mapping[str, Any]
    latent_context: int
    decode_seqs: int
    decode_context: int
    decode_steps: int
    prefill_seqs: int
    prefill_tokens: int
    prefill_steps: int
    shared_seqs: int
    shared_prefix: int
    shared_own: int
    few_rows: int
    many_rows: int
    offline_rows: int
    offline_in: int
    offline_out: int
    copy_bytes: int
    product_size: int
    runs: int
    warm: int

    @property
    def dense(self) -> LlamaConfig:
        return LlamaConfig.from_config(self.model["architectures"][0], self.model)

    @property
    def sparse(self) -> LlamaConfig:
        return LlamaConfig.from_config(self.sparse_model["architectures"][0], self.sparse_model)

    @property
    def experts(self) -> ExpertsConfig:
        """Of a layer of `sparse`."""
        experts = self.sparse.experts[0]
        assert experts is not None
        return experts

    @property
    def latent(self) -> DeepseekConfig:
        return DeepseekConfig.from_config(self.latent_model["architectures"][0], self.latent_model)

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(output features, inputs) of a dense layer's products, by name."""
        at = self.dense
        queries, keys = at.num_heads * at.head_dim, at.num_kv_heads * at.head_dim
        return {
            "qkv": (queries + 2 * keys, at.hidden_size),
            "o": (at.hidden_size, queries),
            "gate_up": (2 * at.intermediate_size, at.hidden_size),
            "down": (at.hidden_size, at.intermediate_size),
        }


def _tiny_models(*families: str, longest: int = 40, new_tokens: int = 12, **overrides: Any) -> dict[str, LawModel]:
    own: Mapping[str, dict[str, Any]] = {"mistral": {"sliding_window": 6}, "deepseek-v3": {"qk_rope_head_dim": 16}}
    return {
        f"tiny {name}": LawModel(
            config=tiny_config(name, **{**overrides, **own.get(name, {})}),
            block_size=4,
            split_size=16,
            longest=longest,
            new_tokens=new_tokens,
        )
        for name in families
    }


WHOLE = Sizes(
    name="whole",
    dtype=torch.bfloat16,
    block_size=16,
    split_size=256,
    model=LLAMA_8B,
    law_models={
        **_tiny_models("llama-bias", "qwen3-tied", "mistral", "qwen3-moe", "deepseek-v3"),
        "SmolLM2-135M's shape": LawModel(
            config=SMOLLM2_135M, block_size=16, split_size=256, longest=600, new_tokens=24
        ),
    },
    sparse_model=QWEN3_30B_A3B,
    latent_model=DEEPSEEK_V3_LAYER,
    latent_context=4096,
    decode_seqs=256,
    decode_context=1024,
    decode_steps=48,
    prefill_seqs=8,
    prefill_tokens=2048,
    prefill_steps=5,
    shared_seqs=256,
    shared_prefix=16_384,
    shared_own=64,
    few_rows=16,
    many_rows=8192,
    offline_rows=512,
    offline_in=1024,
    offline_out=512,
    copy_bytes=2 << 30,
    product_size=8192,
    runs=20,
    warm=3,
)
QUICK = replace(
    WHOLE,
    name="quick",
    law_models=_tiny_models("llama-bias"),
    decode_steps=16,
    prefill_steps=2,
    offline_rows=64,
    offline_in=256,
    offline_out=64,
    runs=8,
)
_TOY_MODEL: Mapping[str, Any] = {
    **_LLAMA,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_TOY_EXPERTS: Mapping[str, Any] = tiny_config(
    "qwen3-moe",
    num_hidden_layers=1,
    mlp_only_layers=[],
    num_key_value_heads=1,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    vocab_size=128,
)
_TOY_LATENTS: Mapping[str, Any] = tiny_config(
    "deepseek-v3",
    num_hidden_layers=1,
    first_k_dense_replace=0,
    qk_rope_head_dim=16,
    moe_intermediate_size=32,
    vocab_size=128,
)
# Triton's interpreter is slow, and wrong in bfloat16.
TOY = Sizes(
    name="toy",
    dtype=torch.float32,
    block_size=4,
    split_size=16,
    model=_TOY_MODEL,
    law_models=_tiny_models(
        "llama-bias", longest=18, new_tokens=4, num_hidden_layers=1, intermediate_size=48, num_key_value_heads=1
    ),
    sparse_model=_TOY_EXPERTS,
    latent_model=_TOY_LATENTS,
    latent_context=20,
    decode_seqs=2,
    decode_context=12,
    decode_steps=2,
    prefill_seqs=2,
    prefill_tokens=8,
    prefill_steps=1,
    shared_seqs=4,
    shared_prefix=32,
    shared_own=4,
    few_rows=3,
    many_rows=4,
    offline_rows=3,
    offline_in=5,
    offline_out=2,
    copy_bytes=1 << 16,
    product_size=64,
    runs=1,
    warm=0,
)
SIZES: Mapping[str, Sizes] = {sizes.name: sizes for sizes in (WHOLE, QUICK, TOY)}
