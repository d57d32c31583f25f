"""A request that is given up and goes on in another engine has the outcome that it would have had, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.config import EngineConfig
from batchinfer.engine import Engine, load_engine
from batchinfer.testing.tiny import make_tiny
from batchinfer.types.request import PartialOutput, Request, RequestOutput, SamplingParams
from batchinfer.types.rows import ErrorClass
from tests.engine.test_engine import EOS, Replay, engine_of, only, request, run
from tests.engine.test_equivalence import MAX_MODEL_LEN, Result, differing, fake, rows, tiny_engine

ARITHMETICS = ["float32", "int8"]


def interrupted(
    requests: Sequence[Request], engines: Sequence[Callable[[], Engine]], steps: Sequence[int]
) -> tuple[Result, int]:
    """Runs requests in one engine after the other, each given up after so many steps, the last one to the end.
    Returns the outcomes, and the tokens generated in all engines together."""
    outputs: dict[int, RequestOutput] = {}
    left, generated = list(requests), 0
    for make, limit in zip(engines, [*steps, 1 << 30], strict=True):
        engine = make()
        for one in left:
            engine.add_request(one)
        for _ in range(limit):
            if not engine.has_unfinished():
                break
            for output in engine.step():
                assert output.error is None, output.error
                assert output.num_cached_tokens <= len(output.prompt_token_ids)
                outputs[output.request_id] = output
            engine.check()
        stats = engine.stats()
        generated += stats.num_generated_tokens
        assert stats.num_cached_tokens <= stats.num_prompt_tokens
        left = [
            one._replace(partial_outputs=engine.partial_outputs(one.request_id))
            for one in left
            if one.request_id not in outputs
        ]
        engine.close()
    assert not left
    found: Result = {
        i: (
            output.prompt_logprobs,
            *((s.text, s.token_ids, s.finish_reason, s.stop_reason, s.logprobs, s.cumulative_logprob) for s in samples),
        )
        for i, output in outputs.items()
        for samples in [output.outputs]
    }
    return found, generated


def with_stops(requests: list[Request], seed: int) -> list[Request]:
    """Some rows get stop strings of the length of several tokens, or an end after some tokens at the earliest."""
    draw = random.Random(seed)
    changed = []
    for one in requests:
        kind = draw.randrange(4)
        values: dict[str, Any] = {}
        if kind == 1:
            values = {"stop": [chr(draw.randrange(33, 127)) + chr(draw.randrange(33, 127)), "zz", chr(75)]}
        elif kind == 2 and one.sampling.max_tokens:
            values = {"min_tokens": one.sampling.max_tokens // 2, "stop": [chr(draw.randrange(33, 127))]}
        elif kind == 3:
            values = {"stop_token_ids": [draw.randrange(33, 127)], "include_stop_str_in_output": draw.random() < 0.5}
        kept = {name: getattr(one.sampling, name) for name in one.sampling.__dataclass_fields__}
        params = SamplingParams(**{**kept, **values})
        changed.append(one._replace(sampling=params, eos_token_ids=frozenset({EOS})))
    return changed


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 5),
    steps=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    max_num_seqs=st.sampled_from([1, 3, 7, 64]),
    budget=st.sampled_from([1, 5, 16, 512]),
    cache=st.booleans(),
    pool_tokens=st.sampled_from([160, 400, 2000]),
)
def test_fake_rows_go_on_wherever_they_were_interrupted(
    seed: int, steps: list[int], max_num_seqs: int, budget: int, cache: bool, pool_tokens: int
) -> None:
    def engine() -> Engine:
        return fake(
            block_size=16,
            num_blocks=pool_tokens // 16,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=cache,
        )

    requests = with_stops(rows(14, max_model_len=160, vocab=256, seed=seed), seed)
    expected, least = interrupted(requests, [engine], [])
    found, generated = interrupted(requests, [engine] * (len(steps) + 1), steps)
    assert differing(expected, found) == []
    # Samples that had ended beside others that had not sample their last token once more.
    assert least <= generated <= least + len(steps) * sum(one.sampling.n for one in requests if one.sampling.n > 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama")


def tiny_rows() -> list[Request]:
    """Among them rows with penalties, n of 2, log-probabilities of output and prompt."""
    return rows(24, max_model_len=MAX_MODEL_LEN, vocab=380)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("steps", [[1], [4], [9], [3, 5], [2, 0, 6]])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_rows_of_a_model_go_on_to_the_bit(tiny: Path, arithmetic: str, steps: list[int], cache: bool) -> None:
    def plain() -> Engine:
        return tiny_engine(tiny, arithmetic, max_num_seqs=1, enable_prefix_caching=False)

    def engine() -> Engine:
        return tiny_engine(tiny, arithmetic, max_num_seqs=20, max_num_batched_tokens=48, enable_prefix_caching=cache)

    requests = tiny_rows()
    expected, least = interrupted(requests, [plain], [])
    found, generated = interrupted(requests, [engine] * (len(steps) + 1), steps)
    assert differing(expected, found) == []
    assert generated <= least + len(steps) * 2 * sum(one.sampling.n > 1 for one in requests)


def test_penalties_count_what_came_from_another_engine_and_was_found_in_the_cache(tiny: Path) -> None:
    """Two samples with the same tokens: the second finds all of the first one's in the cache, output and all."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.4, n=2, max_tokens=40)
    one = Request(request_id=0, prompt_token_ids=list(range(5, 22)), sampling=params, stream_key=7)
    expected, _ = interrupted([one], [lambda: tiny_engine(tiny, max_num_seqs=2)], [])
    found, _ = interrupted(
        [one], [lambda: tiny_engine(tiny, max_num_seqs=2), lambda: tiny_engine(tiny, max_num_seqs=1)], [33]
    )
    assert differing(expected, found) == []


@pytest.mark.parametrize("at", range(1, 9))
def test_a_stop_string_across_the_border_ends_the_text(at: int) -> None:
    script = list(b"abc<<END>>xyz")
    one = request(0, "a prompt", max_tokens=13, stop=["<<END>>"])
    first = engine_of(Replay(script))
    first.add_request(one)
    for _ in range(at):
        assert not first.step()
    partial = first.partial_outputs(0)
    assert [list(sample.token_ids) for sample in partial] == [script[:at]]
    sample = only(engine_of(Replay(script)), one._replace(partial_outputs=partial))
    assert (sample.text, sample.stop_reason, list(sample.token_ids)) == ("abc", "<<END>>", script[:10])


@pytest.mark.parametrize(
    ("sampling", "stop_reason", "num_tokens"),
    [
        ({"stop": ["c<"]}, "c<", 4),
        ({"stop_token_ids": [ord("<")]}, ord("<"), 4),
        ({"stop_token_ids": [ord("z")], "max_tokens": 6}, None, 6),
        ({"max_tokens": 5}, None, 5),
    ],
)
def test_tokens_behind_an_end_are_not_believed(
    sampling: dict[str, Any], stop_reason: int | str | None, num_tokens: int
) -> None:
    """Nobody generates them: they would be of other settings."""
    script = list(b"abc<<END>>xyz")
    one = request(0, "a prompt", **{"max_tokens": 13, **sampling})
    going_on = one._replace(partial_outputs=(PartialOutput(tuple(script)),))
    sample = only(engine_of(Replay(script)), going_on)
    assert sample == only(engine_of(Replay(script)), one)
    assert (sample.stop_reason, len(sample.token_ids)) == (stop_reason, num_tokens)


def test_a_sample_that_had_ended_ends_again_at_the_same_token() -> None:
    """With n of 2 one sample may have ended long before the other."""
    engine = load_engine(EngineConfig(model="fake://hash?eos_rate=0.1", max_num_seqs=2))
    one = request(3, "several samples", n=2, max_tokens=200, temperature=0.9, logprobs=1)
    engine.add_request(one)
    while not any(sample.token_ids[-1:] == (EOS,) for sample in engine.partial_outputs(3)):
        assert not engine.step()
    engine.step()
    partial = engine.partial_outputs(3)
    assert sorted(sample.token_ids[-1] == EOS for sample in partial) == [False, True]
    other = load_engine(EngineConfig(model="fake://hash?eos_rate=0.1", max_num_seqs=2))
    found = run(other, one._replace(partial_outputs=partial))[3]
    assert found == run(engine)[3]
    assert other.stats().num_recomputed_tokens > 0


@pytest.mark.parametrize(
    ("partial", "words"),
    [
        ([PartialOutput((5, 512))], "token id 512"),
        ([PartialOutput((-1, 5))], "token id -1"),
        ([PartialOutput((5,)), PartialOutput((5,))], "there are 2 samples, and n is 1"),
        ([PartialOutput((5, 6), ())], "log-probabilities of 0 of 2 tokens"),
    ],
)
def test_what_can_not_be_an_output_of_the_request_is_refused(partial: list[PartialOutput], words: str) -> None:
    output = run(engine_of(Replay([1])), request(0, "x", logprobs=0)._replace(partial_outputs=partial))[0]
    assert output.error is not None and words in output.error.message
    assert output.error.error_class is ErrorClass.INVALID_PROMPT


def test_of_a_request_that_is_not_there_nothing_has_been_generated() -> None:
    engine = engine_of(Replay([65] * 8))
    assert engine.partial_outputs(0) == ()
    engine.add_request(request(0, "x"))
    assert engine.partial_outputs(0) == (PartialOutput(()),)
