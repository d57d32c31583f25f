"""DeepSeek V2, V2-Lite and V3: pre-norm decoder, latent attention with absorbed projections, gated MLPs, of which
layers behind the first ones have many, as experts.

Responsible for: the family's graph and its weight names. Attention over latents is said in `batchinfer_kernels.mla`,
what configs say in `modelfiles.deepseek_config`. Modules' `forward` is called directly, as in `llama`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from batchinfer_kernels.mla import halves, turn
from batchinfer_kernels.turning import Turning
from torch import Tensor, nn

from batchinfer.attention.context import ForwardContext
from batchinfer.attention.spec import AttentionSpec
from batchinfer.errors import ModelError
from batchinfer.layers import GatedMLP, LayerMaker, Rope, SparseMLP
from batchinfer.modelfiles import ModelFiles
from batchinfer.modelfiles.deepseek_config import DeepseekConfig
from batchinfer.models.base import BuildOptions, ModelFacts
from batchinfer.models.expert_rules import expert_rules, mlp_rules
from batchinfer.models.tied_head import has_tied_head
from batchinfer.weights import Ignore, Rule, stored_parts

# Of the norms of latents: what the released models were trained with, whatever rms_norm_eps says.
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Queries and what the cache holds come out of one product, `down`: of queries their latents, or (without q_rank)
    themselves; then the latents of keys and values, and the rotated part of keys, which all heads share."""

    def __init__(self, layer: int, config: DeepseekConfig, make: LayerMaker) -> None:
        super().__init__()
        self.layer, self.ops, self.config = layer, make.ops, config
        hidden, heads = config.hidden_size, config.num_heads
        q_size = heads * (config.plain_dim + config.rotated_dim)
        parts = {"q": config.q_rank or q_size, "kv": config.row_size}
        self.sizes = [parts["q"], config.rank, config.rotated_dim]
        at = f"layers.{layer}.attn"
        self.down = make.linear(hidden, parts, bias=False, sensitive=("kv",), name=f"{at}.down")
        self.q_up = self.q_norm = None
        if config.q_rank is not None:
            self.q_up = make.linear(config.q_rank, {"": q_size}, bias=False, name=f"{at}.q_up")
            self.q_norm = make.norm(config.q_rank, LATENT_EPS, feeds=self.q_up)
        self.kv_norm = make.norm(config.rank, LATENT_EPS)
        self.kv_up = make.latent_up(config.rank, heads, config.plain_dim, config.value_dim, name=f"{at}.kv_up")
        self.o = make.linear(heads * config.value_dim, {"": hidden}, bias=False, name=f"{at}.o")

    def forward(
        self, x: Any, residual: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext, wanted: Tensor | None
    ) -> Tensor:
        """residual + attention of x, which is what `input_norm` gave for residual [T, H]; of the tokens in `wanted`,
        [W, H], where that is given."""
        at, num_tokens = self.config, residual.shape[0]
        q, latents, rotated = self.down.forward(x).split_with_sizes(self.sizes, dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up.forward(self.q_norm.forward(q.contiguous()))
        q = self.kv_up.absorb(q.view(num_tokens, at.num_heads, -1), cos, sin, pairs=at.pairs)
        latents, rotated, turning = latents[:, None], rotated[:, None], None
        if self.ops.turns:
            rotated = halves(rotated) if at.pairs else rotated
            turning = Turning(cos=cos, sin=sin, k_weight=self.kv_norm.weight, eps=LATENT_EPS)
        else:
            latents = self.kv_norm.forward(latents.contiguous())
            rotated = turn(rotated, cos, sin, pairs=at.pairs)
        out = ctx.attend(self.layer, q, rotated, latents, turning)
        if wanted is not None:
            out, residual = out.index_select(0, wanted), residual.index_select(0, wanted)
        out = self.kv_up.expand(out)
        return self.o.forward(out.view(len(out), at.num_heads * at.value_dim), residual)


class DecoderLayer(nn.Module):
    def __init__(self, layer: int, config: DeepseekConfig, make: LayerMaker) -> None:
        super().__init__()
        hidden_size, experts = config.hidden_size, config.experts[layer]
        self.attn = LatentAttention(layer, config, make)
        self.mlp: GatedMLP | SparseMLP
        feeds, at = None, f"layers.{layer}.mlp"
        if experts is None:
            self.mlp = GatedMLP(hidden_size, config.intermediate_size, make, name=at)
            feeds = self.mlp.gate_up
        else:
            self.mlp = SparseMLP(experts, hidden_size, make, name=at)
        self.input_norm = make.norm(hidden_size, config.rms_norm_eps, feeds=self.attn.down)
        self.post_norm = make.norm(hidden_size, config.rms_norm_eps, feeds=feeds)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, ctx: ForwardContext, wanted: Tensor | None = None
    ) -> Tensor:
        """Of the residual stream [T, H], which is overwritten; of the tokens in `wanted` only where that is given."""
        hidden = self.attn.forward(self.input_norm.forward(hidden), hidden, cos, sin, ctx, wanted)
        return self.mlp.forward(self.post_norm.forward(hidden), hidden)


class DeepseekForCausalLM(nn.Module):
    """Any member of the family. See `models.base.CausalLM` for what is called from outside."""

    def __init__(self, config: DeepseekConfig, facts: ModelFacts, make: LayerMaker) -> None:
        super().__init__()
        self.config, self.facts = config, facts
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=1,
            head_dim=config.row_size,
            scale=config.scale,
            latent_rank=config.rank,
        )
        self.attention_specs = (spec,) * config.num_layers
        self.embed = make.embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(i, config, make) for i in range(config.num_layers))
        tied_to = self.embed if config.tie_word_embeddings else None
        self.lm_head = make.head(config.vocab_size, config.hidden_size, tied_to=tied_to, name="lm_head")
        self.norm = make.norm(config.hidden_size, config.rms_norm_eps, feeds=self.lm_head)
        self.rope = Rope(config.rope, max_model_len=facts.max_model_len, device=make.device)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        cos, sin = self.rope(positions)
        hidden: Tensor = self.embed(token_ids)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, cos, sin, ctx, ctx.wanted if i == last else None)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    @torch.inference_mode()
    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.lm_head.argmax(self.norm(hidden))

    def num_parameter_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def weight_rules(self, kind: str) -> tuple[tuple[Rule, ...], tuple[Ignore, ...]]:
        """Names of the stored tensors, of Hugging Face's files: there are no others of this family."""
        config = self.config
        ignores = HF_IGNORES + tuple(
            Ignore(stored=f"model.layers.{i}.{{rest}}", reason="predicts further tokens")
            for i in range(config.num_layers, config.num_stored_layers)
        )
        rules = HF_RULES
        if config.tie_word_embeddings:
            ignores += (Ignore(stored="lm_head.weight", reason="tied to the embedding"),)
            rules = tuple(rule for rule in rules if rule.parameter != _HEAD)
        return rules, ignores


_HF_LAYER, _OUR_LAYER, _HEAD = "model.layers.{i}.", "layers.{i}.", "lm_head.{kind}"
_HF_ATTN, _OUR_ATTN = _HF_LAYER + "self_attn.", _OUR_LAYER + "attn."
HF_RULES: tuple[Rule, ...] = (
    Rule(stored="model.embed_tokens.weight", parameter="embed.weight"),
    Rule(stored="model.norm.weight", parameter="norm.weight"),
    Rule(stored="lm_head.{kind}", parameter=_HEAD),
    Rule(stored=_HF_LAYER + "input_layernorm.weight", parameter=_OUR_LAYER + "input_norm.weight"),
    Rule(stored=_HF_LAYER + "post_attention_layernorm.weight", parameter=_OUR_LAYER + "post_norm.weight"),
    Rule(stored=_HF_ATTN + "q_proj.{kind}", parameter=_OUR_ATTN + "down.{kind}", part="q"),
    Rule(stored=_HF_ATTN + "q_a_proj.{kind}", parameter=_OUR_ATTN + "down.{kind}", part="q"),
    Rule(stored=_HF_ATTN + "q_a_layernorm.weight", parameter=_OUR_ATTN + "q_norm.weight"),
    Rule(stored=_HF_ATTN + "q_b_proj.{kind}", parameter=_OUR_ATTN + "q_up.{kind}"),
    Rule(stored=_HF_ATTN + "kv_a_proj_with_mqa.{kind}", parameter=_OUR_ATTN + "down.{kind}", part="kv"),
    Rule(stored=_HF_ATTN + "kv_a_layernorm.weight", parameter=_OUR_ATTN + "kv_norm.weight"),
    Rule(stored=_HF_ATTN + "kv_b_proj.{kind}", parameter=_OUR_ATTN + "kv_up.{kind}"),
    Rule(stored=_HF_ATTN + "o_proj.{kind}", parameter=_OUR_ATTN + "o.{kind}"),
    *mlp_rules(_HF_LAYER + "mlp.", _OUR_LAYER + "mlp."),
    *expert_rules(_HF_LAYER + "mlp.", _OUR_LAYER + "mlp.", shared="shared_experts"),
)
HF_IGNORES: tuple[Ignore, ...] = (
    Ignore(stored=_HF_LAYER + "self_attn.rotary_emb.inv_freq", reason="computed from the config"),
)


def build(architecture: str, files: ModelFiles, options: BuildOptions) -> DeepseekForCausalLM:
    """A member of the family with parameters not yet filled."""
    if files.kind != "hf":
        raise ModelError(f"{architecture} is read from a folder with config.json and safetensors only")
    config = DeepseekConfig.from_config(architecture, files.config)
    config = replace(config, tie_word_embeddings=has_tied_head(files, config.tie_word_embeddings))
    facts = ModelFacts(
        architecture=architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=1,
        head_dim=config.row_size,
        vocab_size=config.vocab_size,
        max_model_len=options.max_model_len,
        dtype=options.layers.dtype,
        dtype_source=options.dtype_source,
        quantization=options.layers.scheme.name,
    )
    layers = options.layers
    if layers.scheme.stored_types:
        layers = replace(layers, stored=stored_parts(files.tensors, HF_RULES))
    return DeepseekForCausalLM(config, facts, layers)
