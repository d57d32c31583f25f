"""Steps launched while another is under way, on Triton's kernels: tokens are taken from where they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer.engine import Engine
from batchinfer.runner.base import OverlappingRunner
from batchinfer.runner.local import LocalRunner
from batchinfer.testing.step_driver import GREEDY
from batchinfer.types.request import Request, SamplingParams
from batchinfer.types.rows import ErrorClass
from batchinfer.types.step import UNKNOWN_TOKEN, Chunk, SequenceSpec, StepPlan, StepResult
from tests.kernels.triton.device import ON_GPU
from tests.runner.triton.test_triton_runner import HERE, SIZES, _Waits, make_engine

# What numpy says of rows that are padding: attention gives them whatever was in memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SICK = 7
ONE_LAYER = {"num_hidden_layers": 1, "num_key_value_heads": 1, "intermediate_size": 48}
DRAWN = SamplingParams(temperature=0.9, top_p=0.9)


def outcomes(engine: Engine) -> dict[int, Any]:
    """Rows of many kinds. One is sick, and some end where nobody foresees it."""
    shared = [3 + 37 * i % 370 for i in range(9)]
    kinds: list[tuple[list[int], dict[str, Any]]] = [
        ([*shared, 40], {"temperature": 0.0}),
        ([*shared, 41, 42], {"temperature": 0.9, "top_p": 0.9, "stop_token_ids": list(range(0, 380, 5))}),
        ([200], {"temperature": 0.0, "logprobs": 2}),
        ([5, 6, SICK], {"temperature": 0.8}),
        (list(range(20, 32)), {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2}),
        ([9], {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": list(range(0, 380, 2))}),
    ]
    for i, (prompt, how) in enumerate(kinds):
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, **how)
        engine.add_request(Request(request_id=i, prompt_token_ids=prompt, sampling=sampling, stream_key=100 + i))
    found: dict[int, Any] = {}
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id] = output.error.error_class if output.error else output.outputs
        engine.check()
    assert found.keys() == set(range(len(kinds)))
    return found


def test_outcomes_are_those_of_steps_that_are_waited_for(tiny_folder: Callable[..., Path]) -> None:
    engines = []
    for overlaps in (False, True):
        engine = make_engine(
            tiny_folder("llama", **ONE_LAYER),
            kernels="triton",
            cuda_graphs=True,
            async_scheduling=overlaps,
            max_num_seqs=4,
            max_num_batched_tokens=14,
            pool_blocks=13,
        )
        model: Any = engine.runner._model  # type: ignore[attr-defined]
        model.embed.weight.data[SICK] = torch.nan
        engines.append(engine)
    waited, overlapped = engines
    expected = outcomes(waited)
    assert outcomes(overlapped) == expected
    assert expected[3] is ErrorClass.NON_FINITE_LOGITS
    assert {sample.finish_reason for i in (1, 5) for sample in expected[i]} >= {"stop"}
    assert overlapped.stats().num_overlapped_steps > 4
    # Also after the ends that nobody foresaw, and the error.
    assert overlapped.stats().num_computed_tokens > waited.stats().num_computed_tokens
    assert overlapped.runner._graphs.num_replayed > 0  # type: ignore[attr-defined]
    assert waited.stats().num_overlapped_steps == 0


def test_a_launch_reads_nothing_back(make_runner: Callable[..., LocalRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sequences, then of them in another order and a prompt, then of all three."""
    known, runner = (
        make_runner("llama", ONE_LAYER, kernels="triton", cuda_graphs=True, max_num_seqs=4, **HERE, **SIZES)
        for _ in range(2)
    )
    assert isinstance(runner, OverlappingRunner) and runner.overlaps
    prompts = [[11, 12, 13], [14, 15], [16]]
    specs = [SequenceSpec(i, tuple(p), DRAWN if i else GREEDY, 50 + i) for i, p in enumerate(prompts)]

    def chunk(i: int, start: int, tokens: list[int]) -> Chunk:
        return Chunk(i, start, tokens, ([i, 4 + i],), 1)

    def plan(number: int, token: Callable[[int], int]) -> StepPlan:
        if number == 0:
            return StepPlan(0, (chunk(0, 0, prompts[0]), chunk(1, 0, prompts[1])), tuple(specs[:2]))
        if number == 1:
            chunks = (chunk(1, 2, [token(1)]), chunk(0, 3, [token(0)]), chunk(2, 0, prompts[2]))
            return StepPlan(1, chunks, tuple(specs[2:]))
        return StepPlan(number, tuple(chunk(i, len(prompts[i]) + number - 1 - (i == 2), [token(i)]) for i in range(3)))

    results: list[StepResult] = []
    for number in range(4):
        results.append(known.execute(plan(number, lambda i: results[-1].token_ids[i][0])))

    reads: list[torch.Size] = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        reads.append(tensor.shape)
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    found: list[StepResult] = []
    with _Waits() as watch:
        launched = runner.launch(plan(0, lambda i: UNKNOWN_TOKEN))
        for number in range(1, 4):
            following = runner.launch(plan(number, lambda i: UNKNOWN_TOKEN))
            assert len(reads) == number - 1
            found.append(launched.result())
            launched = following
        found.append(launched.result())
    assert found == results
    assert (reads, watch.seen) == ([(2,), (3,), (3,), (3,)], [])


@pytest.mark.skipif(not ON_GPU, reason="of what a GPU is waited for")
def test_torch_knows_of_no_wait_in_a_launch(make_runner: Callable[..., LocalRunner]) -> None:
    runner = make_runner("llama", ONE_LAYER, kernels="triton", cuda_graphs=True, max_num_seqs=4, **HERE, **SIZES)
    specs = tuple(SequenceSpec(i, (11 + i,), DRAWN if i else GREEDY, 50 + i) for i in range(2))
    chunks = tuple(Chunk(i, 0, [11 + i], ([i],), 1) for i in range(2))
    launched = runner.launch(StepPlan(0, chunks, specs))
    for number in range(1, 6):
        more = tuple(Chunk(i, number, [UNKNOWN_TOKEN], ([i, 2 + i],), 1) for i in range(2))
        if number > 3:  # kernels are compiled, a graph is made
            torch.cuda.set_sync_debug_mode("error")
        try:
            following = runner.launch(StepPlan(number, more))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(launched.result().token_ids) == 2
        launched = following
