"""The engine on Triton's kernels, in the interpreter: tokens of the reference, and the laws of `test_equivalence`."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batchinfer_kernels.table import resolve
from torch.utils._python_dispatch import TorchDispatchMode

from batchinfer.attention.tiles import StepBatch
from batchinfer.config import EngineConfig
from batchinfer.engine import Engine, load_engine
from batchinfer.errors import ConfigError
from batchinfer.runner.local import LocalRunner
from batchinfer.testing.step_driver import StepDriver
from batchinfer.types.request import Request, RequestOutput, SamplingParams
from tests.kernels.triton.device import DEVICE, ON_GPU

Result = dict[int, list[Any]]
# Whole blocks, splits and chunks end within the prompts, and two sequences do not fit the pool to their ends.
SIZES = {"block_size": 4, "split_size": 16, "max_model_len": 28, "num_threads": 1}
TOGETHER = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "pool_blocks": 7}
# On a GPU there are no products of float32; what is closest to it.
HERE: dict[str, Any] = {"device": "cuda", "dtype": "float16"} if ON_GPU else {}
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "pool_blocks": 40, "enable_prefix_caching": False}
# Small, since the interpreter is slow. Grouped heads; norms of heads and a tied head; sliding windows; biases; latents;
# experts, a shared one among them, after a layer without.
SMALL = {"num_hidden_layers": 2, "intermediate_size": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama-bias", SMALL),
    "qwen3-tied": ("qwen3-tied", {**SMALL, "num_key_value_heads": 1}),
    "latent": ("deepseek-v3", {**SMALL, "qk_rope_head_dim": 16, "first_k_dense_replace": 2}),
    "experts": ("qwen2-moe", {**SMALL, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32}),
    "window": ("mistral", {**SMALL, "num_key_value_heads": 1, "sliding_window": 6}),
}

RunRows = Callable[..., tuple[Result, Engine]]


def requests(sure: bool = False) -> list[Request]:
    """Three of them share 9 tokens; greedy and drawn, with log-probabilities and without; `sure`: with those of the two
    best tokens everywhere."""
    shared = [3 + 37 * i % 370 for i in range(9)]
    prompts = [[*shared, 40], [*shared, 41, 42], [*shared, 43], [200], list(range(20, 38))]
    sampling = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "logprobs": 1},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    return [
        Request(
            request_id=i,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=5, ignore_eos=True, **(how | {"logprobs": 2} if sure else how)),
            stream_key=100 + i,
        )
        for i, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))
    ]


def run_engine(engine: Engine, sure: bool = False) -> Result:
    for request in requests(sure):
        engine.add_request(request)
    outputs: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            outputs[output.request_id] = output
        engine.check()
    assert len(outputs) == len(requests())
    return {i: [o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs] for i, o in outputs.items()}


@pytest.fixture(scope="module")
def run_rows(tiny_folder: Callable[..., Path]) -> RunRows:
    """(what each request gives, the engine that ran them) of a model, with kernels and options; each run once."""

    @functools.cache
    def cached(model: str, options: tuple[tuple[str, Any], ...]) -> tuple[Result, Engine]:
        family, overrides = MODELS[model]
        engine = make_engine(tiny_folder(family, **overrides), **dict(options))
        return run_engine(engine), engine

    def run(model: str, kernels: str, **options: Any) -> tuple[Result, Engine]:
        return cached(model, tuple(sorted({"kernels": kernels, **options}.items())))

    return run


def make_engine(path: Path, *, pool_blocks: int, **options: Any) -> Engine:
    settings = {"model": str(path), "quantization": "none", **HERE, **SIZES, **options}
    probed = load_engine(EngineConfig(**settings, kv_cache_memory=1 << 24))
    block_bytes = int(probed.facts["kv_cache_bytes"][0]) // int(probed.facts["num_blocks"][0])
    probed.close()
    return load_engine(EngineConfig(**settings, kv_cache_memory=pool_blocks * block_bytes))


def tokens(result: Result) -> dict[int, list[int]]:
    return {i: list(parts[1]) for i, parts in result.items()}


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_reference(run_rows: RunRows, tiny_folder: Callable[..., Path], model: str) -> None:
    found, engine = run_rows(model, "triton", **TOGETHER)
    expected, _ = run_rows(model, "reference", **TOGETHER)
    if ON_GPU:
        family, overrides = MODELS[model]
        expected = run_engine(make_engine(tiny_folder(family, **overrides), kernels="reference", **TOGETHER), sure=True)
        check_sure_tokens(found, expected)
    else:
        assert tokens(found) == tokens(expected)
    assert engine.facts["kernels"] == ("triton", "engine.kernels")
    assert engine.facts["attention"] == ("triton", "kernels are triton")
    assert engine.facts["batch_invariant"] == (True, "engine.deterministic")
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    of_prompts = [{i: [parts[0], None, None] for i, parts in result.items()} for result in (expected, found)]
    compared = of_prompts if ON_GPU else [expected, found]
    for wanted, got in zip(*map(log_probabilities, compared), strict=True):
        assert abs(wanted - got) < (0.05 if ON_GPU else 1e-3)


def check_sure_tokens(found: Result, expected: Result) -> None:
    """Those of greedy rows, up to where the two best logits are too close to call in float16."""
    for i, request in enumerate(requests()):
        if request.sampling.temperature > 0:
            continue
        for token, entry in zip(found[i][1], expected[i][2], strict=True):
            if token != entry.token_id:
                assert entry.top[0][1] - entry.top[1][1] < 0.05, (i, token, entry)
                break


def log_probabilities(result: Result) -> list[float]:
    entries = [entry for parts in result.values() for part in (parts[0], parts[2]) for entry in part or ()]
    return [entry.logprob for entry in entries if entry is not None]


@pytest.mark.parametrize("model", MODELS)
def test_a_row_alone_gives_the_bytes_that_it_gives_among_others(run_rows: RunRows, model: str) -> None:
    together, _ = run_rows(model, "triton", **TOGETHER)
    alone, engine = run_rows(model, "triton", **ALONE)
    assert together == alone  # log-probabilities too
    assert engine.stats().num_preemptions == 0


def plan_kinds(runner: LocalRunner) -> set[str]:
    """Kinds of tiles of a step with a chunk of 20 tokens and one of one token."""
    tables = np.arange(14).reshape(2, 7)
    batch = StepBatch(starts=np.array([0, 5]), lengths=np.array([20, 1]), block_tables=tables)
    return {tiles.kind for tiles in runner._backends[0].plan(batch).groups}


def test_deterministic_reaches_the_kernels(make_runner: Callable[..., LocalRunner]) -> None:
    strict = make_runner("llama", kernels="triton", **HERE, **SIZES)
    loose = make_runner("llama", kernels="triton", deterministic=False, **HERE, **SIZES)
    assert strict.facts()["batch_invariant"].value is True
    assert loose.facts()["batch_invariant"].value is False
    assert plan_kinds(strict) == {"attention"}
    assert plan_kinds(loose) == {"attention_few", "attention_many"}
    linear: Any = loose._model.ops.linear  # type: ignore[union-attr]
    assert linear.keywords == {"deterministic": False}


class _Waits(TorchDispatchMode):
    """Counts operations that make the host wait for a GPU: values read by Python, and shapes that depend on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.NAMES):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "kernels", "waits"), [("llama", "triton", False), ("llama", "cpu", True), ("qwen3-moe", "triton", False)]
)
def test_forward_does_not_wait_for_the_device(
    make_runner: Callable[..., LocalRunner], monkeypatch: pytest.MonkeyPatch, family: str, kernels: str, waits: bool
) -> None:
    runner = make_runner(family, {"num_hidden_layers": 1}, kernels=kernels, **{"dtype": "float32", **HERE, **SIZES})
    engine = Engine(runner, max_model_len=runner.max_model_len, vocab_size=384)
    model: Any = runner._model
    forward, greedy, seen = model.forward, model.greedy, []

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with _Waits() as watch:
                result = run(*args)
            seen.extend(watch.seen)
            return result

        return call

    monkeypatch.setattr(model, "forward", watched(forward))
    monkeypatch.setattr(model, "greedy", watched(greedy))
    engine.add_request(
        Request(request_id=0, prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=2), stream_key=1)
    )
    while engine.has_unfinished():
        engine.step()
    assert bool(seen) == waits


@pytest.mark.skipif(not ON_GPU, reason="of a GPU's memory")
def test_kv_blocks_get_what_the_largest_step_leaves(make_runner: Callable[..., LocalRunner]) -> None:
    sizes = {"kernels": "triton", "kv_cache_memory": "auto", "max_num_seqs": 3, **HERE, **SIZES}
    runner = make_runner("llama", SMALL, **sizes)
    found = runner.facts()["num_blocks"]
    assert (found.value, found.source) == (3 * 7, "auto: max_num_seqs sequences of max_model_len tokens")
    driver = StepDriver(runner)
    assert len(driver.generate([driver.add([5, 6, 7])], 4)[0]) == 4
    with pytest.raises(ConfigError, match=r"that the largest step leaves of engine\.gpu_memory_utilization"):
        make_runner("llama", SMALL, gpu_memory_utilization=1e-6, **sizes)


@pytest.mark.skipif(ON_GPU, reason="of the interpreter")
def test_a_cpu_without_the_interpreter_is_refused(
    make_runner: Callable[..., LocalRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="interpreter computes wrong numbers in bfloat16"):
        make_runner("llama", kernels="triton", dtype="bfloat16")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match=r"engine\.kernels triton can't be used here: .*TRITON_INTERPRET=1"):
        make_runner("llama", kernels="triton")
    with pytest.raises(ValueError, match=r"'triton' can't be used on cpu: .*TRITON_INTERPRET=1"):
        resolve("triton")


def test_triton_is_imported_only_where_it_is_used() -> None:
    program = f"""
import sys
import batchinfer.runner.load
from batchinfer_kernels.table import resolve
resolve("cpu"), resolve("auto")
def found():
    rooms = ("batchinfer_kernels.triton.", "batchinfer.attention.triton")
    return [name for name in sys.modules if name.startswith(rooms)]
assert not found(), found()
resolve("triton", "{DEVICE}")
assert found()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
