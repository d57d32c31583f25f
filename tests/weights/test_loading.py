"""Filling parameters: whole, sharded, in pieces, on several threads, from every type; wrong tensors by name."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batchinfer_kernels.table import resolve
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from batchinfer.errors import ConfigError, ModelError
from batchinfer.modelfiles import open_model
from batchinfer.models import load_model
from batchinfer.testing.tiny import make_tiny, tiny_config, tiny_tensors
from batchinfer.testing.tiny_gguf import EXPERTS, K_SIZES, make_tiny_gguf
from batchinfer.weights import WeightError, loading
from batchinfer.weights.gguf_types import DEQUANTIZED, dequantize
from batchinfer.weights.loading import PLAIN_TYPES, TensorReader, equal_values
from tests.modelfiles.test_gguf import split

OPS = resolve("reference")


def parameters(path: Path, **options: Any) -> dict[str, Tensor]:
    model = load_model(open_model(str(path)), ops=OPS, **options)
    assert isinstance(model, nn.Module)
    return dict(model.named_parameters())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(path: Path, *words: str, **options: Any) -> None:
    with pytest.raises(ModelError) as caught:
        parameters(path, **options)
    for word in words:
        assert word in str(caught.value)


def test_every_value_lands_in_its_place(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", "llama-bias")
    stored, ours = load_file(folder / "model.safetensors"), parameters(folder)
    for i in range(3):
        theirs = f"model.layers.{i}.self_attn"
        for kind in ("weight", "bias"):
            qkv = torch.cat([stored[f"{theirs}.{p}_proj.{kind}"] for p in "qkv"])
            assert torch.equal(ours[f"layers.{i}.attn.qkv.{kind}"], qkv)
            gate_up = torch.cat([stored[f"model.layers.{i}.mlp.{p}_proj.{kind}"] for p in ("gate", "up")])
            assert torch.equal(ours[f"layers.{i}.mlp.gate_up.{kind}"], gate_up)
    assert torch.equal(ours["embed.weight"], stored["model.embed_tokens.weight"])
    assert sum(p.numel() for p in ours.values()) == sum(t.numel() for t in stored.values())


def test_shards_threads_and_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = parameters(make_tiny(tmp_path / "whole"), num_threads=1)
    sharded = make_tiny(tmp_path / "sharded", num_shards=3)
    gguf = make_tiny_gguf(tmp_path / "t.gguf", quant="Q4_1")
    quantized = parameters(gguf, num_threads=1)
    for piece_elements, num_threads in ((1, 3), (1000, 2), (1 << 30, 4)):
        monkeypatch.setattr(loading, "PIECE_ELEMENTS", piece_elements)
        assert same(parameters(sharded, num_threads=num_threads), expected)
        assert same(parameters(gguf, num_threads=num_threads), quantized)


def test_a_split_file_gives_what_the_whole_one_gives(tmp_path: Path) -> None:
    whole = make_tiny_gguf(tmp_path / "t.gguf", quant="Q4_1")
    expected = parameters(whole)
    first, *_ = split(whole, 3)
    whole.unlink()
    assert same(parameters(first), expected)


@pytest.mark.parametrize("kind", sorted(DEQUANTIZED))
def test_dequantization_is_that_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    import gguf

    path = make_tiny_gguf(tmp_path / "t.gguf", quant=kind, num_hidden_layers=1)
    reader = {t.name: t for t in gguf.GGUFReader(str(path)).tensors}
    with TensorReader() as ours:
        for name, stored in open_model(str(path)).tensors.items():
            theirs = gguf.quants.dequantize(reader[name].data, reader[name].tensor_type)
            assert stored.dtype == reader[name].tensor_type.name
            assert np.array_equal(ours.rows(stored, 0, stored.shape[0]).numpy(), theirs), name
            if len(stored.shape) == 2:
                assert np.array_equal(ours.rows(stored, 3, 7).numpy(), theirs[3:7]), name


def test_the_supported_types_know_their_sizes() -> None:
    from batchinfer.modelfiles.gguf_header import GGML_TYPES

    known = {name: (block, size) for name, block, size in GGML_TYPES.values()}
    assert all(known[name] == sizes for name, sizes in DEQUANTIZED.items())
    assert set(PLAIN_TYPES) <= set(known)
    assert dequantize(np.zeros(34 * 3, dtype=np.uint8), "Q8_0").shape == (96,)


def test_rows_of_llama_gguf_files_are_put_back_in_order(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", "llama-bias", head_dim=32)
    for family_path in (make_tiny_gguf(tmp_path / "t.gguf", "llama-bias", head_dim=32),):
        assert same(parameters(family_path), parameters(folder))
    folder, path = make_tiny(tmp_path / "q", "qwen2"), make_tiny_gguf(tmp_path / "q.gguf", "qwen2")
    assert same(parameters(path), parameters(folder))


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_gguf_land_in_their_places(tmp_path: Path, family: str) -> None:
    folder = make_tiny(tmp_path / "tiny", family, **EXPERTS[family])
    assert same(parameters(make_tiny_gguf(tmp_path / "t.gguf", family, **EXPERTS[family])), parameters(folder))


def test_experts_of_gguf_in_blocks(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, quants

    sizes = {"mlp_only_layers": None, "moe_intermediate_size": 64}
    ours = parameters(make_tiny_gguf(tmp_path / "t.gguf", "qwen3-moe", quant="Q8_0", **sizes))
    for name, tensor in tiny_tensors(tiny_config("qwen3-moe", **sizes)).items():
        if ".experts." in name and name.endswith("down_proj.weight"):
            stored = quants.quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
            meant = quants.dequantize(stored, GGMLQuantizationType.Q8_0)
            mine = name.removeprefix("model.").replace("down_proj", "down")
            assert torch.equal(ours[mine], torch.from_numpy(meant)), name


def test_several_types_in_one_file(tmp_path: Path) -> None:
    kinds = {"ffn_down": "Q6_K", "attn_q": "Q4_K", "token_embd": "Q8_0", "": "F16"}
    path = make_tiny_gguf(tmp_path / "t.gguf", quant=kinds)
    assert {t.dtype for t in open_model(str(path)).tensors.values()} == {"F32", "F16", "Q8_0", "Q4_K", "Q6_K"}
    mixed, alone = parameters(path), parameters(make_tiny_gguf(tmp_path / "a.gguf", quant="Q8_0", **K_SIZES))
    assert torch.equal(mixed["embed.weight"], alone["embed.weight"])


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_XS", "MXFP4"])
def test_other_types_are_refused_by_name(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchinfer.modelfiles import gguf_header

    number = next(n for n, (name, _, _) in gguf_header.GGML_TYPES.items() if name == kind)
    monkeypatch.setitem(gguf_header.GGML_TYPES, 8, gguf_header.GGML_TYPES[number])
    path = make_tiny_gguf(tmp_path / "t.gguf", quant={"ffn_down": "Q8_0", "": "F32"}, intermediate_size=256)
    refused(path, "'blk.0.ffn_down.weight'", f"is of type {kind}", "supported are F32, F16, BF16, Q4_0")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny(tmp_path / "tiny", dtype=dtype)
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(parameters(folder)["lm_head.weight"], stored.float())
    name = str(dtype).removeprefix("torch.")
    assert torch.equal(parameters(folder, dtype=name)["lm_head.weight"], stored)


def test_a_value_that_float16_cannot_hold(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", dtype=torch.bfloat16)
    rewrite(folder, lambda t: t["model.layers.1.mlp.down_proj.weight"][0].fill_(1e5))
    refused(folder, "model.layers.1.mlp.down_proj.weight", "float16 can't hold", dtype="float16")
    assert parameters(folder, dtype="bfloat16")


def test_an_extra_tensor(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.extra.weight": torch.zeros(2)}))
    refused(folder, "not in the model (1): model.layers.0.self_attn.extra.weight")


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    rewrite(folder, lambda t: t.pop("model.layers.2.self_attn.k_proj.weight"))
    refused(folder, "not in the checkpoint (1): model.layers.2.self_attn.k_proj.weight")


def test_weights_of_a_deeper_or_another_model(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    refused(folder, "not in the model (9): model.layers.2.input_layernorm.weight")
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    refused(
        folder,
        "model.safetensors",
        "'model.layers.0.self_attn.k_proj.weight' has shape [32, 64]",
        "config asks for [64, 64]",
    )


def test_a_type_that_is_no_weight(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}))
    refused(folder, "'model.norm.weight' is of type I32", "supported are F32, F16, BF16")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    files = open_model(str(folder))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(WeightError, match=r"model\.safetensors: ends inside tensor"):
        load_model(files, ops=OPS)
    path.unlink()
    with pytest.raises(WeightError, match=r"can't be read: No such file"):
        load_model(files, ops=OPS)


def test_memory_stays_small_beside_the_parameters(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "t.gguf", quant="Q8_0", hidden_size=512, intermediate_size=4096)
    total = open_model(str(path)).num_parameters * 4
    tracemalloc.start()  # sees numpy's memory, not torch's: so all that is not a parameter
    parameters(path, num_threads=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 60 << 20
    assert peak < 25 << 20


def test_equal_values(tmp_path: Path) -> None:
    a = open_model(str(make_tiny(tmp_path / "a"))).tensors
    b = open_model(str(make_tiny(tmp_path / "b", seed=1))).tensors
    assert equal_values(a["lm_head.weight"], a["lm_head.weight"])
    assert not equal_values(a["lm_head.weight"], b["lm_head.weight"])
    assert not equal_values(a["lm_head.weight"], a["model.norm.weight"])


@pytest.mark.parametrize("quantization", ["int4", "awq"])
def test_quantization_is_refused_by_name(tmp_path: Path, quantization: str) -> None:
    with pytest.raises(ConfigError, match=f"no quantization '{quantization}'"):
        parameters(make_tiny(tmp_path / "tiny"), quantization=quantization)


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True},
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["k_proj"]},
        {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": {}, "group_1": {}}},
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["model.layers.0"]},
        {"bits": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantized_checkpoint_is_refused_by_name(tmp_path: Path, key: str, stored: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "tiny", **{key: stored})
    refused(folder, str(folder), f"method {stored.get('quant_method', 'unnamed')!r}", "not supported")
