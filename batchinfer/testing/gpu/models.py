"""Engines of models that no file holds: of a config, with random weights that are made where they lie.

The loader is told what a checkpoint of that config stores, by names and shapes; so everything but the numbers goes the
way of a real model. Those are drawn into the parameters on the device, from a seed: nothing is read, and the host holds
none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchinfer.config import EngineConfig
from batchinfer.cost import ModelShape
from batchinfer.engine import Engine
from batchinfer.modelfiles import ModelFiles, StoredTensor, TokenizerFiles
from batchinfer.runner.load import load_runner
from batchinfer.testing.tiny import tensor_draws
from batchinfer.weights import Fill

NO_FILE = Path("no file")


def random_files(config: Mapping[str, Any]) -> ModelFiles:
    """What files of a model in bfloat16 would say, of which there are none."""
    tensors = {
        name: StoredTensor(
            name=name, file=NO_FILE, dtype="BF16", shape=draw.shape, offset=0, nbytes=2 * math.prod(draw.shape)
        )
        for name, draw in tensor_draws(config).items()
    }
    return ModelFiles(
        name="random weights",
        kind="hf",
        root=NO_FILE,
        config=dict(config),
        tokenizer=TokenizerFiles(kind="fake"),
        tensors=tensors,
        eos_token_ids=frozenset({int(config["eos_token_id"])}),
    )


def random_engine(
    config: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    seed: int = 0,
    **options: Any,
) -> Engine:
    """An engine on Triton's kernels, with so many KV blocks, without a tokenizer. options: of EngineConfig."""
    files = random_files(config)
    settings = {
        "device": device.type,
        "kernels": "triton",
        "dtype": name_of(dtype),
        "quantization": "none",
        "num_threads": 1 if device.type == "cpu" else 8,
        "block_size": block_size,
        "kv_cache_memory": num_blocks * block_size * shape_of(config).kv_bytes_per_token(name_of(dtype)),
        **options,
    }
    engine_config = EngineConfig(model=files.name, **settings)
    runner = load_runner(files, engine_config, fill=drawn(config, device, seed))
    return Engine(
        runner,
        max_model_len=runner.max_model_len,
        vocab_size=int(config["vocab_size"]),
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        enable_prefix_caching=engine_config.enable_prefix_caching,
        async_scheduling=engine_config.async_scheduling,
        model=files,
        facts={name: (fact.value, fact.source) for name, fact in runner.facts().items()},
    )


def drawn(config: Mapping[str, Any], device: torch.device, seed: int) -> Fill:
    """Weights that keep hidden states of one size from layer to layer, and logits apart; the same for the same seed on
    the same device."""
    draws, generator = tensor_draws(config), torch.Generator(device).manual_seed(seed)

    def fill(stored: StoredTensor, numbers: Tensor) -> None:
        draw = draws[stored.name]
        numbers.normal_(draw.mean, draw.std, generator=generator)

    return fill


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Of a config that says all of it."""
    shape = ModelShape.from_config(config)
    assert shape is not None
    return shape


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
