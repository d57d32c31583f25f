"""DeepSeek's models against their definition: float64, keys and values of every head made from latents, no cache.

Written from the papers (DeepSeek-AI 2024: arXiv:2405.04434, section 2 and appendix C, and arXiv:2412.19437, section
2.1; YaRN: arXiv:2309.00071), not from `layers`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import resolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.attention.context import DenseContext
from batchinfer.modelfiles import open_model
from batchinfer.models import CausalLM, load_model
from batchinfer.testing.tiny import make_tiny, tiny_config, tiny_tensors
from batchinfer.weights import WeightError

OPS = resolve("reference")
TOLERANCE = 1e-3
DENSE = {"first_k_dense_replace": 3}
SCALED = {"routed_scaling_factor": 4.0}
TOKEN_IDS = [(7 * i * i + 3 * i) % 384 for i in range(200)]
YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def sharpened(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def angles(config: dict[str, Any], num_tokens: int) -> tuple[Tensor, float, float]:
    """(radians [T, R / 2], factor on rotated parts, factor on scores)."""
    dims, theta = config["qk_rope_head_dim"], config["rope_theta"]
    per_position = torch.tensor([theta ** (-2 * i / dims) for i in range(dims // 2)]).double()
    on_rotated = on_scores = 1.0
    yarn = config.get("rope_scaling")
    if yarn is not None:
        length, factor = yarn["original_max_position_embeddings"], yarn["factor"]
        turns_at = [
            dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (yarn["beta_fast"], yarn["beta_slow"])
        ]
        first, last = max(math.floor(turns_at[0]), 0), min(math.ceil(turns_at[1]), dims - 1)
        ramp = ((torch.arange(dims // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
        per_position = per_position * (1 - ramp) + per_position / factor * ramp
        on_scores = sharpened(factor, yarn["mscale_all_dim"]) ** 2
        on_rotated = sharpened(factor, yarn["mscale"]) / sharpened(factor, yarn["mscale_all_dim"])
    return torch.arange(num_tokens)[:, None] * per_position, on_rotated, on_scores


def rotated(x: Tensor, radians: Tensor, factor: float, pairs: bool) -> Tensor:
    """Of x [T, heads, R]: numbers 2 i and 2 i + 1, or i and i + R / 2, turn together."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
    as_complex = torch.complex(first, second) * torch.polar(torch.full_like(radians, factor), radians)[:, None]
    return torch.cat((as_complex.real, as_complex.imag), -1)


def gated(x: Tensor, at: dict[str, Tensor], name: str) -> Tensor:
    gate = x @ at[name + "gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ at[name + "up_proj.weight"].T)) @ at[name + "down_proj.weight"].T


def of_experts(x: Tensor, config: dict[str, Any], at: dict[str, Tensor], name: str) -> Tensor:
    """Token by token."""
    num_experts, top_k, num_groups = (config[key] for key in ("n_routed_experts", "num_experts_per_tok", "n_group"))
    out = gated(x, at, name + "shared_experts.")
    for t, token in enumerate(x):
        logits = at[name + "gate.weight"] @ token
        if config["model_type"] == "deepseek_v3":
            scores = logits.sigmoid()
            wanted = scores + at[name + "gate.e_score_correction_bias"]
            groups = [sum(sorted(group)[-2:]) for group in wanted.view(num_groups, -1).tolist()]
        else:
            scores = wanted = logits.softmax(-1)
            groups = [max(group) for group in wanted.view(num_groups, -1).tolist()]
        best = sorted(range(num_groups), key=lambda i: -groups[i])[: config["topk_group"]]
        may = [i for i in range(num_experts) if i * num_groups // num_experts in best]
        chosen = sorted(may, key=lambda i: -float(wanted[i]))[:top_k]
        total = scores[chosen].sum() if config["norm_topk_prob"] else 1.0
        for i in chosen:
            out[t] += scores[i] / total * config["routed_scaling_factor"] * gated(token, at, f"{name}experts.{i}.")
    return out


def expected_logits(config: dict[str, Any], tensors: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    """float64 [T, V]."""
    at = {name: tensor.double() for name, tensor in tensors.items()}
    config = {"n_group": 1, "topk_group": 1, **config}
    heads, num_tokens, eps = config["num_attention_heads"], len(token_ids), config["rms_norm_eps"]
    plain, turned, value = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    radians, on_rotated, on_scores = angles(config, num_tokens)
    pairs = config.get("rope_interleave", True)
    hidden = at["model.embed_tokens.weight"][token_ids]
    for i in range(config["num_hidden_layers"]):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        x = norm(hidden, at[f"model.layers.{i}.input_layernorm.weight"], eps)
        if config["q_lora_rank"] is None:
            q = x @ at[attn + "q_proj.weight"].T
        else:
            latent = norm(x @ at[attn + "q_a_proj.weight"].T, at[attn + "q_a_layernorm.weight"], 1e-6)
            q = latent @ at[attn + "q_b_proj.weight"].T
        q = q.view(num_tokens, heads, plain + turned)
        q = torch.cat((q[..., :plain], rotated(q[..., plain:], radians, on_rotated, pairs)), -1)
        both = x @ at[attn + "kv_a_proj_with_mqa.weight"].T
        latent = norm(both[:, :-turned], at[attn + "kv_a_layernorm.weight"], 1e-6)
        shared = rotated(both[:, None, -turned:], radians, on_rotated, pairs)
        of_heads = (latent @ at[attn + "kv_b_proj.weight"].T).view(num_tokens, heads, plain + value)
        k = torch.cat((of_heads[..., :plain], shared.expand(-1, heads, -1)), -1)
        scores = torch.einsum("thd,shd->hts", q, k) * (plain + turned) ** -0.5 * on_scores
        later = torch.ones(num_tokens, num_tokens).triu(1).bool()
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shd->thd", weights, of_heads[..., plain:])
        hidden = hidden + out.reshape(num_tokens, -1) @ at[attn + "o_proj.weight"].T
        x = norm(hidden, at[f"model.layers.{i}.post_attention_layernorm.weight"], eps)
        sparse = i >= config["first_k_dense_replace"]
        hidden = hidden + (of_experts(x, config, at, mlp) if sparse else gated(x, at, mlp))
    return norm(hidden, at["model.norm.weight"], eps) @ at["lm_head.weight"].T


def logits(model: CausalLM, token_ids: list[int] = TOKEN_IDS) -> Tensor:
    ctx = DenseContext(model.attention_specs, len(token_ids))
    return model.compute_logits(model.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), ctx))


def load(path: Path, **options: Any) -> CausalLM:
    return load_model(open_model(str(path)), ops=OPS, **options)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("deepseek-v2", DENSE),
        ("deepseek-v2", {**DENSE, "q_lora_rank": 32, "rope_scaling": YARN}),
        ("deepseek-v2", {"rope_scaling": YARN, "num_attention_heads": 3, "num_key_value_heads": 3}),
        ("deepseek-v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, **SCALED}),
        ("deepseek-v3", {**DENSE, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.4}}),
        ("deepseek-v3", {"rope_interleave": False, "qk_nope_head_dim": 24, "rms_norm_eps": 0.01}),
    ],
    ids=str,
)
def test_logits_are_those_of_the_definition_at_all_positions(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    path = make_tiny(tmp_path, family, **config)
    stored = tiny_config(family, **config)
    expected = expected_logits(stored, tiny_tensors(stored), TOKEN_IDS)
    assert expected.std() > 0.3
    found = logits(load(path))
    assert (found - expected).abs().max() < TOLERANCE


def test_each_of_what_can_be_left_out_would_be_seen(tmp_path: Path) -> None:
    config = tiny_config("deepseek-v3", rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.4}, **DENSE)
    tensors = tiny_tensors(config)
    right = expected_logits(config, tensors, TOKEN_IDS)
    for change in (
        {"rope_interleave": False},
        {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0}},
        {"rope_scaling": {**YARN, "mscale": 0.4, "mscale_all_dim": 0.4}},
    ):
        assert (expected_logits({**config, **change}, tensors, TOKEN_IDS) - right).abs().max() > 30 * TOLERANCE


def test_layers_that_predict_further_tokens_are_ignored_by_their_number(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "deepseek-v3", num_nextn_predict_layers=1, **DENSE)
    plain = logits(load(folder))
    tensors = load_file(folder / "model.safetensors")
    first = "model.layers.0."
    more = {name.replace(first, "model.layers.3."): x for name, x in tensors.items() if name.startswith(first)}
    for name in ("eh_proj", "enorm", "shared_head.norm", "shared_head.head", "embed_tokens", "mlp.experts.12.up_proj"):
        more[f"model.layers.3.{name}.weight"] = torch.ones(3, 3)
    more["model.layers.3.mlp.gate.e_score_correction_bias"] = torch.ones(3)
    save_file({**tensors, **{name: x.clone() for name, x in more.items()}}, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)), plain)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(WeightError, match=r"in the checkpoint, not in the model .*model\.layers\.3\."):
        load(folder)


def test_a_stored_head_of_a_tied_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An equal one is ignored, another one is taken, as in the llama family."""
    tied = make_tiny(tmp_path / "tied", "deepseek-v2", tie_word_embeddings=True, **DENSE)
    tensors = load_file(tied / "model.safetensors")
    assert "lm_head.weight" not in tensors
    plain = logits(load(tied))
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tied / "model.safetensors")
    assert torch.equal(logits(load(tied)), plain) and caplog.text == ""
    save_file({**tensors, "lm_head.weight": embedding.flip(0)}, tied / "model.safetensors")
    torch.testing.assert_close(logits(load(tied)), plain.flip(-1))
    assert "not tied" in caplog.text


def test_what_the_cache_holds_and_what_weights_take(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path, "deepseek-v3", **DENSE))
    (spec,) = set(model.attention_specs)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.latent_rank) == (4, 1, 40, 32)
    assert spec.rows_per_token == 1
    assert spec.scale == pytest.approx(24**-0.5 * sharpened(40, 0.707) ** 2)
    stored = tiny_tensors(tiny_config("deepseek-v3", **DENSE))
    assert model.num_parameter_bytes() == 4 * sum(x.numel() for x in stored.values())  # the up-projection is there once
