"""The engine over tiny real models gives what transformers gives, however the work is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer import LLM, SamplingParams
from batchinfer.config import EngineConfig
from batchinfer.engine import build, load_engine
from batchinfer.modelfiles.files import TokenizerFiles
from batchinfer.testing.oracle import Oracle
from batchinfer.testing.tiny import make_tiny
from batchinfer.text import Tokenizer, load_tokenizer
from batchinfer.types.request import Request, RequestOutput
from batchinfer.types.rows import ErrorClass

NEAR_TIE = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def llm(model: Path, **options: object) -> LLM:
    settings: dict[str, object] = {"quantization": "none", "num_threads": 1, "kv_cache_memory": 1 << 25}
    return LLM(model=str(model), **{**settings, **options})  # type: ignore[arg-type]


def assert_right(oracle: Oracle, output: RequestOutput) -> None:
    assert output.error is None, output.error
    for sample in output.outputs:
        for place, behind in oracle.disagreements(list(output.prompt_token_ids), list(sample.token_ids)):
            assert behind < NEAR_TIE, f"request {output.request_id}: another token at {place}, by {behind}"


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 380) for _ in range(count)]


@pytest.mark.parametrize("budget", [16, 512])
def test_lengths_around_a_block(model: Path, oracle: Oracle, budget: int) -> None:
    engine = llm(model, max_num_batched_tokens=budget, max_num_seqs=8)
    for length in (15, 16, 17, 31, 32, 33, 48):
        prompt = ids(length, seed=length)
        first = engine.generate([prompt], GREEDY)
        again = engine.generate([prompt, prompt], GREEDY)
        assert [o.num_cached_tokens for o in again] == [length - 1] * 2
        assert len({o.outputs[0].token_ids for o in [*first, *again]}) == 1
        assert_right(oracle, first[0])


def test_the_same_long_prompt_many_times_before_and_after_eviction(model: Path, oracle: Oracle) -> None:
    engine = llm(model, max_num_batched_tokens=128, max_num_seqs=16, max_model_len=350, kv_cache_memory=1_700_000)
    prompt = ids(300, seed=0)
    prompts = [prompt] * 8 + [prompt[:160] + ids(20, seed=i) for i in range(8)]
    others = [ids(70, seed=100 + i) for i in range(40)]
    first = engine.generate(prompts, GREEDY)
    engine.generate(others, SamplingParams(temperature=0.0, max_tokens=1))
    manager = engine.engine.scheduler.managers[0]
    assert manager.num_evictions > 0
    again = engine.generate(prompts, GREEDY)
    assert [o.outputs for o in first] == [o.outputs for o in again]
    for output in (first[0], *first[8:]):
        assert_right(oracle, output)
    assert len({o.outputs[0].token_ids for o in first[:8]}) == 1
    manager.check([])
    assert manager.num_available == manager.num_blocks


def test_texts_samples_and_logprobs(model: Path, oracle: Oracle) -> None:
    engine = llm(model, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1)
    outputs = engine.generate(["the question of what", "write a list of names"], params)
    for output in outputs:
        assert_right(oracle, output)
        sample = output.outputs[0]
        prompt = list(output.prompt_token_ids)
        expected = oracle.logits([*prompt, *sample.token_ids]).log_softmax(-1)
        assert sample.logprobs is not None
        assert output.prompt_logprobs is not None
        for place, entry in enumerate([*output.prompt_logprobs[1:], *sample.logprobs]):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(expected[place, entry.token_id]), abs=1e-3)
    (output,) = engine.generate("the question", SamplingParams(n=4, seed=1, max_tokens=16, ignore_eos=True))
    assert len({sample.token_ids for sample in output.outputs}) == 4


def test_chat(model: Path, oracle: Oracle) -> None:
    engine = llm(model)
    (output,) = engine.chat([{"role": "user", "content": "what is this"}], GREEDY)
    tokenizer = engine.get_tokenizer()
    text = tokenizer.decode(list(output.prompt_token_ids), skip_special_tokens=False)
    assert text == "<|im_start|>user\nwhat is this<|im_end|>\n<|im_start|>assistant\n"
    assert_right(oracle, output)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {}),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    ],
    ids=["all layers", "every other layer"],
)
def test_a_sliding_window_with_a_cache_and_pre_emption(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    """Blocks outside the window are kept, so that a prefix hit never reads what was reused."""
    model = make_tiny(tmp_path / family, family, sliding_window=8, num_hidden_layers=4, **config)
    oracle = Oracle(model)
    head = ids(64, seed=0)
    prompts = [ids(n, seed=n) for n in (7, 8, 9, 17, 100)] + [head + ids(5, seed=i) for i in (1, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    engine = llm(model, max_num_batched_tokens=5, max_num_seqs=5, max_model_len=128)
    first = engine.generate(prompts, params)
    for output in first:
        assert_right(oracle, output)
    again = engine.generate(prompts, params)
    assert [output.outputs for output in again] == [output.outputs for output in first]
    assert again[-1].num_cached_tokens == 68
    facts = engine.engine.facts
    block_bytes = facts["kv_cache_bytes"][0] // facts["num_blocks"][0]
    small = llm(model, max_num_batched_tokens=64, max_num_seqs=5, max_model_len=128, kv_cache_memory=8 * block_bytes)
    assert [output.outputs for output in small.generate(prompts, params)] == [output.outputs for output in first]
    assert small.stats()["num_preemptions"] > 0


def test_penalties_are_those_of_transformers_however_the_work_is_cut(model: Path, oracle: Oracle) -> None:
    """Repetition counts prompt and output; presence and frequency the output alone, by the OpenAI definition."""
    from transformers import RepetitionPenaltyLogitsProcessor

    repeat = RepetitionPenaltyLogitsProcessor(1.3)
    head = ids(20, seed=3) * 2
    prompts = [[*head, i, i, i] for i in (40, 41, 42)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=20, presence_penalty=0.5, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),  # a row without any beside them
    ]
    first = llm(model, max_num_seqs=1, enable_prefix_caching=False).generate(prompts, params)
    for kind, output in enumerate(first):
        tokens, prompt = list(output.outputs[0].token_ids), list(output.prompt_token_ids)
        for place, token in enumerate(tokens):
            before = torch.tensor([[*prompt, *tokens[:place]]])
            scores = oracle.logits(before[0].tolist())[-1:]
            if kind == 0:
                scores = repeat(before, scores)
            if kind == 1:
                counts = torch.bincount(torch.tensor(tokens[:place], dtype=torch.int64), minlength=scores.shape[-1])
                scores = scores - 0.5 * counts - 0.5 * (counts > 0)
            assert scores[0].max() - scores[0, token] < NEAR_TIE, (kind, place)
    assert len({output.outputs[0].token_ids for output in first}) == 3
    cut = llm(model, max_num_seqs=3, max_num_batched_tokens=8)
    facts = cut.engine.facts
    block_bytes = facts["kv_cache_bytes"][0] // facts["num_blocks"][0]
    small = llm(model, max_num_seqs=3, max_model_len=64, kv_cache_memory=6 * block_bytes)
    for engine in (cut, small):
        for _ in range(2):  # the second time from the cache
            assert [o.outputs for o in engine.generate(prompts, params)] == [o.outputs for o in first]
    assert small.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("budget", [64, 512])
def test_a_sick_row_does_not_spoil_the_prefix_that_it_shares(model: Path, budget: int) -> None:
    """Its chunk with the bad token also holds the head of the others, whose blocks are cached before its end."""
    head = ids(40, seed=0)
    good = [[*head, 5 + i] for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    expected = [output.outputs for output in llm(model).generate(good, params)]
    engine = llm(model, max_num_batched_tokens=budget, max_num_seqs=4)
    spoil_embedding(engine, 381)
    outputs = engine.generate([[*head, 381, *ids(60, seed=1)], *good], params)
    assert outputs[0].error is not None
    assert outputs[0].error.error_class is ErrorClass.NON_FINITE_LOGITS
    assert [output.error for output in outputs[1:]] == [None] * 3
    assert [output.outputs for output in outputs[1:]] == expected
    assert [output.outputs for output in engine.generate(good, params)] == expected


def spoil_embedding(engine: LLM, token_id: int) -> None:
    runner: Any = engine.engine.runner
    embedding = next(p for name, p in runner._model.named_parameters() if "embed" in name)
    embedding.data[token_id] = float("nan")


def test_a_late_tokenizer_is_built_for_the_first_text(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[TokenizerFiles] = []

    def counted(files: TokenizerFiles, *, to_decode: bool = False) -> Tokenizer:
        built.append(files)
        return load_tokenizer(files, to_decode=to_decode)

    monkeypatch.setattr(build, "load_tokenizer", counted)
    config = EngineConfig(model=str(model), kv_cache_memory=1 << 22, max_model_len=128)
    ordinary, late = load_engine(config), load_engine(config, late_tokenizer=True)
    assert len(built) == 1
    found = {}
    for engine in (ordinary, late):
        for i, stop in enumerate([[], ["e"]]):
            sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=stop)
            if engine is late and not stop:
                engine.add_request(Request(i, (5, 6, 7), sampling, 0))
                assert engine.step() == [] and engine.stats().num_generated_tokens == 1
                assert len(built) == 1
            else:
                engine.add_request(Request(i, (5, 6, 7), sampling, 0))
        found[engine is late] = sorted((o.request_id, o.outputs[0].text) for o in engine.run())
        engine.close()
    assert len(built) == 2
    assert found[True] == found[False] and all(text for _, text in found[True])
