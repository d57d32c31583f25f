"""Layers: how weights get in, and the door for schemes that pack while loading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from batchinfer_kernels.table import Ops, resolve
from safetensors.torch import save_file
from torch import Tensor, nn

from batchinfer.layers import LayerMaker, Linear
from batchinfer.modelfiles.safetensors_header import read_checkpoint
from batchinfer.quant import Basis, LinearScheme, LinearShape, Unquantized
from batchinfer.quant.unquantized import PlainWeights
from batchinfer.weights import Rule, load_weights

OPS = resolve("reference")


class RowScaled:
    """A scheme as later ones will be: full-precision rows go into a staging tensor, int8 and scales are kept."""

    name = "toy"
    stored_types: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.num_staged = self.max_staged = 0

    def weights(self, shape: LinearShape, basis: Basis, shared: Tensor | None = None) -> ScaledRows:
        return ScaledRows(self, shape, basis.ops)


class ScaledRows(PlainWeights):
    def __init__(self, scheme: RowScaled, shape: LinearShape, ops: Ops) -> None:
        super().__init__(ops, torch.empty(0, shape.in_features))
        self.params = {}
        self.scheme, self.shape = scheme, shape
        self.staging: Tensor | None = None

    def target(self, kind: str, part: str, span: slice) -> Tensor:
        if self.staging is None:
            self.staging = torch.empty(self.shape.out_features, self.shape.in_features)
            self.scheme.num_staged += 1
            self.scheme.max_staged = max(self.scheme.max_staged, self.scheme.num_staged)
        return self.staging[span]

    def finish(self) -> None:
        full, self.staging = self.staging, None
        assert full is not None
        self.scheme.num_staged -= 1
        scale = full.abs().amax(1, keepdim=True) / 127
        self.params = {"weight": (full / scale).round().to(torch.int8), "scale": scale}
        self._weight = self.params["weight"].float() * scale


def maker(scheme: LinearScheme) -> LayerMaker:
    return LayerMaker(ops=OPS, scheme=scheme, dtype=torch.float32, device=torch.device("cpu"))


def fill(layers: Sequence[Linear], folder: Path, num_threads: int) -> dict[str, Tensor]:
    """Fills layers of two parts, with biases, from a checkpoint; returns what the checkpoint holds."""
    generator = torch.Generator().manual_seed(0)
    stored = {}
    for i, layer in enumerate(layers):
        for (kind, part), shape in layer.parts().items():
            stored[f"{i}.{part}.{kind}"] = torch.randn(shape, generator=generator)
    save_file(stored, folder / "model.safetensors")
    rule = Rule(stored="{i}.{part}.{kind}", parameter="{i}.{kind}", part="{part}")
    tensors = read_checkpoint(folder)[1]
    load_weights(nn.ModuleList(layers), tensors, [rule], where="test", num_threads=num_threads)
    return stored


@pytest.mark.parametrize("num_threads", [1, 3])
def test_parts_stand_side_by_side(tmp_path: Path, num_threads: int) -> None:
    layer = maker(Unquantized()).linear(8, {"a": 3, "b": 5}, bias=True)
    stored = fill([layer], tmp_path, num_threads)
    x = torch.randn(4, 8)
    expected = torch.cat([x @ stored[f"0.{p}.weight"].T + stored[f"0.{p}.bias"] for p in "ab"], dim=1)
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_a_scheme_that_packs_while_loading(tmp_path: Path) -> None:
    scheme = RowScaled()
    layers = [maker(scheme).linear(16, {"a": 6, "b": 10}, bias=True) for _ in range(6)]
    stored = fill(layers, tmp_path, num_threads=1)
    assert scheme.max_staged == 1  # one layer at a time
    x = torch.randn(4, 16)
    for i, layer in enumerate(layers):
        assert {name: p.dtype for name, p in layer.named_parameters()} == {
            "bias": torch.float32,
            "scale": torch.float32,
            "weight": torch.int8,
        }
        weight = torch.cat([stored[f"{i}.a.weight"], stored[f"{i}.b.weight"]])
        bias = torch.cat([stored[f"{i}.a.bias"], stored[f"{i}.b.bias"]])
        assert torch.allclose(layer(x), x @ weight.T + bias, atol=0.2)
        assert not torch.allclose(layer(x), x @ weight.T + bias, atol=1e-4)


def test_a_tied_head_is_the_embedding() -> None:
    make = maker(Unquantized())
    embedding = make.embedding(10, 4)
    tied, own = make.head(10, 4, tied_to=embedding), make.head(10, 4, tied_to=None)
    assert tied.weight is embedding.weight and tied.parts() == {}
    assert own.parts() == {("weight", ""): (10, 4)}
    embedding.weight.data.normal_()
    assert torch.equal(tied(torch.eye(4)), embedding.weight.T)
