"""The law on a whole real model with a real vocabulary, bitwise: its products are wide enough for a BLAS to split."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer import LLM, SamplingParams

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
HEAD = "You are a careful assistant. Read what follows about rivers, towns and people, then answer shortly. "
PROMPTS = ["The capital of France is", HEAD + "What is a river?", HEAD + "Name a town.", "1 2 3 4"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4, logprobs=3),
    SamplingParams(temperature=0.8, max_tokens=4, seed=1, logprobs=2),
    SamplingParams(temperature=0.8, max_tokens=4, seed=2, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1),
]

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="no demo model in models/ (scripts/quickstart fetches it)")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results(*, cache: bool, **options: Any) -> list[Any]:
    llm = LLM(model=MODEL, max_model_len=256, kv_cache_memory=1 << 25, enable_prefix_caching=cache, **options)
    assert llm.engine.facts["batch_invariant"][0] is True
    outputs = llm.generate(PROMPTS, PARAMS)
    assert all(output.error is None for output in outputs)
    assert (llm.stats()["num_cached_tokens"] > 0) == cache
    llm.close()
    return [(output.prompt_logprobs, output.outputs) for output in outputs]


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_rows_do_not_depend_on_batch_budget_cache_and_threads(quantization: str) -> None:
    """As it comes, which is in int8 where the processor has it, and in float32."""
    same = {"quantization": quantization}
    alone = results(max_num_seqs=1, max_num_batched_tokens=512, cache=False, num_threads=1, **same)
    assert len({outputs[0].token_ids for _, outputs in alone}) == 4
    for seqs, budget, cache, threads in ((3, 16, True, 1), (3, 512, False, 2), (1, 16, True, 2)):
        found = results(max_num_seqs=seqs, max_num_batched_tokens=budget, cache=cache, num_threads=threads, **same)
        assert found == alone, (seqs, budget, cache, threads)


def test_the_law_holds_where_torch_was_used_first() -> None:
    """MKL is not asked for strict products then: the probe has to find another way."""
    program = f"""
import torch
torch.set_num_threads(2)
torch.rand(9, 9) @ torch.rand(9, 9)
from batchinfer import LLM, SamplingParams
found = []
for seqs, budget in ((1, 512), (5, 24)):
    llm = LLM({str(MODEL)!r}, max_model_len=64, kv_cache_memory=1 << 24, num_threads=2, quantization="none",
              max_num_seqs=seqs, max_num_batched_tokens=budget)
    assert llm.engine.facts["batch_invariant"][0] is True
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)
    found.append([o.outputs for o in llm.generate({[*PROMPTS, "One", "Two words"]!r}, params)])
assert found[0] == found[1]
print(llm.engine.facts["row_rule"][0])
"""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
