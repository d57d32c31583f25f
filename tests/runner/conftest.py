"""Runners of tiny checkpoints, made once. Strict products are asked for before torch does any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batchinfer_kernels.determinism import prepare

prepare()

import torch  # noqa: E402

from batchinfer.config import EngineConfig  # noqa: E402
from batchinfer.modelfiles import open_model  # noqa: E402
from batchinfer.runner.load import load_runner  # noqa: E402
from batchinfer.runner.local import LocalRunner  # noqa: E402
from batchinfer.testing.tiny import make_tiny  # noqa: E402

MakeRunner = Callable[..., LocalRunner]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def folder(family: str = "llama", **overrides: Any) -> Path:
        key = f"{family}-{sorted(overrides.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("tiny") / family
            make_tiny(made[key], family, **overrides)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def make_runner(tiny_folder: Callable[..., Path]) -> MakeRunner:
    """make_runner("llama", num_threads=2, ...): a new runner of a tiny checkpoint, unquantized unless told."""

    def make(family: str = "llama", overrides: dict[str, Any] | None = None, **options: Any) -> LocalRunner:
        path = str(tiny_folder(family, **(overrides or {})))
        options = {"num_threads": 1, "kv_cache_memory": 16 << 20, "quantization": "none"} | options
        return load_runner(open_model(path), EngineConfig(model=path, **options))

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
