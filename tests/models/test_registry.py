"""Which models are taken and which are refused, by name and before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import resolve

from batchinfer.errors import ConfigError, ModelError
from batchinfer.layers.rope import frequencies
from batchinfer.modelfiles import open_model
from batchinfer.modelfiles.rope_config import RopeConfig
from batchinfer.models import load_model
from batchinfer.models.dtype import resolve_dtype
from batchinfer.testing.tiny import make_tiny

OPS = resolve("reference")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def refused(path: Path, *words: str, error: type[Exception] = ModelError, **options: Any) -> None:
    with pytest.raises(error) as caught:
        load_model(open_model(str(path)), ops=OPS, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            [
                "GPT2LMHeadModel is not supported",
                "LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM",
            ],
        ),
        ({"architectures": None}, ["architecture none (model_type 'llama')"]),
        ({"architectures": "LlamaForCausalLM"}, ["must be a list"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4 is not a multiple of num_key_value_heads 3"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ["not a multiple of", "no head_dim"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "got 0"]),
        ({"head_dim": "wide"}, ["head_dim in the model's config must be a positive integer, got 'wide'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "positive integer, got 0"]),
        ({"vocab_size": "384"}, ["vocab_size", "positive integer"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, ["'longrope' is not supported", "yarn"]),
        ({"rope_scaling": {"type": "su"}}, ["'su' is not supported"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["'linear': factor is missing"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, ["unknown keys mrope_section"]),
        ({"rope_scaling": "linear"}, ["rope_scaling must be a JSON object"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["unknown keys full_attention"]),
        ({"partial_rotary_factor": 0.01}, ["RoPE over 0 of 16 dimensions"]),
    ],
    ids=str,
)
def test_refused_by_name(tmp_path: Path, config: dict[str, Any], words: list[str]) -> None:
    path = make_tiny(tmp_path)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, **config}))
    refused(path, str(path), *words)


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "DeepseekForCausalLM",
        "GptOssForCausalLM",
        "Qwen3NextForCausalLM",
        "LlamaForSequenceClassification",
    ],
)
def test_families_that_are_not_there_are_refused_by_name(tmp_path: Path, architecture: str) -> None:
    """Never run as if it were a llama, however much its config looks like one."""
    path = make_tiny(tmp_path, architectures=[architecture])
    refused(path, f"architecture {architecture} is not supported; supported are DeepseekV2ForCausalLM, ")


@pytest.mark.parametrize("config", [{"sliding_window": 0}, {"sliding_window": 8, "layer_types": ["full_attention"]}])
def test_windows_that_are_none(tmp_path: Path, config: dict[str, Any]) -> None:
    refused(make_tiny(tmp_path, "mistral", **config), "in the model's config")


def test_a_window_that_nothing_outgrows_is_none(tmp_path: Path) -> None:
    files = open_model(str(make_tiny(tmp_path, "mistral", sliding_window=64)))
    windows = [spec.window for spec in load_model(files, ops=OPS).attention_specs]
    assert windows == [64] * 3
    assert [s.window for s in load_model(files, ops=OPS, max_model_len=64).attention_specs] == [None] * 3


def test_facts(tmp_path: Path) -> None:
    model = load_model(open_model(str(make_tiny(tmp_path, "qwen3"))), ops=OPS, max_model_len=100)
    facts = model.facts
    assert (facts.architecture, facts.num_layers, facts.hidden_size) == ("Qwen3ForCausalLM", 3, 64)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 2, 32)
    assert (facts.vocab_size, facts.max_model_len, facts.quantization) == (384, 100, "none")
    assert (facts.dtype, facts.dtype_source) == (torch.float32, "auto: float32 on the CPU")
    assert len(model.attention_specs) == 3
    assert model.attention_specs[0].scale == 32**-0.5


def test_lengths(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    refused(path, "max_model_len 513 is more than the model's own 512", error=ConfigError, max_model_len=513)


def test_fake_models_are_not_loaded() -> None:
    with pytest.raises(ModelError, match="fake runner only"):
        load_model(open_model("fake://hash"), ops=OPS)


@pytest.mark.parametrize(
    ("dtype", "config", "device", "expected"),
    [
        ("auto", {"torch_dtype": "bfloat16"}, CPU, torch.float32),
        ("bfloat16", {}, CPU, torch.bfloat16),
        ("float16", {"torch_dtype": "bfloat16"}, CPU, torch.float16),
        ("auto", {"torch_dtype": "float16"}, GPU, torch.float16),
        ("auto", {"dtype": "bfloat16"}, GPU, torch.bfloat16),
        ("auto", {"torch_dtype": "float32"}, GPU, torch.bfloat16),
        ("float32", {"torch_dtype": "bfloat16"}, GPU, torch.float32),
    ],
)
def test_dtypes(dtype: str, config: dict[str, Any], device: torch.device, expected: torch.dtype) -> None:
    found, source = resolve_dtype(dtype, config, device)
    assert found == expected
    assert source.startswith("auto: ") == (dtype == "auto")


def test_an_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype must be auto, float32, bfloat16 or float16, got 'half'"):
        resolve_dtype("half", {}, CPU)


def test_partial_rotation() -> None:
    """Frequencies of a half rotated head are those of a head half as large."""
    config = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    half = RopeConfig.from_config(config, head_dim=32, max_position_embeddings=64)
    whole = RopeConfig.from_config({"rope_theta": 10000.0}, head_dim=16, max_position_embeddings=64)
    assert half.rotary_dim == 16
    assert torch.equal(frequencies(half)[0], frequencies(whole)[0])
    nested = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}}
    assert RopeConfig.from_config(nested, head_dim=32, max_position_embeddings=64) == half
