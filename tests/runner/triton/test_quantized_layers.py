"""Layers of quantized checkpoints on Triton's products, in the interpreter: what the reference's products give, however
the checkpoint has them, and whichever parts of a fused layer it has left plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batchinfer_kernels.table import resolve
from torch import nn

from batchinfer.layers import Linear
from batchinfer.modelfiles import open_model
from batchinfer.models import load_model
from batchinfer.quant.packed import Apart
from batchinfer.testing.tiny import make_tiny
from batchinfer.testing.tiny_quantized import CONFIGS, quantize_folder
from tests.kernels.triton.conftest import float8_to_nearest  # noqa: F401 (a fixture of every test here)
from tests.kernels.triton.device import DEVICE, ON_GPU, WIDE

# Parts of one product are no whole blocks of 128, the second input is neither of whole groups nor of whole blocks;
# there are biases.
SIZES = {"num_hidden_layers": 1, "intermediate_size": 144}
# One of three, one of two, and the whole of a product; the head is quantized then.
PLAIN = ("k_proj", "up_proj", "o_proj")


def linears(folder: Path, kernels: str) -> dict[str, Linear]:
    """Of a folder that is named as how it is stored."""
    model: nn.Module = load_model(
        open_model(str(folder)),
        ops=resolve(kernels, DEVICE),
        quantization=folder.name.partition("-")[0],
        dtype=str(WIDE).removeprefix("torch."),
        device=DEVICE,
    )
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}


@pytest.mark.parametrize(
    ("name", "in_parts"),
    [*((name, False) for name in CONFIGS), *((name, True) for name in ("gptq-order", "awq", "fp8-channel", "w8a8"))],
)
def test_products_are_those_of_the_reference(tmp_path: Path, name: str, in_parts: bool) -> None:
    folder = make_tiny(tmp_path / name, "llama-bias", **SIZES)
    leave = (lambda layer: layer.endswith(PLAIN)) if in_parts else (lambda layer: False)
    quantize_folder(folder, name, leave=leave, head=in_parts)
    ours, theirs = linears(folder, "triton"), linears(folder, "reference")
    blocks = name in ("fp8-blocks", "fp8-group")
    assert isinstance(ours["layers.0.attn.qkv"].weights, Apart) == (in_parts or blocks)
    generator = torch.Generator().manual_seed(0)
    for key, layer in ours.items():
        x = torch.randn(5, layer.in_features, generator=generator).to(DEVICE, WIDE)
        weight = torch.rand(layer.in_features, generator=generator).to(DEVICE, WIDE)
        if key == "lm_head":
            found, expected = (which[key](which[key].normed(x, weight, 1e-5)) for which in (ours, theirs))
            tokens, is_finite = layer.weights.argmax(layer.normed(x, weight, 1e-5))
            assert torch.equal(tokens, found.argmax(-1)) and bool(is_finite.all())
        else:
            features = sum(layer.out_parts.values())
            residual = torch.randn(5, features, generator=generator).to(DEVICE, WIDE)
            found, expected = (
                which[key](which[key].normed(x, weight, 1e-5), residual.clone()) for which in (ours, theirs)
            )
            alone = layer(layer.normed(x[3:4].contiguous(), weight, 1e-5), residual[3:4].clone())
            assert torch.equal(alone[0], found[3]), key
        # A norm that is rounded otherwise may change a code of an activation.
        most = 1e-4 if name.startswith(("gptq", "awq")) and not ON_GPU else 0.02
        assert (found - expected).std() < most * expected.std(), key
