"""How large a decoder is: weights, what of them a token meets, KV cache, multiplications of attention.

Counted from a config in Hugging Face's form: llama and its relatives, mixtures of experts (Mixtral, Qwen3-MoE,
gpt-oss), latent attention (DeepSeek). Biases and the norms of single heads are left out: less than a thousandth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
_SCALE_BYTES = {"int8": 4}  # of a token's key or value of one head


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts are of the whole model.

    layer_weights        matrices of the layers that every token is multiplied with: attention, gated layers, routers
    plain_weights        of layer_weights what no quantization is for: routers, and the up-projection of latents, whose
                         absorbed form queries are multiplied with the other way round
    expert_weights       of one expert in one layer; there are num_experts in each of expert_layers
    layer_outputs, expert_outputs   outputs of what may be quantized: each may have a scale then
    head_weights         of the LM head
    embedding_weights    of the table of embeddings; 0 where that is the head
    norm_weights         of the norms
    kv_values, kv_rows   of one token: values in the KV cache, and rows of them (keys or values of one head)
    attention_products   multiplications for one query and one token that it sees, while decoding; in a prefill
                         `prefill_attention_products`, which differ in latent attention
    window, windowed     `windowed` of the layers (a share) see only the last `window` tokens; the KV cache keeps all
    """

    layer_weights: int
    head_weights: int
    plain_weights: int = 0
    layer_outputs: int = 0
    expert_outputs: int = 0
    embedding_weights: int = 0
    norm_weights: int = 0
    expert_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0
    kv_values: int = 0
    kv_rows: int = 0
    attention_products: int = 0
    prefill_attention_products: int = 0
    window: int = 0
    windowed: float = 0.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """None where the config does not say how large its layers are."""

        def count(*names: str, default: int = 0) -> int:
            found = (config.get(name) for name in names)
            return next((v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0), default)

        layers, hidden, vocab = count("num_hidden_layers"), count("hidden_size"), count("vocab_size")
        heads, inner = count("num_attention_heads"), count("intermediate_size")
        experts = count("num_experts", "num_local_experts", "n_routed_experts")
        expert_inner = count("moe_intermediate_size", default=inner)
        if not (layers and hidden and vocab and heads and (inner or (experts and expert_inner))):
            return None
        family = _family(config)
        usual_head_dim = hidden // heads if "head_dim" in config else _HEAD_DIM.get(family, hidden // heads)
        kv_heads, head_dim = count("num_key_value_heads", default=heads), count("head_dim", default=usual_head_dim)
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        outputs = (heads + 2 * kv_heads) * head_dim + hidden
        kv_values, kv_rows = 2 * kv_heads * head_dim, 2 * kv_heads
        decoding = prefill = 2 * heads * head_dim
        up = 0  # from latents
        if rank := count("kv_lora_rank"):
            nope, rope, value = count("qk_nope_head_dim"), count("qk_rope_head_dim"), count("v_head_dim")
            query, query_rank = heads * (nope + rope), count("q_lora_rank")
            attention = query_rank * (hidden + query) if query_rank else hidden * query
            up = rank * heads * (nope + value)
            attention += hidden * (rank + rope) + up + heads * value * hidden
            outputs = query_rank + query + rank + rope + hidden
            kv_values, kv_rows = rank + rope, 1
            decoding, prefill = heads * (2 * rank + rope), heads * (nope + rope + value)
        dense = _dense_layers(config, layers) if experts else layers
        shared = count("n_shared_experts") * expert_inner or count("shared_expert_intermediate_size")
        window, windowed = _window(config, family, layers)
        return cls(
            layer_weights=layers * attention
            + dense * 3 * hidden * inner
            + (layers - dense) * (hidden * experts + 3 * hidden * shared),
            plain_weights=layers * up + (layers - dense) * hidden * experts,
            layer_outputs=layers * outputs
            + dense * (2 * inner + hidden)
            + (layers - dense) * (2 * shared + hidden if shared else 0),
            expert_outputs=2 * expert_inner + hidden if experts else 0,
            head_weights=vocab * hidden,
            embedding_weights=0 if config.get("tie_word_embeddings") else vocab * hidden,
            norm_weights=(2 * layers + 1) * hidden,
            expert_layers=layers - dense,
            num_experts=experts,
            experts_per_token=min(count("num_experts_per_tok", "experts_per_token", default=1), experts),
            expert_weights=3 * hidden * expert_inner if experts else 0,
            kv_values=layers * kv_values,
            kv_rows=layers * kv_rows,
            attention_products=layers * decoding,
            prefill_attention_products=layers * prefill,
            window=window,
            windowed=windowed,
        )

    @property
    def all_expert_weights(self) -> int:
        return self.expert_layers * self.num_experts * self.expert_weights

    @property
    def num_parameters(self) -> int:
        return (
            self.layer_weights
            + self.all_expert_weights
            + self.head_weights
            + self.embedding_weights
            + self.norm_weights
        )

    @property
    def active_weights(self) -> int:
        """Of the layers: what one token is multiplied with."""
        return self.layer_weights + self.expert_layers * self.experts_per_token * self.expert_weights

    def touched_weights(self, tokens: float) -> float:
        """Of the layers: what a step of so many tokens reads, where each chooses its experts by chance."""
        return self.layer_weights + self.all_expert_weights * self._touched_experts(tokens)

    def touched_outputs(self, tokens: float) -> float:
        """Outputs of the weights that such a step reads."""
        experts = self.expert_layers * self.num_experts * self._touched_experts(tokens)
        return self.layer_outputs + experts * self.expert_outputs

    def _touched_experts(self, tokens: float) -> float:
        """A share of all of them."""
        return 1 - math.pow(1 - self.experts_per_token / self.num_experts, tokens) if self.num_experts else 0.0

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Of one token of one sequence, in all layers; scales included."""
        return self.kv_values * _KV_BYTES[dtype] + self.kv_rows * _SCALE_BYTES.get(dtype, 0)

    def seen_tokens(self, context: float) -> float:
        """How many tokens of so long a context a query sees, in the mean over the layers."""
        return context - self.windowed * max(context - self.window, 0.0)


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many layers of a mixture of experts have none."""
    first, step, named = (
        config.get(key) for key in ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers")
    )
    first = first if isinstance(first, int) else 0
    step = step if isinstance(step, int) and step > 0 else 1
    named = named if isinstance(named, list) else []
    return sum(i < first or (i + 1) % step != 0 or i in named for i in range(layers))


# What the classes of configs take for keys that config.json leaves out (`modelfiles.llama_config`; null is no default).
_HEAD_DIM = {"qwen3": 128}
_WINDOW = {"mistral": 4096}
_FIRST_WINDOWED = 28  # max_window_layers
_FLAGGED = ("qwen2", "qwen3", "qwen2moe", "qwen3moe")  # a window is one only under use_sliding_window


def _family(config: Mapping[str, Any]) -> str:
    """ "qwen3moe" of Qwen3MoeForCausalLM, else of the model_type qwen3_moe; "" where neither is told."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    known = name.removesuffix("ForCausalLM").lower() if isinstance(name, str) else config.get("model_type")
    return known.replace("_", "") if isinstance(known, str) else ""


def _window(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, float]:
    """(tokens, share of the layers): (0, 0.0) where all of them see everything."""
    window, kinds = config.get("sliding_window", _WINDOW.get(family)), config.get("layer_types")
    flagged = family in _FLAGGED or (family not in _WINDOW and "use_sliding_window" in config)
    if not isinstance(window, int) or window <= 0 or family == "llama":
        return 0, 0.0
    if flagged and config.get("use_sliding_window") is not True:
        return 0, 0.0
    if isinstance(kinds, list):
        return window, kinds.count("sliding_attention") / layers
    first, every = config.get("max_window_layers", _FIRST_WINDOWED), config.get("sliding_window_pattern")
    if flagged and isinstance(first, int):
        return window, (layers - min(first, layers)) / layers
    if isinstance(every, int) and every > 0:  # each layer of that number sees everything
        return window, (layers - layers // every) / layers
    return window, 1.0
