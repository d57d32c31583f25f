"""Experts that are stored in different ways are found in the files' headers, before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.arithmetic import Machine, resolve_arithmetic
from batchinfer.errors import ConfigError
from batchinfer.modelfiles import ModelFiles, open_model
from batchinfer.modelfiles.stored_experts import StoredExperts, stored_experts
from batchinfer.modelfiles.stored_quantization import stored_quantization
from batchinfer.testing.tiny import make_tiny
from batchinfer.testing.tiny_quantized import quantize_folder

GPU = Machine(vector_level="avx512", product_level="avx512", gpu_level="sm_90", gpu_name="a GPU", triton_on_gpu=None)
BLOCKS = {"fp8-blocks": {"moe_intermediate_size": 128, "intermediate_size": 128}}
LATENT = {"qk_rope_head_dim": 16}
# Members, and what their experts are called.
MEMBERS: dict[str, tuple[str, tuple[str, str, str], dict[str, Any]]] = {
    "mixtral": ("model.layers.1.block_sparse_moe.experts", ("w1", "w3", "w2"), {}),
    "qwen3-moe": ("model.layers.2.mlp.experts", ("gate_proj", "up_proj", "down_proj"), {}),
    "deepseek-v3": ("model.layers.2.mlp.experts", ("gate_proj", "up_proj", "down_proj"), LATENT),
}


def opened(folder: Path, member: str, stored: str, leave: Callable[[str], bool] = lambda layer: False) -> ModelFiles:
    make_tiny(folder, member, **(MEMBERS[member][2] | BLOCKS.get(stored, {})))
    quantize_folder(folder, stored, leave=leave)
    return open_model(str(folder))


def found(files: ModelFiles) -> StoredExperts:
    stored = stored_quantization(files.config)
    assert stored is not None
    return stored_experts(files.tensors, stored, files.config["num_hidden_layers"])


@pytest.mark.parametrize("stored", ["awq", "gptq", "fp8-channel", "fp8-blocks", "w8a8"])
@pytest.mark.parametrize("member", MEMBERS)
def test_one_that_is_not_quantized(tmp_path: Path, member: str, stored: str) -> None:
    """Whichever of its weights it is; gates and ups are one product, downs another."""
    at, names, _ = MEMBERS[member]
    assert found(opened(tmp_path / "all", member, stored)) == StoredExperts(gate_up=True, down=True)
    for name in names:
        left = f"{at}.3.{name}"
        files = opened(tmp_path / name, member, stored, lambda layer, left=left: layer == left)
        told = found(files).difference
        assert told is not None and told.endswith(f" and {left.removeprefix(at + '.')} is not quantized"), told
        assert told.startswith(f"of {at}, 0.{names[2] if name == names[2] else names[0]} is stored as ")
        with pytest.raises(ConfigError, match=r"triton can't be used here: experts are stored in different ways"):
            resolve_arithmetic(files, GPU, device="cuda", kernels="triton")
        auto = resolve_arithmetic(files, GPU, device="cuda")
        assert auto.kernels == "cpu" and auto.degraded is not None and left.removeprefix(at + ".") in auto.degraded


@pytest.mark.parametrize("member", MEMBERS)
def test_what_may_differ(tmp_path: Path, member: str) -> None:
    """Downs from gates and ups, layers from each other, experts from all else."""
    at, names, _ = MEMBERS[member]
    layer = f"{at.split('.experts')[0]}."
    rules: list[Callable[[str], bool]] = [
        lambda name: name.endswith(names[2]) and ".experts." in name,
        lambda name: name.startswith(layer),
        lambda name: ".experts." not in name,
    ]
    for i, leave in enumerate(rules):
        files = opened(tmp_path / str(i), member, "fp8-channel", leave)
        assert found(files) == StoredExperts(gate_up=True, down=i > 0)
        assert resolve_arithmetic(files, GPU, device="cuda", kernels="triton").kernels == "triton"


def test_plain_experts_of_a_quantized_checkpoint_have_no_limits_of_quantized_ones(tmp_path: Path) -> None:
    for stored in ("gptq-order", "fp8-blocks"):
        quantized = opened(tmp_path / stored, "qwen3-moe", stored)
        plain = opened(tmp_path / (stored + "-plain"), "qwen3-moe", stored, lambda layer: ".experts." in layer)
        for files, expected in ((quantized, True), (plain, False)):
            assert found(files) == StoredExperts(gate_up=expected, down=expected)
        assert resolve_arithmetic(plain, GPU, device="cuda", kernels="triton").kernels == "triton"
    with pytest.raises(ConfigError, match="experts whose inputs have orders"):
        resolve_arithmetic(open_model(str(tmp_path / "gptq-order")), GPU, device="cuda", kernels="triton")


def test_layers_that_are_not_run_may_be_stored_in_any_way(tmp_path: Path) -> None:
    """Those of DeepSeek-V3 that predict further tokens."""
    at, *_ = MEMBERS["deepseek-v3"]
    further = at.replace(".2.", ".3.")
    opened(tmp_path, "deepseek-v3", "fp8-channel")
    tensors = load_file(tmp_path / "model.safetensors")
    more = {name.replace(at, further): x.clone() for name, x in tensors.items() if name.startswith(f"{at}.")}
    left = f"{further}.3.up_proj.weight"
    more[left] = more[left].to(torch.bfloat16)
    save_file({**tensors, **more}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = open_model(str(tmp_path))
    assert left in files.tensors and found(files).difference is None
    assert resolve_arithmetic(files, GPU, device="cuda", kernels="triton").kernels == "triton"
    as_if_run = replace(files, config=files.config | {"num_hidden_layers": 4})
    assert found(as_if_run).difference is not None
