"""Tiny checkpoints of every family's members, written without a hub: a folder that any Hugging Face tool opens.

Responsible for: `make_tiny` (safetensors, config, byte-level tokenizer, chat template; whole in a tenth of a
second) and the tensors behind it. GGUF files of the same weights are `tiny_gguf`'s. Weights are random but drawn
so that logits are decisive: greedy choices don't hang on rounding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

VOCAB_SIZE = 384
BOS, EOS, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, BOS, EOS)  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the of and to in is that for it was with as on be at by this from or an are not have but what all were when "
    "question answer write list number name return function true false one two three user assistant system"
)

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "attention_bias": False,
    "use_sliding_window": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
_DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
# What differs from `_BASE`, by the member's name.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"head_dim": 32},
    "llama3": {"rope_scaling": _LLAMA3, "rope_theta": 500000.0},
    "llama-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama-yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    "smollm": {"tie_word_embeddings": True, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 24,
        "sliding_window": None,
    },
    "qwen2": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2-untied": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3-tied": {**_QWEN3, "tie_word_embeddings": True},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen2-moe": {
        **_EXPERTS,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "use_sliding_window": False,
    },
    "qwen3-moe": {
        **_QWEN3,
        **_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "deepseek-v2": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek-v3": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 32,
        "v_head_dim": 12,
        "rope_scaling": _DEEPSEEK_YARN,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json of a member; an override of None stores null, which stands for "not given" in these configs."""
    return {**_BASE, **FAMILIES[family], **overrides}


def make_tiny(
    path: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes a tiny model folder and returns it. `overrides` go into config.json; see FAMILIES for members."""
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    tensors = {name: t.to(dtype).contiguous() for name, t in tiny_tensors(config, seed=seed).items()}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": config["eos_token_id"]})
    write_tokenizer(folder)
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return folder


class Draw(NamedTuple):
    """How a tensor is drawn: normal numbers."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def tiny_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """float32 tensors under Hugging Face names for a config; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*draw.shape, generator=generator) * draw.std + draw.mean
        for name, draw in tensor_draws(config).items()
    }


def tensor_draws(config: Mapping[str, Any]) -> dict[str, Draw]:
    """What a checkpoint of a config stores, under Hugging Face names; nothing is allocated."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kind = config["model_type"]
    always_bias = kind in ("qwen2", "qwen2_moe")
    qkv_bias = always_bias or bool(config.get("attention_bias"))
    o_bias = not always_bias and bool(config.get("attention_bias"))

    def normal(*shape: int, std: float, mean: float = 0.0) -> Draw:
        return Draw(shape, std, mean)

    tensors: dict[str, Draw] = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=0.3)}

    def linear(name: str, out_features: int, in_features: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = normal(out_features, in_features, std=1.5 * in_features**-0.5)
        if bias:
            tensors[f"{name}.bias"] = normal(out_features, std=0.3)

    def mlp(at: str, inner: int, bias: bool = False) -> None:
        linear(f"{at}.gate_proj", inner, hidden, bias)
        linear(f"{at}.up_proj", inner, hidden, bias)
        linear(f"{at}.down_proj", hidden, inner, bias)

    def router(rows: int) -> Draw:
        return normal(rows, hidden, std=2 * hidden**-0.5)

    def latent_attention(at: str) -> None:
        plain, rotated, value = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
        rank, q_rank, q_size = config["kv_lora_rank"], config["q_lora_rank"], heads * (plain + rotated)
        if q_rank is None:
            linear(f"{at}.q_proj", q_size, hidden, False)
        else:
            linear(f"{at}.q_a_proj", q_rank, hidden, False)
            tensors[f"{at}.q_a_layernorm.weight"] = normal(q_rank, std=0.1, mean=1.0)
            linear(f"{at}.q_b_proj", q_size, q_rank, False)
        linear(f"{at}.kv_a_proj_with_mqa", rank + rotated, hidden, False)
        tensors[f"{at}.kv_a_layernorm.weight"] = normal(rank, std=0.1, mean=1.0)
        linear(f"{at}.kv_b_proj", heads * (plain + value), rank, False)
        linear(f"{at}.o_proj", hidden, heads * value, False)

    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        tensors[f"{at}.input_layernorm.weight"] = normal(hidden, std=0.1, mean=1.0)
        if kind.startswith("deepseek"):
            latent_attention(f"{at}.self_attn")
        else:
            linear(f"{at}.self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
            linear(f"{at}.self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias)
            linear(f"{at}.self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
            linear(f"{at}.self_attn.o_proj", hidden, heads * head_dim, o_bias)
        if kind in ("qwen3", "qwen3_moe"):
            tensors[f"{at}.self_attn.q_norm.weight"] = normal(head_dim, std=0.1, mean=1.0)
            tensors[f"{at}.self_attn.k_norm.weight"] = normal(head_dim, std=0.1, mean=1.0)
        tensors[f"{at}.post_attention_layernorm.weight"] = normal(hidden, std=0.1, mean=1.0)
        if kind == "mixtral":
            at += ".block_sparse_moe"
            tensors[f"{at}.gate.weight"] = router(config["num_local_experts"])
            for expert in range(config["num_local_experts"]):
                for name, sizes in {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}.items():
                    linear(f"{at}.experts.{expert}.{name}", *sizes, False)
        elif _is_sparse(config, i):
            num_experts = config["num_experts" if "num_experts" in config else "n_routed_experts"]
            tensors[f"{at}.mlp.gate.weight"] = router(num_experts)
            for expert in range(num_experts):
                mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
            if config.get("n_shared_experts"):
                mlp(f"{at}.mlp.shared_experts", config["n_shared_experts"] * config["moe_intermediate_size"])
            if kind == "deepseek_v3":
                tensors[f"{at}.mlp.gate.e_score_correction_bias"] = normal(num_experts, std=0.1)
            if kind == "qwen2_moe":
                mlp(f"{at}.mlp.shared_expert", config["shared_expert_intermediate_size"])
                tensors[f"{at}.mlp.shared_expert_gate.weight"] = router(1)
        else:
            mlp(f"{at}.mlp", inner, bool(config.get("mlp_bias")))
    tensors["model.norm.weight"] = normal(hidden, std=0.1, mean=1.0)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, std=0.3)
    return tensors


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Of Qwen's and DeepSeek's mixtures of experts."""
    if "moe_intermediate_size" not in config or layer < config.get("first_k_dense_replace", 0):
        return False
    dense = config.get("mlp_only_layers") or []
    return (layer + 1) % config.get("decoder_sparse_step", 1) == 0 and layer not in dense


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's mapping)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(sorted(set(range(256)) - set(printable))):
        symbols[byte] = chr(256 + n)
    return [symbols[byte] for byte in range(256)]


def tiny_vocabulary(vocab_size: int = VOCAB_SIZE) -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens in order of their ids, merges): special tokens, bytes, then pieces of common words."""
    space = byte_symbols()[ord(" ")]
    tokens = [*SPECIAL_TOKENS, *byte_symbols()]
    merges: list[tuple[str, str]] = []
    for word in WORDS.split():
        piece = space
        for letter in word:
            if len(tokens) < vocab_size and piece + letter not in tokens:
                tokens.append(piece + letter)
                merges.append((piece, letter))
            piece += letter
    tokens += [f"<|unused_{n}|>" for n in range(vocab_size - len(tokens))]
    return tokens[:vocab_size], merges


def write_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, **config: Any) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE of VOCAB_SIZE tokens."""
    tokens, merges = tiny_vocabulary()
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, token in enumerate(SPECIAL_TOKENS)
    ]
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": split,
            "post_processor": None,
            "decoder": split,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: token_id for token_id, token in enumerate(tokens)},
                "merges": [list(pair) for pair in merges],
            },
        },
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": END_OF_TEXT,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        **({} if chat_template is None else {"chat_template": chat_template}),
        **config,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
