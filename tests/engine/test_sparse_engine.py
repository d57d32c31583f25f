"""The engine over mixtures of experts: a token whose router has no answer, and experts that nobody takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer import LLM, SamplingParams
from batchinfer.testing.tiny import make_tiny
from batchinfer.types.rows import ErrorClass

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
SICK = 300
PROMPTS = [[5 + i, 40, 41 + i, 7] for i in range(12)]


def llm(model: Path, **options: Any) -> LLM:
    return LLM(model=str(model), **{"num_threads": 1, "kv_cache_memory": 1 << 25, **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In its first layer logits of the router are infinite for one token alone, which leaves no shares."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3-moe")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 5].clamp_(-0.3, 0.3)
    embedding[SICK] = 0
    embedding[SICK, 5] = 1000
    tensors["lm_head.weight"][SICK] = 0  # never the best token
    tensors["model.layers.0.self_attn.o_proj.weight"][5] = 0
    tensors["model.layers.0.mlp.gate.weight"][:, 5] = 1e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_token_without_experts_is_one_error_row(model: Path, quantization: str) -> None:
    prompts = [*PROMPTS[:4], [5, SICK, 40], *PROMPTS[4:]]
    engine = llm(model, quantization=quantization, max_num_seqs=13)
    outputs = engine.generate(prompts, GREEDY)
    assert outputs[4].error is not None
    assert outputs[4].error.error_class is ErrorClass.NON_FINITE_LOGITS
    alone = llm(model, quantization=quantization, max_num_seqs=1, enable_prefix_caching=False)
    expected = alone.generate(PROMPTS, GREEDY)
    assert [o.outputs for o in [*outputs[:4], *outputs[5:]]] == [o.outputs for o in expected]
    assert all(o.error is None for o in expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mixtral", {"num_experts_per_tok": 8}),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
        ("qwen3-moe", {"num_experts": 70, "num_experts_per_tok": 1}),
    ],
    ids=["all experts", "one expert", "more experts than tokens"],
)
def test_rows_do_not_depend_on_each_other(tmp_path: Path, family: str, config: dict[str, Any], dtype: str) -> None:
    folder = make_tiny(tmp_path, family, num_hidden_layers=2, **config)
    together = llm(folder, dtype=dtype, num_threads=2, max_num_batched_tokens=16, max_num_seqs=7)
    alone = llm(folder, dtype=dtype, max_num_seqs=1, enable_prefix_caching=False)
    found = together.generate([*PROMPTS, [9]], GREEDY)
    torch.set_num_threads(1)
    expected = alone.generate([*PROMPTS, [9]], GREEDY)
    assert [o.outputs for o in found] == [o.outputs for o in expected]
    assert all(o.error is None for o in found)
