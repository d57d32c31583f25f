"""Timers around a step: they add up, change nothing, and are gone afterwards; steps of one kind are what they say."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import batchinfer
from batchinfer.engine import Engine
from batchinfer.errors import ConfigError
from batchinfer.testing.profiling import ATTENTION, HEAD, PRODUCTS, SCHEDULING, StepTimes, step_timers
from batchinfer.testing.steps import SteadySteps
from batchinfer.testing.tiny import make_tiny, tiny_config

STEPS, SEQS = 3, 6


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> batchinfer.LLM:
    folder = make_tiny(tmp_path_factory.mktemp("model") / "llama")
    return batchinfer.LLM(str(folder), max_num_seqs=SEQS, max_num_batched_tokens=64)


def measured(engine: Engine, shape: Any, **options: Any) -> StepTimes:
    steady = SteadySteps(engine, shape, num_seqs=SEQS, context=40, **options)
    try:
        with step_timers(engine) as times:
            steady.run(STEPS)
    finally:
        steady.close()
    return times


def test_own_times_add_up_to_the_step(llm: batchinfer.LLM) -> None:
    times = measured(llm.engine, "decode")
    (step,) = (part for part in times.parts.values() if part.name == "engine")
    assert step.calls == STEPS
    assert times.total_s == pytest.approx(step.whole_s)
    assert all(part.own_s >= 0 for part in times.parts.values())
    assert {PRODUCTS, ATTENTION, HEAD, SCHEDULING} <= set(times.groups())


def test_operations_are_those_of_the_model(llm: batchinfer.LLM) -> None:
    times = measured(llm.engine, "decode")
    config = tiny_config("llama")
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], 16
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * inner
    per_token = {PRODUCTS: 2 * config["num_hidden_layers"] * layer, HEAD: 2 * config["vocab_size"] * hidden}
    for group, operations in per_token.items():
        counted = sum(part.operations for part in times.groups()[group])
        assert counted == operations * SEQS * STEPS, group


def test_nothing_is_changed_and_nothing_is_left(llm: batchinfer.LLM) -> None:
    engine = llm.engine
    model = engine.runner._model  # type: ignore[attr-defined]
    sampling = batchinfer.SamplingParams(temperature=0.0, max_tokens=5)
    before = llm.generate(["one two three"], sampling)[0].outputs[0].token_ids
    tables = {module.ops for module in model.modules() if hasattr(module, "ops")}
    kernels = [{one.name: getattr(table, one.name) for one in fields(table)} for table in tables]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with step_timers(engine) as times:
        assert llm.generate(["one two three"], sampling)[0].outputs[0].token_ids == before
        assert times.num_steps > 0
        steps = times.num_steps
    assert llm.generate(["one two three"], sampling)[0].outputs[0].token_ids == before
    assert times.num_steps == steps
    assert "step" not in vars(engine)
    assert [{one.name: getattr(table, one.name) for one in fields(table)} for table in tables] == kernels
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_steps_are_of_the_kind_that_was_asked_for(llm: batchinfer.LLM) -> None:
    decode, prefill, mixed = (measured(llm.engine, shape) for shape in ("decode", "prefill", "mixed"))
    assert decode.num_tokens == decode.num_chunks == SEQS * STEPS
    assert decode.num_context_tokens / decode.num_chunks > 30
    assert prefill.num_tokens > 10 * prefill.num_chunks
    assert mixed.num_tokens > mixed.num_chunks > STEPS * SEQS // 2
    assert not llm.engine.has_unfinished()
    cached = llm.stats()["num_cached_tokens"]
    measured(llm.engine, "prefill", shared=32)
    assert llm.stats()["num_cached_tokens"] >= cached + 32
    with pytest.raises(ConfigError, match="max_model_len"):
        SteadySteps(llm.engine, "decode", num_seqs=2, context=500)
