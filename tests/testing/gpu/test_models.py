"""Engines of models that no file holds: weights are drawn, all of them, the same from the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import resolve
from torch import Tensor

from batchinfer.models import load_model
from batchinfer.testing.gpu.models import drawn, random_files
from batchinfer.testing.gpu.sizes import TOY
from batchinfer.weights.loading import TensorReader

MODELS = {"dense": TOY.model, "sparse": TOY.sparse_model, "latent": TOY.latent_model}


@pytest.fixture
def _unfilled_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    device = torch.device("cpu")
    model: Any = load_model(
        random_files(config), ops=resolve("triton"), dtype="float32", fill=drawn(config, device, seed)
    )
    return dict(model.named_parameters())


@pytest.mark.usefixtures("_unfilled_memory_is_nan")
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_drawn_and_nothing_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("nothing is to be read")

    monkeypatch.setattr(TensorReader, "read_into", read)
    found = weights(MODELS[name], 1)
    again, other = weights(MODELS[name], 1), weights(MODELS[name], 2)
    for weight, numbers in found.items():
        assert numbers.isfinite().all(), weight
        assert torch.equal(numbers, again[weight])
        if numbers.any():  # biases of routers that have none are not
            assert not torch.equal(numbers, other[weight]), weight
    norm = found["layers.0.input_norm.weight"]
    assert abs(float(norm.mean()) - 1) < 0.1 and 0.05 < float(norm.std()) < 0.15
    assert abs(float(found["embed.weight"].std()) - 0.3) < 0.05
