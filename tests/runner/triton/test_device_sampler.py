"""Sampling where the logits lie gives the tokens and log-probabilities of the host's sampler, and waits once a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batchinfer_kernels import sampling as specification
from batchinfer_kernels.sampling import SamplingOps
from batchinfer_kernels.table import resolve
from torch import Tensor

from batchinfer.attention.staging import Staging
from batchinfer.runner.device_sampler import DeviceSampler
from batchinfer.runner.local import LocalRunner
from batchinfer.runner.logprobs import token_logprobs
from batchinfer.runner.sampler import Sampler, SampleRow
from batchinfer.runner.sequence_state import SequenceState
from batchinfer.testing.step_driver import GREEDY, StepDriver
from batchinfer.types.request import SamplingParams
from batchinfer.types.step import Chunk, SequenceSpec, StepResult
from tests.kernels.triton.device import DEVICE, HOST, ON_GPU
from tests.kernels.triton.drawing import CASES
from tests.runner.triton.test_triton_runner import HERE, SIZES, _Waits

# What numpy says of temperatures that make everything else too small.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
VOCAB = 90
ADJUSTED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logit_bias": {3: 4.0, 999: 1.0}},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 3},
    {"temperature": 0.7, "logit_bias": {5: 1e308, 6: -1e308}, "logprobs": 0},
    {"temperature": 0.9, "repetition_penalty": 0.6, "frequency_penalty": 0.7, "presence_penalty": -0.4, "top_k": 9},
    {"temperature": 0.0, "min_tokens": 50, "logprobs": 2},
    {"temperature": 1.1, "min_tokens": 50, "top_p": 0.8},
    {"temperature": 0.0, "min_tokens": 2},
    {"top_k": 1 << 40, "logprobs": 20},
]


def rows_of(cases: list[dict[str, Any]]) -> list[SampleRow]:
    rows = []
    for i, params in enumerate(cases):
        prompt, output = [1, 2 + i % 7, 5], [(i + 3 * j) % VOCAB for j in range(i % 6)]
        spec = SequenceSpec(
            seq_id=i,
            prompt_token_ids=prompt,
            sampling=SamplingParams(**params),
            sample_key=(i * 0x9E3779B97F4A7C15) % (1 << 64),
            stop_token_ids=frozenset({4, 7, VOCAB + 1}),
        )
        state = SequenceState(spec, 1)
        state.record(Chunk(i, 0, prompt + output, ([0],), 1))
        rows.append(SampleRow(state, len(output)))
    return rows


class Head:
    """A model whose hidden states are its logits."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden.argmax(-1), hidden.isfinite().all(-1)


def ops_of(name: str) -> SamplingOps:
    if name == "specification":
        return SamplingOps(greedy=specification.greedy, sample=specification.sample)
    found = resolve("triton", DEVICE).sampling
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["apart", "ties"])
@pytest.mark.parametrize("ops", ["specification", "triton"])
def test_tokens_and_logprobs_are_the_hosts(ops: str, kind: str) -> None:
    """In parts of 5 rows, from hidden states in another order among others, two of them with sick logits."""
    rows = rows_of([*ADJUSTED, {}, *CASES])
    logits = 3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(7))
    if kind == "ties":
        logits = logits.round()
    hidden = torch.zeros(len(rows) + 3, VOCAB)
    at = torch.randperm(len(hidden), generator=torch.Generator().manual_seed(1))[: len(rows)].tolist()
    hidden[at] = logits
    sick = [2, 8, 10]  # with log-probabilities; drawn; greedy
    hidden[[at[r] for r in sick], 11] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    model: Any = Head()
    drawn = DeviceSampler(ops_of(ops), DEVICE, part_rows=5).sample(model, hidden.to(DEVICE), rows, at)
    tokens, entries = drawn.by_row(), drawn.logprobs
    well = [r for r in range(len(rows)) if r not in sick]
    expected = Sampler(VOCAB, HOST).sample(logits[well].clone(), [rows[r] for r in well])
    assert tokens == dict(zip(well, expected, strict=True))
    asked = [r for r in well if rows[r].state.spec.sampling.logprobs is not None]
    num_top = [rows[r].state.spec.sampling.logprobs or 0 for r in asked]
    wanted = token_logprobs(logits[asked].to(DEVICE), [tokens[r] for r in asked], num_top)
    assert list(entries.items()) == list(zip(asked, wanted, strict=True))


def test_a_step_waits_for_nothing_of_the_one_before_it() -> None:
    """Host memory that a step's parts pass through is not written twice in it, nor again in the next step, which is
    launched while the first is under way: the host would wait for the model."""
    waits: list[str] = []

    class Watched:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            waits.append("waited")

    rows = rows_of([*ADJUSTED, {}, *CASES])
    hidden = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    model: Any = Head()
    sampler = DeviceSampler(ops_of("specification"), DEVICE, part_rows=2)
    for name in ("_index_staging", "_row_staging"):
        setattr(sampler, name, Staging(DEVICE, torch.int64, Watched))
    for num_waits in (0, 0, 2):  # the third step for the first: its indices, its rows
        tokens = sampler.sample(model, hidden, rows, list(reversed(range(len(rows))))).by_row()
        assert len(tokens) == len(rows) > 6
        assert len(waits) == num_waits


def test_nothing_to_sample() -> None:
    model: Any = Head()
    drawn = DeviceSampler(ops_of("triton"), DEVICE, part_rows=5).sample(model, torch.zeros(0, VOCAB), [], [])
    drawn.send()
    assert (drawn.by_row(), drawn.logprobs) == ({}, {})


@pytest.fixture
def mixed_step(make_runner: Callable[..., LocalRunner], monkeypatch: pytest.MonkeyPatch) -> Callable[[], StepResult]:
    """A step with greedy rows and drawn ones, with penalties and without, in several parts. The first was made."""
    monkeypatch.setattr("batchinfer.runner.local.LOGITS_ROWS", 1)
    runner = make_runner("llama", {"num_hidden_layers": 1}, kernels="triton", **HERE, **SIZES)
    driver = StepDriver(runner)
    kinds = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9),
        GREEDY,
        SamplingParams(temperature=0.9, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={5: 1.0}),
        SamplingParams(temperature=0.0, min_tokens=9),
    ]
    ids = [driver.add([5 + i, 6], kind, sample_key=i, stop_token_ids=[3]) for i, kind in enumerate(kinds)]
    driver.step(dict.fromkeys(ids, 2))
    return lambda: driver.step(dict.fromkeys(ids, 1))


def test_a_step_waits_once(mixed_step: Callable[[], StepResult], monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy to the host."""
    reads: list[int] = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        reads.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    with _Waits() as watch:
        result = mixed_step()
    assert len(result.token_ids) == 5
    assert (reads, watch.seen) == ([5], [])


@pytest.mark.skipif(not ON_GPU, reason="of what a GPU is waited for")
def test_torch_knows_of_one_wait(mixed_step: Callable[[], StepResult]) -> None:
    """Copies from memory that is not pinned would be others."""
    for _ in range(3):  # kernels are compiled, a graph is made
        mixed_step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            mixed_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing CUDA operation" in str(warning.message) for warning in told) == 1
