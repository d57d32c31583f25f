"""The loop: one outcome per request, the rules of ending, errors that stay with their row."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from batchinfer.config import EngineConfig
from batchinfer.engine import Engine, load_engine
from batchinfer.errors import ConfigError, EngineError, ModelError, OutOfMemory
from batchinfer.testing import FakeRunner, expected_output
from batchinfer.types.request import Request, RequestOutput, SamplingParams
from batchinfer.types.rows import ErrorClass
from batchinfer.types.step import KVGroup, StepPlan, StepResult
from batchinfer.types.streams import sample_key

EOS = 257


class Replay(FakeRunner):
    """Gives each sequence the tokens it is told to give: `scripts` by prompt."""

    def __init__(self, script: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.script = list(script)

    def _is_plain(self, spec: Any) -> bool:
        return False

    def _sample(self, spec: Any, mixed: int, position: int) -> int:
        return self.script[position]


def fake_engine(query: str = "", kind: str = "hash", **options: Any) -> Engine:
    return load_engine(EngineConfig(model=f"fake://{kind}?{query}", **options))


def engine_of(runner: FakeRunner, **options: Any) -> Engine:
    tokenizer = fake_engine().tokenizer
    return Engine(runner, tokenizer, **{"max_model_len": 256, "vocab_size": 512, **options})


def request(
    number: int, prompt: str | Sequence[int], *, eos: frozenset[int] = frozenset({EOS}), **sampling: Any
) -> Request:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    return Request(request_id=number, prompt_token_ids=ids, sampling=params, stream_key=number + 1, eos_token_ids=eos)


def run(engine: Engine, *requests: Request) -> dict[int, RequestOutput]:
    for one in requests:
        engine.add_request(one)
    outputs: dict[int, RequestOutput] = {}
    for _ in range(100_000):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            assert output.request_id not in outputs, "a request has two outcomes"
            assert (output.error is None) != (not output.outputs)
            outputs[output.request_id] = output
        engine.check()
    assert not engine.has_unfinished()
    assert not engine._watches
    return outputs


def only(engine: Engine, one: Request) -> Any:
    output = run(engine, one)[one.request_id]
    assert output.error is None, output.error
    (sample,) = output.outputs
    return sample


# -------------------------------------------------------------------- the context's end


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_new"),
    [(14, 1, 1), (14, 2, 2), (14, 10, 2), (14, None, 2), (14, 10**9, 2), (15, 1, 1), (15, 10, 1), (15, None, 1)],
)
def test_max_tokens_are_clamped_to_the_context(length: int, max_tokens: int | None, num_new: int) -> None:
    engine = fake_engine(max_model_len=16)
    sample = only(engine, request(0, "x" * length, max_tokens=max_tokens))
    assert len(sample.token_ids) == num_new
    assert sample.finish_reason == "length"
    clamped = max_tokens is not None and length + max_tokens > 16
    assert engine.stats().num_clamped_requests == clamped


@pytest.mark.parametrize("length", [16, 17, 200_000])
def test_a_prompt_that_fills_the_context_is_an_error_row_with_both_numbers(length: int) -> None:
    outputs = run(fake_engine(max_model_len=16), request(0, "abc"), request(1, "x" * length), request(2, "def"))
    error = outputs[1].error
    assert error is not None
    assert error.error_class is ErrorClass.PROMPT_TOO_LONG
    assert f"{length} tokens" in error.message
    assert "max_model_len is 16" in error.message
    assert outputs[0].error is None
    assert outputs[2].error is None


@pytest.mark.parametrize("value", [0, -1])
def test_max_tokens_below_one_are_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        SamplingParams(max_tokens=value)


def test_without_max_tokens_a_row_goes_on_to_the_end_of_the_context() -> None:
    sample = only(fake_engine(max_model_len=200), request(0, "x" * 20, max_tokens=None))
    assert len(sample.token_ids) == 180


def test_one_over_long_row_of_a_thousand() -> None:
    engine = fake_engine(max_model_len=512)
    rows = [request(i, f"row {i}" if i != 500 else "x" * 200_000, max_tokens=2) for i in range(1000)]
    outputs = run(engine, *rows)
    assert [i for i, output in outputs.items() if output.error] == [500]
    assert len(outputs) == 1000
    assert engine.stats().num_errors == 1
    assert engine.stats().num_finished == 999


@pytest.mark.parametrize(
    ("prompt", "sampling", "error_class", "words"),
    [
        ([], {}, ErrorClass.INVALID_PROMPT, "no tokens"),
        ([1, 512], {}, ErrorClass.INVALID_PROMPT, "token id 512"),
        ([1, -1], {}, ErrorClass.INVALID_PROMPT, "token id -1"),
        ([1], {"logit_bias": {600: 1.0}}, ErrorClass.INVALID_SAMPLING, "600"),
        ([1], {"stop_token_ids": list(range(512)), "min_tokens": 1}, ErrorClass.INVALID_SAMPLING, "none is left"),
    ],
)
def test_what_can_not_run_is_an_error_of_its_own(
    prompt: list[int], sampling: dict[str, Any], error_class: ErrorClass, words: str
) -> None:
    outputs = run(fake_engine(), request(0, prompt, **sampling), request(1, "fine"))
    assert outputs[0].error is not None
    assert outputs[0].error.error_class is error_class
    assert words in outputs[0].error.message
    assert outputs[1].error is None


def test_without_a_tokenizer_there_are_ids_but_no_stop_strings() -> None:
    engine = Engine(FakeRunner(), None, max_model_len=64, vocab_size=512)
    outputs = run(engine, request(0, "abc"), request(1, "abc", stop=["x"]))
    assert len(outputs[0].outputs[0].token_ids) == 8
    assert outputs[0].outputs[0].text == ""
    assert outputs[1].error is not None
    assert outputs[1].error.error_class is ErrorClass.INVALID_SAMPLING


# -------------------------------------------------------------------- ends


SCRIPT = list(b"abcde") + [7, 8] + list(b"fgh") * 50


@pytest.mark.parametrize(
    ("sampling", "num_tokens", "reason", "stop"),
    [
        ({}, 6, "stop", None),  # 7 is one of the model's ends
        ({"ignore_eos": True}, 8, "length", None),
        ({"ignore_eos": True, "stop_token_ids": [8]}, 7, "stop", 8),
        ({"ignore_eos": True, "stop_token_ids": [7]}, 6, "stop", 7),  # no end any more, but the user's stop
        ({"stop_token_ids": [100]}, 4, "stop", 100),
        ({"stop_token_ids": [7]}, 6, "stop", None),
        ({"temperature": 0.7}, 6, "stop", None),
    ],
)
def test_every_end_of_the_model_counts(
    sampling: dict[str, Any], num_tokens: int, reason: str, stop: int | None
) -> None:
    sample = only(engine_of(Replay(SCRIPT)), request(0, "p", eos=frozenset({2, 7, 9}), **sampling))
    assert len(sample.token_ids) == num_tokens
    assert (sample.finish_reason, sample.stop_reason) == (reason, stop)
    assert list(sample.token_ids) == SCRIPT[:num_tokens]


@pytest.mark.parametrize(("include", "text"), [(False, "abc"), (True, "abcd")])
def test_the_stop_id_is_in_the_ids_and_not_in_the_text(include: bool, text: str) -> None:
    engine = engine_of(Replay(SCRIPT))
    sample = only(engine, request(0, "p", stop_token_ids=[100], include_stop_str_in_output=include))
    assert sample.text == text
    assert bytes(sample.token_ids) == b"abcd"


STORY = b"abc###END###xyz" + b"." * 100


@pytest.mark.parametrize(
    ("stop", "found", "text", "num_tokens"),
    [
        (["END"], "END", "abc###", 9),
        (["#E"], "#E", "abc##", 7),
        (["c##"], "c##", "ab", 5),
        (["###", "#"], "#", "abc", 4),
        (["a"], "a", "", 1),
        (["nowhere"], None, "abc###END###xyz.....", 20),
        (["z" * 200], None, "abc###END###xyz.....", 20),
        ([f"no{i}" for i in range(99)] + ["xyz"], "xyz", "abc###END###", 15),
        (["p"], None, "abc###END###xyz.....", 20),  # what the prompt says does not count
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(stop: list[str], found: str | None, text: str, num_tokens: int, include: bool) -> None:
    engine = engine_of(Replay(STORY))
    sample = only(engine, request(0, "p", stop=stop, max_tokens=20, include_stop_str_in_output=include))
    assert sample.text == text + (found or "" if include else "")
    assert sample.finish_reason == ("stop" if found else "length")
    assert sample.stop_reason == found
    assert bytes(sample.token_ids) == STORY[:num_tokens]


def test_a_stop_string_at_the_length_limit_is_a_stop() -> None:
    sample = only(engine_of(Replay(STORY)), request(0, "p", stop=["END"], max_tokens=9))
    assert (sample.finish_reason, sample.stop_reason, sample.text) == ("stop", "END", "abc###")


def test_an_end_of_the_model_before_a_stop_string() -> None:
    script = [*b"ab", EOS, *b"cd"]
    sample = only(engine_of(Replay(script)), request(0, "p", stop=["c"]))
    assert (sample.finish_reason, sample.stop_reason, sample.text) == ("stop", None, "ab")
    assert list(sample.token_ids) == [97, 98, EOS]


def test_a_stop_string_before_the_minimum_does_not_stop() -> None:
    engine = engine_of(Replay(STORY))
    sample = only(engine, request(0, "p", stop=["#"], min_tokens=5, max_tokens=20))
    assert sample.finish_reason == "stop"
    assert len(sample.token_ids) == 5


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop"):
        SamplingParams(stop=[""])


@pytest.mark.parametrize("extra", [{}, {"stop_token_ids": [5]}, {"ignore_eos": True}])
@pytest.mark.parametrize(("least", "most"), [(10, 20), (20, 20), (0, 20)])
def test_min_tokens(least: int, most: int, extra: dict[str, Any]) -> None:
    engine = fake_engine("eos_rate=1")
    sample = only(engine, request(0, "x" * 100, min_tokens=least, max_tokens=most, **extra))
    if extra.get("ignore_eos"):
        assert len(sample.token_ids) == most
    else:
        assert len(sample.token_ids) == min(least + 1, most)
        assert EOS not in sample.token_ids[:least]


@pytest.mark.parametrize("stops", [range(33, 126), range(33, 127), range(300)])
def test_min_tokens_where_nearly_every_token_stops(stops: range) -> None:
    sample = only(fake_engine(), request(0, "p", stop_token_ids=list(stops), min_tokens=5, max_tokens=9))
    assert len(sample.token_ids) in range(6, 10)
    assert not set(sample.token_ids[:5]) & set(stops)


@pytest.mark.parametrize("ends", [[0, 1, 2, 5], [2, 6], [5], [4, 9]])
def test_a_stop_id_counts_after_the_minimum_only(ends: list[int]) -> None:
    script = [EOS if i in ends else 97 for i in range(20)]
    sample = only(engine_of(Replay(script)), request(0, "p", min_tokens=5, max_tokens=20))
    assert len(sample.token_ids) == min(i for i in ends if i >= 5) + 1
    assert sample.finish_reason == "stop"


def test_min_tokens_above_max_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_tokens"):
        SamplingParams(min_tokens=21, max_tokens=20)


# -------------------------------------------------------------------- samples, logprobs


def test_samples_share_the_prompt_and_have_streams_of_their_own() -> None:
    engine = fake_engine()
    one = request(0, "y" * 100, n=5, temperature=0.8)
    output = run(engine, one)[0]
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3, 4]
    assert isinstance(engine.runner, FakeRunner)
    for sample in output.outputs:
        key = sample_key(one.stream_key, sample.index)
        expected = expected_output(engine.runner, one.prompt_token_ids, one.sampling, key, 8)
        assert list(sample.token_ids) == expected
    assert len({sample.token_ids for sample in output.outputs}) == 5
    # 99 tokens once, the last of the prompt and 7 of the output for each sample
    stats = engine.stats()
    assert stats.num_computed_tokens == 99 + 5 * (1 + 7)
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_copied_tokens) == (5 * 100, 4 * 99, 4 * 3)


@pytest.mark.parametrize("num_blocks", [24, 400])
def test_every_token_that_ran_is_accounted_for(num_blocks: int) -> None:
    engine = engine_of(FakeRunner(kv_groups=(KVGroup(num_blocks=num_blocks, block_size=4),)))
    run(engine, *(request(i, f"row {i % 7}", max_tokens=30) for i in range(40)))
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (stats.num_recomputed_tokens > 0) == (num_blocks == 24)
    begun = stats.num_prompt_tokens - stats.num_cached_tokens
    last_ones = stats.num_finished  # are not run
    assert stats.num_computed_tokens == begun + stats.num_generated_tokens - last_ones + stats.num_recomputed_tokens


def test_samples_are_in_order_whichever_ends_first() -> None:
    output = run(fake_engine("eos_rate=0.1"), request(0, "abc", n=12, temperature=1.0, max_tokens=60))[0]
    assert [sample.index for sample in output.outputs] == list(range(12))
    assert len({len(sample.token_ids) for sample in output.outputs}) > 3


def test_the_prompts_logprobs_are_worked_out_once() -> None:
    engine = fake_engine()
    output = run(engine, request(0, "y" * 100, n=3, prompt_logprobs=0, max_tokens=1))[0]
    assert output.prompt_logprobs is not None
    assert engine.stats().num_computed_tokens == 100 + 2 * 1


def test_more_samples_than_sequences() -> None:
    output = run(fake_engine(max_num_seqs=2), request(0, "abc", n=9, temperature=1.0))[0]
    assert len(output.outputs) == 9


def test_one_failed_sample_fails_the_row() -> None:
    class SecondIsBroken(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            for spec in plan.added:
                if spec.sample_key == sample_key(1, 1):
                    self._broken = spec.seq_id
            if any(chunk.seq_id == getattr(self, "_broken", None) and chunk.start > 12 for chunk in plan.chunks):
                raise ValueError("broken")
            return super().execute(plan)

    engine = engine_of(SecondIsBroken())
    outputs = run(engine, request(0, "abcdefghij", n=3, temperature=1.0), request(1, "other"))
    assert outputs[0].error is not None
    assert outputs[0].outputs == ()
    assert outputs[1].error is None
    assert engine.scheduler.num_unfinished == 0


def test_logprobs() -> None:
    engine = fake_engine()
    outputs = run(
        engine,
        request(0, "hello", logprobs=2, prompt_logprobs=1, n=2, temperature=0.5),
        request(1, "hello"),
    )
    for sample in outputs[0].outputs:
        assert sample.logprobs is not None
        assert [entry.token_id for entry in sample.logprobs] == list(sample.token_ids)
        assert all(len(entry.top) == 2 for entry in sample.logprobs)
        assert sample.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in sample.logprobs))
    told = outputs[0].prompt_logprobs
    assert told is not None
    assert told[0] is None
    assert [entry.token_id for entry in told if entry] == list(b"ello")
    assert outputs[1].prompt_logprobs is None
    assert outputs[1].outputs[0].logprobs is None
    assert outputs[1].outputs[0].cumulative_logprob is None


def test_cached_tokens_are_told() -> None:
    engine = fake_engine()
    outputs = [run(engine, request(i, "z" * 40))[i].num_cached_tokens for i in range(2)]
    assert outputs == [0, 39]


# -------------------------------------------------------------------- requests at any time


def test_requests_come_and_go_while_others_run() -> None:
    engine = fake_engine(max_num_seqs=4)
    outputs: dict[int, RequestOutput] = {}
    for i in range(50):
        engine.add_request(request(i, f"row {i}", max_tokens=1 + i % 9, stop=["~"] if i % 2 else []))
        if i % 7 == 3:
            assert engine.abort(i)
            assert not engine.abort(i)
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check()
    outputs |= run(engine)
    assert set(outputs) == {i for i in range(50) if i % 7 != 3}
    assert engine.step() == []


@pytest.mark.parametrize("prompt", ["a", ""])
def test_a_request_id_that_is_in_use_is_refused(prompt: str) -> None:
    engine = fake_engine()
    engine.add_request(request(0, prompt))
    with pytest.raises(ConfigError, match="request 0"):
        engine.add_request(request(0, "b"))
    assert len(run(engine)) == 1


def test_a_request_that_was_refused_can_be_aborted() -> None:
    engine = fake_engine()
    engine.add_request(request(0, ""))
    assert engine.num_unfinished == 1
    assert engine.abort(0)
    assert not engine.abort(0)
    assert not engine.has_unfinished()
    assert engine.step() == []


# -------------------------------------------------------------------- runners in trouble


def test_a_row_that_makes_the_runner_raise_is_found(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine("raise_token=7")
    rows = [request(i, [65, 66, i]) if i not in (7, 37) else request(i, [65, 7, i]) for i in range(64)]
    with caplog.at_level(logging.CRITICAL, "batchinfer"):
        outputs = run(engine, *rows)
    assert {i for i, output in outputs.items() if output.error} == {7, 37}
    for i in (7, 37):
        error = outputs[i].error
        assert error is not None
        assert error.error_class is ErrorClass.INTERNAL
        assert "RuntimeError" in error.message
        assert "token 7" in error.message
    assert isinstance(engine.runner, FakeRunner)
    for i in (0, 63):
        key = sample_key(rows[i].stream_key, 0)
        expected = expected_output(engine.runner, rows[i].prompt_token_ids, rows[i].sampling, key, 8)
        assert list(outputs[i].outputs[0].token_ids) == expected


def test_many_bad_rows_beside_each_other_are_rows_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine("raise_token=7")
    with caplog.at_level(logging.CRITICAL, "batchinfer"):
        outputs = run(engine, *(request(i, [65, 7 if 8 <= i < 40 else 66]) for i in range(64)))
    assert {i for i, output in outputs.items() if output.error} == set(range(8, 40))


def test_a_runner_that_raises_for_everybody_is_an_engine_error() -> None:
    class Broken(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            raise ValueError("no such device")

    engine = engine_of(Broken())
    with pytest.raises(EngineError, match="no such device"):
        run(engine, *(request(i, "abc") for i in range(10)))


@pytest.mark.parametrize("trouble", [ValueError, OutOfMemory, MemoryError])
@pytest.mark.parametrize("seed", range(3))
def test_steps_that_fail_half_done_are_done_again(seed: int, trouble: type[Exception]) -> None:
    class Flaky(FakeRunner):
        """Fails often before, in the middle of and after executing a step of more than one row."""

        rng = random.Random(seed)
        num_failures = 0

        def execute(self, plan: StepPlan) -> StepResult:
            if len(plan.chunks) > 1 and self.rng.random() < 0.3:
                self.num_failures += 1
                done = plan.chunks[: self.rng.randrange(len(plan.chunks) + 1)]
                super().execute(StepPlan(plan.step, done, plan.added, plan.finished, plan.copies))
                self.num_steps -= 1
                raise trouble("now and then")
            return super().execute(plan)

    rows = [
        request(i, "same head, " * (i % 5) + f"row {i}", n=1 + i % 2, temperature=0.8, logprobs=1, prompt_logprobs=1)
        for i in range(40)
    ]
    groups = (KVGroup(num_blocks=40, block_size=4),)
    options: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 40, "max_model_len": 100}
    flaky = Flaky(kv_groups=groups)
    outputs = run(engine_of(flaky, **options), *rows)
    plain = run(engine_of(FakeRunner(kv_groups=groups), **options), *rows)
    assert flaky.num_failures > 0
    assert flaky.num_copies > 0
    for i, output in outputs.items():
        assert (output.outputs, output.prompt_logprobs) == (plain[i].outputs, plain[i].prompt_logprobs)


def test_an_engine_error_of_the_runner_is_not_a_rows_fault() -> None:
    class Lost(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            raise EngineError("a rank is gone")

    with pytest.raises(EngineError, match="a rank is gone"):
        run(engine_of(Lost()), request(0, "abc"))


def test_non_finite_logits_fail_one_row() -> None:
    outputs = run(fake_engine("nan_token=9"), *(request(i, [65, 9 if i == 3 else 10]) for i in range(8)))
    assert {i for i, output in outputs.items() if output.error} == {3}
    assert outputs[3].error is not None
    assert outputs[3].error.error_class is ErrorClass.NON_FINITE_LOGITS


@pytest.mark.parametrize("fits", [1, 3, 40])
def test_out_of_memory_shrinks_the_step_and_goes_on(fits: int) -> None:
    engine = fake_engine(f"max_step_tokens={fits}", max_num_seqs=32)
    rows = [request(i, f"{i}" + " words" * (9 + i % 9)) for i in range(100)]
    outputs = run(engine, *rows)
    assert not any(output.error for output in outputs.values())
    plain = run(fake_engine(), *rows)
    assert {i: o.outputs for i, o in outputs.items()} == {i: o.outputs for i, o in plain.items()}
    stats = engine.stats()
    assert stats.max_num_seqs < 32
    assert stats.max_num_batched_tokens <= max(fits, stats.max_num_seqs)
    assert stats.num_cut_steps > 0


def test_after_memory_was_short_for_a_while_the_limits_come_back() -> None:
    runner = FakeRunner(max_step_tokens=30)
    engine = engine_of(runner, max_num_seqs=32, max_num_batched_tokens=200)
    run(engine, *(request(i, "word " * 5) for i in range(40)))
    assert engine.stats().max_num_seqs < 32
    assert engine.stats().max_num_batched_tokens <= 30
    runner._max_step_tokens = None
    for i in range(5000):
        if engine.stats().max_num_seqs == 32 and engine.stats().max_num_batched_tokens == 200:
            break
        engine.add_request(request(1000 + i, "x", max_tokens=3))
        engine.step()
    assert 500 < i < 4000
    engine.check()


def test_a_row_that_does_not_fit_alone_leaves_the_limits_to_the_others() -> None:
    class Big(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            for spec in plan.added:
                if spec.prompt_token_ids[0] == 66:
                    self._big = spec.seq_id
            if any(chunk.seq_id == getattr(self, "_big", None) for chunk in plan.chunks):
                raise OutOfMemory("too much")
            return super().execute(plan)

    engine = engine_of(Big(), max_num_seqs=16)
    outputs = run(engine, *(request(i, "BBBB" if i == 5 else "a" * 20) for i in range(20)))
    assert {i for i, output in outputs.items() if output.error} == {5}
    assert engine._executor.num_failed_rows == 1
    assert outputs[5].error is not None
    assert outputs[5].error.error_class is ErrorClass.OUT_OF_MEMORY
    assert engine.stats().max_num_seqs == 16


def test_a_row_that_outgrows_the_pool_is_an_error_row() -> None:
    engine = fake_engine("num_blocks=4")
    outputs = run(engine, request(0, "x" * 40, max_tokens=100), request(1, "abc"))
    assert outputs[0].error is not None
    assert outputs[0].error.error_class is ErrorClass.OUT_OF_MEMORY
    assert outputs[1].error is None


def test_a_crash_kills_the_process() -> None:
    program = (
        "from batchinfer import LLM\n"
        "llm = LLM(model='fake://hash?crash_token=66')\n"
        "print(len(llm.generate(['a', 'c'])), flush=True)\n"
        "llm.generate(['a', 'B', 'c'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (13, "2")


# -------------------------------------------------------------------- building


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"max_model_len": 4096}, "2048 positions"),
        ({"max_model_len": 1}, "at least 2"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": "lots"}, "max_num_seqs must be 'auto' or a whole number, got 'lots'"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens must be 'auto' or a whole number, got 2.5"),
        ({"max_model_len": "100"}, "max_model_len must be None or a whole number, got '100'"),
        ({"kv_cache_memory": "4GiB"}, "kv_cache_memory must be 'auto' or a whole number"),
        ({"kv_cache_memory": -1}, "kv_cache_memory must be at least 1"),
        ({"split_size": 0}, "split_size must be at least 1"),
        ({"num_threads": True}, "num_threads must be None or a whole number, got True"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false, got 'no'"),
        ({"cuda_graphs": "yes"}, "cuda_graphs must be 'auto', true or false, got 'yes'"),
        ({"cuda_graphs": 1}, "cuda_graphs must be 'auto', true or false, got 1"),
        ({"async_scheduling": "no"}, "async_scheduling must be 'auto', true or false, got 'no'"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be above 0 and at most 1, got 0"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization must be above 0 and at most 1, got 90"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be above 0 and at most 1, got '0.9'"),
        ({"block_size": 0}, "block_size"),
        ({"model": "fake://nonsense"}, "fake://hash"),
        ({"model": "fake://hash?bogus=1"}, "bogus"),
        ({"model": "fake://hash?eos_rate=often"}, "eos_rate"),
    ],
)
def test_what_can_not_be_built_says_why(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_engine(EngineConfig(**{"model": "fake://hash", **options}))


def test_no_such_model() -> None:
    with pytest.raises(ModelError, match="no/such"):
        load_engine(EngineConfig(model="./no/such/model"))


def test_a_fake_engine_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from batchinfer import LLM, SamplingParams\n"
        "import batchinfer.scheduling, batchinfer.runner.fake, batchinfer.engine, batchinfer.testing\n"
        "out = LLM(model='fake://echo').generate(['hi'], SamplingParams(stop=['~'], max_tokens=9))\n"
        "print(out[0].outputs[0].text)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "hi", done.stderr


def test_a_row_that_failed_alone_leaves_nothing_in_the_runner() -> None:
    engine = fake_engine("raise_token=7")
    outputs = run(engine, request(0, [65, 7]))
    assert outputs[0].error is not None
    assert run(engine, request(1, [65, 66]))[1].error is None
    assert isinstance(engine.runner, FakeRunner)
    assert set(engine.runner._traces) == {1}  # told to be finished with the next step


def test_steps_have_no_gap() -> None:
    runner = FakeRunner()
    runner.execute(StepPlan(0, ()))
    for step in (0, 2):
        with pytest.raises(EngineError, match=f"step {step} was planned"):
            runner.execute(StepPlan(step, ()))


def test_the_pool_follows_the_block_size() -> None:
    engine = fake_engine(block_size=4)
    assert engine.runner.kv_groups == (KVGroup(num_blocks=4096, block_size=4),)
