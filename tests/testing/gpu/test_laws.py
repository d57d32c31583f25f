"""The engine's laws: they hold with the kernels as they are, and a kernel that breaks one is found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batchinfer_kernels.triton import ops
from torch import Tensor

from batchinfer.engine import Engine
from batchinfer.runner.fake import FakeRunner
from batchinfer.testing.gpu import laws
from batchinfer.testing.gpu.laws import Laws, engines_of
from batchinfer.testing.gpu.outcome import Check, Clock, Line, attempt
from batchinfer.testing.gpu.sizes import QUICK, TOY, WHOLE, LawModel
from batchinfer.types.step import KVGroup

# What numpy says of rows that are padding, as in tests of graphs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")


def attempt_all(checks: list[Check]) -> dict[str, Line]:
    clock = Clock(600)
    return {check.name.split(": ")[1]: attempt("laws", check, clock) for check in checks}


def fake_engines(model: LawModel) -> Callable[..., Engine]:
    def make_engine(num_blocks: int, *, max_model_len: int, cuda_graphs: bool = True, **options: Any) -> Engine:
        runner: Any = FakeRunner(kv_groups=[KVGroup(num_blocks=num_blocks, block_size=model.block_size)])
        runner._graphs = SimpleNamespace(num_replayed=int(cuda_graphs))
        return Engine(runner, max_model_len=max_model_len, vocab_size=int(model.config["vocab_size"]), **options)

    return make_engine


def test_they_hold() -> None:
    found = attempt_all(list(laws.checks(TOY, CPU, Clock(600))))
    assert {line.status for line in found.values()} == {"passed"}, found
    assert len(found) == 7
    assert found["without CUDA graphs"].text.endswith("launches of graphs in what it is held against")


def test_a_product_that_looks_at_its_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.linear

    def wrong(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return right(x, *arguments, **options) * (1 + 1e-5 * (len(x) == 1))

    monkeypatch.setattr(ops, "linear", wrong)
    checks = [check for check in laws.checks(TOY, CPU, Clock(600)) if "batches of 1" in check.name]
    (line,) = attempt_all(checks).values()
    assert line.status == "failed" and "rows differ" in line.text
    assert line.numbers["found"] != line.numbers["expected"]


@pytest.mark.parametrize("sizes", [WHOLE, QUICK, TOY], ids=lambda sizes: sizes.name)
def test_prefixes_are_cached_and_rows_pre_empted_at_these_sizes(sizes: Any) -> None:
    """What the fake runner shows in no time: it is the scheduler's doing."""
    for model in sizes.law_models.values():
        found = attempt_all(list(Laws(fake_engines(model), model, Clock(60)).checks("fake")))
        assert {line.status for line in found.values()} == {"passed"}, found


def test_a_law_that_was_not_tried_did_not_hold() -> None:
    model = TOY.law_models["tiny llama-bias"]
    never = Laws(fake_engines(model), model, Clock(60))._check("it", {}, lambda stats: stats.num_preemptions, "of it")
    line = attempt("laws", never, Clock(60))
    assert (line.status, line.text) == ("failed", "no of it: this run shows nothing")


def test_engines_have_the_same_weights_each_time_and_others_by_seed() -> None:
    model = TOY.law_models["tiny llama-bias"]
    first, second = (engines_of(model, torch.float32, CPU)(8, max_model_len=22) for _ in range(2))
    for a, b in zip(first.runner._model.parameters(), second.runner._model.parameters(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(a, b) and a.std() > 0
