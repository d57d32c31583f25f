"""What a config says of positions, heads and windows, on Triton's kernels in the interpreter: logits of the reference's
kernels, in prompts, chunks, and single tokens that run as CUDA graphs do, which are identity here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer.config import EngineConfig
from batchinfer.errors import ConfigError
from batchinfer.modelfiles import open_model
from batchinfer.runner.load import load_runner
from batchinfer.runner.local import LocalRunner
from batchinfer.testing.tiny import VOCAB_SIZE
from batchinfer.testing.tiny_gguf import make_tiny_gguf
from tests.kernels.triton.device import ON_GPU
from tests.runner.test_runner_oracle import all_logits
from tests.runner.triton.test_triton_runner import HERE

# What numpy says of rows that are padding: attention gives them whatever was in memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = {"block_size": 4, "split_size": 16, "max_model_len": 24, "num_threads": 1, "max_num_seqs": 1}
NUM_TOKENS = 22  # into the second split
SCALED = {"factor": 4.0, "original_max_position_embeddings": 8}
HYBRID = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_key_value_heads": 1,
}
# Family, config; options of the engine.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}},
        {},
    ),
    "yarn, which scales queries and keys": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.4, **SCALED}},
        {},
    ),
    "heads that are no power of two": (
        "llama",
        {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 1},
        {},
    ),
    "windows in every other layer": ("qwen3", HYBRID, {}),
    "windows in every other layer, KV in int8": ("qwen2", HYBRID, {"kv_cache_dtype": "int8"}),
}
SMALL = {"num_hidden_layers": 1, "intermediate_size": 48}

MakeRunner = Callable[..., LocalRunner]


def check(make: Callable[[str], LocalRunner], most: float) -> None:
    tokens = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = all_logits(make("reference"), tokens, [NUM_TOKENS])
    runner = make("triton")
    whole = all_logits(runner, tokens, [NUM_TOKENS])
    assert expected.std() > 0.3  # logits that say something
    assert (whole - expected).abs().max() < (1.0 if ON_GPU else most)
    assert torch.equal(all_logits(runner, tokens, [13, 1, 1, 7]), whole)
    assert runner._graphs is not None and runner._graphs.num_replayed > 0


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_reference(make_runner: MakeRunner, case: str) -> None:
    family, config, options = CASES[case]

    def make(kernels: str) -> LocalRunner:
        graphs = {"cuda_graphs": True} if kernels == "triton" else {}
        return make_runner(family, {**SMALL, **config}, kernels=kernels, **HERE, **SIZES, **options, **graphs)

    check(make, most=0.05 if "kv_cache_dtype" in options else 1e-3)


def test_a_part_of_each_head_is_rotated(tmp_path: Path) -> None:
    metadata = {"llama.rope.dimension_count": 8}
    path = str(make_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata, **SMALL))

    def make(kernels: str) -> LocalRunner:
        graphs = {"cuda_graphs": True} if kernels == "triton" else {}
        options: dict[str, Any] = {"kv_cache_memory": 16 << 20, "quantization": "none", **HERE, **SIZES, **graphs}
        return load_runner(open_model(path), EngineConfig(model=path, kernels=kernels, **options))

    assert open_model(path).config["rope_dimension_count"] == 8
    check(make, most=1e-3)


@pytest.mark.parametrize(("head_dim", "block_size"), [(26, 7), (26, 6), (20, 7)])
def test_blocks_that_an_int8_cache_can_not_be_in(make_runner: MakeRunner, head_dim: int, block_size: int) -> None:
    """Refused before the model is loaded; no other kernels mind."""
    sizes = {**SIZES, "block_size": block_size, "split_size": 2 * block_size, "kv_cache_dtype": "int8"}
    make_runner("llama", {**SMALL, "head_dim": head_dim}, kernels="reference", **HERE, **sizes)
    if head_dim * block_size % 4 == 0:
        make_runner("llama", {**SMALL, "head_dim": head_dim}, kernels="triton", **HERE, **sizes)
        return
    message = (
        r"engine\.block_size 7 does not go with engine\.kernels triton: .*26 dimensions needs blocks of a multiple of 2"
    )
    with pytest.raises(ConfigError, match=message):
        make_runner("llama", {**SMALL, "head_dim": head_dim}, kernels="triton", **HERE, **sizes)
