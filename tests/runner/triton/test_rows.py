"""Rows of an engine on Triton's kernels, in the interpreter, with CUDA graphs as identity: what sampling settings say,
prompts that are cached whole, the context's end, and rows that are no numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.engine import Engine
from batchinfer.types.request import Request, RequestOutput, SamplingParams
from batchinfer.types.rows import ErrorClass
from tests.kernels.triton.device import ON_GPU
from tests.runner.triton.test_graphs import graphs_of
from tests.runner.triton.test_triton_runner import SIZES, make_engine

# What numpy says of rows that are padding, and of those that are no numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ONE_LAYER = {"num_hidden_layers": 1, "num_key_value_heads": 1, "intermediate_size": 48}
MAX_LEN = int(SIZES["max_model_len"])
HEAD = [70, 71, 70, 70, 72, 71, 70, 73, 70]  # penalties find tokens of the prompt, some more than once


def row(request_id: int, prompt: list[int], **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling})
    return Request(request_id=request_id, prompt_token_ids=prompt, sampling=params, stream_key=100 + request_id)


def run(engine: Engine, rows: list[Request]) -> dict[int, RequestOutput]:
    for request in rows:
        engine.add_request(request)
    outputs: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check()
    assert outputs.keys() == {request.request_id for request in rows}
    return outputs


def generated(outputs: dict[int, RequestOutput]) -> dict[int, Any]:
    """All that a row gives, but for how much of it was cached."""
    return {i: (output.error, output.prompt_logprobs, output.outputs) for i, output in outputs.items()}


def check_against_the_reference(found: dict[int, RequestOutput], expected: dict[int, RequestOutput]) -> None:
    """Tokens and why they end; log-probabilities, of the prompt too."""
    if ON_GPU:  # where sums have other orders: near ties may differ
        return
    for i, output in found.items():
        ours, theirs = output.outputs[0], expected[i].outputs[0]
        assert (ours.token_ids, ours.finish_reason, ours.stop_reason) == (
            theirs.token_ids,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        entries = [[*(o.prompt_logprobs or ()), *(o.outputs[0].logprobs or ())] for o in (output, expected[i])]
        for entry, wanted in zip(*entries, strict=True):
            assert (entry is None) == (wanted is None)
            if entry is not None and wanted is not None:
                assert abs(entry.logprob - wanted.logprob) < 1e-3 and entry.rank == wanted.rank
                assert [token for token, _ in entry.top] == [token for token, _ in wanted.top]


def test_settings_count_what_they_should_however_rows_are_cut(tiny_folder: Callable[..., Path]) -> None:
    """Pre-empted, in chunks, from the cache: tokens of prompt and output, and the minimum, are what they were."""
    path = tiny_folder("llama", **ONE_LAYER)
    plain = make_engine(path, kernels="reference", pool_blocks=40, max_num_seqs=1, enable_prefix_caching=False)
    free = run(plain, [row(0, [*HEAD, 40])])[0].outputs[0].token_ids
    # Two tokens far above all others, of which one is in the prompt: with the penalties, now one and now the other.
    first, second = HEAD[0], 80
    rows = [
        row(0, [*HEAD, 40]),
        row(1, [*HEAD, 40], repetition_penalty=1.5, logit_bias={first: 90.0, second: 70.0}),
        row(2, [*HEAD, 40], presence_penalty=2.0, frequency_penalty=2.0, logit_bias={first: 46.0, second: 43.0}),
        row(3, [*HEAD, 41], temperature=0.9, repetition_penalty=0.8, frequency_penalty=0.7, logprobs=2),
        row(4, [*HEAD, 40], min_tokens=4, stop_token_ids=free, logprobs=0),
        row(5, [*HEAD, 42, 43], temperature=0.01, min_p=0.1, logprobs=20, prompt_logprobs=3),
    ]
    expected = run(plain, rows)
    engine = make_engine(
        path, kernels="triton", cuda_graphs=True, pool_blocks=7, max_num_seqs=3, max_num_batched_tokens=12
    )
    found = run(engine, rows)
    check_against_the_reference(found, expected)
    assert generated(run(engine, rows)) == generated(found)
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.num_cached_tokens > 0 and graphs_of(engine.runner).num_replayed > 0
    tokens = {i: list(output.outputs[0].token_ids) for i, output in found.items()}
    assert tokens[1] == [second, *[first] * (len(tokens[1]) - 1)] and set(tokens[2]) == {first, second}
    if not ON_GPU:
        assert tokens[0] == list(free) and not set(tokens[4][:4]) & set(free)
    for i, num_top in ((3, 2), (4, 0), (5, 20)):
        entries = found[i].outputs[0].logprobs
        assert entries is not None and [entry.token_id for entry in entries] == tokens[i]
        assert {len(entry.top) for entry in entries} == {num_top}


def test_prompts_that_are_cached_whole_and_the_contexts_end(tiny_folder: Callable[..., Path]) -> None:
    """Lengths around a block, a split and the context: first, then twice beside each other, from the cache."""
    path = tiny_folder("llama", **ONE_LAYER)
    lengths = (3, 4, 5, 15, 16, 17, MAX_LEN - 2, MAX_LEN - 1, MAX_LEN)

    def rows(begin: int) -> list[Request]:
        prompts = [[200 + length, *range(20, 20 + length - 1)] for length in lengths]
        return [row(begin + i, prompt, max_tokens=None if i > 5 else 2, logprobs=1) for i, prompt in enumerate(prompts)]

    expected = run(make_engine(path, kernels="reference", pool_blocks=99, enable_prefix_caching=False), rows(0))
    engine = make_engine(
        path, kernels="triton", cuda_graphs=True, pool_blocks=99, max_num_seqs=4, max_num_batched_tokens=16
    )
    found = run(engine, rows(0))
    too_long = len(lengths) - 1
    error = found.pop(too_long).error
    assert error is not None and error.error_class is ErrorClass.PROMPT_TOO_LONG
    check_against_the_reference(found, expected)
    assert [len(found[i].outputs[0].token_ids) for i in (6, 7)] == [2, 1]
    assert {found[i].outputs[0].finish_reason for i in (6, 7)} == {"length"}
    again = run(engine, [*rows(100), *rows(200)])
    for i, output in found.items():
        for other in (again[100 + i], again[200 + i]):
            assert other.outputs == output.outputs
            assert other.num_cached_tokens == lengths[i] - 1
    assert graphs_of(engine.runner).num_replayed > 0


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_rows_that_are_no_numbers_are_errors_and_harm_no_other(
    tiny_folder: Callable[..., Path], tmp_path: Path, quantization: str
) -> None:
    """A token that is NaN, and one for which float16 is too narrow in the first of two layers: greedy and drawn, asked
    for log-probabilities; behind a prefix that is shared, in blocks that others get after them."""
    nan, large = 350, 351
    path = tmp_path / "model"
    shutil.copytree(tiny_folder("llama-bias", **ONE_LAYER | {"num_hidden_layers": 2}), path)
    widen(path, large)
    engine = make_engine(
        path,
        kernels="triton",
        cuda_graphs=True,
        dtype="float16",
        quantization=quantization,
        pool_blocks=16,
        max_num_seqs=4,
        max_num_batched_tokens=24,
    )
    model: Any = engine.runner._model  # type: ignore[attr-defined]
    model.embed.weight.data[nan] = torch.nan
    good = [
        row(0, [*HEAD, 40], max_tokens=3),
        row(1, [*HEAD, 41], max_tokens=3, temperature=0.9, logprobs=1),
        row(2, [*HEAD, 42], max_tokens=3, prompt_logprobs=1, repetition_penalty=1.2),
    ]
    sick = [
        row(10, [*HEAD, nan]),
        row(11, [*HEAD, nan, 43, 44], temperature=0.9, logprobs=1),
        row(12, [*HEAD, large, 43]),
        row(13, [*HEAD, large], logprobs=1),
    ]
    expected = run(engine, good)
    assert [output.error for output in expected.values()] == [None] * 3
    found = run(engine, [*sick[:2], *good, *sick[2:]])
    errors = [found.pop(request.request_id).error for request in sick]
    assert [error and error.error_class for error in errors] == [ErrorClass.NON_FINITE_LOGITS] * 4
    assert all("output position 0" in error.message for error in errors if error is not None)
    assert generated(found) == generated(expected)
    assert generated(run(engine, good[1:2]))[1] == generated(expected)[1]


def widen(folder: Path, token: int) -> None:
    """Makes the first layer's MLP overflow float16 after one token, and give others nothing more than it did."""
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[token] *= 20  # attention changes it little
    along = 3 * embedding[token] / embedding[token].norm()  # 24 after the norm, and of others -12 to 12
    at = "model.layers.0.mlp."
    tensors[at + "gate_proj.weight"][0] = tensors[at + "up_proj.weight"][0] = along
    tensors[at + "gate_proj.bias"][0], tensors[at + "up_proj.bias"][0] = -18, 0
    tensors[at + "down_proj.weight"][5, 0] = 1000
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
