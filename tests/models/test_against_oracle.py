"""Every member of the llama family gives the logits that transformers gives (whole sequences, float32)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import resolve
from torch import Tensor

from batchinfer.attention.context import DenseContext
from batchinfer.modelfiles import open_model
from batchinfer.models import CausalLM, load_model
from batchinfer.testing.oracle import Oracle
from batchinfer.testing.tiny import FAMILIES, make_tiny
from batchinfer.testing.tiny_gguf import EXPERTS, make_tiny_gguf

OPS = resolve("reference")
TOLERANCE = 1e-3
TOKEN_IDS = [(7 * i * i + 3 * i) % 384 for i in range(512)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(path: Path, **options: Any) -> CausalLM:
    return load_model(open_model(str(path)), ops=OPS, **options)


def logits(model: CausalLM, token_ids: list[int]) -> Tensor:
    """float32 [T, V] for a whole sequence."""
    num_tokens = len(token_ids)
    ctx = DenseContext(model.attention_specs, num_tokens)
    return model.compute_logits(model.forward(torch.tensor(token_ids), torch.arange(num_tokens), ctx))


def assert_equals_oracle(path: Path, num_tokens: int = 512, *, oracle_path: Path | None = None) -> None:
    expected = Oracle(oracle_path or path).logits(TOKEN_IDS[:num_tokens])
    found = logits(load(path), TOKEN_IDS[:num_tokens])
    assert found.dtype == torch.float32
    assert expected.std() > 0.3  # logits that say something
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_members(tmp_path: Path, family: str) -> None:
    assert_equals_oracle(make_tiny(tmp_path, family))


@pytest.mark.parametrize(
    "rope_scaling",
    [
        YARN,
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        {**YARN, "attention_factor": 1.0},
        {**YARN, "beta_fast": 16, "beta_slow": 2},
        {**YARN, "truncate": False},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 8.0},
        {"type": "dynamic", "factor": 4.0},
        {"rope_type": "default"},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0},
    ],
    ids=str,
)
def test_rope_scaling(tmp_path: Path, rope_scaling: dict[str, Any]) -> None:
    assert_equals_oracle(make_tiny(tmp_path, rope_scaling=rope_scaling, num_hidden_layers=2))


def test_rope_parameters(tmp_path: Path) -> None:
    """The form in which transformers 5 writes a config: theta and scaling in one object."""
    path = make_tiny(tmp_path, rope_parameters={**YARN, "rope_theta": 50000.0}, rope_theta=None)
    assert_equals_oracle(path)


def test_the_original_length_beside_the_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert_equals_oracle(make_tiny(tmp_path, rope_scaling=scaling, original_max_position_embeddings=64))


def test_scaling_is_not_ignored(tmp_path: Path) -> None:
    """The tests above would see scaling left out: it changes logits by far more than their tolerance."""
    plain = logits(load(make_tiny(tmp_path / "plain")), TOKEN_IDS)
    for family in ("llama3", "llama-linear", "llama-yarn"):
        changed = logits(load(make_tiny(tmp_path / family, family, rope_theta=10000.0)), TOKEN_IDS)
        assert (plain - changed)[64:].abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        {"head_dim": 32},
        {"head_dim": None},
        {"head_dim": 80},
        {"head_dim": 96, "num_key_value_heads": 1},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
        {"rms_norm_eps": 0.1},
        {"tie_word_embeddings": True, "attention_bias": True},
    ],
    ids=str,
)
def test_shapes_and_flags(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_equals_oracle(make_tiny(tmp_path, num_hidden_layers=2, **config), 130)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"head_dim": 8}),
    ],
    ids=str,
)
def test_windows_and_variants(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    assert_equals_oracle(make_tiny(tmp_path, family, **config), 130)


def test_a_stored_head_of_a_tied_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An equal one is ignored, another one is taken, as transformers does."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny(tmp_path, "smollm")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_equals_oracle(folder, 60)
    assert caplog.text == ""
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_equals_oracle(folder, 60)
    assert "not tied" in caplog.text


@pytest.mark.parametrize(
    "quant", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
def test_gguf_llama(tmp_path: Path, quant: str) -> None:
    assert_equals_oracle(make_tiny_gguf(tmp_path / "tiny.gguf", "llama", quant=quant), 64)


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "Q6_K"])
def test_gguf_qwen2(tmp_path: Path, quant: str) -> None:
    assert_equals_oracle(make_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", quant=quant), 64)


def test_gguf_of_several_types(tmp_path: Path) -> None:
    kinds = {"ffn_down": "Q6_K", "attn_v": "Q5_K", "token_embd": "Q8_0", "": "Q4_K"}
    assert_equals_oracle(make_tiny_gguf(tmp_path / "tiny.gguf", "smollm", quant=kinds), 64)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "llama-head-dim", "llama-mha"])
def test_gguf_equals_the_folder_of_the_same_weights(tmp_path: Path, family: str) -> None:
    gguf = make_tiny_gguf(tmp_path / "tiny.gguf", family)
    assert_equals_oracle(gguf, 64, oracle_path=make_tiny(tmp_path / "tiny", family))


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_gguf_equal_the_folder_of_the_same_weights(tmp_path: Path, family: str) -> None:
    gguf = make_tiny_gguf(tmp_path / "tiny.gguf", family, **EXPERTS[family])
    assert_equals_oracle(gguf, 64, oracle_path=make_tiny(tmp_path / "tiny", family, **EXPERTS[family]))


def test_gguf_frequency_factors(tmp_path: Path) -> None:
    """llama3 scaling is stored as one divisor for each frequency."""
    folder = make_tiny(tmp_path / "tiny", "llama3")
    rope = load(folder).rope  # type: ignore[attr-defined]
    plain = load(make_tiny(tmp_path / "plain", rope_theta=500000.0)).rope  # type: ignore[attr-defined]
    factors = (plain.sin[1].asin() / rope.sin[1].asin()).tolist()
    assert min(factors) == pytest.approx(1.0) and max(factors) == pytest.approx(8.0, rel=1e-3)
    gguf = make_tiny_gguf(tmp_path / "tiny.gguf", freq_factors=factors, rope_theta=500000.0)
    assert_equals_oracle(gguf, 512, oracle_path=folder)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.5), ("float16", 0.1)])
def test_half_precision(tmp_path: Path, dtype: str, tolerance: float) -> None:
    path = make_tiny(tmp_path)
    model = load(path, dtype=dtype)
    found, expected = logits(model, TOKEN_IDS[:64]), logits(load(path), TOKEN_IDS[:64])
    assert str(model.facts.dtype) == f"torch.{dtype}"
    assert found.dtype == torch.float32
    assert 0 < (found - expected).abs().max() < tolerance
    assert (found - expected).abs().mean() < tolerance / 5


def test_greedy_of_the_oracle_follows_its_logits(tmp_path: Path) -> None:
    oracle = Oracle(make_tiny(tmp_path))
    token_ids, gaps = oracle.greedy_with_gaps([5, 6, 7], 8)
    whole = oracle.logits([5, 6, 7, *token_ids])
    assert token_ids == whole[2:-1].argmax(-1).tolist()
    assert len(gaps) == 8 and min(gaps) > 0
    assert oracle.disagreements([5, 6, 7], token_ids) == []
    other = [*token_ids[:4], (token_ids[4] + 1) % 384]
    ((position, behind),) = oracle.disagreements([5, 6, 7], other)
    assert position == 4 and behind > 0
    assert oracle.greedy([5, 6, 7], 8, eos_token_ids={token_ids[3]})[-1] == token_ids[3]


@pytest.mark.skipif(not DEMO.exists(), reason="the demo model is not in models/ (scripts/quickstart fetches it)")
def test_the_demo_model(tmp_path: Path) -> None:
    token_ids = [1, 504, 2, 3717, 260, 28, 198, 359, 1000, 2000, 3000, 45000]
    model = load(DEMO)
    assert model.num_parameter_bytes() == 134_515_008 * 4
    assert (logits(model, token_ids) - Oracle(DEMO).logits(token_ids)).abs().max() < TOLERANCE
