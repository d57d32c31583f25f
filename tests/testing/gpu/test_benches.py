"""Benches as toys in the interpreter: each runs and has a number; a target that is missed is missed."""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import replace

import pytest
import torch

from batchinfer.testing.gpu.engine_benches import OFFLINE, EngineBenches, model_checks
from batchinfer.testing.gpu.kernel_benches import KernelBenches
from batchinfer.testing.gpu.kernels import Maker, cases, step_batch
from batchinfer.testing.gpu.outcome import Check, Clock, Line, attempt
from batchinfer.testing.gpu.sizes import TOY, WHOLE
from batchinfer.testing.gpu.timing import Rates, Timer
from batchinfer.testing.gpu.tuner import Timed, time_case

CPU = torch.device("cpu")
RATES = Rates(copy_bytes_s=1e9, product_ops_s=1e10)


def lines_of(checks: list[Check], clock: Clock | None = None) -> dict[str, Line]:
    return {check.name: attempt("benches", check, clock or Clock(600)) for check in checks}


def check_numbers(found: dict[str, Line]) -> None:
    for line in found.values():
        assert line.status in ("passed", "missed", "number"), line
        assert line.value is not None and line.value > -1 and math.isfinite(line.value), line


def test_benches_of_kernels() -> None:
    found = lines_of(list(KernelBenches(TOY, CPU).checks()))
    check_numbers(found)
    assert len(found) == 10


def test_benches_of_the_engine() -> None:
    benches = EngineBenches(TOY, CPU, Clock(600))
    found = lines_of(list(benches.checks()))
    check_numbers(found)
    rate = found[OFFLINE].value
    assert rate is not None
    benches.given = {OFFLINE: rate}
    check_numbers(lines_of(list(benches.loose_checks())))
    decode = next(line for name, line in found.items() if name.startswith("decode"))
    assert decode.numbers["context"] == pytest.approx(TOY.decode_context, abs=3)
    assert not benches.engine.has_unfinished()


def test_benches_of_models_with_experts_and_latents() -> None:
    """Each has gone before the next comes."""
    checks = list(model_checks(TOY, CPU, Clock(600)))
    found = lines_of(checks)
    check_numbers(found)
    assert [name.partition(":")[0] for name in found] == ["qwen3_moe, one layer"] * 2 + ["deepseek_v3, one layer"] * 2
    first, last = (check.run.args[0] for check in (checks[0], checks[-1]))  # type: ignore[attr-defined]
    assert "engine" not in vars(first) and "engine" in vars(last)
    for name, line in found.items():
        if "decode" in name:
            assert line.numbers["context"] == pytest.approx(TOY.decode_context, abs=3)


def test_what_steps_must_read_and_compute() -> None:
    """By hand, for a dense model."""
    benches = EngineBenches(WHOLE, CPU, Clock(60))
    layers = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert benches._weight_bytes(256) == 2 * (layers + 4096 * 128256 + 65 * 4096)
    attention = 4 * 4096 * 32 * 2048 * 2049 / 2
    assert benches._prompt_operations(8, 2048) == 8 * (2 * layers * 2048 + attention + 2 * 4096 * 128256)
    sparse = replace(benches, other_model=WHOLE.sparse_model)
    expert = 3 * 2048 * 768
    attention_weights = 48 * (2048 * 5120 + 4096 * 2048 + 128 * 2048)
    most, least = (2 * (attention_weights + 48 * n * expert + 2048 * 151936 + 97 * 2048) for n in (128, 8))
    assert sparse._weight_bytes(1) == pytest.approx(least)
    assert sparse._weight_bytes(256) == pytest.approx(most)


def test_a_step_that_takes_long_once_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineBenches, "_steps", lambda self, count: [*([1.0] * (count - 1)), 50.0])
    benches = EngineBenches(replace(TOY, decode_steps=5), CPU, Clock(600))
    (line,) = lines_of(list(benches.checks())[:1]).values()
    assert line.numbers["step_s"] == 1.0 and "mean 10800.00 ms" in line.text
    assert line.numbers["graphs"] is None  # in the interpreter


def test_an_engine_bench_ends_when_time_does() -> None:
    late = EngineBenches(TOY, CPU, Clock(-1.0))
    found = lines_of(list(late.checks()), Clock(60))
    assert {line.status for line in found.values()} == {"not run"}


def test_nothing_is_compared_with_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (line,) = lines_of(list(EngineBenches(TOY, CPU, Clock(60)).peer_checks())).values()
    assert (line.status, line.text) == ("number", "no peer installed: transformers is not there")
    (cost,) = lines_of(list(EngineBenches(TOY, CPU, Clock(60), deterministic=False).loose_checks())).values()
    assert cost.status == "failed" and "no result to be held against" in cost.text


def test_kernels_that_are_too_slow_miss_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes the same time: nothing is faster than anything."""
    monkeypatch.setattr(KernelBenches, "_seconds", lambda self, make, *arguments, **options: 1e-3)
    found = lines_of([check for check in KernelBenches(TOY, CPU).checks() if check.target is not None])
    assert {(line.status, line.value) for line in found.values()} == {("missed", 1.0)}
    assert len(found) == 3


CASES = {case.name: case for case in cases(TOY, CPU)}


@functools.cache
def timed(name: str) -> Timed:
    return time_case(CASES[name], Timer(device=CPU, runs=1, warm=0), RATES)


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_can_be_timed(name: str) -> None:
    found = timed(name)
    assert found.seconds > 0 and 0 < found.share < math.inf and found.bytes_s > 0
    assert found.configs


def test_no_kernel_is_left_out() -> None:
    """By the names of their configurations, which are read where they are asked for."""
    asked = {kernel for name in CASES for kernel in timed(name).configs}
    wanted = {"linear", "linear.16", "linear_int8", "linear_w4", "linear_fp8", "linear_mxfp4", "rms_norm", "activation"}
    wanted |= {"activation_row", "quantize", "lm_head", "lm_head.finish", "sampling.greedy", "sampling.sample"}
    wanted |= {"attention", "attention_few", "merge", "kv_store", "router", "align", "experts.plain", "combine"}
    assert wanted <= asked


def test_shapes_are_those_of_the_models() -> None:
    assert (WHOLE.experts.num_experts, WHOLE.experts.top_k, WHOLE.sparse.hidden_size) == (128, 8, 2048)
    assert WHOLE.experts.intermediate_size == 768
    assert (WHOLE.latent.num_heads, WHOLE.latent.rank, WHOLE.latent.row_size) == (128, 512, 576)
    assert WHOLE.latent.experts[0] is not None and WHOLE.latent.experts[0].num_experts == 256
    assert WHOLE.products == {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def test_sequences_share_the_blocks_of_their_prefix_and_no_others() -> None:
    batch, num_blocks = step_batch([11, 14, 8], [1, 1, 1], 4, shared=8)
    assert num_blocks == 2 + 1 + 2 + 1
    assert (batch.block_tables[:, :2] == batch.block_tables[0, :2]).all()
    own = [batch.block_tables[0, 2], *batch.block_tables[1, 2:4], batch.block_tables[2, 2]]
    assert len({*own, *batch.block_tables[0, :2]}) == num_blocks


def test_experts_of_no_token_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are alike here, and so go to the same two of four experts."""
    monkeypatch.setattr(Maker, "normal", lambda self, *shape, std=1.0: torch.ones(shape))
    at, rows = TOY.experts, 4
    hidden = TOY.sparse.hidden_size
    numbers = 3 * at.top_k * hidden * at.intermediate_size + at.num_experts * hidden + 2 * rows * hidden
    assert Maker(sizes=TOY, device=CPU).experts(rows).num_bytes == 4 * numbers
