"""How much of a GPU's memory KV blocks get; the meter is a fake, the largest step is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.config import EngineConfig
from batchinfer.errors import ConfigError, OutOfMemory
from batchinfer.modelfiles import open_model
from batchinfer.runner.load import load_runner
from batchinfer.runner.local import LocalRunner
from batchinfer.runner.memory_profile import largest_step, measure_spare, spare_bytes
from batchinfer.testing.step_driver import StepDriver
from batchinfer.types.step import StepPlan, StepResult

GIB = 2**30
SIZES = {"max_num_seqs": 5, "max_num_batched_tokens": 100, "max_model_len": 40}


class Meter:
    """Of a device of 10 GiB."""

    def __init__(self, peak: int) -> None:
        self.peak = peak
        self.log: list[str] = []

    def begin(self) -> None:
        self.log.append("begin")

    def end(self) -> int:
        self.log.append("end")
        return self.peak

    def outside_bytes(self) -> int:
        return GIB

    def total_bytes(self) -> int:
        return 10 * GIB


def test_blocks_get_what_weights_activations_and_others_leave() -> None:
    numbers = {"total": 80 * GIB, "utilization": 0.9, "outside": GIB, "peak": 20 * GIB, "peak_kv": 2 * GIB}
    assert spare_bytes(**numbers) == (72 - 1 - 18) * GIB  # type: ignore[arg-type]
    assert spare_bytes(**numbers | {"utilization": 0.5}) == (40 - 1 - 18) * GIB  # type: ignore[arg-type]
    assert spare_bytes(**numbers | {"peak": 79 * GIB}) == 0  # type: ignore[arg-type]


def test_the_step_runs_while_it_is_measured() -> None:
    meter = Meter(3 * GIB)
    spare = measure_spare(lambda: meter.log.append("run"), meter, utilization=0.9, peak_kv=GIB)
    assert meter.log == ["begin", "run", "end"]
    assert spare == (9 - 1 - 2) * GIB


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ({}, [40, 40, 18, 1, 1]),
        ({"max_num_batched_tokens": 1000}, [40] * 5),  # as many as there can be
        ({"max_num_batched_tokens": 3}, [1] * 3),
        ({"max_num_batched_tokens": 5}, [1] * 5),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 16}, [16]),
    ],
)
def test_the_largest_step_is_full(limits: dict[str, int], lengths: list[int]) -> None:
    plan = largest_step(**SIZES | limits, block_size=16, num_groups=2)
    assert [len(chunk.token_ids) for chunk in plan.chunks] == lengths
    assert all(chunk.num_logits == 1 and chunk.start == 0 for chunk in plan.chunks)
    assert [spec.seq_id for spec in plan.added] == [chunk.seq_id for chunk in plan.chunks]
    blocks = -(-max(lengths) // 16)
    assert all([list(table) for table in chunk.block_tables] == [list(range(blocks))] * 2 for chunk in plan.chunks)


def load(tiny_folder: Callable[..., Path], meter: Meter, **options: Any) -> LocalRunner:
    path = str(tiny_folder("llama"))
    settings = {"num_threads": 1, "quantization": "none", "kernels": "cpu", **SIZES, **options}
    return load_runner(open_model(path), EngineConfig(model=path, **settings), meter=meter)


def test_an_engine_sizes_its_blocks_by_it(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(GIB)
    lengths: list[list[int]] = []
    execute = LocalRunner.execute

    def noted(runner: LocalRunner, plan: StepPlan) -> StepResult:
        meter.log.append("run")
        lengths.append([len(chunk.token_ids) for chunk in plan.chunks])
        result = execute(runner, plan)
        assert len(result.token_ids) == len(result.logprobs) == len(plan.chunks)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(LocalRunner, "execute", noted)
        ample = load(tiny_folder, meter)
    assert (meter.log, lengths) == (["begin", "run", "end"], [[40, 40, 18, 1, 1]])
    facts = {name: fact.value for name, fact in ample.facts().items()}
    assert facts["num_blocks"] == 5 * 3  # all that the sequences can use
    block_bytes = int(facts["kv_cache_bytes"]) // 15
    # Of the device's 10 GiB a part is asked for that leaves 4.5 blocks beside 1 GiB outside, and the peak less its own.
    meter.peak = GIB + 3 * block_bytes
    share = (2 * GIB + 4.5 * block_bytes) / (10 * GIB)
    tight = load(tiny_folder, meter, gpu_memory_utilization=share)
    assert tight.facts()["num_blocks"].value == 4
    assert "that the largest step leaves of engine.gpu_memory_utilization" in tight.facts()["num_blocks"].source
    driver = StepDriver(tight)
    assert len(driver.generate([driver.add([5, 6, 7])], 4)[0]) == 4
    with pytest.raises(ConfigError, match="can't hold one sequence"):
        load(tiny_folder, meter, gpu_memory_utilization=0.2)
    meter.log.clear()
    assert load(tiny_folder, meter, kv_cache_memory=6 * block_bytes).facts()["num_blocks"].value == 6
    assert meter.log == []  # who says how much is not asked


def test_a_largest_step_that_does_not_fit_says_what_to_lower(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(runner: LocalRunner, plan: StepPlan) -> StepResult:
        raise OutOfMemory("a step of 100 tokens does not fit in memory")

    monkeypatch.setattr(LocalRunner, "execute", too_large)
    with pytest.raises(OutOfMemory, match=r"100 tokens .*; lower engine\.max_num_batched_tokens"):
        load(tiny_folder, Meter(GIB))
