"""Tiny GGUF files: the weights of `tiny` under GGUF's names, in any block type, whole or split.

Types that the `gguf` package can quantize to hold the weights of `tiny_tensors`. K types, which it can only read,
hold random blocks with fitting scales: their values are what `gguf` dequantizes them to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchinfer.testing.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_config, tiny_tensors, tiny_vocabulary

K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
# K blocks are 256 elements long, so rows must be.
K_SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
# Members with experts, as these files can have them: in every layer.
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2-moe": {"decoder_sparse_step": 1},
    "qwen3-moe": {"mlp_only_layers": None},
}
_ARCH = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_EXPERT = re.compile(r"model\.layers\.([0-9]+)\.(?:mlp|block_sparse_moe)\.experts\.[0-9]+\.(.*)\.weight")
_OF_EXPERT = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def make_tiny_gguf(
    path: str | Path,
    family: str = "llama",
    *,
    quant: str | dict[str, str] = "F32",
    seed: int = 0,
    freq_factors: list[float] | None = None,
    metadata: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Writes a tiny .gguf file and returns its path.

    quant         type of all matrices, or by a part of the GGUF name ("" is the rest): {"ffn_down": "Q8_0", "": "F16"}
    freq_factors  RoPE divisors stored as rope_freqs.weight
    metadata      further or other metadata; a value of None leaves a key out
    """
    import gguf

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {"": quant} if isinstance(quant, str) else quant
    if set(kinds.values()) & set(K_TYPES):
        overrides = {**K_SIZES, **overrides}
    config = tiny_config(family, **overrides)
    arch = _ARCH[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in tiny_metadata(config, arch, metadata or {}).items():
        _add(writer, key, value)
    for gguf_name, tensor in _gguf_tensors(tiny_tensors(config, seed=seed)).items():
        values = tensor.numpy()
        if arch == "llama" and ("attn_q." in gguf_name or "attn_k." in gguf_name):
            values = _interleave(values, config)
        kind = next(kinds[part] for part in sorted(kinds, key=len, reverse=True) if part in gguf_name)
        plain = tensor.dim() == 1 or "ffn_gate_inp" in gguf_name
        _add_tensor(writer, gguf_name, values, "F32" if plain else kind, seed)
    if freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(freq_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_metadata(config: dict[str, Any], arch: str, more: dict[str, Any]) -> dict[str, Any]:
    """Metadata of a tiny file, tokenizer included; `more` wins, None leaves a key out."""
    tokens, merges = tiny_vocabulary(config["vocab_size"])
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    found: dict[str, Any] = {
        "general.name": f"tiny {arch}",
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.vocab_size": config["vocab_size"],
        **_experts_metadata(config, arch),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL_TOKENS else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return {key: value for key, value in {**found, **more}.items() if value is not None}


def _experts_metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    keys = {
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    return {f"{arch}.{key}": value for key, value in keys.items()}


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: Any, name: str, values: np.ndarray[Any, Any], kind: str, seed: int) -> None:
    import gguf

    qtype = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, values)
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    elif kind in K_TYPES:
        blocks = random_k_blocks(kind, values.shape, seed=seed + len(name))
        writer.add_tensor(name, blocks, raw_dtype=qtype)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)


def random_k_blocks(kind: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random blocks [.., bytes] of a K type, dequantizing to values about as large as an initialised layer's."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    *rows, width = shape
    num_blocks = width // block
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, size=(*rows, num_blocks, size), dtype=np.uint8)
    scale = np.array([2e-4 if kind != "Q6_K" else 3e-5], dtype=np.float16).view(np.uint8)
    if kind == "Q6_K":
        data[..., -2:] = scale  # the block's scale stands last
    else:
        data[..., 0:2] = scale  # scale, then minimum
        data[..., 2:4] = np.array([2e-3], dtype=np.float16).view(np.uint8)
    return data.reshape(*rows, num_blocks * size)


def _gguf_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By GGUF's names; experts of a layer stacked, gates of shared experts as vectors."""
    found: dict[str, torch.Tensor] = {}
    stacked: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (hit := _EXPERT.fullmatch(name)) is not None:
            stacked.setdefault(f"blk.{hit[1]}.ffn_{_OF_EXPERT[hit[2]]}_exps.weight", []).append(tensor)
        else:
            found[_gguf_name(name)] = tensor[0] if "shared_expert_gate" in name else tensor
    return found | {name: torch.stack(experts) for name, experts in stacked.items()}


def _gguf_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base in _TOP:
        return f"{_TOP[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{_IN_LAYER[rest]}.{kind}"


def _interleave(values: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Rows of q or k in the order of llama files: rotated pairs next to each other."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rows = torch.from_numpy(values).view(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(rows.transpose(1, 2).reshape(values.shape).numpy())
