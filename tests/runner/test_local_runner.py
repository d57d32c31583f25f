"""The runner's laws: a sequence's tokens do not depend on batch, chunks, blocks, pre-emption, prefix hits, threads."""

from __future__ import annotations

import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer.arithmetic import Machine
from batchinfer.config import EngineConfig
from batchinfer.errors import ConfigError, EngineError, ModelError, OutOfMemory
from batchinfer.modelfiles import open_model
from batchinfer.runner import load
from batchinfer.runner.local import LocalRunner
from batchinfer.testing.step_driver import GREEDY, StepDriver
from batchinfer.testing.tiny import VOCAB_SIZE
from batchinfer.types.request import SamplingParams
from batchinfer.types.rows import ErrorClass
from batchinfer.types.step import Chunk, SequenceSpec, StepPlan

MakeRunner = Callable[..., LocalRunner]
PENALIZED = SamplingParams(
    temperature=0.8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1, max_tokens=40
)
KINDS = (GREEDY, SamplingParams(temperature=0.8, max_tokens=40), PENALIZED)


def prompts_of(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, VOCAB_SIZE) for _ in range(numbers.randrange(1, longest))] for _ in range(count)]


def run_all(
    runner: LocalRunner, prompts: list[list[int]], *, at_once: int, chunk: int = 1 << 30, tokens: int = 12
) -> list[list[int]]:
    """Outputs of all prompts, `at_once` of them in a step; kinds of sampling take turns."""
    driver = StepDriver(runner, seed=at_once, next_step=runner._next_step)
    outputs: list[list[int]] = []
    for begin in range(0, len(prompts), at_once):
        ids = [
            driver.add(prompts[i], KINDS[i % len(KINDS)], sample_key=1000 + i)
            for i in range(begin, min(begin + at_once, len(prompts)))
        ]
        outputs.extend(driver.generate(ids, tokens, chunk=chunk))
        for seq_id in ids:
            driver.finish(seq_id)
    return outputs


INT8: dict[str, Any] = {"quantization": "int8"}


@pytest.mark.parametrize("arithmetic", [{"dtype": "float32"}, INT8], ids=["float32", "int8"])
def test_tokens_do_not_depend_on_batch_chunks_and_threads(arithmetic: dict[str, Any], make_runner: MakeRunner) -> None:
    prompts = [*prompts_of(11), prompts_of(1, seed=1, longest=2)[0] * 270]
    runner = make_runner(**arithmetic)
    expected = run_all(runner, prompts, at_once=len(prompts))
    assert len({tuple(output) for output in expected}) == len(prompts)
    assert run_all(runner, prompts, at_once=1) == expected
    assert run_all(runner, prompts, at_once=3, chunk=16) == expected
    assert run_all(runner, prompts, at_once=len(prompts), chunk=5) == expected
    two = make_runner(num_threads=2, **arithmetic)
    assert torch.get_num_threads() == 2
    assert run_all(two, prompts, at_once=len(prompts)) == expected
    if arithmetic != INT8:  # whose attention in C has blocks of 16 tokens; others are computed in torch
        small = make_runner(block_size=4, **arithmetic)
        assert run_all(small, prompts, at_once=4) == expected


@pytest.mark.parametrize("arithmetic", [{"dtype": "float32"}, INT8], ids=["float32", "int8"])
def test_greedy_rows_get_what_their_logits_would_say(arithmetic: dict[str, Any], make_runner: MakeRunner) -> None:
    """Without logits where nothing else is asked of them, in steps of both kinds of rows, several at a chunk's end."""
    runner = make_runner(**arithmetic)
    model: Any = runner._model
    num_greedy: list[int] = []
    greedy = model.greedy

    def noted(hidden: torch.Tensor) -> Any:
        num_greedy.append(len(hidden))
        return greedy(hidden)

    model.greedy = noted
    prompts = prompts_of(7, seed=3)
    with_logits = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, logit_bias={5: 0.0}),
        SamplingParams(temperature=0.0, presence_penalty=1e-30),
        SamplingParams(temperature=0.0, min_tokens=99),  # stop ids that never come
    ]
    driver = StepDriver(runner)
    plain = [driver.add(prompt) for prompt in prompts]
    expected = driver.generate(plain, 10)
    assert sum(num_greedy) == 70
    num_greedy.clear()
    others = [
        driver.add(prompt, with_logits[i % 4], stop_token_ids=[VOCAB_SIZE - 1]) for i, prompt in enumerate(prompts)
    ]
    assert driver.generate(others, 10) == expected
    assert num_greedy == []
    mixed = [driver.add(p, with_logits[0] if i % 2 else GREEDY) for i, p in enumerate(prompts)]
    assert driver.generate(mixed, 10) == expected
    assert sum(num_greedy) == 40
    # Of one sequence, the first positions may need logits (min_tokens) and the last not.
    drafted = driver.add(prompts[0], SamplingParams(temperature=0.0, min_tokens=3), stop_token_ids=[VOCAB_SIZE - 1])
    driver.step({drafted: len(prompts[0])})
    driver.tokens[drafted].extend(expected[0][1:7])
    num_greedy.clear()
    assert driver.step({drafted: 7}, num_logits=7).token_ids[drafted] == expected[0][1:8]
    assert num_greedy == [5]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_law_holds_in_narrow_types(dtype: str, make_runner: MakeRunner) -> None:
    prompts = [*prompts_of(5), prompts_of(1, seed=1, longest=2)[0] * 270]
    runner = make_runner(dtype=dtype)
    assert runner.facts()["dtype"].value == dtype
    expected = run_all(runner, prompts, at_once=len(prompts))
    assert run_all(runner, prompts, at_once=1, chunk=40) == expected
    assert run_all(runner, prompts, at_once=3, chunk=16) == expected


def test_preemption_changes_nothing(make_runner: MakeRunner) -> None:
    """Recomputed positions draw the same numbers, and penalties count each output token once."""
    prompts = prompts_of(6, seed=2)
    runner = make_runner()
    expected = run_all(runner, prompts, at_once=6, tokens=20)
    driver = StepDriver(runner, next_step=runner._next_step)
    ids = [driver.add(p, KINDS[i % len(KINDS)], sample_key=1000 + i) for i, p in enumerate(prompts)]
    numbers = random.Random(0)
    for tokens in range(2, 21, 3):
        driver.generate(ids, min(tokens, 20), chunk=numbers.choice([3, 16, 1000]))
        for seq_id in numbers.sample(ids, 3):
            driver.preempt(seq_id)
    assert driver.generate(ids, 20) == expected


def test_blocks_of_another_sequence_serve_as_prefix(make_runner: MakeRunner) -> None:
    """What a prefix hit leaves to compute, down to the last token alone, gives the same bytes."""
    runner = make_runner()
    for length in (15, 16, 17, 31, 32, 33, 48):
        prompt = prompts_of(1, seed=length, longest=2)[0] * length
        driver = StepDriver(runner, next_step=runner._next_step)
        first = driver.add(prompt)
        driver.generate([first], 6)
        second = driver.add(prompt)
        shared = (length - 1) // 16  # whole blocks, and at least the last token is computed
        driver._tables[second][0].extend(driver._tables[first][0][:shared])
        driver.num_computed[second] = 16 * shared
        assert driver.generate([second], 6) == [driver.output(first)], length


def test_greedy_verification_of_many_positions_equals_decode(make_runner: MakeRunner) -> None:
    runner = make_runner()
    prompt = prompts_of(1, seed=4)[0]
    driver = StepDriver(runner)
    plain = driver.add(prompt)
    [output] = driver.generate([plain], 9)
    drafted = driver.add(prompt)
    driver.step({drafted: len(prompt)})
    assert driver.output(drafted) == output[:1]
    driver.tokens[drafted].extend(output[1:8])
    result = driver.step({drafted: 8}, num_logits=8)
    assert result.token_ids[drafted] == output[1:9]


def test_seeded_verification_uses_each_positions_own_number(make_runner: MakeRunner) -> None:
    runner = make_runner()
    prompt = prompts_of(1, seed=5)[0]
    driver = StepDriver(runner)
    plain = driver.add(prompt, PENALIZED, sample_key=9)
    [output] = driver.generate([plain], 9)
    drafted = driver.add(prompt, PENALIZED, sample_key=9)
    driver.step({drafted: len(prompt)})
    driver.tokens[drafted].extend(output[1:8])
    assert driver.step({drafted: 8}, num_logits=8).token_ids[drafted] == output[1:9]


def test_min_tokens_holds_with_prompts_of_any_length(make_runner: MakeRunner) -> None:
    runner = make_runner()
    driver = StepDriver(runner)
    prompt = prompts_of(1, seed=6)[0]
    [free] = driver.generate([driver.add(prompt)], 12)
    for chunk in (1, 1000):
        masked = driver.add(prompt, SamplingParams(temperature=0, min_tokens=7), stop_token_ids=set(free))
        [output] = driver.generate([masked], 12, chunk=chunk)
        assert not set(output[:7]) & set(free)
        unmasked = driver.add(prompt, SamplingParams(temperature=0), stop_token_ids=set(free))
        assert driver.generate([unmasked], 12) == [free]


def logprob_entries(driver: StepDriver, seq_id: int, field: str) -> list[Any]:
    return [entry for result in driver.results for entry in getattr(result, field).get(seq_id, ())]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_logprobs_come_with_every_token_and_do_not_depend_on_settings(chunk: int, make_runner: MakeRunner) -> None:
    """Raw log-probabilities, the sampled token among them whatever was cut off."""
    runner = make_runner()
    prompt = prompts_of(1, seed=7)[0]
    driver = StepDriver(runner)
    seq_ids = [
        driver.add(prompt, SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=3)),
        driver.add(prompt, SamplingParams(temperature=0.01, top_k=1, logprobs=0)),
        driver.add(prompt, SamplingParams(temperature=5.0, logprobs=2, logit_bias={40: -100.0}), sample_key=3),
        driver.add(prompt, GREEDY),
    ]
    driver.generate(seq_ids, 8, chunk=chunk)
    for seq_id, top in ((0, 5), (1, 0), (2, 2)):
        entries = logprob_entries(driver, seq_ids[seq_id], "logprobs")
        assert [e.token_id for e in entries] == driver.output(seq_ids[seq_id])
        assert {len(e.top) for e in entries} == {top}
    greedy, top1 = (logprob_entries(driver, s, "logprobs") for s in seq_ids[:2])
    assert [e.logprob for e in greedy] == [e.logprob for e in top1]
    assert all(e.rank == 1 and e.top[0] == (e.token_id, e.logprob) for e in greedy)
    assert logprob_entries(driver, seq_ids[3], "logprobs") == []
    of_prompt = logprob_entries(driver, seq_ids[0], "prompt_logprobs")
    assert [e.token_id for e in of_prompt] == prompt[1:]
    assert {len(e.top) for e in of_prompt} == {3}
    # The same numbers as when each prompt token was a greedy step of its own.
    for position in (1, 5, len(prompt) - 1):
        prefix = driver.add(prompt[:position], SamplingParams(temperature=0.0, logprobs=3))
        driver.generate([prefix], 1)
        [entry] = logprob_entries(driver, prefix, "logprobs")
        assert entry.top == of_prompt[position - 1].top


def test_prompt_logprobs_of_a_long_prompt_come_in_slices(make_runner: MakeRunner) -> None:
    runner = make_runner()
    driver = StepDriver(runner)
    prompt = prompts_of(1, seed=8, longest=2)[0] * 300
    whole = driver.add(prompt, SamplingParams(temperature=0.0, prompt_logprobs=1))
    driver.generate([whole], 1)
    cut = driver.add(prompt, SamplingParams(temperature=0.0, prompt_logprobs=1))
    driver.generate([cut], 1, chunk=100)
    entries = logprob_entries(driver, whole, "prompt_logprobs")
    assert len(entries) == 299
    assert entries == logprob_entries(driver, cut, "prompt_logprobs")


@pytest.mark.parametrize("arithmetic", [{"dtype": "float32"}, INT8], ids=["float32", "int8"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_non_finite_logits_is_an_error_and_others_are_not(
    value: float, arithmetic: dict[str, Any], make_runner: MakeRunner
) -> None:
    """One bad embedding among good rows, greedy and sampled; a stale NaN leaves no trace for its blocks' heirs."""
    runner = make_runner(kv_cache_memory=1 << 21, **arithmetic)
    prompts = [[5 + i, *prompt] for i, prompt in enumerate(prompts_of(8, seed=9))]
    expected = run_all(runner, prompts, at_once=8)
    in_use = {token for tokens in (*prompts, *expected) for token in tokens}
    bad = next(token for token in range(3, VOCAB_SIZE) if token not in in_use)
    model: Any = runner._model
    embedding = next(p for n, p in model.named_parameters() if "embed" in n)
    embedding.data[bad] = value
    driver = StepDriver(runner, next_step=runner._next_step)
    ids = [driver.add(p, KINDS[i % len(KINDS)], sample_key=1000 + i) for i, p in enumerate(prompts)]
    sick = [driver.add([*prompts[0], bad, 7], kind) for kind in KINDS]
    outputs = driver.generate([*sick, *ids], 12)
    assert outputs == [[]] * 3 + expected
    errors = {seq_id: error for result in driver.results for seq_id, error in result.errors.items()}
    assert set(errors) == set(sick)
    assert {error.error_class for error in errors.values()} == {ErrorClass.NON_FINITE_LOGITS}
    assert "output position 0" in errors[sick[0]].message
    driver.finish(ids[0])
    for _ in range(8):  # the blocks of the sick rows go round
        again = [driver.add(p, KINDS[i % len(KINDS)], sample_key=1000 + i) for i, p in enumerate(prompts)]
        assert driver.generate(again, 12) == expected
        for seq_id in again:
            driver.finish(seq_id)


def test_float16_that_overflows_gives_error_rows(make_runner: MakeRunner) -> None:
    """Never token 0 to the end."""
    runner = make_runner(dtype="float16")
    model: Any = runner._model
    down = next(p for n, p in model.named_parameters() if "down" in n)
    down.data.fill_(6e4)
    driver = StepDriver(runner)
    ids = [driver.add(prompt, kind) for prompt, kind in zip(prompts_of(3), KINDS, strict=True)]
    assert driver.generate(ids, 5) == [[], [], []]
    errors = {e.error_class for result in driver.results for e in result.errors.values()}
    assert errors == {ErrorClass.NON_FINITE_LOGITS}


def test_one_infinite_logit_is_enough(make_runner: MakeRunner) -> None:
    runner = make_runner()
    model: Any = runner._model
    compute = model.compute_logits

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[1, 17] = torch.inf
        return logits

    model.compute_logits = spoiled
    driver = StepDriver(runner)
    drawn = SamplingParams(temperature=0.5)  # greedy rows have no logits
    ids = [driver.add(prompt, drawn) for prompt in ([4, 5], [6, 7], [8, 9])]
    result = driver.step(dict.fromkeys(ids, 2))
    assert set(result.errors) == {ids[1]}
    assert set(result.token_ids) == {ids[0], ids[2]}


def test_steps_must_follow_each_other_and_a_failed_one_may_come_again(make_runner: MakeRunner) -> None:
    runner = make_runner()
    spec = SequenceSpec(seq_id=0, prompt_token_ids=(5, 6), sampling=GREEDY, sample_key=0)
    plan = StepPlan(0, (Chunk(0, 0, [5, 6], ([3],), 1),), added=(spec,))
    with pytest.raises(EngineError, match="step 1 was planned, but this runner is at step 0"):
        runner.execute(StepPlan(1, plan.chunks, plan.added))
    model: Any = runner._model
    forward = model.forward
    made: list[weakref.ref[Tensor]] = []

    def out_of_memory(*args: Any) -> None:
        activations = torch.zeros(8)
        made.append(weakref.ref(activations))
        raise said

    model.forward = out_of_memory
    for said in (
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
        RuntimeError("CUDA error: out of memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ):
        with pytest.raises(OutOfMemory, match="a step of 2 tokens does not fit in memory") as raised:
            runner.execute(plan)
        assert raised.value.__cause__ is said
    assert [ref() for ref in made] == [None] * 3  # though the exceptions are there
    model.forward = forward
    assert len(runner.execute(plan).token_ids[0]) == 1
    assert runner.execute(StepPlan(1, (), finished=(0, 99))).token_ids == {}
    assert not runner._states
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.execute(StepPlan(2, ()))


def test_layers_with_and_without_window_have_groups_of_their_own(make_runner: MakeRunner) -> None:
    overrides = {
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    runner = make_runner("qwen3", overrides)
    assert [group.window for group in runner.kv_groups] == [8, None]
    prompts = prompts_of(4, seed=3)
    assert run_all(runner, prompts, at_once=4) == run_all(runner, prompts, at_once=1, chunk=5)


def test_facts_say_what_was_resolved_and_from_what(make_runner: MakeRunner) -> None:
    facts = make_runner(max_num_seqs=7).facts()
    assert (facts["max_num_seqs"].value, facts["max_num_seqs"].source) == (7, "engine.max_num_seqs")
    assert (facts["device"].value, facts["device"].source) == ("cpu", "auto")
    assert facts["dtype"].value == "float32"
    assert facts["batch_invariant"].value is True
    assert facts["num_threads"].value == 1
    assert facts["max_num_batched_tokens"].source == "auto: for cpu"


class TestArithmetic:
    """What a job froze, or a user asked for, is met or refused with the reason; what was left open gives way."""

    @pytest.fixture
    def no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A machine that looks suited to native kernels, where compiling them fails."""
        suited = Machine(vector_level="avx512", product_level="avx512_bf16")
        monkeypatch.setattr(load, "this_machine", lambda: suited)
        monkeypatch.setattr(load.library, "available", lambda: "gcc: error: broken")

    def test_native_kernels_give_way_to_torch(
        self, no_library: None, make_runner: MakeRunner, caplog: pytest.LogCaptureFixture
    ) -> None:
        facts = make_runner(quantization="auto").facts()
        assert (facts["kernels"].value, facts["quantization"].value) == ("cpu", "none")
        assert "gcc: error: broken" in facts["kernels"].source
        [record] = [r for r in caplog.records if r.levelname == "WARNING"]
        assert "gcc: error: broken" in record.getMessage() and "install a C compiler" in record.getMessage()

    def test_native_kernels_that_are_asked_for_do_not(self, no_library: None, make_runner: MakeRunner) -> None:
        with pytest.raises(ConfigError, match=r"engine\.kernels native can't be used here: gcc: error: broken"):
            make_runner(kernels="native", quantization="int8")

    def test_another_instruction_level_is_refused(self, make_runner: MakeRunner) -> None:
        level = str(make_runner().facts()["instruction_level"].value)
        make_runner(instruction_level=level)
        with pytest.raises(ConfigError, match=f"is run with z80, this machine's is {level}"):
            make_runner(instruction_level="z80")

    def test_options_are_facts_with_their_sources(self, make_runner: MakeRunner) -> None:
        options = {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "bfloat16", "kernels": "cpu"}
        facts = make_runner(**options).facts()
        for name, value in options.items():
            assert (facts[name].value, facts[name].source.partition(".")[2]) == (value, name)
        assert facts["attention"].value == "tiled"


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("kernels", ["auto", "cpu", "reference"])
def test_the_law_holds_for_every_type_of_kv(kv_dtype: str, kernels: str, make_runner: MakeRunner) -> None:
    prompts = prompts_of(4, seed=5)
    runner = make_runner(kv_cache_dtype=kv_dtype, kernels=kernels)
    assert runner.facts()["kv_cache_dtype"].value == kv_dtype
    together = run_all(runner, prompts, at_once=4)
    assert run_all(runner, prompts, at_once=1, chunk=5) == together


def test_another_gpu_than_the_current_one_is_refused(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match=r"engine.device 'cuda:1' is not supported; use cuda, and say which by CUDA_"):
        make_runner(device="cuda:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "sees no CUDA device"),
        ({"device": "tpu"}, "engine.device must be auto, cpu or cuda"),
        ({"device": "mps"}, "is not supported"),
        ({"split_size": 250}, "engine.split_size 250 must be a multiple of engine.block_size 16"),
        ({"num_threads": 0}, "engine.num_threads must be at least 1"),
        ({"kv_cache_dtype": "fp8"}, "model.kv_cache_dtype: 'fp8' is planned and not there yet"),
        ({"kv_cache_memory": 1000}, "can't hold one sequence of engine.max_model_len 512 tokens"),
    ],
)
def test_what_can_not_be_met_is_refused_by_name(options: dict[str, Any], message: str, make_runner: MakeRunner) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=message):
        make_runner(**options)


@pytest.mark.parametrize("family", ["llama", "deepseek-v2"])
@pytest.mark.parametrize("kernels", ["auto", "cpu"])
def test_a_model_that_can_not_run_is_named(tiny_folder: Callable[..., Path], family: str, kernels: str) -> None:
    """Wherever that is found out first."""
    path = str(tiny_folder(family, hidden_act="gelu"))
    with pytest.raises(ModelError, match=rf"^{re.escape(path)}: hidden_act 'gelu' is not supported"):
        load.load_runner(open_model(path), EngineConfig(model=path, kernels=kernels, kv_cache_memory=16 << 20))
