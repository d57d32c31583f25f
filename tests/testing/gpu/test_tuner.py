"""Tuning: to better neighbours until none is better, past those that are refused or give other results."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from batchinfer_kernels.tuning import config, trial
from torch import Tensor

from batchinfer.testing.gpu.kernels import Case, Work
from batchinfer.testing.gpu.tuner import neighbours, tune

CPU = torch.device("cpu")
DEFAULTS = {80: {"BLOCK": 16, "num_warps": 4, "num_stages": 2}}


@dataclass
class FakeKernel:
    """Faster with larger blocks, up to 64, and with three stages; wrong with blocks of 8; can't be launched with 16
    warps, nor with blocks of 128."""

    launched: dict[str, int] = field(default_factory=dict)

    def run(self) -> Tensor:
        self.launched = dict(config("fake", DEFAULTS, CPU))
        if self.launched["BLOCK"] > 64 or self.launched["num_warps"] > 8:
            raise RuntimeError("out of resources")
        return torch.ones(4) * (2.0 if self.launched["BLOCK"] == 8 else 1.0)

    @property
    def device(self) -> torch.device:
        return CPU

    def __call__(self, run) -> float:  # type: ignore[no-untyped-def]
        """As a timer."""
        run()
        at = self.launched
        if at["BLOCK"] == 8:
            return 1e-6
        return 1.0 / at["BLOCK"] + 0.01 * abs(at["num_stages"] - 3) + 0.001 * at["num_warps"]


def test_it_finds_the_best_one_and_none_that_is_wrong() -> None:
    kernel, said = FakeKernel(), []
    case = Case("fake", lambda: Work(run=kernel.run, num_bytes=1.0))
    other = Case("other", lambda: Work(run=lambda: torch.zeros(1), num_bytes=1.0))
    tuned = tune("fake", [other, case], kernel, said.append)  # type: ignore[arg-type]
    assert tuned.best == {"BLOCK": 64, "num_warps": 1, "num_stages": 3}
    assert tuned.before == DEFAULTS[80] and tuned.cases == ("fake",) and tuned.gain > 2
    assert len(said) == tuned.num_tried > tuned.num_refused > 0
    assert any("the result is another one" in text for text in said)
    with pytest.raises(ValueError, match="no case launches a kernel of the name 'none'"):
        tune("none", [case], kernel, said.append)  # type: ignore[arg-type]


def test_neighbours_are_one_number_away() -> None:
    found = list(neighbours({"BLOCK": 2, "num_warps": 16, "num_stages": 1}))
    assert found == [
        {"BLOCK": 1, "num_warps": 16, "num_stages": 1},
        {"BLOCK": 4, "num_warps": 16, "num_stages": 1},
        {"BLOCK": 2, "num_warps": 8, "num_stages": 1},
        {"BLOCK": 2, "num_warps": 16, "num_stages": 2},
    ]


def test_a_trial_ends() -> None:
    with trial({"fake": {"BLOCK": 1}}) as asked:
        assert config("fake", DEFAULTS, CPU) == {"BLOCK": 1}
        assert config("other", DEFAULTS, CPU) == DEFAULTS[80]
    assert asked == {"fake": {"BLOCK": 1}, "other": DEFAULTS[80]}
    assert config("fake", DEFAULTS, CPU) == DEFAULTS[80]
