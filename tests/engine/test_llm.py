"""The facade: kinds of prompts, order, defaults, seeds, and one clear message for what is wrong."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import batchinfer
from batchinfer import LLM, SamplingParams
from batchinfer.errors import ConfigError, EngineError
from batchinfer.garbage import RARELY, collected_rarely
from batchinfer.types.rows import ErrorClass

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def echo() -> LLM:
    return LLM(model="fake://echo", max_num_seqs=4)


def hashing(**options: Any) -> LLM:
    return LLM(model="fake://hash", **{"max_num_seqs": 4, **options})


def with_generation_config(llm: LLM, config: Mapping[str, Any]) -> LLM:
    assert llm.engine.model is not None
    llm.engine.model = dataclasses.replace(llm.engine.model, generation_config=config)
    return llm


# -------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    "prompt",
    [
        "abc",
        [97, 98, 99],
        (97, 98, 99),
        {"prompt": "abc"},
        {"prompt_token_ids": [97, 98, 99]},
        {"prompt_token_ids": np.array([97, 98, 99])},
        list(np.array([97, 98, 99])),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_kinds_of_prompts(echo: LLM, prompt: Any, listed: bool) -> None:
    (output,) = echo.generate([prompt] if listed else prompt, GREEDY)
    assert output.error is None
    assert list(output.prompt_token_ids) == [97, 98, 99]
    assert output.outputs[0].text == "abc"
    assert output.prompt == ("abc" if isinstance(prompt, str) or "prompt" in prompt else None)


def test_results_are_in_the_order_of_the_prompts(echo: LLM) -> None:
    prompts = [f"row {i} " + "." * (i * 7 % 20) for i in range(100)]
    outputs = echo.generate(prompts, SamplingParams(max_tokens=64))
    assert [output.outputs[0].text for output in outputs] == prompts
    again = echo.generate(prompts[:3], SamplingParams(max_tokens=64))
    assert [output.outputs[0].text for output in again] == prompts[:3]


def test_nothing_in_nothing_out(echo: LLM) -> None:
    assert echo.generate([]) == []
    assert echo.chat([]) == []


@pytest.mark.parametrize("bad", [None, float("nan"), 1.5, {"promt": "x"}, "", [], [1, "a"], b"bytes", [True]])
def test_a_prompt_that_is_none_is_its_own_error(echo: LLM, bad: Any) -> None:
    outputs = echo.generate(["before", bad, "after"], GREEDY)
    assert [output.outputs[0].text for output in (outputs[0], outputs[2])] == ["before", "after"]
    error = outputs[1].error
    assert error is not None
    assert error.error_class is ErrorClass.INVALID_PROMPT


def test_an_over_long_prompt_says_how_long(echo: LLM) -> None:
    outputs = echo.generate(["a", "x" * 3000, "b"], GREEDY)
    assert outputs[1].error is not None
    assert outputs[1].error.error_class is ErrorClass.PROMPT_TOO_LONG
    assert "3,000 tokens" in outputs[1].error.message
    assert outputs[2].error is None


def test_sampling_one_for_all_or_one_each(echo: LLM) -> None:
    each = [SamplingParams(max_tokens=n) for n in (1, 2, 3)]
    outputs = echo.generate(["abcdef"] * 3, each)
    assert [output.outputs[0].text for output in outputs] == ["a", "ab", "abc"]
    assert [params.max_tokens for params in each] == [1, 2, 3]
    with pytest.raises(ConfigError, match="3 prompts and 2 sampling_params"):
        echo.generate(["a"] * 3, each[:2])
    with pytest.raises(ConfigError, match="must be SamplingParams"):
        echo.generate(["a"], [{"max_tokens": 1}])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="SamplingParams or a list of them, got dict"):
        echo.generate(["a"], {"max_tokens": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="prompts must be"):
        echo.generate(7)  # type: ignore[arg-type]


# -------------------------------------------------------------------- chat


def test_chat_renders_the_models_template(echo: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=64)
    (output,) = echo.chat(conversation, params)
    assert output.outputs[0].text == "<user>hello\n<assistant>"
    outputs = echo.chat([conversation, [*conversation, {"role": "assistant", "content": "hi"}]], params)
    assert outputs[1].outputs[0].text == "<user>hello\n<assistant>hi\n<assistant>"
    (output,) = echo.chat(conversation, params, add_generation_prompt=False)
    assert output.outputs[0].text == "<user>hello\n"
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"
    (output,) = echo.chat(conversation, params, chat_template=template, chat_template_kwargs={"mood": "!"})
    assert output.outputs[0].text == "[hello]!"


def test_a_text_is_no_conversation(echo: LLM) -> None:
    with pytest.raises(ConfigError, match=r"messages must be a conversation .* got str"):
        echo.chat("hello")  # type: ignore[arg-type]


def test_a_conversation_that_is_none_is_its_own_error(echo: LLM) -> None:
    good: Any = [{"role": "user", "content": "hello"}]
    outputs = echo.chat([good, None, good], GREEDY)  # type: ignore[list-item]
    assert [output.error is None for output in outputs] == [True, False, True]


# -------------------------------------------------------------------- seeds and defaults


def ids(llm: LLM, prompts: list[str], **sampling: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(**{"temperature": 0.8, "max_tokens": 12, **sampling})
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_a_seed_gives_the_same_output_wherever_the_prompt_stands() -> None:
    alone = ids(hashing(), ["p"], seed=7)[0]
    assert ids(hashing(seed=99), ["a", "b", "p", "p"], seed=7)[2:] == [alone, alone]
    assert ids(hashing(), ["p"], seed=8)[0] != alone


def test_samples_of_one_seed_differ() -> None:
    (output,) = hashing().generate(["p"], SamplingParams(n=3, seed=1, max_tokens=12))
    assert len({sample.token_ids for sample in output.outputs}) == 3
    assert output.outputs[0].token_ids == ids(hashing(), ["p"], seed=1, temperature=1.0)[0]


def test_without_a_seed_prompts_have_streams_by_their_number() -> None:
    together = ids(hashing(), ["p"] * 4)
    assert len(set(together)) == 4
    llm = hashing()
    assert [ids(llm, ["p"])[0] for _ in range(4)] == together
    assert ids(hashing(seed=1), ["p"] * 4) != together


def test_greedy_needs_no_seed() -> None:
    assert len(set(ids(hashing(), ["p"] * 4, temperature=0.0))) == 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"temperature": 0.1, "top_k": 50}, {"temperature": 0.0, "top_k": 0}),
        (
            {"do_sample": True, "temperature": 0.1, "top_k": 50, "repetition_penalty": 1.3},
            {"temperature": 0.1, "top_k": 50, "repetition_penalty": 1.3},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
    ],
)
def test_defaults_come_from_the_generation_config(config: dict[str, Any], expected: dict[str, Any]) -> None:
    llm = with_generation_config(hashing(), config)
    params = llm.default_sampling_params()
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.max_tokens is None
    key = llm.generate(["p"])[0].outputs[0].token_ids
    assert key == hashing().generate(["p"], params)[0].outputs[0].token_ids


# -------------------------------------------------------------------- options, trouble


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("max_num_seq", "did you mean 'max_num_seqs'"),
        ("enforce_eager", "use cuda_graphs=False"),
        ("trust_remote_code", "no code is ever loaded"),
        ("speculative_config", "speculation is planned and not there yet"),
        ("enable_lora", "LoRA is planned and not there yet"),
        ("pipeline_parallel_size", "planned and not there yet"),
        ("frobnicate", "there are model, tokenizer"),
    ],
)
def test_unknown_options_are_errors(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(model="fake://hash", **{option: 1})  # type: ignore[arg-type]


def test_zero_is_not_auto() -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory"):
        with pytest.raises(ConfigError, match=f"engine.{name} must be at least 1, got 0"):
            LLM(model="fake://hash", **{name: 0})  # type: ignore[arg-type]
        LLM(model="fake://hash", **{name: None})  # type: ignore[arg-type]


def test_tensor_parallel_sizes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(model="fake://hash", tensor_parallel_size=2)


def test_after_an_interrupt_the_next_call_is_clean(echo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = echo.engine.step
    calls = 0

    def interrupted() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(echo.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        echo.generate([f"prompt {i}" for i in range(6)] + [[-1]] * 20, SamplingParams(max_tokens=50))
    assert not echo.engine.has_unfinished()
    assert echo.generate("abc", GREEDY)[0].outputs[0].text == "abc"


def test_a_dead_runner_raises_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = hashing()
    plain = llm.engine.runner.execute
    calls = 0

    def dies(plan: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise EngineError("the device is gone")
        return plain(plan)

    monkeypatch.setattr(llm.engine.runner, "execute", dies)
    with pytest.raises(EngineError, match="the device is gone"):
        llm.generate(["a"] * 100, SamplingParams(max_tokens=50))


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "during"),
    [
        ((700, 10, 10), RARELY),
        ((50_000, 10, 100), (50_000, 50, 100)),
        ((30_000, 60, 70), (30_000, 60, 70)),
        ((0, 10, 10), (0, 10, 10)),
    ],
)
def test_the_programs_garbage_is_collected_as_before(
    echo: LLM, monkeypatch: pytest.MonkeyPatch, thresholds: None, before: Any, during: Any
) -> None:
    seen = set()
    step = echo.engine.step

    def noted() -> Any:
        seen.add(gc.get_threshold())
        return step()

    def broken() -> Any:
        raise KeyboardInterrupt

    gc.set_threshold(*before)
    monkeypatch.setattr(echo.engine, "step", noted)
    echo.generate("abc", GREEDY)
    assert gc.get_threshold() == before
    echo.chat([{"role": "user", "content": "abc"}], GREEDY)
    assert gc.get_threshold() == before and seen == {during}
    monkeypatch.setattr(echo.engine, "step", broken)
    with pytest.raises(KeyboardInterrupt):
        echo.generate("abc", GREEDY)
    assert gc.get_threshold() == before


def test_what_a_program_sets_for_its_garbage_meanwhile_stays(
    echo: LLM, monkeypatch: pytest.MonkeyPatch, thresholds: None
) -> None:
    step = echo.engine.step

    def setting() -> Any:
        gc.set_threshold(900, 9, 9)
        return step()

    monkeypatch.setattr(echo.engine, "step", setting)
    echo.generate("abc", GREEDY)
    assert gc.get_threshold() == (900, 9, 9)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_of_several_threads_may_end_in_any_order(thresholds: None, order: tuple[int, int]) -> None:
    gc.set_threshold(700, 10, 10)
    calls = [ExitStack(), ExitStack()]
    for call in calls:
        call.enter_context(collected_rarely())
    assert gc.get_threshold() == RARELY
    calls[order[0]].close()
    assert gc.get_threshold() == RARELY
    calls[order[1]].close()
    assert gc.get_threshold() == (700, 10, 10)


def test_thresholds_are_put_back_where_python_has_two(monkeypatch: pytest.MonkeyPatch, thresholds: None) -> None:
    """CPython 3.14 takes a third one and gives 0 for it."""
    real = gc.get_threshold
    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr(gc, "get_threshold", lambda: (*real()[:2], 0))
    with collected_rarely():
        assert real()[:2] == RARELY[:2]
    assert real()[:2] == (700, 10)


def test_exports() -> None:
    assert batchinfer.LLM is LLM
    assert "submit" in dir(batchinfer)
    with pytest.raises(AttributeError, match="frobnicate"):
        _ = batchinfer.frobnicate
    stats = hashing().stats()
    assert stats["num_steps"] == 0


def test_prompts_that_share_a_prefix_are_run_together_wherever_they_stand() -> None:
    """Sorted, each of 40 heads of 64 tokens is computed once, though the cache holds few of them at a time."""
    heads = [[7 + head] * 64 for head in range(40)]
    prompts = [{"prompt_token_ids": [*head, 100 + tail]} for tail in range(4) for head in heads]
    llm = LLM("fake://hash?vocab=512&max_model_len=512", max_num_seqs=4, kv_cache_memory=60 * 16)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2))
    assert [list(output.prompt_token_ids) for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert sum(output.num_cached_tokens for output in outputs) == 40 * 3 * 64
