"""Whole models in int8: their logits against those of the weights as int8 has them, in float32; what files give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.int8 import FINER, TURNED, ReferenceInt8, turn
from batchinfer_kernels.native import library
from batchinfer_kernels.probe import STRICT
from batchinfer_kernels.table import resolve
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from batchinfer.attention.context import DenseContext
from batchinfer.modelfiles import open_model
from batchinfer.models import CausalLM, load_model
from batchinfer.testing.tiny import make_tiny
from batchinfer.testing.tiny_gguf import make_tiny_gguf
from batchinfer.weights.loading import TensorReader

BACKENDS = ["reference"] + ["native"] * (library.available() is None)
TOKEN_IDS = [(7 * i * i + 3 * i) % 384 for i in range(96)]


def load(path: Path, backend: str = "reference", *, quantization: str = "int8") -> CausalLM:
    return load_model(open_model(str(path)), ops=resolve(backend), dtype="float32", quantization=quantization)


def hidden_states(model: CausalLM, token_ids: list[int] = TOKEN_IDS) -> Tensor:
    ctx = DenseContext(model.attention_specs, len(token_ids))
    return model.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), ctx)


def parameters(model: CausalLM) -> dict[str, Tensor]:
    assert isinstance(model, nn.Module)
    return dict(model.named_parameters())


def rounded(name: str, weight: Tensor) -> Tensor:
    """A stored tensor as the scheme has it."""
    if not name.endswith("proj.weight") and "lm_head" not in name:
        return weight
    if "lm_head" in name:
        return weight.bfloat16().float()
    padded = -(-weight.shape[1] // TURNED) * TURNED
    values, fine = (torch.zeros(len(weight), padded, dtype=torch.int8) for _ in range(2))
    scales = torch.empty(len(weight))
    ReferenceInt8(STRICT).quantize_weight(weight.clone(), values, scales, fine if "v_proj" in name else None)
    return turn((values + fine / FINER) * scales[:, None])[:, : weight.shape[1]].contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "llama-bias", "smollm", "qwen2", "qwen2-untied", "qwen3"])
def test_logits_are_near_those_of_the_rounded_weights(tmp_path: Path, family: str, backend: str) -> None:
    folder = make_tiny(tmp_path / "stored", family)
    model = load(folder, backend)
    found = model.compute_logits(hidden_states(model))
    tensors = load_file(folder / "model.safetensors")
    plain = load(folder, quantization="none")
    stored = plain.compute_logits(hidden_states(plain))
    tied = "lm_head.weight" not in tensors
    if tied:  # the head is rounded, the embedding is not
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file({name: rounded(name, t) for name, t in tensors.items()}, folder / "model.safetensors")
    exact = load(folder, quantization="none")
    expected = exact.compute_logits(hidden_states(exact))
    # Left are the activations' 8 bits, through three layers. A mistake in any part is of the size of the logits.
    assert (found - expected).std() < 0.06 * expected.std()
    assert (found - expected).std() < 0.75 * (found - stored).std()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_is_the_largest_logit(tmp_path: Path, backend: str) -> None:
    for family in ("llama", "smollm"):
        model = load(make_tiny(tmp_path / family, family), backend)
        hidden = hidden_states(model)
        tokens, finite = model.greedy(hidden)
        assert torch.equal(tokens, model.compute_logits(hidden).argmax(-1)) and finite.all()
        for row in (0, 50):
            assert torch.equal(model.greedy(hidden[row : row + 1])[0], tokens[row : row + 1])
        hidden = hidden.clone()
        hidden[3, 5] = torch.nan
        spoiled, finite = model.greedy(hidden)
        assert finite.tolist() == [row != 3 for row in range(len(hidden))]
        assert torch.equal(spoiled[4:], tokens[4:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_1", "Q8_0", "Q6_K"])
def test_every_stored_type_gives_what_its_values_in_float32_give(tmp_path: Path, quant: str, backend: str) -> None:
    """Also: rows of q and k that a GGUF file keeps in another order."""
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "llama", quant=quant)
    found = parameters(load(path, backend))
    wide = make_tiny_gguf(tmp_path / "wide.gguf", "llama", quant="F32", **_sizes_of(path))
    _overwrite(wide, path)
    expected = parameters(load(wide, backend))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def _sizes_of(path: Path) -> dict[str, Any]:
    config = open_model(str(path)).config
    return {key: config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}


def _overwrite(wide: Path, path: Path) -> None:
    """Puts one file's values, as float32, into another file of the same tensors."""
    ours, theirs = open_model(str(wide)).tensors, open_model(str(path)).tensors
    assert ours.keys() == theirs.keys()
    with TensorReader() as reader, wide.open("r+b") as file:
        for name, stored in theirs.items():
            rows = reader.rows(stored, 0, stored.shape[0]).float().contiguous()
            assert ours[name].dtype == "F32" and ours[name].shape == stored.shape
            file.seek(ours[name].offset)
            file.write(rows.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_safetensors_of_narrow_types(tmp_path: Path, dtype: torch.dtype) -> None:
    narrow = make_tiny(tmp_path / "narrow", dtype=dtype)
    wide = make_tiny(tmp_path / "wide")
    stored = load_file(narrow / "model.safetensors")
    save_file({name: t.float() for name, t in stored.items()}, wide / "model.safetensors")
    found, expected = parameters(load(narrow)), parameters(load(wide))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_facts_and_bytes(tmp_path: Path, backend: str) -> None:
    config = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    model = load(make_tiny(tmp_path, tie_word_embeddings=True, **config), backend)
    assert model.facts.quantization == "int8" and model.facts.dtype == torch.float32
    per_layer = 128 * 128 * 5 + 128 * 256 * 3  # q, k, o, v in two bytes each, and the MLP
    values = 3 * (per_layer + 4 * (5 * 128 + 2 * 256))  # a byte each, and a scale for each output
    plain = 384 * 128 * 2  # the head
    kept = 384 * 128 * 4 + 7 * 128 * 4  # the embedding and norms
    total = model.num_parameter_bytes()
    # A backend may keep sums of weights by group, and the head in bytes as well.
    assert values + plain + kept <= total < 1.25 * (values + plain + kept)
