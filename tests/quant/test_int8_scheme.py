"""The int8 scheme: weights quantized as they are read, layers of any shape, heads, tied or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batchinfer_kernels.int8 import TURNED, ReferenceInt8, turn
from batchinfer_kernels.native import library
from batchinfer_kernels.probe import STRICT
from batchinfer_kernels.table import Ops, resolve
from safetensors.torch import save_file
from torch import Tensor, nn

from batchinfer.errors import ConfigError
from batchinfer.layers import LayerMaker, Linear
from batchinfer.modelfiles.safetensors_header import read_checkpoint
from batchinfer.quant import resolve_scheme
from batchinfer.quant.int8 import Int8
from batchinfer.quant.unquantized import Unquantized
from batchinfer.weights import Rule, load_weights, loading

BACKENDS = ["reference", "cpu"] + ["native"] * (library.available() is None)


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return resolve(request.param)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(ops: Ops) -> LayerMaker:
    return LayerMaker(ops=ops, scheme=Int8(), dtype=torch.float32, device=torch.device("cpu"))


def padded(width: int) -> int:
    return -(-width // TURNED) * TURNED


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(len(weight), padded(weight.shape[1]), dtype=torch.int8)
    scales = torch.empty(len(weight))
    ReferenceInt8(STRICT).quantize_weight(weight.clone(), values, scales)
    return values, scales


def rounded(weight: Tensor) -> Tensor:
    """The weight as int8 has it."""
    values, scales = quantized(weight)
    return turn(values.float() * scales[:, None])[:, : weight.shape[1]]


def fill(layer: nn.Module, weights: Mapping[str, Tensor], folder: Path, **options: Any) -> None:
    """Loads stored tensors "name" or "part.name" into a layer of these."""
    folder.mkdir(exist_ok=True)
    save_file(dict(weights), folder / "model.safetensors")
    rules = [
        Rule(stored="{part}.{kind}", parameter="0.{kind}", part="{part}"),
        Rule(stored="{kind}", parameter="0.{kind}"),
    ]
    load_weights(nn.ModuleList([layer]), read_checkpoint(folder)[1], rules, where="test", **options)


@pytest.mark.parametrize("width", [1, 64, 100, 128, 576])
def test_a_weight_is_within_half_a_step(width: int) -> None:
    weight = normal(20, width) * torch.logspace(-4, 4, 20)[:, None]
    values, scales = quantized(weight)
    turned = turn(nn.functional.pad(weight, (0, padded(width) - width)))
    assert torch.allclose(scales * 127, turned.abs().amax(1), rtol=1e-6)
    assert (values.abs().amax(1) == 127).all()
    assert ((values * scales[:, None] - turned).abs() <= 0.5001 * scales[:, None]).all()
    # Turned back, the whole row's error is as large, and no number's larger than it.
    assert ((rounded(weight) - weight).norm(dim=1) <= 0.5001 * scales * padded(width) ** 0.5).all()


def test_rows_stand_alone() -> None:
    weight = normal(9, 200)
    values, scales = quantized(weight)
    for row in range(9):
        alone = quantized(weight[row : row + 1])
        assert torch.equal(alone[0][0], values[row]) and torch.equal(alone[1][0], scales[row])


@pytest.mark.parametrize("sick", [np.nan, np.inf, -np.inf])
def test_rows_that_are_zero_tiny_or_not_finite(sick: float) -> None:
    weight = normal(4, 128)
    weight[0] = 0
    weight[1, 70] = sick
    weight[2] = 3e-44  # too small to be divided by exactly
    values, scales = quantized(weight)
    assert not values[:3].any() and values[3].any()
    assert scales[0] == scales[2] == 0 and scales[1].isnan() and scales[3] > 0


@pytest.mark.parametrize("width", [1, 64, 100, 200, 576])
def test_kernels_quantize_weights_bit_by_bit_as_the_reference(ops: Ops, width: int) -> None:
    weight = normal(50, width) * torch.logspace(-42, 38, 50)[:, None]
    weight[3] = 0
    weight[5, 0], weight[6, -1], weight[7, width // 2] = torch.nan, torch.inf, -torch.inf
    expected, scales = quantized(weight)
    found, steps = torch.empty_like(expected), torch.empty_like(scales)
    ops.int8.quantize_weight(weight.clone(), found, steps)
    assert torch.equal(found, expected)
    torch.testing.assert_close(steps, scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "a", "b"), [(64, 64, 32), (100, 33, 7), (72, 1, 1)])
def test_a_layer_multiplies_by_what_was_stored(
    ops: Ops, tmp_path: Path, dtype: torch.dtype, width: int, a: int, b: int
) -> None:
    """Parts of any size, K that is no multiple of a group, biases, a sensitive part at the end."""
    layer = make(ops).linear(width, {"a": a, "b": b}, bias=True, sensitive=("b",))
    stored = {"a.weight": normal(a, width), "b.weight": normal(b, width, seed=1)}
    stored |= {"a.bias": normal(a, seed=2), "b.bias": normal(b, seed=3)}
    stored = {name: value.to(dtype) for name, value in stored.items()}
    fill(layer, stored, tmp_path)
    x = normal(11, width, seed=4)
    weight = torch.cat((rounded(stored["a.weight"].float()), stored["b.weight"].float().bfloat16().float()))
    expected = x @ weight.T + torch.cat((stored["a.bias"], stored["b.bias"])).float()
    found = layer(x)
    # Activations are rounded to 1 / 255 of a group's range in a, to 8 bits in b; errors add up as a random walk does.
    assert (found - expected).std() < 0.01 * expected.std()
    assert (found - expected).abs().max() < 0.06 * expected.std()
    residual = normal(11, a + b, seed=5)
    assert torch.equal(layer(x, residual.clone()), residual + found)
    assert {p.dtype for name, p in layer.named_parameters() if name != "bias"}.isdisjoint(
        {torch.float16, torch.float64}
    )


@pytest.mark.parametrize("inner", [64, 100, 31])
def test_a_gated_layer_feeds_the_next(ops: Ops, tmp_path: Path, inner: int) -> None:
    width = 72
    up = make(ops).linear(width, {"gate": inner, "up": inner}, bias=True, gated=True)
    down = make(ops).linear(inner, {"": width}, bias=False)
    norm = make(ops).norm(width, 1e-5, feeds=up)
    norm.weight.data.uniform_(0.5, 1.5)
    stored = {f"{part}.{kind}": normal(*shape, seed=i) for i, ((kind, part), shape) in enumerate(up.parts().items())}
    fill(up, stored, tmp_path / "up")
    last = normal(width, inner, seed=9)
    fill(down, {"weight": last}, tmp_path / "down")
    x = normal(7, width, seed=8)
    normed = resolve("reference").rms_norm(x, norm.weight, 1e-5)
    gate, ups = (normed @ rounded(stored[f"{p}.weight"]).T + stored[f"{p}.bias"] for p in ("gate", "up"))
    expected = (nn.functional.silu(gate) * ups) @ rounded(last).T
    found = down(up.gated(norm(x), down))
    assert (found - expected).std() < 0.02 * expected.std()


def test_pieces_and_threads_change_nothing(ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"a.weight": normal(65, 100), "b.weight": normal(40, 100, seed=1)}

    def loaded(**options: Any) -> dict[str, Tensor]:
        layer = make(ops).linear(100, {"a": 65, "b": 40}, bias=False, sensitive=("b",))
        fill(layer, stored, tmp_path, **options)
        return dict(layer.named_parameters())

    expected = loaded(num_threads=1)
    for elements, threads in ((1, 3), (700, 2)):
        monkeypatch.setattr(loading, "PIECE_ELEMENTS", elements)
        found = loaded(num_threads=threads)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_no_layer_is_ever_there_in_full_precision(ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer's rows are read into is as large as a piece, not as the layer."""
    monkeypatch.setattr(loading, "PIECE_ELEMENTS", 1000)
    read: list[int] = []
    fill_piece = loading._fill

    def noted(piece: Tensor, *args: Any) -> None:
        read.append(piece.untyped_storage().nbytes())
        fill_piece(piece, *args)

    monkeypatch.setattr(loading, "_fill", noted)
    layer = make(ops).linear(100, {"": 500}, bias=False)
    fill(layer, {"weight": normal(500, 100)}, tmp_path)
    assert len(read) == 50 and max(read) == 4000
    kept = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert 500 * 100 <= kept < 2 * 512 * 128


def test_a_tied_head_is_one_of_the_same_weights(ops: Ops, tmp_path: Path) -> None:
    table = normal(70, 72)
    embedding = make(ops).embedding(70, 72)
    tied, own = make(ops).head(70, 72, tied_to=embedding), make(ops).head(70, 72, tied_to=None)
    assert tied.parts() == {} and own.parts() == {("weight", ""): (70, 72)}
    fill(own, {"weight": table}, tmp_path)
    save_file({"weight": table}, tmp_path / "model.safetensors")
    both = nn.ModuleDict({"head": tied, "embed": embedding})  # the head comes first, and waits for the embedding
    rules = [Rule(stored="weight", parameter="embed.weight")]
    load_weights(both, read_checkpoint(tmp_path)[1], rules, where="test")
    assert torch.equal(embedding.weight, table)
    norm = make(ops).norm(72, 1e-5, feeds=tied)
    norm.weight.data.fill_(1)
    x = normal(5, 72, seed=3)
    assert torch.equal(tied(norm(x)), own(norm(x)))
    expected = resolve("reference").rms_norm(x, torch.ones(72), 1e-5) @ table.T
    assert (tied(norm(x)) - expected).abs().max() < 0.02 * expected.abs().max()
    index, finite = tied.argmax(norm(x))
    assert torch.equal(index, tied(norm(x)).argmax(-1)) and finite.all()


def test_a_sick_weight_or_row_is_seen(ops: Ops, tmp_path: Path) -> None:
    weight = normal(40, 128)
    weight[5, 100] = torch.nan
    layer = make(ops).linear(128, {"": 40}, bias=False)
    fill(layer, {"weight": weight}, tmp_path)
    x = normal(6, 128)
    y = layer(x)
    assert y[:, 5].isnan().all() and y[:, [4, 6]].isfinite().all()
    x[2, 1] = torch.inf
    spoiled = layer(x)
    assert not spoiled[2].isfinite().any()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(spoiled[others].nan_to_num(7), y[others].nan_to_num(7))


def test_only_the_last_parts_can_be_sensitive() -> None:
    with pytest.raises(AssertionError):
        make(resolve("reference")).linear(64, {"a": 32, "b": 32}, bias=False, sensitive=("a",))


def test_only_layers_that_native_kernels_have_packed_are_for_c(ops: Ops, tmp_path: Path) -> None:
    layer = make(ops).linear(64, {"": 32}, bias=False)
    assert layer.weights.in_c() is None  # nothing is there yet
    fill(layer, {"weight": normal(32, 64)}, tmp_path)
    assert layer.weights.in_c() is (layer.weights.params if ops.backend == "native" else None)
    plain = LayerMaker(ops=ops, scheme=Unquantized(), dtype=torch.float32, device=torch.device("cpu"))
    assert plain.linear(64, {"": 32}, bias=False).weights.in_c() is None


def test_schemes_by_name() -> None:
    assert resolve_scheme("int8", {}).name == "int8"
    assert resolve_scheme("none", {}).name == "none"
    for name in ("auto", "int4", "int9"):  # what is not resolved, planned, unknown: `arithmetic` tells them apart
        with pytest.raises(ConfigError, match=f"no quantization '{name}'"):
            resolve_scheme(name, {})


def test_the_layer_is_one_of_the_model() -> None:
    """Nothing is kept twice: a layer's parameters are the scheme's tensors."""
    layer = make(resolve("reference")).linear(64, {"": 32}, bias=False)
    assert isinstance(layer, Linear) and list(layer.parameters()) == []
    target = layer.target(("weight", ""))
    assert not isinstance(target, Tensor)
    target.put(0, normal(32, 64))
    layer.loaded()
    assert {p.data_ptr() for p in layer.parameters()} == {t.data_ptr() for t in layer.weights.params.values()}
