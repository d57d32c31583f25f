"""Steps in parts that have few partial results each: together they are the step, and no block is begun in two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batchinfer_kernels.probe import STRICT

from batchinfer.attention.tiles import AttentionShape, StepBatch, cut_batch, find_slots, ranges

BLOCK, SPLIT = 4, 16


def shape_of(window: int | None) -> AttentionShape:
    return AttentionShape(
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        block_size=BLOCK,
        split_size=SPLIT,
        window=window,
        row_rule=STRICT,
        device=torch.device("cpu"),
    )


def tokens_of(batch: StepBatch) -> list[tuple[int, int]]:
    """(first block of its sequence, position) of each; blocks are nobody else's here."""
    chunk = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    positions = batch.starts[chunk] + ranges(batch.lengths)
    return list(zip(batch.block_tables[chunk, 0].tolist(), positions.tolist(), strict=True))


def num_results(batch: StepBatch, shape: AttentionShape) -> int:
    positions = np.array([position for _, position in tokens_of(batch)])
    splits = positions // SPLIT - shape.first_split(positions) + 1
    return int(splits[splits > 1].sum())


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("seed", range(8))
def test_parts_are_the_step(seed: int, window: int | None) -> None:
    draw, shape = np.random.default_rng(seed), shape_of(window)
    rows = int(draw.integers(1, 7))
    starts, lengths = draw.integers(0, 90, rows), draw.integers(1, 40, rows)
    batch = StepBatch(starts=starts, lengths=lengths, block_tables=np.arange(rows * 40).reshape(rows, 40))
    most = int(draw.integers(30, 60))  # a block's tokens have up to 4 x 8
    parts = cut_batch(batch, shape, most)
    assert [token for _, part in parts for token in tokens_of(part)] == tokens_of(batch)
    counts = [int(part.lengths.sum()) for _, part in parts]
    assert [first for first, _ in parts] == (np.cumsum(counts) - counts).tolist()
    assert min(counts) > 0 and all(part.lengths.min() > 0 for _, part in parts)
    assert all(num_results(part, shape) <= max(most, 32) for _, part in parts)
    assert len(parts) >= num_results(batch, shape) / max(most, 32)

    def found(batch: StepBatch) -> tuple[list[int], list[int]]:
        chunk = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        slots, fresh = find_slots(batch, shape, chunk, batch.starts[chunk] + ranges(batch.lengths))
        return slots.tolist(), fresh.tolist()

    slots, fresh = found(batch)
    of_parts = [found(part) for _, part in parts]
    assert [slot for more, _ in of_parts for slot in more] == slots
    assert [block for _, more in of_parts for block in more] == fresh


def test_what_has_room_is_not_cut() -> None:
    batch = StepBatch(starts=np.array([0, 30]), lengths=np.array([40, 1]), block_tables=np.arange(40).reshape(2, 20))
    shape = shape_of(None)
    ((first, part),) = cut_batch(batch, shape, num_results(batch, shape))
    assert first == 0 and part is batch
    assert len(cut_batch(batch, shape, num_results(batch, shape) - 1)) == 2
    # Not less than a block's tokens, and single tokens.
    assert [int(part.lengths.sum()) for _, part in cut_batch(batch, shape, 1)] == [16, *[4] * 6, 1]
