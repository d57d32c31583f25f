"""Layers of experts on Triton's kernels, in the interpreter: what the reference makes of the same checkpoint, in every
format; and that weights are there once."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from batchinfer_kernels.experts import sigmoid_top_k, softmax_top_k
from batchinfer_kernels.table import resolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.arithmetic import Machine, resolve_arithmetic
from batchinfer.errors import ConfigError, ModelError
from batchinfer.layers import LayerMaker, SparseMLP
from batchinfer.layers.experts import Router
from batchinfer.modelfiles import StoredTensor, open_model
from batchinfer.modelfiles.experts_config import ExpertsConfig
from batchinfer.models import load_model
from batchinfer.quant import resolve_scheme
from batchinfer.testing.tiny_quantized import quantize_folder
from batchinfer.weights.loading import TensorReader
from tests.kernels.triton.conftest import float8_to_nearest  # noqa: F401 (a fixture of every test here)
from tests.kernels.triton.device import DEVICE, ON_GPU

DTYPE = "float16" if ON_GPU else "float32"
SMALL = {"num_hidden_layers": 1, "num_local_experts": 6, "num_experts_per_tok": 3}
BLOCKS = {**SMALL, "intermediate_size": 128}  # parts are whole blocks
# How the checkpoint is stored (None: plain), its sizes, and model.quantization.
CASES: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "plain": (None, SMALL, "none"),
    "int8": (None, SMALL, "w8a8"),
    "fp8": (None, SMALL, "fp8"),
    "stored int8": ("w8a8", SMALL, "w8a8"),
    "stored fp8": ("fp8-channel", SMALL, "fp8"),
    "fp8 in blocks": ("fp8-blocks", BLOCKS, "fp8"),
    "gptq": ("gptq", SMALL, "gptq"),
    "gptq without zeros": ("gptq-v2", SMALL, "gptq"),
    "awq": ("awq", SMALL, "awq"),
}

TinyFolder = Callable[..., Path]
Loaded = Callable[[str, str], Any]


def stored_folder(plain: Path, folder: Path, stored: str | None) -> Path:
    shutil.copytree(plain, folder)
    if stored is not None:
        quantize_folder(folder, stored)
    return folder


def load(folder: Path, kernels: str, quantization: str) -> Any:
    device = str(DEVICE) if kernels == "triton" else "cpu"
    ops = resolve(kernels, device)
    return load_model(open_model(str(folder)), ops=ops, quantization=quantization, dtype=DTYPE, device=device)


@pytest.fixture(scope="module")
def loaded(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model of a case, by kernels; each made once."""

    @functools.cache
    def folder(case: str) -> Path:
        stored, sizes, _ = CASES[case]
        return stored_folder(tiny_folder("mixtral", **sizes), tmp_path_factory.mktemp("experts") / "model", stored)

    return functools.cache(lambda case, kernels: load(folder(case), kernels, CASES[case][2]))


def layer_of(model: Any) -> SparseMLP:
    layer = model.layers[0].mlp
    assert isinstance(layer, SparseMLP)
    return layer


def rows(count: int = 9) -> tuple[Tensor, Tensor]:
    """x and residual."""
    generator = torch.Generator().manual_seed(5)
    dtype = getattr(torch, DTYPE)
    x, residual = (torch.randn(count, 64, generator=generator).to(DEVICE, dtype) for _ in range(2))
    return x, residual


@pytest.mark.parametrize("case", CASES)
def test_what_the_reference_makes_of_it(loaded: Loaded, case: str) -> None:
    found, expected = (layer_of(loaded(case, kernels)) for kernels in ("triton", "reference"))
    x, residual = rows()
    ours, theirs = found.router.forward(x), expected.router.forward(x.cpu())
    assert torch.equal(ours[1].cpu(), theirs[1])
    y, wanted = found.forward(x, residual.clone()).cpu(), expected.forward(x.cpu(), residual.cpu())
    if case in ("plain", "gptq", "gptq without zeros", "awq"):
        most = 0.01 if ON_GPU else 1e-4
        torch.testing.assert_close(y, wanted, rtol=most, atol=most)
    else:  # a sum that is rounded otherwise may change a code of an activation
        assert (y - wanted).abs().max() < 0.1 and (y - wanted).float().std() < 0.02 * wanted.float().std()


@pytest.mark.parametrize("case", CASES)
def test_weights_are_there_once(loaded: Loaded, case: str) -> None:
    found, expected = loaded(case, "triton"), loaded(case, "reference")
    for name in ("gate_up", "down"):
        tensors = [dict(getattr(expert, name).named_parameters()) for expert in layer_of(found).experts]
        for kind in tensors[0]:
            assert len({parameters[kind].untyped_storage().data_ptr() for parameters in tensors}) == 1
    assert found.num_parameter_bytes() == expected.num_parameter_bytes()


@pytest.mark.parametrize("case", ["plain", "int8", "awq"])
def test_a_row_is_the_same_whatever_shares_its_experts(loaded: Loaded, case: str) -> None:
    layer = layer_of(loaded(case, "triton"))
    x, residual = rows(20)
    x[10:] = x[:1]  # to the same experts
    together = layer.forward(x, residual.clone())
    for some in ([0], [7, 3], [19, 2, 10]):
        assert torch.equal(layer.forward(x[some], residual[some].clone()), together[some]), some
    sick = x.clone()
    sick[4, 3] = torch.nan
    found = layer.forward(sick, residual.clone())
    others = [i for i in range(20) if i != 4]
    assert found[4].isnan().all() and torch.equal(found[others], together[others])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routers_round_their_logits_as_the_reference_does(scoring: Literal["softmax", "sigmoid"], wide: bool) -> None:
    """In float16 (the interpreter's products of bfloat16 are wrong), where rounded ones choose other experts."""
    config = ExpertsConfig(num_experts=64, top_k=6, intermediate_size=48, scoring=scoring, wide_logits=wide)
    generator = torch.Generator().manual_seed(7)
    weight, x = (torch.randn(n, 64, generator=generator) for n in (64, 60))
    weight /= 128
    weight[:, 0] = x[:, 0] = 2.0  # logits are close to 4, where float16 is coarse and sigmoids are not yet 1
    weight, x = weight.half(), x.half()
    found = {}
    for kernels, device in (("triton", DEVICE), ("reference", torch.device("cpu"))):
        ops = resolve(kernels, device)
        make = LayerMaker(ops=ops, scheme=resolve_scheme("none", {}), dtype=torch.float16, device=device)
        router = Router(config, 64, make)
        router.target(("weight", "")).copy_(weight)
        assert router.weight.dtype == (torch.float32 if wide and kernels == "reference" else torch.float16)
        weights, ids, _ = router.forward(x.to(device))
        found[kernels] = weights.cpu(), ids.cpu()
    same = (found["triton"][1] == found["reference"][1]).all(-1)
    assert same.sum() >= 57  # a sum may be rounded to the other side
    torch.testing.assert_close(found["triton"][0][same], found["reference"][0][same], rtol=2e-3, atol=1e-6)
    rounded = (x.float() @ weight.float().T).half()
    choose = softmax_top_k if scoring == "softmax" else partial(sigmoid_top_k, bias=torch.zeros(64))
    _, ids = choose(rounded, k=6, renormalize=True)
    differing = int((ids != found["triton"][1]).any(-1).sum())
    assert differing >= 15 if wide else differing <= 3


def test_an_order_of_inputs_that_each_expert_has_of_its_own_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = stored_folder(tiny_folder("mixtral", **SMALL), tmp_path / "model", "gptq-order")
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.\w+: .*experts with activation order"):
        load(folder, "triton", "gptq")
    load(folder, "cpu", "gptq")


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tensors, as they are read from here on."""
    found: list[str] = []
    read_into = TensorReader.read_into

    def counting(self: TensorReader, buffer: Any, stored: StoredTensor, offset: int) -> None:
        found.append(stored.name)
        read_into(self, buffer, stored, offset)

    monkeypatch.setattr(TensorReader, "read_into", counting)
    return found


def test_experts_that_are_stored_in_different_ways_are_refused_before_any_is_read(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_folder("mixtral", **SMALL), tmp_path / "model")
    at = "model.layers.0.block_sparse_moe.experts.2"
    read = count_reads(monkeypatch)
    for names, message in (
        ([f"{at}.w1", f"{at}.w2", f"{at}.w3"], "different ways, .*; use engine.kernels cpu"),
        ([f"{at}.w1"], "can't be one product; use engine.kernels cpu"),
    ):
        folder = tmp_path / str(len(names))
        shutil.copytree(tmp_path / "model", folder)
        quantize_folder(folder, "awq", leave=lambda layer, names=names: layer in names)
        with pytest.raises(ModelError, match=message):
            load(folder, "triton", "awq")
        assert not read
        load(folder, "reference", "awq")
        assert read
        read.clear()


# Which of a checkpoint's layers are stored plain.
LEFT: dict[str, Callable[[str], bool]] = {
    "none": lambda layer: False,
    "experts": lambda layer: ".experts." in layer,
    "downs": lambda layer: layer.endswith(".w2"),
    "gates and ups": lambda layer: layer.endswith((".w1", ".w3")),
    "one up": lambda layer: layer.endswith(".experts.2.w3"),
    "one expert": lambda layer: ".experts.2." in layer,
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("stored", ["gptq-order", "gptq-v2", "awq", "fp8-blocks", "w8a8"])
def test_what_the_loader_refuses_is_told_before_and_nothing_else(
    tiny_folder: TinyFolder, tmp_path: Path, stored: str, left: str
) -> None:
    shutil.copytree(tiny_folder("mixtral", **SMALL), tmp_path / "model")
    quantize_folder(tmp_path / "model", stored, leave=LEFT[left])
    machine = Machine(vector_level="avx512", product_level="avx512", triton_on_cpu=None, triton_on_gpu=None)
    refused = []
    for run in (
        lambda: resolve_arithmetic(
            open_model(str(tmp_path / "model")), machine, dtype=DTYPE, kernels="triton", device=str(DEVICE)
        ),
        lambda: load(tmp_path / "model", "triton", stored.partition("-")[0]),
    ):
        try:
            run()
            refused.append(False)
        except (ConfigError, ModelError):
            refused.append(True)
    assert refused[0] == refused[1]


def test_a_layer_that_is_stored_plain_stays_plain(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder("mixtral", **SMALL), tmp_path / "model")
    quantize_folder(tmp_path / "model", "fp8-channel", leave=lambda layer: ".experts." in layer)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    layer = layer_of(load(tmp_path / "model", "triton", "fp8"))
    weight = layer.experts[3].get_submodule("down").get_parameter("weight")
    assert torch.equal(weight.cpu(), stored["model.layers.0.block_sparse_moe.experts.3.w2.weight"].to(weight.dtype))


@pytest.mark.parametrize("without", [(0, 1, 2), (5,)])
def test_zero_points_that_only_some_experts_have(
    tiny_folder: TinyFolder, tmp_path: Path, without: tuple[int, ...]
) -> None:
    """8 everywhere is what is left out; whichever expert is filled first."""
    folder = stored_folder(tiny_folder("mixtral", **SMALL), tmp_path / "model", "gptq")
    tensors = load_file(folder / "model.safetensors")
    for i in without:
        for name in ("w1", "w2", "w3"):
            tensors[f"model.layers.0.block_sparse_moe.experts.{i}.{name}.qzeros"].fill_(0x77777777)  # 8, less 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found, expected = (layer_of(load(folder, kernels, "gptq")) for kernels in ("triton", "reference"))
    x, residual = rows()
    y, wanted = found.forward(x, residual.clone()).cpu(), expected.forward(x.cpu(), residual.cpu())
    most = 0.01 if ON_GPU else 1e-4
    torch.testing.assert_close(y, wanted, rtol=most, atol=most)
