"""Steps of single tokens through `DecodeGraphs`, graphs being identity in the interpreter: the bytes of other steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer.config import EngineConfig
from batchinfer.engine import load_engine
from batchinfer.errors import ConfigError
from batchinfer.runner.batch import StepBatches
from batchinfer.runner.graphs import DecodeGraphs, Run, row_buckets
from batchinfer.runner.local import LocalRunner
from batchinfer.testing.step_driver import GREEDY, StepDriver
from batchinfer.types.request import SamplingParams
from tests.kernels.triton.device import ON_GPU
from tests.runner.triton.test_triton_runner import HERE, MODELS, SIZES, make_engine, run_engine

# What numpy says of rows that are padding: attention gives them whatever was in memory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DRAWN = SamplingParams(temperature=0.8, top_p=0.9, logprobs=1)
ONE_LAYER = {"num_hidden_layers": 1, "num_key_value_heads": 1}
# Of torch's allocator; of CUDA, as a graph is made.
OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")]


def graphs_of(runner: Any) -> DecodeGraphs:
    found = runner._graphs
    assert isinstance(found, DecodeGraphs)
    return found


def caches_of(runner: LocalRunner) -> list[Tensor]:
    return [cache.clone().view(torch.uint8) for at in runner._layers for cache in (at.k_cache, at.v_cache)]


class Compared:
    """Runs every step of a runner's graphs without them as well, and compares hidden states and caches, bit by bit."""

    def __init__(self, runner: LocalRunner) -> None:
        self.runner, self.graphs = runner, graphs_of(runner)
        self.rows: list[int] = []
        self._run = self.graphs.run
        self.graphs.run = self.run  # type: ignore[method-assign]

    def run(self, batches: StepBatches) -> Tensor:
        assert self.runner._model is not None
        expected = self.runner._forward(self.runner._model, batches, None).clone()
        caches = caches_of(self.runner)
        found = self._run(batches)
        assert torch.equal(found, expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches_of(self.runner), caches, strict=True))
        self.rows.append(len(found))
        return found


@pytest.mark.parametrize("model", MODELS)
def test_steps_of_an_engine_have_the_bytes_that_they_have_without(tiny_folder: Callable[..., Path], model: str) -> None:
    """Rows come and go, prefixes are shared, sequences are pre-empted."""
    family, overrides = MODELS[model]
    engine = make_engine(
        tiny_folder(family, **(overrides | {"num_hidden_layers": 1})),
        kernels="triton",
        cuda_graphs=True,
        max_num_seqs=7,
        max_num_batched_tokens=20,
        pool_blocks=12,
    )
    assert engine.facts["cuda_graphs"] == (True, "engine.cuda_graphs")
    compared = Compared(engine.runner)  # type: ignore[arg-type]
    run_engine(engine)
    assert len(set(compared.rows)) > 1 and max(compared.rows) > 2
    assert compared.graphs.num_replayed > 0


def test_shapes_that_come_again_are_replayed(make_runner: Callable[..., LocalRunner]) -> None:
    runner = make_runner("llama", ONE_LAYER, kernels="triton", cuda_graphs=True, max_num_seqs=9, **HERE, **SIZES)
    compared, driver = Compared(runner), StepDriver(runner)
    ids = [driver.add([5 + i, 6, 7][: 1 + i % 3], (GREEDY, DRAWN)[i % 2], sample_key=i) for i in range(5)]
    driver.step(dict.fromkeys(ids, 3))  # prompts
    assert compared.rows == []
    for _ in range(3):
        driver.step(dict.fromkeys(ids, 1))
    # First it is run, then the largest shape and this one are captured, and from then on it is replayed.
    assert compared.rows == [5, 5, 5]
    graphs = compared.graphs
    assert (graphs.num_captured, graphs.num_replayed) == (2, 2)
    for _ in range(2):
        driver.step(dict.fromkeys(ids[:3], 1))
        driver.step(dict.fromkeys(ids[3:4], 1))
    assert (graphs.num_captured, graphs.num_replayed) == (4, 4)
    driver.step({ids[0]: 1, driver.add([9]): 1}, num_logits=1)
    assert compared.rows[-1] == 2
    driver.step(dict.fromkeys(ids[1:], 1), num_logits=0)  # whose hidden states nobody reads
    assert len(compared.rows) == 8
    runner.close()
    assert runner._graphs is None


class Pool:
    """As torch's allocator has pools: into one whose graphs are all gone nothing is captured any more."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Run] = weakref.WeakSet()
        self.is_used = False

    def __call__(self, run: Run) -> Run:
        assert self.graphs or not self.is_used

        def replay() -> Tensor:
            return run()

        self.graphs.add(replay)
        self.is_used = True
        return replay


def test_memory_that_grows_costs_the_graphs_and_their_pool(make_runner: Callable[..., LocalRunner]) -> None:
    runner = make_runner("llama", ONE_LAYER, kernels="triton", cuda_graphs=True, max_num_seqs=3, **HERE, **SIZES)
    compared, driver = Compared(runner), StepDriver(runner)
    graphs = compared.graphs
    if not ON_GPU:
        graphs._new_capture, graphs._capture = Pool, Pool()
    ids = [driver.add([5 + i]) for i in range(2)]
    for _ in range(3):
        driver.step(dict.fromkeys(ids, 1))
    assert (graphs.num_captured, graphs.num_replayed) == (2, 2)
    plans = graphs._plans[0]
    plans._reserve_entries(plans._num_entries + 1)
    for _ in range(3):
        driver.step(dict.fromkeys(ids, 1))
    assert (graphs.num_captured, graphs.num_replayed) == (4, 4)
    assert len(compared.rows) == 6


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_without_memory_for_a_graph_steps_run_on(make_runner: Callable[..., LocalRunner], error: Exception) -> None:
    runner = make_runner("llama", ONE_LAYER, kernels="triton", cuda_graphs=True, max_num_seqs=2, **HERE, **SIZES)
    compared, driver = Compared(runner), StepDriver(runner)

    def full(run: Run) -> Run:
        raise error

    compared.graphs._capture = full
    ids = [driver.add([5 + i]) for i in range(2)]
    for _ in range(4):
        driver.step(dict.fromkeys(ids, 1))
    # The third runs without, as all that follow.
    assert compared.rows == [2, 2]
    assert (compared.graphs.num_captured, compared.graphs.num_replayed) == (0, 0)
    assert [len(driver.output(seq_id)) for seq_id in ids] == [4, 4]


def test_what_else_goes_wrong_is_not_passed_over(make_runner: Callable[..., LocalRunner]) -> None:
    runner = make_runner("llama", ONE_LAYER, kernels="triton", cuda_graphs=True, max_num_seqs=1, **HERE, **SIZES)
    driver = StepDriver(runner)

    def broken(run: Run) -> Run:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    graphs_of(runner)._capture = broken
    seq_id = driver.add([5])
    driver.step({seq_id: 1})
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        driver.step({seq_id: 1})


def test_where_graphs_are_and_where_not(make_runner: Callable[..., LocalRunner], tiny_folder: Any) -> None:
    runner = make_runner("llama", ONE_LAYER, kernels="triton", **HERE, **SIZES)
    auto = "auto: a GPU" if ON_GPU else "auto: the interpreter"
    assert (runner.facts()["cuda_graphs"].value, runner.facts()["cuda_graphs"].source) == (ON_GPU, auto)
    assert make_runner("llama", ONE_LAYER, kernels="triton", cuda_graphs=False, **HERE, **SIZES)._graphs is None
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs: true needs engine\.kernels triton, here .* reference"):
        load_engine(EngineConfig(model=str(tiny_folder("llama")), kernels="reference", cuda_graphs=True))


def test_row_buckets() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(6) == (1, 2, 4, 6)
    assert row_buckets(8) == (1, 2, 4, 8)
    assert row_buckets(30) == (1, 2, 4, 8, 16, 24, 30)
    assert len(row_buckets(256)) == 3 + 32
