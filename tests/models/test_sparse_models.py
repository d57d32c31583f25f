"""Layers of experts, and models that have them, against what their definitions say, token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import Ops, resolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.attention.context import DenseContext
from batchinfer.layers import LayerMaker, SparseMLP
from batchinfer.modelfiles import open_model
from batchinfer.modelfiles.experts_config import ExpertsConfig
from batchinfer.models import load_model
from batchinfer.quant import resolve_scheme
from batchinfer.testing.tiny import make_tiny, tiny_config
from batchinfer.weights import WeightError

HIDDEN = 64
MIXTRAL = ExpertsConfig(num_experts=8, top_k=2, intermediate_size=48)
CONFIGS = {
    "mixtral": MIXTRAL,
    "qwen2": ExpertsConfig(
        num_experts=6, top_k=4, intermediate_size=48, renormalize=False, shared_size=80, shared_gate=True
    ),
    "every expert": ExpertsConfig(num_experts=5, top_k=5, intermediate_size=48, renormalize=False),
    "one expert": ExpertsConfig(num_experts=1, top_k=1, intermediate_size=48),
    "deepseek 2": ExpertsConfig(
        num_experts=12,
        top_k=3,
        wide_logits=True,
        intermediate_size=48,
        renormalize=False,
        scale=1.5,
        num_groups=4,
        top_groups=2,
        shared_size=96,
    ),
    "deepseek 3": ExpertsConfig(
        num_experts=12,
        top_k=4,
        wide_logits=True,
        intermediate_size=48,
        scoring="sigmoid",
        correction_bias=True,
        scale=2.5,
        num_groups=3,
        top_groups=2,
        shared_size=48,
    ),
}


def layer(config: ExpertsConfig, ops: Ops, quantization: str = "none", *, seed: int = 0) -> SparseMLP:
    """With weights drawn."""
    dtype = torch.bfloat16 if quantization == "bfloat16" else torch.float32
    scheme = resolve_scheme("int8" if quantization == "int8" else "none", {})
    make = LayerMaker(ops=ops, scheme=scheme, dtype=dtype, device=torch.device("cpu"))
    made = SparseMLP(config, HIDDEN, make, name="mlp")
    generator = torch.Generator().manual_seed(seed)
    for module in made.modules():
        if not hasattr(module, "parts"):
            continue
        for part, shape in module.parts().items():
            values = torch.randn(*shape, generator=generator) * (1.0 if len(shape) == 1 else 1.5 * shape[1] ** -0.5)
            target = module.target(part)
            if isinstance(target, Tensor):
                target.copy_(values)
            else:
                target.put(0, values)
        module.loaded()
    return made


def by_definition(made: SparseMLP, config: ExpertsConfig, x: Tensor) -> Tensor:
    """float64 [T, H] of x [T, H], without the residual. Lists and sorts where the layer has kernels."""
    router, bias = made.router.weight.double(), made.router.bias.tolist()
    rows = []
    for token in x.double():
        logits = [float(row @ token) for row in router[: config.num_experts]]
        if config.scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-z)) for z in logits]
        else:
            total = sum(math.exp(z) for z in logits)
            scores = [math.exp(z) / total for z in logits]
        choice = [s + b for s, b in zip(scores, bias, strict=True)]
        size = config.num_experts // config.num_groups
        groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
        counted = 2 if config.scoring == "sigmoid" else 1
        groups.sort(key=lambda group: -sum(sorted((choice[i] for i in group), reverse=True)[:counted]))
        allowed = [i for group in groups[: config.top_groups] for i in group]
        chosen = sorted(allowed, key=lambda i: -choice[i])[: config.top_k]
        weights = [scores[i] for i in chosen]
        if config.renormalize:
            weights = [w / sum(weights) for w in weights]
        row = sum(config.scale * w * mlp(made.experts[i], token) for w, i in zip(weights, chosen, strict=True))
        if made.shared is not None:
            gate = 1 / (1 + math.exp(-float(router[config.num_experts] @ token))) if config.shared_gate else 1.0
            row = row + gate * mlp(made.shared, token)
        rows.append(row)
    return torch.stack(rows)


def mlp(made: Any, token: Tensor) -> Tensor:
    gate, up = made.gate_up.weight.double().chunk(2)
    gate = gate @ token
    return made.down.weight.double() @ (gate / (1 + torch.exp(-gate)) * (up @ token))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_is_what_its_definition_says(name: str, backend: str) -> None:
    config = CONFIGS[name]
    made = layer(config, resolve(backend))
    torch.manual_seed(1)
    x, residual = torch.randn(23, HIDDEN), torch.randn(23, HIDDEN)
    expected = residual.double() + by_definition(made, config, x)
    found = made.forward(x, residual.clone())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert made.forward(x[:0], residual[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quantization", ["none", "int8", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_is_the_same_whatever_shares_its_experts(name: str, quantization: str, threads: int) -> None:
    """Also where an expert has all rows, or just one of them."""
    made = layer(CONFIGS[name], resolve("auto"), quantization)
    torch.manual_seed(2)
    x, residual = torch.randn(150, HIDDEN), torch.randn(150, HIDDEN)
    x[100:] = x[:1] + torch.randn(50, HIDDEN) / 100  # to the experts of the first
    if quantization == "bfloat16":
        x, residual = x.bfloat16(), residual.bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = made.forward(x, residual.clone())
        for rows in ([0], [1], [7, 0], [3, 149, 5], list(range(100, 150)), list(range(149, -1, -1))):
            assert torch.equal(made.forward(x[rows], residual[rows].clone()), together[rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_sick_token_harms_no_other(name: str, backend: str) -> None:
    made = layer(CONFIGS[name], resolve(backend))
    torch.manual_seed(3)
    x, residual = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN)
    well = made.forward(x, residual.clone())
    x[4, 5] = torch.nan
    found = made.forward(x, residual.clone())
    assert found[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    torch.testing.assert_close(found[others], well[others], rtol=1e-5 if backend == "reference" else 0, atol=1e-6)


def test_experts_with_all_tokens_and_with_none() -> None:
    made = layer(MIXTRAL, resolve("cpu"))
    made.router.weight.data.zero_()
    made.router.weight.data[3, 0] = made.router.weight.data[6, 0] = 10
    x = torch.randn(40, HIDDEN)
    x[:, 0] = 1
    weights, ids, _ = made.router.forward(x)
    assert ids.tolist() == [[3, 6]] * 40 and torch.equal(weights, torch.full((40, 2), 0.5))
    found = made.forward(x, torch.zeros(40, HIDDEN))
    torch.testing.assert_close(found.double(), by_definition(made, MIXTRAL, x), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------- whole models


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def model_by_definition(config: dict[str, Any], tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits float64 [T, V] of the mixtures of experts of this family."""
    kind, eps = config["model_type"], config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads

    def linear(name: str, x: Tensor) -> Tensor:
        y = x @ tensors[f"{name}.weight"].double().T
        return y + tensors[f"{name}.bias"].double() if f"{name}.bias" in tensors else y

    def gated(names: tuple[str, str, str], x: Tensor) -> Tensor:
        gate = linear(names[0], x)
        return linear(names[2], gate * torch.sigmoid(gate) * linear(names[1], x))

    def rotated(x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None] / config["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
        cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    hidden = tensors["model.embed_tokens.weight"].double()[ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        x = norm(hidden, tensors[f"{at}.input_layernorm.weight"], eps)
        q, k, v = (linear(f"{at}.self_attn.{p}_proj", x).view(len(ids), -1, dim) for p in "qkv")
        if kind == "qwen3_moe":
            q = norm(q, tensors[f"{at}.self_attn.q_norm.weight"], eps)
            k = norm(k, tensors[f"{at}.self_attn.k_norm.weight"], eps)
        k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / dim**0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v).reshape(len(ids), -1)
        hidden = hidden + linear(f"{at}.self_attn.o_proj", mixed)
        x = norm(hidden, tensors[f"{at}.post_attention_layernorm.weight"], eps)
        mlp_at = f"{at}.block_sparse_moe" if kind == "mixtral" else f"{at}.mlp"
        projections = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        if f"{mlp_at}.gate.weight" not in tensors:
            hidden = hidden + gated(tuple(f"{mlp_at}.{p}" for p in projections), x)  # type: ignore[arg-type]
            continue
        shares, chosen = torch.softmax(linear(f"{mlp_at}.gate", x), -1).topk(config["num_experts_per_tok"], -1)
        if kind == "mixtral" or config["norm_topk_prob"]:
            shares = shares / shares.sum(-1, keepdim=True)
        rows = []
        for token, share, experts in zip(x, shares, chosen.tolist(), strict=True):
            names = [tuple(f"{mlp_at}.experts.{e}.{p}" for p in projections) for e in experts]
            rows.append(sum(w * gated(n, token) for w, n in zip(share, names, strict=True)))  # type: ignore[arg-type]
        hidden = hidden + torch.stack(rows)
        if kind == "qwen2_moe":
            shared = gated(tuple(f"{mlp_at}.shared_expert.{p}" for p in projections), x)  # type: ignore[arg-type]
            hidden = hidden + torch.sigmoid(linear(f"{mlp_at}.shared_expert_gate", x)) * shared
    return norm(hidden, tensors["model.norm.weight"], eps) @ tensors["lm_head.weight"].double().T


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mixtral", {}),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
        ("qwen2-moe", {}),
        ("qwen2-moe", {"decoder_sparse_step": 1, "norm_topk_prob": True, "num_experts_per_tok": 8}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"norm_topk_prob": False, "mlp_only_layers": None, "decoder_sparse_step": 3}),
    ],
    ids=str,
)
def test_models_are_what_their_definitions_say(
    tmp_path: Path, family: str, config: dict[str, Any], backend: str
) -> None:
    path = make_tiny(tmp_path, family, **config)
    made = tiny_config(family, **config)
    ids = [(7 * i * i + 3 * i) % 384 for i in range(40)]
    expected = model_by_definition(made, load_file(path / "model.safetensors"), ids)
    model = load_model(open_model(str(path)), ops=resolve(backend))
    hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), DenseContext(model.attention_specs, len(ids)))
    found = model.compute_logits(hidden)
    assert expected.std() > 0.3
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)
    assert torch.equal(model.greedy(hidden)[0], expected.argmax(-1))


# ---------------------------------------------------------------------------- checkpoints


def drop(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def add(name: str, *shape: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3-moe",
            drop("model.layers.0.mlp.experts.7.up_proj.weight"),
            r"not in the checkpoint \(1\): model.layers.0.mlp.experts.7.up_proj.weight",
        ),
        (
            "qwen3-moe",
            add("model.layers.0.mlp.experts.8.up_proj.weight", 48, 64),
            r"not in the model \(1\): model.layers.0.mlp.experts.8.up_proj.weight",
        ),
        (
            "qwen3-moe",
            add("model.layers.0.mlp.experts.01.up_proj.weight", 48, 64),
            r"not in the model \(1\): model.layers.0.mlp.experts.01.up_proj.weight",
        ),
        ("qwen3-moe", add("model.layers.1.mlp.gate.weight", 8, 64), r"not in the model \(1\): model.layers.1.mlp.gate"),
        (
            "qwen3-moe",
            add("model.layers.0.mlp.experts.3.down_proj.weight", 64, 47),
            r"experts.3.down_proj.weight' has shape \[64, 47\], the model's config asks for \[64, 48\]",
        ),
        (
            "mixtral",
            drop("model.layers.2.block_sparse_moe.gate.weight"),
            r"\(1\): model.layers.2.block_sparse_moe.gate",
        ),
        (
            "mixtral",
            add("model.layers.0.mlp.experts.0.up_proj.weight", 48, 64),
            r"not in the model \(1\): model.layers.0.mlp.experts.0.up_proj.weight",
        ),
        (
            "mixtral",
            drop("model.layers.0.block_sparse_moe.experts.0.w3.weight"),
            r"not in the checkpoint \(1\): model.layers.0.block_sparse_moe.experts.0.w3.weight",
        ),
        (
            "qwen2-moe",
            drop("model.layers.1.mlp.shared_expert_gate.weight"),
            r"not in the checkpoint \(1\): model.layers.1.mlp.shared_expert_gate.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, family: str, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    path = make_tiny(tmp_path, family)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(WeightError, match=message):
        load_model(open_model(str(path)), ops=resolve("reference"))
