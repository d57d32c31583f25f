"""A LocalRunner against transformers: logits through prefill, chunks and decode, for every member of the family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer.runner.local import LocalRunner
from batchinfer.testing.oracle import Oracle
from batchinfer.testing.step_driver import StepDriver
from batchinfer.testing.tiny import FAMILIES, VOCAB_SIZE

NUM_TOKENS = 300  # into the second split of 256


class RecordingModel:
    """Hands everything to a model and keeps its logits."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.compute_logits(hidden)
        self.logits.append(logits.clone())
        return logits

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Holds the model to what it says of `greedy`, too."""
        logits = self.compute_logits(hidden)
        tokens, finite = self._model.greedy(hidden)
        assert torch.equal(tokens, logits.argmax(-1)) and finite.all()
        return tokens, finite


def all_logits(runner: LocalRunner, tokens: list[int], chunk_sizes: list[int]) -> Tensor:
    """Logits [T, V] of a sequence that runs in chunks of the given sizes, the last size repeated."""
    model = RecordingModel(runner._model)
    runner._model = model  # type: ignore[assignment]
    driver = StepDriver(runner, next_step=runner._next_step)
    seq_id = driver.add(tokens)
    sizes = iter(chunk_sizes)
    size = 0
    while driver.num_computed[seq_id] < len(tokens):
        size = next(sizes, size)
        left = len(tokens) - driver.num_computed[seq_id]
        driver.step({seq_id: size}, num_logits=min(size, left))
    runner._model = model._model
    return torch.cat(model.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_and_do_not_depend_on_chunks(
    family: str, make_runner: Callable[..., LocalRunner], tiny_folder: Callable[..., Path]
) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=generator).tolist()
    expected = Oracle(tiny_folder(family)).logits(tokens)
    runner = make_runner(family)
    whole = all_logits(runner, tokens, [NUM_TOKENS])
    assert (whole - expected).abs().max() < 1e-3
    # Token by token only over a split's edge; for one member all the way.
    for sizes in ([1] if family == "smollm" else [240, *[1] * 24, 36], [7], [16]):
        assert torch.equal(all_logits(runner, tokens, sizes), whole), sizes
