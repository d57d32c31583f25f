"""The engine with quantized weights on Triton's kernels, in the interpreter: tokens of the reference, and the law
that a row's bytes are its own."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from batchinfer.engine import Engine
from batchinfer.errors import ConfigError
from batchinfer.testing.tiny_quantized import quantize_folder
from tests.kernels.triton.conftest import float8_to_nearest  # noqa: F401 (a fixture of every test here)
from tests.kernels.triton.device import ON_GPU
from tests.runner.triton.test_triton_runner import (
    ALONE,
    TOGETHER,
    Result,
    log_probabilities,
    make_engine,
    requests,
    tokens,
)

SMALL = {"num_hidden_layers": 1, "intermediate_size": 48}
# Parts are whole blocks of 128 output features.
BLOCKS = {
    "num_hidden_layers": 1,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
}
# Model, and how it is stored (None: plain); `quantization` on Triton's kernels and on the reference's; what that is.
CASES: dict[str, tuple[str, dict[str, Any], str | None, str, str, str]] = {
    "int8": ("llama-bias", SMALL, None, "int8", "w8a8", "w8a8"),
    "fp8": ("qwen3-tied", SMALL, None, "fp8", "fp8", "fp8"),
    "fp8 in blocks": ("llama", BLOCKS, "fp8-blocks", "auto", "auto", "fp8"),
    "gptq": ("llama-bias", SMALL, "gptq-order", "auto", "auto", "gptq"),
    "awq": ("llama", SMALL, "awq", "auto", "auto", "awq"),
    "int8 experts": ("mixtral", SMALL, None, "int8", "w8a8", "w8a8"),
}

RunCase = Callable[..., tuple[Result, Engine]]


def run_engine(engine: Engine) -> Result:
    """Of three requests: two that share a prefix, one of them drawn, and one with log-probabilities of its prompt."""
    for i in (1, 2, 4):
        engine.add_request(requests()[i])
    outputs = [output for _ in range(100) if engine.has_unfinished() for output in engine.step()]
    assert len(outputs) == 3 and all(output.error is None for output in outputs)
    return {o.request_id: [o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs] for o in outputs}


@pytest.fixture(scope="module")
def run_case(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> RunCase:
    """(what each request gives, the engine that ran them) of a case, with kernels and options; each run once."""

    @functools.cache
    def folder(case: str) -> Path:
        family, overrides, stored, *_ = CASES[case]
        made = tmp_path_factory.mktemp("quantized") / "model"
        shutil.copytree(tiny_folder(family, **overrides), made)
        if stored is not None:
            quantize_folder(made, stored)
        return made

    @functools.cache
    def cached(case: str, options: tuple[tuple[str, Any], ...]) -> tuple[Result, Engine]:
        engine = make_engine(folder(case), **dict(options))
        return run_engine(engine), engine

    def run(case: str, kernels: str, **options: Any) -> tuple[Result, Engine]:
        quantization = CASES[case][3 if kernels == "triton" else 4]
        return cached(case, tuple(sorted({"kernels": kernels, "quantization": quantization, **options}.items())))

    return run


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_reference(run_case: RunCase, case: str) -> None:
    found, engine = run_case(case, "triton", **TOGETHER)
    expected, reference = run_case(case, "reference", **TOGETHER)
    if not ON_GPU:  # where sums have other orders: drawn tokens and near ties may differ
        assert tokens(found) == tokens(expected)
    *_, wanted, _, scheme = CASES[case]
    source = f"auto: the checkpoint's {scheme}" if wanted == "auto" else "model.quantization"
    assert engine.facts["quantization"] == (scheme, source)
    assert reference.facts["quantization"][0] == scheme
    assert engine.facts["batch_invariant"] == (True, "engine.deterministic")
    # A sum that is rounded otherwise may change a code of an activation.
    most = 1e-3 if scheme in ("gptq", "awq") and not ON_GPU else 0.1
    compared = [
        {i: parts[:1] + [None] * 2 for i, parts in result.items()} if ON_GPU else result for result in (expected, found)
    ]
    for theirs, ours in zip(*map(log_probabilities, compared), strict=True):
        assert abs(theirs - ours) < most


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_gives_the_bytes_that_it_gives_among_others(run_case: RunCase, case: str) -> None:
    together, _ = run_case(case, "triton", **TOGETHER)
    alone, _ = run_case(case, "triton", **ALONE)
    assert together == alone  # log-probabilities too


@pytest.mark.parametrize("stored", ["gptq", "fp8-channel"])
def test_kernels_without_such_products_multiply_what_the_weights_stand_for(
    tiny_folder: Callable[..., Path], tmp_path: Path, stored: str
) -> None:
    """To the last bit, as a plain checkpoint of those weights."""
    for name in ("quantized", "plain"):
        shutil.copytree(tiny_folder("llama", **SMALL), tmp_path / name)
    meant = quantize_folder(tmp_path / "quantized", stored)
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    results = [
        run_engine(make_engine(tmp_path / name, kernels="cpu", quantization="auto", **TOGETHER))
        for name in ("quantized", "plain")
    ]
    assert results[0] == results[1]


def test_what_can_not_be_had_is_refused(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    plain = tiny_folder("llama", **SMALL)
    with pytest.raises(ConfigError, match=r"fp8 needs engine\.kernels triton .* here they are cpu"):
        make_engine(plain, kernels="cpu", quantization="fp8", **TOGETHER)
    with pytest.raises(ConfigError, match="gptq: the checkpoint is not stored so"):
        make_engine(plain, kernels="triton", quantization="gptq", **TOGETHER)
    shutil.copytree(plain, tmp_path / "awq")
    quantize_folder(tmp_path / "awq", "awq")
    for quantization in ("none", "int8", "fp8", "gptq"):
        with pytest.raises(ConfigError, match=f"quantization {quantization}: .* stored as awq"):
            make_engine(tmp_path / "awq", kernels="triton", quantization=quantization, **TOGETHER)
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="version 'gemv'; known: "):
        make_engine(tmp_path / "awq", kernels="triton", quantization="auto", **TOGETHER)
