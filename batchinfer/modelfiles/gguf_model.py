"""Opens a .gguf model: puts its metadata into the form of Hugging Face's config.json.

Responsible for: which metadata key means what, the defaults where one is missing, and experts' tensors one by one. Not
for: the container (`gguf_header`), nor names and row order of weights (models/llama.py). To add an architecture, add an
entry to ARCHITECTURES and its weight names to the model's file.
"""

from __future__ import annotations

import array
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.modelfiles.experts_config import MOST_EXPERTS
from batchinfer.modelfiles.files import ModelFiles, StoredTensor, TokenizerFiles
from batchinfer.modelfiles.gguf_header import GGUFHeader, read_headers

TOKENIZER_PREFIX = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """Of Hugging Face. renormalize: whether weights of experts add up to 1, which files need not say; None: there are
    no experts."""

    name: str
    model_type: str
    renormalize: bool | None = None


# GGUF files of Mistral models carry the architecture "llama", those of Mixtral too.
ARCHITECTURES = {
    "llama": _Architecture(name="LlamaForCausalLM", model_type="llama"),
    "qwen2": _Architecture(name="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen2moe": _Architecture(name="Qwen2MoeForCausalLM", model_type="qwen2_moe", renormalize=False),
    "qwen3": _Architecture(name="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": _Architecture(name="Qwen3MoeForCausalLM", model_type="qwen3_moe", renormalize=True),
}
_MIXTRAL = _Architecture(name="MixtralForCausalLM", model_type="mixtral", renormalize=True)
# Metadata that change what a model computes and that no model here has: the key after the architecture, and the values
# that mean "not there".
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "expert_gating_func": (0, 1),  # 1: softmax
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "attention.sliding_window": (0,),
    "attention.scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def open_gguf(path: Path) -> ModelFiles:
    """Opens a .gguf file, or the first part of a split one."""
    header, parts = read_headers(path)
    tokenizer = TokenizerFiles(kind="gguf", gguf=tokenizer_metadata(header))
    try:
        config = config_from_metadata(header)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: metadata of the wrong type: {error}") from error
    return ModelFiles(
        name=path.stem,
        kind="gguf",
        root=path,
        config=config,
        tokenizer=tokenizer,
        chat_templates=chat_templates(header.metadata),
        weight_files=parts,
        tensors=_experts_apart(header.tensors),
        eos_token_ids=eos_token_ids(header.metadata),
    )


_EXPERTS = re.compile(r"(blk\.[0-9]+\.ffn_(?:gate|up|down)_exps)\.weight")
_SHARED_GATE = re.compile(r"blk\.[0-9]+\.ffn_gate_inp_shexp\.weight")


def _experts_apart(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors of all experts of a layer as one for each, with its number before the last part of the name. Gates of
    shared experts, which are written as vectors, as the rows that they are."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        num_experts = tensor.shape[0] if len(tensor.shape) == 3 else 0
        # Those of another form, or of a damaged number, stay as they are: no parameter is of such a name.
        if (hit := _EXPERTS.fullmatch(name)) is not None and 0 < num_experts <= MOST_EXPERTS:
            nbytes = tensor.nbytes // num_experts
            for i in range(num_experts):
                one = f"{hit[1]}.{i}.weight"
                offset = tensor.offset + i * nbytes
                found[one] = replace(tensor, name=one, shape=tensor.shape[1:], offset=offset, nbytes=nbytes)
        elif _SHARED_GATE.fullmatch(name) and len(tensor.shape) == 1:
            found[name] = replace(tensor, shape=(1, *tensor.shape))
        else:
            found[name] = tensor
    return found


def open_gguf_tokenizer(path: Path) -> tuple[TokenizerFiles, dict[str, str], frozenset[int]]:
    """Tokenizer, chat templates and end tokens of a GGUF file (also of one that holds a vocabulary only)."""
    header, _ = read_headers(path)
    return (
        TokenizerFiles(kind="gguf", gguf=tokenizer_metadata(header)),
        chat_templates(header.metadata),
        eos_token_ids(header.metadata),
    )


def tokenizer_metadata(header: GGUFHeader) -> dict[str, Any]:
    found = {
        key.removeprefix(TOKENIZER_PREFIX): value
        for key, value in header.metadata.items()
        if key.startswith(TOKENIZER_PREFIX)
    }
    if not found.get("tokens"):
        raise ModelError(
            f"{header.path}: it holds no tokenizer ({TOKENIZER_PREFIX}tokens is missing or empty); "
            "name a tokenizer under model.tokenizer"
        )
    return found


def eos_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    values = (metadata.get(TOKENIZER_PREFIX + key) for key in EOS_KEYS)
    return frozenset(value for value in values if isinstance(value, int))


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default one, `tokenizer.chat_template.NAME` are named ones."""
    templates = {}
    for key, value in metadata.items():
        if isinstance(value, str) and (key == TEMPLATE_KEY or key.startswith(TEMPLATE_KEY + ".")):
            templates[key.removeprefix(TEMPLATE_KEY).lstrip(".") or "default"] = value
    return templates


def config_from_metadata(header: GGUFHeader) -> dict[str, Any]:
    """The config.json that a Hugging Face folder of the same model would have."""
    metadata, tensors = header.metadata, header.tensors
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: GGUF architecture {arch!r} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ModelError(f"{header.path}: metadata key {arch}.{key} is missing; convert the model again")
        return value

    def whole(key: str, value: Any) -> int:
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{header.path}: {arch}.{key} differs from layer to layer; not supported")
            value = value[0]
        return int(value)

    for key, neutral in UNSUPPORTED.items():
        value = get(key)
        if value is not None and value not in neutral:
            raise ModelError(
                f"{header.path}: metadata key {arch}.{key} is {value!r}; GGUF models with it are not supported"
            )
    architecture, num_experts = ARCHITECTURES[arch], int(get("expert_count", 0))
    if num_experts and architecture.renormalize is None:
        if arch != "llama":
            raise ModelError(f"{header.path}: metadata key {arch}.expert_count is {num_experts}; not supported there")
        architecture = _MIXTRAL
    hidden_size = int(need("embedding_length"))
    num_heads = whole("attention.head_count", need("attention.head_count"))
    num_kv_heads = whole("attention.head_count_kv", get("attention.head_count_kv", num_heads))
    head_dim = int(get("attention.key_length", hidden_size // num_heads))
    if int(get("attention.value_length", head_dim)) != head_dim:
        raise ModelError(f"{header.path}: keys and values of different head sizes are not supported")
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_size": hidden_size,
        "intermediate_size": whole("feed_forward_length", need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _nice(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(need("context_length")),
        "vocab_size": _vocab_size(header),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_parameters": _rope_parameters(header, get),
        "bos_token_id": metadata.get(TOKENIZER_PREFIX + "bos_token_id"),
        "eos_token_id": metadata.get(TOKENIZER_PREFIX + "eos_token_id"),
    }
    rotary_dim = int(get("rope.dimension_count", head_dim))
    if rotary_dim != head_dim:
        config["rope_dimension_count"] = rotary_dim
    if architecture.renormalize is not None:
        config["num_local_experts" if architecture is _MIXTRAL else "num_experts"] = int(need("expert_count"))
        config["num_experts_per_tok"] = int(need("expert_used_count"))
        config["norm_topk_prob"] = bool(get("expert_weights_norm", architecture.renormalize))
        if architecture is _MIXTRAL:
            if not config["norm_topk_prob"]:
                raise ModelError(f"{header.path}: metadata key {arch}.expert_weights_norm is false; not supported")
        else:
            config["moe_intermediate_size"] = int(need("expert_feed_forward_length"))
        if arch == "qwen2moe":
            config["shared_expert_intermediate_size"] = int(need("expert_shared_feed_forward_length"))
    return config


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: tensor 'token_embd.weight' is missing: not a complete model")
    return embedding.shape[0]


def _nice(value: float) -> float:
    """A float32 from metadata as the decimal number that was meant (1e-05, not 9.999999747378752e-06)."""
    return float(f"{value:.7g}")


def _rope_parameters(header: GGUFHeader, get: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _nice(get("rope.freq_base", 10000.0))}
    if "rope_freqs.weight" in header.tensors:
        # Scaling as one divisor per frequency: how llama3 scaling is stored in GGUF.
        rope["rope_type"] = "freq_factors"
        rope["freq_factors"] = _read_floats(header.tensors["rope_freqs.weight"])
        return rope
    kind = get("rope.scaling.type", "none")
    # Files from before rope.scaling.type existed have linear scaling under another key.
    old_linear = float(get("rope.scale_linear", 1.0))
    if kind == "none" and old_linear == 1.0:
        return rope
    if kind in ("linear", "none"):
        rope["rope_type"] = "linear"
        rope["factor"] = float(get("rope.scaling.factor", old_linear))
    elif kind == "yarn":
        factor = float(get("rope.scaling.factor", 1.0))
        rope["rope_type"] = "yarn"
        rope["factor"] = factor
        rope["original_max_position_embeddings"] = int(
            get("rope.scaling.original_context_length", get("context_length"))
        )
        # The file's attn_factor is a multiplier on top of YaRN's own temperature.
        attn_factor = float(get("rope.scaling.attn_factor", 1.0))
        rope["attention_factor"] = attn_factor * (1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            value = get(f"rope.scaling.{theirs}")
            if value is not None:
                rope[ours] = float(value)
    else:
        raise ModelError(f"{header.path}: RoPE scaling of type {kind!r} is not supported (none, linear, yarn)")
    return rope


def _read_floats(tensor: StoredTensor) -> list[float]:
    if tensor.dtype != "F32":
        raise ModelError(f"{tensor.file}: tensor {tensor.name!r} is of type {tensor.dtype}, F32 is expected")
    values = array.array("f")
    with tensor.file.open("rb") as f:
        f.seek(tensor.offset)
        values.frombytes(f.read(tensor.nbytes))
    if sys.byteorder == "big":
        values.byteswap()
    return list(values)
