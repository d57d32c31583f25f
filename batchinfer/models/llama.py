"""The llama family: Llama 2 and 3, SmolLM, Mistral, Mixtral, Qwen2, Qwen3 and their mixtures of experts. Pre-norm
decoder, grouped-query attention, RoPE, gated MLP, or experts that are such.

Modules' `forward` is called directly: the way through `nn.Module.__call__`, hundreds of times in a step, is a tenth of
what Python takes of it.

Responsible for: the family's graph, its weight names in safetensors and GGUF. Its members differ by their configs
only (`modelfiles.llama_config`). Operations are the kernel table's; attention is the
context's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from batchinfer_kernels.native.attention import TileLayer, TileStep
from batchinfer_kernels.native.decoder import DecoderWeights, NativeDecoder
from batchinfer_kernels.turning import Turning
from torch import Tensor, nn

from batchinfer.attention.context import ForwardContext
from batchinfer.attention.spec import AttentionSpec
from batchinfer.layers import GatedMLP, LayerMaker, Rope, SparseMLP
from batchinfer.modelfiles import ModelFiles
from batchinfer.modelfiles.experts_config import MIXTRAL_PROJECTIONS
from batchinfer.modelfiles.llama_config import LlamaConfig
from batchinfer.models.base import BuildOptions, ModelFacts
from batchinfer.models.expert_rules import expert_rules, mlp_rules
from batchinfer.models.tied_head import has_tied_head
from batchinfer.weights import Ignore, Rule, stored_parts


class Attention(nn.Module):
    def __init__(self, layer: int, config: LlamaConfig, make: LayerMaker) -> None:
        super().__init__()
        self.layer, self.ops = layer, make.ops
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.sizes = [q_size, kv_size, kv_size]
        parts = {"q": q_size, "k": kv_size, "v": kv_size}
        at = f"layers.{layer}.attn"
        self.qkv = make.linear(config.hidden_size, parts, bias=config.qkv_bias, sensitive=("v",), name=f"{at}.qkv")
        self.o = make.linear(q_size, {"": config.hidden_size}, bias=config.o_bias, name=f"{at}.o")
        self.q_norm = make.norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = make.norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x: Any, residual: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext, wanted: Tensor | None
    ) -> Tensor:
        """residual + attention of x, which is what `input_norm` gave for residual [T, H]; of the tokens in `wanted`,
        [W, H], where that is given."""
        num_tokens = residual.shape[0]
        q, k, v = self.qkv.forward(x).split_with_sizes(self.sizes, dim=-1)
        q = q.view(num_tokens, self.num_heads, self.head_dim)
        k = k.view(num_tokens, self.num_kv_heads, self.head_dim)
        v = v.view(num_tokens, self.num_kv_heads, self.head_dim)
        turning = None
        if self.ops.turns:
            turning = self._turning(cos, sin)
        else:
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = self.ops.rope(q, k, cos, sin)
        out = ctx.attend(self.layer, q, k, v, turning).reshape(num_tokens, self.num_heads * self.head_dim)
        if wanted is not None:
            out, residual = out.index_select(0, wanted), residual.index_select(0, wanted)
        return self.o.forward(out, residual)

    def _turning(self, cos: Tensor, sin: Tensor) -> Turning:
        if self.q_norm is None or self.k_norm is None:
            return Turning(cos=cos, sin=sin)
        return Turning(cos=cos, sin=sin, q_weight=self.q_norm.weight, k_weight=self.k_norm.weight, eps=self.q_norm.eps)


class DecoderLayer(nn.Module):
    def __init__(self, layer: int, config: LlamaConfig, make: LayerMaker) -> None:
        super().__init__()
        hidden_size, inner, experts = config.hidden_size, config.intermediate_size, config.experts[layer]
        self.attn = Attention(layer, config, make)
        self.mlp: GatedMLP | SparseMLP
        feeds, at = None, f"layers.{layer}.mlp"
        if experts is None:
            self.mlp = GatedMLP(hidden_size, inner, make, name=at, bias=config.mlp_bias)
            feeds = self.mlp.gate_up
        else:
            self.mlp = SparseMLP(experts, hidden_size, make, name=at)
        self.input_norm = make.norm(hidden_size, config.rms_norm_eps, feeds=self.attn.qkv)
        self.post_norm = make.norm(hidden_size, config.rms_norm_eps, feeds=feeds)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext, wanted: Tensor | None = None
    ) -> Tensor:
        """Of the residual stream [T, H], which is overwritten; of the tokens in `wanted` only where that is given."""
        hidden = self.attn.forward(self.input_norm.forward(hidden), hidden, cos, sin, ctx, wanted)
        return self.mlp.forward(self.post_norm.forward(hidden), hidden)

    def in_c(self) -> DecoderWeights | None:
        """As `NativeDecoder` takes it; None where weights are not packed for it, heads have norms of their own, or
        there are experts."""
        attn, mlp = self.attn, self.mlp
        if isinstance(mlp, SparseMLP):
            return None
        qkv, o, gate_up, down = (x.weights.in_c() for x in (attn.qkv, attn.o, mlp.gate_up, mlp.down))
        if qkv is None or o is None or gate_up is None or down is None or attn.q_norm is not None:
            return None
        return DecoderWeights(
            input_norm=self.input_norm.weight,
            post_norm=self.post_norm.weight,
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            qkv_bias=attn.qkv.bias,
            o_bias=attn.o.bias,
            gate_up_bias=mlp.gate_up.bias,
            down_bias=mlp.down.bias,
        )


class LlamaForCausalLM(nn.Module):
    """Any member of the family. See `models.base.CausalLM` for what is called from outside."""

    def __init__(self, config: LlamaConfig, facts: ModelFacts, make: LayerMaker) -> None:
        super().__init__()
        self.config, self.facts, self.ops = config, facts, make.ops
        self.attention_specs = tuple(
            AttentionSpec(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
                # A window that no sequence can outgrow is none.
                window=window if window is not None and window < facts.max_model_len else None,
            )
            for window in config.windows
        )
        self.embed = make.embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(i, config, make) for i in range(config.num_layers))
        tied_to = self.embed if config.tie_word_embeddings else None
        self.lm_head = make.head(config.vocab_size, config.hidden_size, tied_to=tied_to, name="lm_head")
        self.norm = make.norm(config.hidden_size, config.rms_norm_eps, feeds=self.lm_head)
        self.rope = Rope(config.rope, max_model_len=facts.max_model_len, device=make.device)
        self._decoder: NativeDecoder | None = None  # made when weights are there

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        cos, sin = self.rope(positions)
        hidden: Tensor = self.embed(token_ids)
        whole = self._whole(ctx)
        if whole is not None:
            decoder, attention = whole
            return decoder.run(hidden, cos, sin, attention, ctx.wanted)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, cos, sin, ctx, ctx.wanted if i == last else None)
        return hidden

    def _whole(self, ctx: ForwardContext) -> tuple[NativeDecoder, list[tuple[TileLayer, TileStep]]] | None:
        """What runs all layers in one call, where the kernel table has such a thing, and layers and attention are what
        it is for; else None."""
        if self.ops.decoder is None:
            return None
        attention = ctx.in_c()
        if attention is None:
            return None
        if self._decoder is None:
            layers = []
            for layer in self.layers:
                assert isinstance(layer, DecoderLayer)
                in_c = layer.in_c()
                if in_c is None:
                    return None
                layers.append(in_c)
            self._decoder = self.ops.decoder(
                layers,
                num_heads=self.config.num_heads,
                num_kv_heads=self.config.num_kv_heads,
                head_dim=self.config.head_dim,
                eps=self.config.rms_norm_eps,
            )
        return self._decoder, attention

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    @torch.inference_mode()
    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.lm_head.argmax(self.norm(hidden))

    def num_parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def weight_rules(self, kind: str) -> tuple[tuple[Rule, ...], tuple[Ignore, ...]]:
        """Names of the stored tensors, by kind of file ("hf" or "gguf")."""
        if kind == "gguf":
            permuted = self.facts.architecture in ("LlamaForCausalLM", "MixtralForCausalLM")
            return _gguf_rules(self.config, permuted=permuted), GGUF_IGNORES
        rules, ignores = _hf_rules(self.facts.architecture), HF_IGNORES
        if self.config.tie_word_embeddings:
            ignores += (Ignore(stored="lm_head.weight", reason="tied to the embedding"),)
            rules = tuple(rule for rule in rules if rule.parameter != _HEAD)
        return rules, ignores


_HF_LAYER, _OUR_LAYER, _HEAD = "model.layers.{i}.", "layers.{i}.", "lm_head.{kind}"
HF_RULES: tuple[Rule, ...] = (
    Rule(stored="model.embed_tokens.weight", parameter="embed.weight"),
    Rule(stored="model.norm.weight", parameter="norm.weight"),
    Rule(stored="lm_head.{kind}", parameter=_HEAD),
    Rule(stored=_HF_LAYER + "input_layernorm.weight", parameter=_OUR_LAYER + "input_norm.weight"),
    Rule(stored=_HF_LAYER + "post_attention_layernorm.weight", parameter=_OUR_LAYER + "post_norm.weight"),
    *(
        Rule(
            stored=f"{_HF_LAYER}self_attn.{part}_proj.{{kind}}",
            parameter=f"{_OUR_LAYER}attn.qkv.{{kind}}",
            part=part,
        )
        for part in ("q", "k", "v")
    ),
    Rule(stored=_HF_LAYER + "self_attn.o_proj.{kind}", parameter=_OUR_LAYER + "attn.o.{kind}"),
    Rule(stored=_HF_LAYER + "self_attn.{p}_norm.weight", parameter=_OUR_LAYER + "attn.{p}_norm.weight"),
    *mlp_rules(_HF_LAYER + "mlp.", _OUR_LAYER + "mlp."),
)
MIXTRAL_RULES = expert_rules(_HF_LAYER + "block_sparse_moe.", _OUR_LAYER + "mlp.", names=MIXTRAL_PROJECTIONS)
QWEN_MOE_RULES = expert_rules(_HF_LAYER + "mlp.", _OUR_LAYER + "mlp.", shared="shared_expert")
HF_IGNORES: tuple[Ignore, ...] = (
    Ignore(stored=_HF_LAYER + "self_attn.rotary_emb.inv_freq", reason="computed from the config"),
)
GGUF_IGNORES: tuple[Ignore, ...] = (
    Ignore(stored="rope_freqs.weight", reason="read as RoPE frequency factors when the file was opened"),
)


def _hf_rules(architecture: str) -> tuple[Rule, ...]:
    if architecture == "MixtralForCausalLM":
        return HF_RULES + MIXTRAL_RULES
    return HF_RULES + QWEN_MOE_RULES if architecture.startswith("Qwen") else HF_RULES


def _gguf_rules(config: LlamaConfig, *, permuted: bool) -> tuple[Rule, ...]:
    """GGUF's names. Files of the architecture "llama" store the rows of q and k in another order (`pairwise`)."""
    view = partial(pairwise, head_dim=config.head_dim) if permuted else None
    stored, ours = "blk.{i}.", "layers.{i}."
    return (
        Rule(stored="token_embd.weight", parameter="embed.weight"),
        Rule(stored="output_norm.weight", parameter="norm.weight"),
        Rule(stored="output.weight", parameter="lm_head.weight"),
        Rule(stored=stored + "attn_norm.weight", parameter=ours + "input_norm.weight"),
        Rule(stored=stored + "ffn_norm.weight", parameter=ours + "post_norm.weight"),
        *(
            Rule(
                stored=f"{stored}attn_{part}.{{kind}}",
                parameter=f"{ours}attn.qkv.{{kind}}",
                part=part,
                view=None if part == "v" else view,
                group=config.head_dim,
            )
            for part in ("q", "k", "v")
        ),
        Rule(stored=stored + "attn_output.{kind}", parameter=ours + "attn.o.{kind}"),
        *(
            Rule(stored=f"{stored}attn_{part}_norm.weight", parameter=f"{ours}attn.{part}_norm.weight")
            for part in ("q", "k")
        ),
        *mlp_rules(stored, ours + "mlp.", _ffn("")),
        *mlp_rules(stored, ours + "mlp.experts.{expert}.", _ffn("_exps.{expert}")),
        *mlp_rules(stored, ours + "mlp.shared.", _ffn("_shexp")),
        Rule(stored=stored + "ffn_gate_inp.weight", parameter=ours + "mlp.router.weight"),
        Rule(stored=stored + "ffn_gate_inp_shexp.weight", parameter=ours + "mlp.router.weight", part="shared"),
    )


def _ffn(kind: str) -> dict[str, str]:
    return {part: f"ffn_{part}{kind}" for part in ("gate", "up", "down")}


def pairwise(rows: Tensor, *, head_dim: int) -> Tensor:
    """Rows of q or k [heads * head_dim, ...] as seen by a file that keeps rotated pairs next to each other.

    We keep a head's rows as (first halves, second halves), which `ops.rope` rotates; the file has
    (first 0, second 0, first 1, second 1, ...).
    """
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2)


def build(architecture: str, files: ModelFiles, options: BuildOptions) -> LlamaForCausalLM:
    """A member of the family with parameters not yet filled."""
    config = LlamaConfig.from_config(architecture, files.config)
    config = replace(config, tie_word_embeddings=has_tied_head(files, config.tie_word_embeddings))
    facts = ModelFacts(
        architecture=architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=options.max_model_len,
        dtype=options.layers.dtype,
        dtype_source=options.dtype_source,
        quantization=options.layers.scheme.name,
    )
    layers = options.layers
    if layers.scheme.stored_types:
        layers = replace(layers, stored=stored_parts(files.tensors, _hf_rules(architecture)))
    return LlamaForCausalLM(config, facts, layers)
