"""How large everything is: shapes of real models, and the sizes of benches, whole, quick, and as toys for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    num_experts: int
    top: int
    hidden: int
    inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    heads: int
    rank: int
    rotary_dim: int
    plain_dim: int  # of a head's query and key, beside the rotary part; and of its value


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
    experts: ExpertsShape
    latent: LatentShape
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
    def head_dim(self) -> int:
        return int(self.model.get("head_dim") or self.model["hidden_size"] // self.model["num_attention_heads"])

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(output features, inputs) of a layer's products, by name."""
        config, hidden = self.model, int(self.model["hidden_size"])
        queries, keys = (config[f"num_{kind}_heads"] * self.head_dim for kind in ("attention", "key_value"))
        inner = int(config["intermediate_size"])
        return {
            "qkv": (queries + 2 * keys, hidden),
            "o": (hidden, queries),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }


def _tiny_models(*families: str, longest: int = 40, new_tokens: int = 12, **overrides: Any) -> dict[str, LawModel]:

    windows = {"mistral": {"sliding_window": 6}}
    return {
        f"tiny {name}": LawModel(
            config=tiny_config(name, **{**overrides, **windows.get(name, {})}),
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
        **_tiny_models("llama-bias", "qwen3-tied", "mistral"),
        "SmolLM2-135M's shape": LawModel(
            config=SMOLLM2_135M, block_size=16, split_size=256, longest=600, new_tokens=24
        ),
    },
    experts=ExpertsShape(num_experts=128, top=8, hidden=2048, inner=768),  # Qwen3-30B-A3B
    latent=LatentShape(heads=128, rank=512, rotary_dim=64, plain_dim=128),  # DeepSeek-V3
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
    experts=ExpertsShape(num_experts=4, top=2, hidden=64, inner=32),
    latent=LatentShape(heads=4, rank=32, rotary_dim=16, plain_dim=16),
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
