"""All layers in one call of C against the operations one by one, and hidden states of only the tokens that are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.native import library
from batchinfer_kernels.probe import STRICT, AttentionTiles, RowFacts, RowRule, find_row_rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchinfer.config import EngineConfig
from batchinfer.modelfiles import open_model
from batchinfer.runner import load
from batchinfer.runner.local import LocalRunner
from batchinfer.testing.step_driver import GREEDY, StepDriver
from batchinfer.testing.tiny import FAMILIES, VOCAB_SIZE, make_tiny
from batchinfer.types.request import SamplingParams

MakeRunner = Callable[..., LocalRunner]
REPORTED = SamplingParams(temperature=0.0, logprobs=2)
PROMPT_REPORTED = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=2)
KINDS = (GREEDY, REPORTED, PROMPT_REPORTED)
LENGTHS = (300, 1, 17, 64, 259, 33)  # beyond a split, ends of blocks, a row block that is not full

WINDOW = {"sliding_window": 40}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("llama", {}),
    "a KV head each": ("llama-mha", {}),
    "biases": ("llama-bias", {}),
    "bias of qkv": ("qwen2", {}),
    "wide heads": ("llama-head-dim", {}),
    "scaled rope": ("llama3", {}),
    "odd widths": ("smollm", {"hidden_size": 144, "intermediate_size": 100}),
    "several groups of inputs, of which the last is shorter": ("llama", {"hidden_size": 384, "intermediate_size": 704}),
    "window": ("mistral", {"head_dim": 48, **WINDOW}),
    "keys and values in bfloat16": ("llama-bias", {}),
    "two KV groups": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    # The first layer has fewer partial results than the others.
    "two KV groups, the window first": (
        "qwen2",
        {
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            **WINDOW,
        },
    ),
}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of heads": ("qwen3", {}),
    "attention not in C": ("smollm", {}),
    "weights not in int8": ("llama", {}),
}

needs_native = pytest.mark.skipif(library.available() is not None, reason="no C kernels here")


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=draw).tolist() for length in LENGTHS]


def run(runner: LocalRunner, *, chunk: int) -> tuple[list[Tensor], list[Any]]:
    """Hidden states and results of all steps: chunked prompts and decoding side by side."""
    model: Any = runner._model
    hidden: list[Tensor] = []
    forward = model.forward

    def noted(*args: Any) -> Tensor:
        found: Tensor = forward(*args)
        hidden.append(found.clone())
        return found

    model.forward = noted
    try:
        driver = StepDriver(runner, next_step=runner._next_step)
        ids = [driver.add(prompt, KINDS[i % 3], sample_key=i) for i, prompt in enumerate(prompts())]
        driver.generate(ids, 6, chunk=chunk)
        for seq_id in ids:
            driver.finish(seq_id)
    finally:
        model.forward = forward
    return hidden, [(r.token_ids, r.logprobs, r.prompt_logprobs) for r in driver.results]


def without_whole(runner: LocalRunner) -> None:
    model: Any = runner._model
    model.ops = replace(model.ops, decoder=None)


def count_whole(runner: LocalRunner) -> list[int]:
    """Sizes of the steps that run in one call, as they come."""
    model: Any = runner._model
    sizes: list[int] = []

    class Counted(model.ops.decoder):  # type: ignore[misc, name-defined]
        def run(self, hidden: Tensor, *args: Any) -> Tensor:
            sizes.append(len(hidden))
            result: Tensor = super().run(hidden, *args)
            return result

    model.ops = replace(model.ops, decoder=Counted)
    return sizes


@needs_native
@pytest.mark.parametrize("name", WHOLE)
def test_whole_layers_give_the_bytes_of_their_parts(name: str, make_runner: MakeRunner) -> None:
    family, overrides = WHOLE[name]
    for threads in (1, 3):
        kv_cache_dtype = "bfloat16" if name.endswith("bfloat16") else "int8"
        runner = make_runner(family, overrides, quantization="int8", num_threads=threads, kv_cache_dtype=kv_cache_dtype)
        assert len(runner.kv_groups) == (2 if name.startswith("two KV groups") else 1)
        sizes = count_whole(runner)
        found = {chunk: run(runner, chunk=chunk) for chunk in (1 << 30, 50)}
        assert sizes[0] == sum(LENGTHS)
        num_steps = len(sizes)
        without_whole(runner)
        for chunk, (hidden, results) in found.items():
            expected_hidden, expected = run(runner, chunk=chunk)
            assert results == expected
            assert len(hidden) == len(expected_hidden)
            assert all(torch.equal(a, b) for a, b in zip(hidden, expected_hidden, strict=True))
            assert all(h.isfinite().all() for h in hidden)
        assert len(sizes) == num_steps


@needs_native
@pytest.mark.parametrize("name", PARTS)
def test_what_whole_layers_are_not_for_runs_part_by_part(name: str, make_runner: MakeRunner) -> None:
    family, overrides = PARTS[name]
    runner = make_runner(family, overrides, quantization="none" if name == "weights not in int8" else "int8")
    sizes = count_whole(runner)
    run(runner, chunk=50)
    assert not sizes


class Products(TorchDispatchMode):
    """Counts what torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if any(part in name for part in ("mm", "mv", "dot", "linear", "einsum", "attention")):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_torch_are_measured_where_there_are_any(family: str, make_runner: MakeRunner) -> None:
    """Models of which nothing is measured multiply nothing with torch: each kind of sampling, with and without KV."""
    runner = make_runner(family, quantization="int8")
    with Products() as products:
        run(runner, chunk=50)
    assert bool(products.names) == ("row_rule" in runner.facts()), products.names
    if family == "llama":
        assert not products.names
    assert runner.facts()["batch_invariant"].value is True
    # What the mode sees of a model that does multiply with torch.
    runner = make_runner(family, quantization="none")
    with Products() as products:
        run(runner, chunk=50)
    assert products.names and "row_rule" in runner.facts()


def test_products_of_all_experts_are_measured(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts, of the shared one, and of layers without any."""
    tried: list[tuple[int, int]] = []

    def find(shapes: list[tuple[int, int]], **options: Any) -> RowFacts:
        tried.extend(shapes)
        return find_row_rule(shapes, **options)

    monkeypatch.setattr(load, "find_row_rule", find)
    make_runner("qwen2-moe", quantization="none")
    assert {(2 * inner, 64) for inner in (160, 80, 48)} | {(64, inner) for inner in (160, 80, 48)} <= set(tried)


@pytest.mark.parametrize(
    ("family", "given", "expected"), [("qwen3", None, 128), ("llama", None, 16), ("mistral", 24, 24)]
)
def test_heads_are_measured_that_the_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, given: int | None, expected: int
) -> None:
    """Also where config.json does not say how large they are: Qwen3's are of 128 dimensions then."""
    folder = make_tiny(tmp_path / "model", family, head_dim=expected)
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config | ({"head_dim": given} if given else {})))
    tried: list[AttentionTiles] = []

    def find(
        shapes: list[tuple[int, int]], *, attention: Callable[[RowRule], AttentionTiles], **options: Any
    ) -> RowFacts:
        tried.append(attention(STRICT))
        assert ((64, 4 * expected) in shapes) == (expected != 16)
        return find_row_rule(shapes, attention=attention, **options)

    monkeypatch.setattr(load, "find_row_rule", find)
    options: dict[str, Any] = {"quantization": "none", "num_threads": 1, "kv_cache_memory": 16 << 20}
    load.load_runner(open_model(str(folder)), EngineConfig(model=str(folder), **options))
    assert [tiles.head_dim for tiles in tried] == [expected]


@pytest.mark.parametrize(("family", "expected"), [("deepseek-v3", [(64, 64)]), ("qwen2-moe", [])])
def test_routers_that_multiply_in_float32_are_measured_in_it(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, family: str, expected: list[tuple[int, int]]
) -> None:
    tried: list[tuple[int, int]] = []

    def find(shapes: list[tuple[int, int]], *, wide: Iterable[tuple[int, int]], **options: Any) -> RowFacts:
        tried.extend(wide)
        return find_row_rule(shapes, wide=wide, **options)

    monkeypatch.setattr(load, "find_row_rule", find)
    make_runner(family, dtype="bfloat16", quantization="none")
    assert tried == expected


@needs_native
def test_where_nothing_is_wanted_the_last_layer_ends_with_its_keys_and_values(make_runner: MakeRunner) -> None:
    """A model of one layer leaves the residual stream as it came; a later step finds the chunk's keys and values."""
    runner = make_runner(overrides={"num_hidden_layers": 1}, quantization="int8")
    model: Any = runner._model
    untouched: list[bool] = []
    results: list[Tensor] = []

    class Compared(model.ops.decoder):  # type: ignore[misc, name-defined]
        def run(self, hidden: Tensor, *args: Any) -> Tensor:
            before = hidden.clone()
            results.append(super().run(hidden, *args))
            untouched.append(torch.equal(hidden, before))
            return results[-1]

    model.ops = replace(model.ops, decoder=Compared)
    prompt = prompts()[0]
    driver = StepDriver(runner)
    chunked, at_once = driver.add(prompt), driver.add(prompt)
    driver.step({chunked: 100})
    driver.step({chunked: 200, at_once: 300})
    assert [len(result) for result in results] == [0, 2] and all(untouched)
    assert torch.equal(results[1][0], results[1][1])


@needs_native
def test_a_sick_row_stays_alone(make_runner: MakeRunner) -> None:
    runner = make_runner(quantization="int8")
    expected = run(runner, chunk=1 << 30)[1]
    model: Any = runner._model
    first = prompts()[0]
    token = next(t for t in first if all(t not in prompt for prompt in prompts()[1:]))
    model.embed.weight.data[token] = torch.nan
    driver = StepDriver(runner, next_step=runner._next_step)
    ids = [driver.add(prompt, KINDS[i % 3], sample_key=i) for i, prompt in enumerate(prompts())]
    result = driver.step(dict.fromkeys(ids, 1 << 30))
    assert set(result.errors) == {ids[0]}
    assert result.token_ids == {i: t for i, t in expected[0][0].items() if i != ids[0]}


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "reference", "dtype": "float32"},
        {"kernels": "cpu", "dtype": "float32"},
        pytest.param({"quantization": "int8"}, marks=needs_native),
        pytest.param({"quantization": "int8", "parts": True}, marks=needs_native),
    ],
    ids=["reference", "cpu", "whole layers in C", "parts in C"],
)
def test_hidden_states_of_the_tokens_that_are_read(options: dict[str, Any], make_runner: MakeRunner) -> None:
    """They are what they would be among those of all tokens; an inner chunk has none."""
    options = dict(options)
    parts = options.pop("parts", False)
    runner = make_runner(**options)
    if parts:
        without_whole(runner)
    model: Any = runner._model
    forward = model.forward

    def compare(token_ids: Tensor, positions: Tensor, ctx: Any) -> Tensor:
        found: Tensor = forward(token_ids, positions, ctx)
        everything = forward(token_ids, positions, replace(ctx, wanted=None))
        assert len(everything) == len(token_ids)
        wanted = everything if ctx.wanted is None else everything[ctx.wanted]
        sizes.append((len(token_ids), len(found)))
        if options.get("kernels") == "reference":  # whose products are not the same in every batch
            torch.testing.assert_close(found, wanted)
        else:
            assert torch.equal(found, wanted)
        return found

    sizes: list[tuple[int, int]] = []
    model.forward = compare
    driver = StepDriver(runner)
    ids = [driver.add(prompt) for prompt in prompts()[:3]]
    reported = driver.add(prompts()[3], PROMPT_REPORTED)
    driver.step({ids[0]: 100})
    driver.step({ids[0]: 300, ids[1]: 1})
    driver.step({ids[0]: 1, ids[2]: 10, reported: 40})
    driver.step({ids[2]: 7, reported: 40}, num_logits=3)
    driver.step({ids[0]: 1, ids[1]: 1})
    assert sizes == [(100, 0), (201, 2), (51, 41), (31, 27), (2, 2)]
    assert len(driver.results[2].prompt_logprobs[reported]) == 40
    assert len(driver.results[3].prompt_logprobs[reported]) == 23
