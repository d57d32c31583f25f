"""Models that no file holds: parameters are filled where they lie, by names and shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import resolve
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchinfer.modelfiles import ModelFiles, StoredTensor, open_model
from batchinfer.models import load_model
from batchinfer.testing.tiny import make_tiny
from batchinfer.weights import WeightError, loading

OPS = resolve("reference")
FAMILIES = ["llama-bias", "smollm", "qwen2-moe", "deepseek-v3"]


def without_files(files: ModelFiles) -> ModelFiles:
    tensors = {name: replace(tensor, file=Path("no file")) for name, tensor in files.tensors.items()}
    return replace(files, tensors=tensors, weight_files=())


def parameters(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_land_where_those_of_files_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: str
) -> None:
    """Also where rows are quantized as they come, a few at a time."""
    folder = make_tiny(tmp_path / "model", family)
    files, stored = open_model(str(folder)), load_file(folder / "model.safetensors")
    expected = parameters(load_model(files, ops=OPS, quantization=quantization, dtype="float32"))
    monkeypatch.setattr(loading, "FILLED_ELEMENTS", 300)
    given: dict[str, int] = {}

    def fill(tensor: StoredTensor, numbers: Tensor) -> None:
        start = given.get(tensor.name, 0)
        given[tensor.name] = start + len(numbers)
        numbers.copy_(stored[tensor.name][start : start + len(numbers)])

    found = parameters(load_model(without_files(files), ops=OPS, quantization=quantization, dtype="float32", fill=fill))
    assert given == {name: len(tensor) for name, tensor in stored.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


class Sizes(TorchDispatchMode):
    """The largest tensor that is made or seen on each kind of device."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in (made,) if isinstance(made, Tensor) else ():
            kind = tensor.device.type
            self.most[kind] = max(self.most.get(kind, 0), tensor.numel())
        return made


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_it_happens_on_the_device(tmp_path: Path, family: str) -> None:
    """Here one that has no numbers: a tensor of weights on the CPU would be seen."""
    folder = make_tiny(tmp_path / "model", family, max_position_embeddings=32)
    drawn: list[str] = []

    def fill(tensor: StoredTensor, numbers: Tensor) -> None:
        assert numbers.device.type == "meta"
        numbers.normal_()
        drawn.append(tensor.name)

    files = without_files(open_model(str(folder)))
    with Sizes() as sizes:
        model = load_model(files, ops=OPS, dtype="bfloat16", device="meta", fill=fill)
    assert drawn == list(files.tensors)
    assert all(parameter.device.type == "meta" for parameter in parameters(model).values())
    assert sizes.most["meta"] >= 384 * 64 and sizes.most.get("cpu", 0) < 48 * 64


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("model.norm.weight"),
        lambda tensors: tensors.update({"model.more": tensors["model.norm.weight"]}),
        lambda tensors: tensors.update({"model.norm.weight": replace(tensors["model.norm.weight"], shape=(3,))}),
    ],
)
def test_names_and_shapes_are_those_of_the_model(
    tmp_path: Path, change: Callable[[dict[str, StoredTensor]], Any]
) -> None:
    """As strictly as with files."""
    files = open_model(str(make_tiny(tmp_path / "model")))
    tensors = dict(files.tensors)
    change(tensors)
    with pytest.raises(WeightError):
        load_model(replace(files, tensors=tensors), ops=OPS, fill=lambda tensor, numbers: None)
