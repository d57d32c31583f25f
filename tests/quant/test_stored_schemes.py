"""Checkpoints that are stored quantized: their weights to the last bit, layers that are plain among them, and files
that are not what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels import fp8, w8
from batchinfer_kernels.activation_formats import quantize
from batchinfer_kernels.table import resolve
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from batchinfer.attention.context import DenseContext
from batchinfer.errors import ConfigError, ModelError
from batchinfer.layers import Linear
from batchinfer.modelfiles import open_model
from batchinfer.modelfiles.stored_quantization import StoredQuantization, stored_quantization
from batchinfer.modelfiles.supported import check_supported
from batchinfer.models import load_model
from batchinfer.quant import Basis, LinearShape, LinearWeights, resolve_scheme
from batchinfer.quant.packed import Apart, Dequantized
from batchinfer.quant.unquantized import PlainWeights
from batchinfer.quant.w4 import W4Weights
from batchinfer.testing.tiny import make_tiny
from batchinfer.testing.tiny_gguf import make_tiny_gguf
from batchinfer.testing.tiny_quantized import CONFIGS, quantize_folder
from batchinfer.weights import WeightError, loading

SCHEMES = {name: name.partition("-")[0] for name in CONFIGS}
# Parts are whole blocks of 128 outputs; neither K is a multiple of a block, and one is none of a group.
SIZES = {
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
}


def sizes(name: str) -> dict[str, Any]:
    return SIZES | ({"intermediate_size": 256} if name in ("fp8-blocks", "fp8-group") else {})


def linears(model: nn.Module) -> dict[str, Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}


def loaded(folder: Path, quantization: str, kernels: str = "cpu", **options: Any) -> Any:
    return load_model(open_model(str(folder)), ops=resolve(kernels), quantization=quantization, **options)


def twin(folder: Path, plain: dict[str, Tensor]) -> Path:
    """A plain checkpoint beside the quantized one."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    made = make_tiny(folder.parent / "twin")
    (made / "config.json").write_text(json.dumps(config))
    save_file(plain, made / "model.safetensors")
    return made


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def meant(layer: Linear) -> Tensor:
    """W [N, K] of a layer as its products take it."""
    if isinstance(layer.weights, Apart):
        return torch.cat([of_weights(part, layer.in_features) for part in layer.weights._parts.values()])
    return of_weights(layer.weights, layer.in_features)


def logits_of(model: Any) -> Tensor:
    """Of 30 tokens."""
    token_ids = torch.arange(30) * 7 % 384
    ctx = DenseContext(model.attention_specs, len(token_ids))
    logits: Tensor = model.compute_logits(model.forward(token_ids, torch.arange(len(token_ids)), ctx))
    return logits


def of_weights(weights: LinearWeights, depth: int) -> Tensor:
    if isinstance(weights, W4Weights):
        return weights.linear(torch.eye(depth), None, None).T
    params = weights.params
    return fp8.dequantize(params["weight"], params["scales"]) if "scales" in params else params["weight"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_weights_are_those_that_were_stored(
    tmp_path: Path, name: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_ELEMENTS", 1000)  # in many pieces
    folder = make_tiny(tmp_path / "tiny", **sizes(name))
    plain = twin(folder, quantize_folder(folder, name))
    expected = dict(loaded(plain, "none").named_parameters())
    check_supported(open_model(str(folder)))
    found = loaded(folder, SCHEMES[name], num_threads=num_threads)
    assert found.facts.quantization == SCHEMES[name]
    assert all(isinstance(layer.weights, Dequantized) != (key == "lm_head") for key, layer in linears(found).items())
    assert {key: value.dtype for key, value in found.named_parameters()} == dict.fromkeys(expected, torch.float32)
    for key, value in found.named_parameters():
        assert torch.equal(value, expected[key]), key
    packed = linears(loaded(folder, SCHEMES[name], "reference", num_threads=num_threads))
    for key, layer in packed.items():
        assert torch.equal(meant(layer), expected[f"{key}.weight"]), key
        names = {"codes", "scales"} if name.startswith(("gptq", "awq")) else {"weight", "scales"}
        assert layer.weights.params.keys() >= ({"weight"} if key == "lm_head" else names), key


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-tensor", "fp8-channel", "w8a8"])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_projections_that_are_absorbed_are_what_was_stored(tmp_path: Path, name: str, kernels: str) -> None:
    """Of latent attention, and what is beside it in dense layers; the rows of a block are of several heads."""
    whole = {"q_lora_rank": 128, "intermediate_size": 256, "first_k_dense_replace": 2}
    folder = make_tiny(tmp_path / "tiny", "deepseek-v3", num_hidden_layers=2, qk_nope_head_dim=40, **whole)
    plain = loaded(twin(folder, quantize_folder(folder, name)), "none", kernels)
    check_supported(open_model(str(folder)))
    model = loaded(folder, SCHEMES[name], kernels)
    wanted, got = logits_of(plain), logits_of(model)
    assert (got - wanted).abs().mean() < (1e-6 if kernels == "cpu" else 0.2 * wanted.std())  # activations of 8 bits
    expected, found = (dict(x.named_parameters()) for x in (plain, model))
    up = [key for key in expected if ".kv_up." in key]
    assert len(up) == 4 and expected[up[0]].shape == (4, 32, 40)
    for key in expected if kernels == "cpu" else up:
        assert torch.equal(found[key], expected[key]), key


@pytest.mark.parametrize("g_idx", ["zeros", "in turn", "shuffled"])
def test_groups_are_what_g_idx_says(tmp_path: Path, g_idx: str) -> None:
    """Whatever desc_act says; zeros stand there where nothing was said."""
    folder = make_tiny(tmp_path / "tiny", **SIZES)
    plain = quantize_folder(folder, "gptq-order" if g_idx == "shuffled" else "gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = g_idx == "in turn"
    (folder / "config.json").write_text(json.dumps(config))

    def forget(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            if key.endswith("g_idx"):
                tensors[key].zero_()

    if g_idx == "zeros":
        change_tensors(folder, forget)
    expected = loaded(twin(folder, plain), "none")
    found = dict(loaded(folder, "gptq").named_parameters())
    assert all(torch.equal(found[key], value) for key, value in expected.named_parameters())


def stored_names(key: str) -> list[str]:
    """Of the parts of one of our layers."""
    at, _, last = key.replace("layers.", "model.layers.").replace(".attn.", ".self_attn.").rpartition(".")
    parts = {"qkv": "qkv", "gate_up": ("gate", "up"), "o": "o", "down": ("down",)}.get(last)
    return [key] if parts is None else [f"{at}.{part}_proj" for part in parts]


@pytest.mark.parametrize("name", ["gptq-order", "awq", "fp8-channel", "w8a8"])
@pytest.mark.parametrize(
    ("leave", "head"),
    [
        (lambda layer: "layers.1." in layer, False),
        (lambda layer: "down_proj" in layer or "q_proj" in layer or "k_proj" in layer or "v_proj" in layer, True),
        (lambda layer: "gate_proj" in layer or "up_proj" in layer, False),
        (lambda layer: "k_proj" in layer or "1.mlp.up_proj" in layer, False),
    ],
    ids=["a layer", "projections", "gate and up", "parts of products"],
)
def test_layers_that_are_stored_plain_stay_plain(
    tmp_path: Path, name: str, leave: Callable[[str], bool], head: bool
) -> None:
    """As their tensors say, whatever the lists of names in the config do."""
    folder = make_tiny(tmp_path / "tiny", **SIZES)
    plain = quantize_folder(folder, name, leave=leave, head=head, change={"modules_to_not_convert": ["layers.1", "x"]})
    expected = loaded(twin(folder, plain), "none", "reference")
    found = loaded(folder, SCHEMES[name], "reference")
    theirs = linears(expected)
    for key, layer in linears(found).items():
        plain_parts = [leave(part) if part != "lm_head" else not head for part in stored_names(key)]
        assert isinstance(layer.weights, Apart) == (any(plain_parts) and not all(plain_parts)), key
        assert isinstance(layer.weights, PlainWeights) == all(plain_parts), key
        assert torch.equal(meant(layer), meant(theirs[key])), key
    x = torch.randn(5, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    for layer, other in zip(found.layers, expected.layers, strict=True):
        y, wanted = (which.mlp(which.post_norm(x), x.clone()) for which in (layer, other))
        if name in ("gptq-order", "awq"):
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        else:
            assert (y - wanted).std() < 0.1 * wanted.std()
    logits, tokens = found.compute_logits(x), found.greedy(x)
    assert torch.equal(tokens[0], logits.argmax(-1)) and bool(tokens[1].all())


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_made_while_loading(tmp_path: Path, scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By output feature, from what is stored; the head stays as it is."""
    folder = make_tiny(tmp_path / "tiny", "llama-bias", dtype=dtype)
    plain = linears(loaded(folder, "none"))
    found = linears(loaded(folder, scheme, "reference"))
    monkeypatch.setattr(loading, "PIECE_ELEMENTS", 700)
    again = linears(loaded(folder, scheme, "reference", num_threads=2))
    for key, layer in found.items():
        weight = plain[key].weights.params["weight"]
        if key == "lm_head":
            assert torch.equal(layer.weights.params["weight"], weight)
            continue
        values, scales = quantize(weight, "int8" if scheme == "w8a8" else "fp8")
        for params in (layer.weights.params, again[key].weights.params):
            assert torch.equal(params["weight"].float(), values.float()) and params["weight"].dtype == values.dtype
            assert torch.equal(params["scales"], scales)
    layer = found["layers.0.attn.o"]
    x, residual = torch.randn(3, layer.in_features), torch.randn(3, 64)
    codes, x_scales = quantize(x, "int8" if scheme == "w8a8" else "fp8")
    kept = layer.weights.params
    product = w8.linear if scheme == "w8a8" else fp8.linear
    expected = product(codes, x_scales, kept["weight"], kept["scales"], layer.bias, residual, dtype=torch.float32)
    assert torch.equal(layer(x, residual.clone()), expected)


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_made_while_loading_of_a_gguf_file(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows of q and k stand in another order: what the folder of the same weights gives."""
    monkeypatch.setattr(loading, "PIECE_ELEMENTS", 700)
    folder, file = make_tiny(tmp_path / "tiny"), make_tiny_gguf(tmp_path / "tiny.gguf")
    expected = dict(loaded(folder, scheme, "reference").named_parameters())
    found = dict(loaded(file, scheme, "reference", num_threads=2).named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].float(), value.float()) for key, value in expected.items())


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", "qwen3-tied")
    for scheme in ("w8a8", "fp8"):
        model = loaded(folder, scheme, "reference")
        assert model.lm_head.weight is model.embed.weight
    quantize_folder(folder, "awq")
    model = loaded(folder, "awq", "reference")
    assert model.lm_head.weight is model.embed.weight


def test_kernels_without_such_products() -> None:
    with pytest.raises(ConfigError, match=r"model\.quantization fp8: cpu kernels have no such products"):
        shape = LinearShape(in_features=8, out_features=8)
        basis = Basis(ops=resolve("cpu"), dtype=torch.float32, device=torch.device("cpu"))
        resolve_scheme("fp8", {}).weights(shape, basis)


def test_biases_of_layers_that_have_none(tmp_path: Path) -> None:
    """Older GPTQ checkpoints store zeros."""
    folder = make_tiny(tmp_path / "tiny", **SIZES)
    quantize_folder(folder, "gptq")
    before = loaded(folder, "gptq", "reference")

    def add(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(".scales")]:
            tensors[key.replace("scales", "bias")] = torch.zeros(tensors[key].shape[1]).half()

    change_tensors(folder, add)
    x = torch.randn(2, 64)
    assert torch.equal(loaded(folder, "gptq", "reference").layers[0].attn.qkv(x), before.layers[0].attn.qkv(x))


AT = "model.layers.1."


Change = Callable[[dict[str, Tensor]], object]


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(AT + name)


def put(name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> Change:
    return lambda tensors: tensors.update({AT + name: make(tensors)})


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda tensors: torch.zeros(shape, dtype=dtype)


def nan(tensors: dict[str, Tensor]) -> Tensor:
    weight = tensors[AT + "mlp.down_proj.weight"]
    weight.view(torch.uint8)[3, 5] = 0xFF
    return weight


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gptq", drop("self_attn.q_proj.scales"), r"not in the checkpoint \(1\): .*1.self_attn.q_proj.scales"),
        ("gptq", drop("self_attn.o_proj.qzeros"), r"not in the checkpoint \(1\): .*1.self_attn.o_proj.qzeros"),
        ("gptq-order", drop("mlp.down_proj.g_idx"), r"not in the checkpoint \(1\): .*1.mlp.down_proj.g_idx"),
        ("gptq", drop("self_attn.k_proj.qweight"), r"not in the checkpoint \(1\): .*1.self_attn.k_proj.weight\b"),
        ("awq", put("mlp.up_proj.qzeros", zeros(3, 18, dtype=torch.int32)), r"has shape \[3, 18\], .* for \[2, 18\]"),
        ("awq", put("mlp.down_proj.scales", zeros(5, 64, dtype=torch.int32)), "is of type I32, which is not expected"),
        ("awq", put("mlp.down_proj.qzeros", zeros(5, 8)), "is of type F32, which is not expected there"),
        ("gptq", put("mlp.up_proj.extra", zeros(3)), r"in the checkpoint, not in the model \(1\): .*up_proj.extra"),
        (
            "gptq",
            put("mlp.down_proj.g_idx", lambda t: torch.full((144,), 3).int()),
            "layers.1.mlp.down: GPTQ: g_idx does not put 32 inputs in each group",
        ),
        ("fp8-channel", drop("mlp.up_proj.weight_scale"), r"not in the checkpoint \(1\): .*mlp.up_proj.weight_scale"),
        ("fp8-channel", put("mlp.up_proj.weight_scale", zeros(7, 1)), r"has shape \[7, 1\], .* for \[144, 1\]"),
        ("fp8-channel", put("mlp.up_proj.input_scale", zeros(1)), "not in the model .*up_proj.input_scale"),
        ("fp8-channel", put("mlp.down_proj.weight", nan), "layers.1.mlp.down: FP8: a weight is NaN"),
        ("fp8-channel", put("mlp.up_proj.weight", zeros(144, 64)), r"not in the model \(1\): .*up_proj.weight_scale"),
        ("fp8-blocks", put("mlp.down_proj.weight_scale_inv", zeros(1, 1)), r"has shape \[1, 1\], .* for \[1, 2\]"),
        ("w8a8", put("self_attn.o_proj.weight", zeros(64, 128)), r"not in the model \(1\): .*o_proj.weight_scale"),
    ],
)
def test_files_that_are_not_what_they_say(tmp_path: Path, name: str, change: Change, says: str) -> None:
    folder = make_tiny(tmp_path / "tiny", **sizes(name))
    quantize_folder(folder, name)
    change_tensors(folder, change)
    for kernels in ("cpu", "reference"):
        with pytest.raises(ModelError, match=f"(?s){says}") as caught:
            loaded(folder, SCHEMES[name], kernels)
        assert str(folder) in str(caught.value)


def test_blocks_that_cross_parts(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", "llama-bias")
    plain = quantize_folder(folder, "fp8-blocks")
    expected = linears(loaded(twin(folder, plain), "none"))
    for kernels in ("cpu", "reference"):
        for key, layer in linears(loaded(folder, "fp8", kernels)).items():
            assert torch.equal(meant(layer), meant(expected[key])), key
            assert isinstance(layer.weights, Apart) == (key.endswith(("qkv", "gate_up")))
            x, residual = torch.randn(3, layer.in_features), torch.randn(3, sum(layer.out_parts.values()))
            if key != "lm_head":
                y, wanted = layer(x, residual.clone()), expected[key](x, residual.clone())
                assert (y - wanted).std() < (0.05 if kernels == "reference" else 1e-5) * wanted.std()


def test_parts_with_different_orders_of_inputs(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", "llama-bias")
    plain = quantize_folder(folder, "gptq-order")
    at = AT + "self_attn.k_proj."

    def shuffle(tensors: dict[str, Tensor]) -> None:
        """k has its two groups the other way round, and so another order of inputs; its weights are the same."""
        tensors[at + "g_idx"] = 1 - tensors[at + "g_idx"]
        for kind in ("scales", "qzeros"):
            tensors[at + kind] = tensors[at + kind].flip(0)

    change_tensors(folder, shuffle)
    expected = linears(loaded(twin(folder, plain), "none"))
    for kernels in ("cpu", "reference"):
        layer, other = (found["layers.1.attn.qkv"] for found in (linears(loaded(folder, "gptq", kernels)), expected))
        assert torch.equal(meant(layer), meant(other))
        x, residual = torch.randn(3, 64), torch.randn(3, 128)
        torch.testing.assert_close(layer(x, residual.clone()), other(x, residual.clone()))


def test_float8_without_a_word_in_the_config(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", **SIZES)
    change_tensors(folder, lambda t: t.update({AT + "mlp.up_proj.weight": torch.zeros(144, 64).to(fp8.TYPE)}))
    with pytest.raises(WeightError, match="is of type F8_E4M3, which is not supported"):
        loaded(folder, "none")


def test_another_scheme_than_the_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", **SIZES)
    quantize_folder(folder, "awq")
    for quantization in ("none", "int8", "fp8", "gptq"):
        with pytest.raises(ModelError, match=rf"quantized \(awq, .* model.quantization {quantization} is not"):
            loaded(folder, quantization)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_configs_say(name: str) -> None:
    found = stored_quantization({"quantization_config": CONFIGS[name]})
    assert found is not None and found.scheme == SCHEMES[name]
    assert found.blocks == (name in ("fp8-blocks", "fp8-group"))
    assert stored_quantization({"compression_config": CONFIGS[name]}) == found
    assert stored_quantization({"quantization_config": None}) is None
    details = {
        "gptq": StoredQuantization(scheme="gptq", group=32, zero_offset=1),
        "gptq-order": StoredQuantization(scheme="gptq", group=32, zero_offset=1, act_order=True),
        "gptq-v2": StoredQuantization(scheme="gptq", group=-1, zero_offset=0),
        "awq": StoredQuantization(scheme="awq", group=32),
    }
    assert found == details.get(name, found)


def with_group(name: str, **change: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": CONFIGS[name]["config_groups"]["group_0"] | change}}


def in_group(name: str, part: str, **change: Any) -> dict[str, Any]:
    return with_group(name, **{part: CONFIGS[name]["config_groups"]["group_0"][part] | change})


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gptq", {"bits": 8}, "method 'gptq', bits 8; known: 4"),
        ("gptq", {"bits": True}, "bits True"),
        ("gptq", {"group_size": 16}, "group_size 16; known: 32, 64, 128, -1"),
        ("gptq", {"group_size": None}, "group_size None"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"format": "bitblas"}, "format 'bitblas'"),
        ("gptq", {"format": "gptq", "checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq_v2' and format 'gptq'"),
        ("gptq", {"adapter": {"name": "lora"}}, "with adapter"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format True"),
        ("gptq", {"desc_act": "yes"}, "desc_act 'yes'"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "rules for single layers"),
        ("gptq", {"dynamic": 3}, "rules for single layers"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"checkpoint_format": "gemv"}, "checkpoint_format 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point False"),
        ("awq", {"bits": 3}, "bits 3"),
        ("fp8-blocks", {"activation_scheme": "static"}, "activation_scheme 'static'"),
        ("fp8-blocks", {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ("fp8-blocks", {"kv_cache_scheme": "static"}, "with kv_cache_scheme"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt 'e5m2'"),
        ("fp8-channel", {"config_groups": {"a": {}, "b": {}}}, r"config_groups \['a', 'b'\]; one is known"),
        ("fp8-channel", {"config_groups": [1]}, "one is known"),
        ("fp8-channel", {"config_groups": {"a": {"weights": None}}}, "without weights and input_activations"),
        ("fp8-channel", {"format": "pack-quantized"}, "format 'pack-quantized'"),
        ("fp8-channel", {"kv_cache_scheme": {"num_bits": 8}}, "with kv_cache_scheme"),
        ("fp8-channel", {"kv_cache_scheme": {"format": "dense"}}, "with kv_cache_scheme"),
        ("fp8-channel", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparsity_config"),
        ("fp8-channel", {"sparsity_config": "dense"}, "with sparsity_config"),
        ("fp8-channel", {"transform_config": {"config_groups": {"r1": {}}}}, "with transform_config"),
        ("fp8-channel", with_group("fp8-channel", output_activations={"num_bits": 8}), "with output_activations"),
        ("fp8-channel", in_group("fp8-channel", "weights", num_bits=4), "num_bits 4"),
        ("fp8-channel", in_group("fp8-channel", "weights", strategy="group"), "strategy 'group'"),
        ("fp8-channel", in_group("fp8-channel", "weights", dynamic=True), "dynamic True"),
        ("fp8-channel", in_group("fp8-channel", "input_activations", dynamic=False), "dynamic False"),
        ("fp8-channel", in_group("fp8-channel", "input_activations", type="int"), "type 'int'"),
        ("fp8-group", in_group("fp8-group", "input_activations", group_size=64), "group_size 64"),
        ("fp8-group", in_group("fp8-group", "weights", block_structure=[64, 64]), "block_structure"),
        ("w8a8", in_group("w8a8", "weights", symmetric=False), "symmetric False"),
        ("w8a8", in_group("w8a8", "weights", strategy="tensor"), "strategy 'tensor'"),
        ("w8a8", {"quant_method": "bitsandbytes"}, "method 'bitsandbytes'"),
        ("w8a8", {"quant_method": ["gptq"]}, "method"),
        ("w8a8", {"quant_method": None}, "method None"),
    ],
)
def test_what_configs_say_that_is_not_known(name: str, change: dict[str, Any], says: str) -> None:
    config = {"quantization_config": CONFIGS[name] | change}
    with pytest.raises(ModelError, match=rf"{says}.* not supported; use the original checkpoint"):
        stored_quantization(config)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq-v2", {"checkpoint_format": None, "format": "gptq_v2"}),
        ("gptq-v2", {"format": "gptq_v2"}),
        ("gptq", {"format": "gptq", "checkpoint_format": "gptq", "adapter": None, "dynamic": {"-:.*down.*": {}}}),
        ("awq", {"format": "gemm", "checkpoint_format": "gemm"}),
        # Weights with many zeros are stored like any others.
        ("w8a8", {"sparsity_config": {"format": "dense", "global_sparsity": 0.14, "targets": []}}),
        ("w8a8", {"sparsity_config": {}, "transform_config": {}, "kv_cache_scheme": None}),
        ("w8a8", with_group("w8a8", output_activations=None)),
    ],
)
def test_what_configs_may_say_besides(name: str, change: dict[str, Any]) -> None:
    plain = stored_quantization({"quantization_config": CONFIGS[name]})
    assert stored_quantization({"quantization_config": CONFIGS[name] | change}) == plain


@pytest.mark.parametrize("last", ["mlp.up_proj.input_scale", "self_attn.k_scale", "self_attn.v_proj.output_scale"])
def test_scales_that_are_not_used_are_refused_before_the_start(tmp_path: Path, last: str) -> None:
    folder = make_tiny(tmp_path / "tiny", **SIZES)
    quantize_folder(folder, "fp8-channel")
    change_tensors(folder, put(last, zeros(1)))
    with pytest.raises(ModelError, match=rf"{last}' in model\.safetensors.* not supported in a checkpoint of fp8"):
        check_supported(open_model(str(folder)))


def test_a_config_that_is_no_object() -> None:
    for value in ("gptq", [1], 3):
        with pytest.raises(ModelError, match="not supported; use the original checkpoint"):
            stored_quantization({"quantization_config": value})
