"""The laws: a row's tokens depend on the row alone, never on batch, budget, cache, pool or pre-emption.

First with the fake runner over random settings, then with tiny real models, bitwise: what is compared are token ids
of sampled and greedy rows and their log-probabilities, for equality.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.config import EngineConfig
from batchinfer.engine import Engine, load_engine
from batchinfer.testing.tiny import make_tiny
from batchinfer.types.request import Request, RequestOutput, SamplingParams

Result = dict[int, tuple[Any, ...]]


def rows(count: int, *, max_model_len: int, vocab: int, seed: int = 0, **sampling: Any) -> list[Request]:
    """Prompts of many lengths, most with one of three heads; greedy and sampled, n of 1 and 2, some with logprobs."""
    rng = random.Random(seed)
    heads = [[rng.randrange(3, vocab) for _ in range(max_model_len // 2)] for _ in range(3)]
    requests = []
    for i in range(count):
        head = rng.choice([*heads, []])[: rng.choice([0, 7, 16, 33, max_model_len // 2])]
        prompt = head + [rng.randrange(3, vocab) for _ in range(rng.randint(1, max_model_len // 4))]
        if i % 10 == 9:
            prompt = list(requests[-3].prompt_token_ids)  # some rows are the same
        params = SamplingParams(
            temperature=0.8 if i % 2 else 0.0,
            top_p=0.95 if i % 4 == 1 else 1.0,
            top_k=20 if i % 8 == 3 else 0,
            repetition_penalty=1.2 if i % 8 == 5 else 1.0,
            n=2 if i % 6 == 5 else 1,
            max_tokens=rng.randint(1, max_model_len // 5),
            logprobs=2 if i % 5 == 0 else None,
            prompt_logprobs=1 if i % 11 == 0 else None,
            **sampling,
        )
        requests.append(Request(request_id=i, prompt_token_ids=prompt, sampling=params, stream_key=1000 + i))
    return requests


def results(engine: Engine, requests: list[Request], *, check: bool = True) -> Result:
    outputs: dict[int, RequestOutput] = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            outputs[output.request_id] = output
        if check:
            engine.check()
    assert len(outputs) == len(requests)
    for manager in engine.scheduler.managers:
        assert manager.num_available == manager.num_blocks
    return {
        i: (output.prompt_logprobs, *((s.token_ids, s.finish_reason, s.logprobs) for s in output.outputs))
        for i, output in outputs.items()
    }


def differing(one: Result, other: Result) -> list[int]:
    assert one.keys() == other.keys()
    return [i for i in one if one[i] != other[i]]


# -------------------------------------------------------------------- the fake runner


def fake(**options: Any) -> Engine:
    num_blocks = options.pop("num_blocks", 4096)
    model = f"fake://hash?max_model_len=160&eos_rate=0.03&num_blocks={num_blocks}"
    return load_engine(EngineConfig(model=model, **options))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 3),
    max_num_seqs=st.sampled_from([1, 2, 3, 7, 64]),
    budget=st.sampled_from([1, 5, 16, 100, 512]),
    cache=st.booleans(),
    block_size=st.sampled_from([1, 3, 16]),
    pool_tokens=st.sampled_from([160, 200, 400, 2000]),
    order=st.sampled_from(["given", "reversed", "shuffled"]),
)
def test_fake_rows_do_not_depend_on_anything_else(
    seed: int, max_num_seqs: int, budget: int, cache: bool, block_size: int, pool_tokens: int, order: str
) -> None:
    # The fake's tokens follow its block size, through the block that is mixed in: only that is held the same.
    sizes = {"block_size": block_size, "split_size": 16 * block_size}
    plain = fake(**sizes, num_blocks=160, enable_prefix_caching=False, max_num_seqs=1)
    engine = fake(
        **sizes,
        num_blocks=-(-pool_tokens // block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=cache,
    )
    requests = rows(16, max_model_len=160, vocab=256, seed=seed)
    other = list(requests)
    if order != "given":
        other = other[::-1] if order == "reversed" else random.Random(1).sample(other, len(other))
    expected, found = results(plain, requests, check=False), results(engine, other)
    assert differing(expected, found) == []


# -------------------------------------------------------------------- tiny models

MAX_MODEL_LEN = 96
FAMILIES = ["llama", "qwen3", "smollm", "qwen2-moe"]
LATENT = "deepseek-v3"
# What differs between arithmetics; rows of one are compared with rows of the same.
ARITHMETICS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},  # with the best kernels that are here
    "int8 reference": {"quantization": "int8", "kernels": "reference"},
    "int8, KV bfloat16": {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
    "float32, KV int8": {"dtype": "float32", "kernels": "cpu", "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {family: make_tiny(folder / family, family) for family in [*FAMILIES, LATENT]}


def tiny_engine(model: Path, arithmetic: str = "float32", *, pool_blocks: int = 300, **options: Any) -> Engine:
    settings = {
        "model": str(model),
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory": 1 << 25,
        "num_threads": 1,
        **ARITHMETICS[arithmetic],
        **options,
    }
    engine = load_engine(EngineConfig(**settings))
    block_bytes = int(engine.facts["kv_cache_bytes"][0]) // int(engine.facts["num_blocks"][0])
    if pool_blocks * block_bytes < settings["kv_cache_memory"]:
        engine.close()
        engine = load_engine(EngineConfig(**{**settings, "kv_cache_memory": pool_blocks * block_bytes}))
        assert engine.runner.kv_groups[0].num_blocks == pool_blocks
    return engine


@pytest.fixture(scope="module")
def one_at_a_time(tiny_models: dict[str, Path]) -> Callable[[str, str], Result]:
    """What a family gives for every row alone, its prompt in one piece, nothing cached."""

    @functools.cache
    def run(family: str, arithmetic: str) -> Result:
        alone = {"max_num_seqs": 1, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
        return results(tiny_engine(tiny_models[family], arithmetic, **alone), tiny_rows(), check=False)

    return run


def tiny_rows() -> list[Request]:
    return rows(24, max_model_len=MAX_MODEL_LEN, vocab=380)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
@pytest.mark.parametrize("arithmetic", ["float32", "int8"])
def test_rows_of_a_model_do_not_depend_on_the_batch(
    tiny_models: dict[str, Path],
    one_at_a_time: Callable[[str, str], Result],
    arithmetic: str,
    max_num_seqs: int,
    budget: int,
    cache: bool,
) -> None:
    engine = tiny_engine(
        tiny_models["llama"],
        arithmetic,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=cache,
    )
    found = results(engine, tiny_rows(), check=False)
    assert differing(one_at_a_time("llama", arithmetic), found) == []
    assert (engine.stats().num_cached_tokens > 0) == cache


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("arithmetic", "max_num_seqs", "budget"),
    [("float32", 64, 16), ("float32", 3, 512), ("int8", 3, 16), ("int8", 64, 512), ("int8 reference", 7, 24)],
)
def test_rows_of_latent_attention_do_not_depend_on_the_batch(
    tiny_models: dict[str, Path],
    one_at_a_time: Callable[[str, str], Result],
    arithmetic: str,
    max_num_seqs: int,
    budget: int,
    cache: bool,
) -> None:
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "enable_prefix_caching": cache}
    engine = tiny_engine(tiny_models[LATENT], arithmetic, num_threads=2, **options)
    found = results(engine, tiny_rows())
    torch.set_num_threads(1)
    assert differing(one_at_a_time(LATENT, arithmetic), found) == []
    assert (engine.stats().num_cached_tokens > 0) == cache


@pytest.mark.parametrize("arithmetic", [name for name in ARITHMETICS if name != "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_members_in_int8_do_not_depend_on_the_batch(
    tiny_models: dict[str, Path], one_at_a_time: Callable[[str, str], Result], family: str, arithmetic: str
) -> None:
    engine = tiny_engine(tiny_models[family], arithmetic, max_num_seqs=7, max_num_batched_tokens=24, num_threads=2)
    assert differing(one_at_a_time(family, arithmetic), results(engine, tiny_rows())) == []
    torch.set_num_threads(1)
    assert differing(one_at_a_time(family, arithmetic), one_at_a_time(family, "float32")) != []


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("family", "arithmetic", "block_size", "pool_blocks"),
    [
        *((family, "float32", 4, 28) for family in [*FAMILIES, LATENT]),
        (LATENT, "int8", 16, 6),
        ("llama", "int8", 16, 6),
        ("smollm", "int8", 4, 28),
        ("llama", "int8, KV bfloat16", 16, 6),
        ("llama", "float32, KV int8", 4, 28),
    ],
)
def test_fifty_pre_emptions_change_no_bit(
    tiny_models: dict[str, Path],
    one_at_a_time: Callable[[str, str], Result],
    family: str,
    arithmetic: str,
    block_size: int,
    pool_blocks: int,
    cache: bool,
) -> None:
    engine = tiny_engine(
        tiny_models[family],
        arithmetic,
        pool_blocks=pool_blocks,
        block_size=block_size,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        enable_prefix_caching=cache,
    )
    expected = one_at_a_time(family, arithmetic)
    for _ in range(20):
        assert differing(expected, results(engine, tiny_rows())) == []
        if engine.stats().num_preemptions >= 50:
            break
    assert engine.stats().num_preemptions >= 50


@pytest.mark.parametrize(("chunk", "max_num_seqs"), [(16, 7), (64, 50), (512, 1)])
def test_repeating_a_shared_head_changes_nothing(tiny_models: dict[str, Path], chunk: int, max_num_seqs: int) -> None:
    rng = random.Random(5)
    head = [rng.randrange(3, 380) for _ in range(70)]
    requests = [
        Request(
            request_id=i,
            prompt_token_ids=head + [rng.randrange(3, 380) for _ in range(1 + i % 7)],
            sampling=SamplingParams(temperature=0.0, max_tokens=6),
            stream_key=i,
        )
        for i in range(15)
    ]
    plain = tiny_engine(tiny_models["llama"], max_num_seqs=1, enable_prefix_caching=False)
    expected = results(plain, requests, check=False)
    engine = tiny_engine(tiny_models["llama"], max_num_seqs=max_num_seqs, max_num_batched_tokens=chunk)
    for _ in range(3):
        assert differing(expected, results(engine, requests, check=False)) == []
    assert engine.stats().num_cached_tokens >= 44 * 64


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_cached_whole_gives_the_same(tiny_models: dict[str, Path], length: int) -> None:
    rng = random.Random(length)
    prompt = [rng.randrange(3, 380) for _ in range(length)]
    requests = [
        Request(
            request_id=i,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=8, logprobs=3),
            stream_key=i,
        )
        for i in range(3)
    ]
    engine = tiny_engine(tiny_models["llama"], max_num_batched_tokens=16, max_num_seqs=8)
    alone = results(engine, requests[:1])
    beside = results(engine, requests)
    assert {alone[0], *beside.values()} == {alone[0]}
    plain = tiny_engine(tiny_models["llama"], enable_prefix_caching=False)
    assert results(plain, requests[:1]) == alone
