"""Plans that are padded and kept: what is launched with them gives the bytes of plans made for the step, and what pads
them touches nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batchinfer_kernels.triton.attention import TilePlan

from batchinfer.attention.kept_plans import KeptPlans, rounded_up
from batchinfer.attention.tiles import StepBatch
from batchinfer.attention.triton import KeptPlan
from tests.kernels.triton.device import HOST
from tests.kernels.triton.paged import Paged, batch_of, normal, spec_of

# Two sequences share two splits of 16 tokens in the same blocks of 4; the others have from 1 token to 3 splits. The
# third begins a block, the fourth fills its last one, the sixth is new.
SHARED = list(range(8))
TABLES = [[*SHARED, 8], [*SHARED, 9], [10, 11], [12, 13, 14, 15], list(range(16, 28)), [28]]
ENDS = [33, 35, 4, 15, 47, 0]
NUM_BLOCKS = 32


def batch_of_next(sequences: list[int]) -> StepBatch:
    """One token of each, behind those that it has."""
    return batch_of([ENDS[s] for s in sequences], [1] * len(sequences), [TABLES[s] for s in sequences])


class Both:
    """One cache under plans made for the step, and one under kept plans, with equal bytes before each step."""

    def __init__(self, max_rows: int = 8, max_len: int = 48, **options: Any) -> None:
        window = options.pop("window", None)
        self.eager, self.kept = (Paged(spec_of(window=window), NUM_BLOCKS, **options) for _ in range(2))
        if self.eager.k_cache.dtype == torch.int8:  # not any bytes are numbers
            for s, length in enumerate(ENDS[:-1]):
                self.run(self.eager, batch_of([0], [length], [TABLES[s]]), seed=s)
        else:
            for nth, cache in enumerate((self.eager.k_cache, self.eager.v_cache)):
                cache.copy_(normal(*cache.shape, seed=nth))
        with HOST:
            self.plans = KeptPlans(self.kept.backend, max_rows=max_rows, max_len=max_len)
        self.used: dict[tuple[int, tuple[int, ...]], KeptPlan] = {}
        self.num_again = 0

    def run(self, paged: Paged, batch: StepBatch, *, seed: int, plan: TilePlan | None = None, rows: int = 0) -> Any:
        tokens = int(batch.lengths.sum())
        inputs = []
        for nth, heads in enumerate((6, 2, 2)):
            x = normal(tokens, heads, 16, seed=10 * seed + nth)
            if rows:
                sick = torch.full((rows - tokens, heads, 16), torch.nan, dtype=x.dtype, device=x.device)
                x = torch.cat([x, sick])
            inputs.append(x)
        if plan is None:
            return paged(*inputs, batch)
        return paged.backend.run(*inputs, paged.k_cache, paged.v_cache, plan, spec=paged.spec)

    def step(self, batch: StepBatch, rows: int, seed: int) -> tuple[int, ...]:
        """Runs it on both, and compares; the numbers of tiles of the kept plan."""
        for ours, theirs in ((self.kept.k_cache, self.eager.k_cache), (self.kept.v_cache, self.eager.v_cache)):
            ours.copy_(theirs)
        expected = self.run(self.eager, batch, seed=seed)
        generation = self.plans.generation
        with HOST:
            tiles = self.plans.write(batch, rows)
        if self.plans.generation != generation:
            self.used.clear()
        self.num_again += (rows, tiles) in self.used
        plan = self.used.setdefault((rows, tiles), self.plans.plan(rows, tiles))
        found = self.run(self.kept, batch, seed=seed, plan=plan, rows=rows)
        assert torch.equal(found[: len(expected)], expected)
        for ours, theirs in ((self.kept.k_cache, self.eager.k_cache), (self.kept.v_cache, self.eager.v_cache)):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        return tiles


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20}, {"kv_dtype": torch.int8}, {"deterministic": False}],
    ids=["plain", "window", "int8", "kinds"],
)
def test_a_step_has_the_bytes_that_it_has_with_a_plan_of_its_own(options: dict[str, Any]) -> None:
    """Also with the plan object of an earlier step of the same shape, since only what it points to is written."""
    both = Both(**options)
    for seed, (sequences, rows) in enumerate(
        [([0, 1, 2, 3, 4, 5], 8), ([5], 1), ([4], 2), ([5, 3, 1, 0, 4, 2], 8), ([2, 5, 3], 4), ([3, 2, 5], 4)]
    ):
        both.step(batch_of_next(sequences), rows, seed)
    assert both.num_again >= 2


def test_memory_that_grows_changes_the_generation() -> None:
    both = Both(max_rows=1, max_len=4)
    generation = both.plans.generation
    for seed in range(2):
        both.step(batch_of_next([0, 1, 2, 3, 4, 5]), 6, seed)
        both.step(batch_of_next([4]), 1, seed)
        assert both.plans.generation > generation if seed == 0 else both.plans.generation == generation
        generation = both.plans.generation


def test_what_was_told_of_fits_without_new_memory_but_for_partial_results() -> None:
    """All rows at their longest: arrays of whole numbers stay where they are."""
    both = Both(max_rows=6, max_len=48, deterministic=False)
    memory = {name: tensor.data_ptr() for name, tensor in both.plans._memory.items()}
    tables = [list(range(12 * i % 24, 12 * i % 24 + 12)) for i in range(6)]
    with HOST:
        both.plans.write(batch_of([47] * 6, [1] * 6, tables), 6)
    assert {name: tensor.data_ptr() for name, tensor in both.plans._memory.items()} == memory


def test_partial_results_that_memory_ended_for_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(max_rows=1, max_len=4)
    generation = both.plans.generation
    empty = torch.empty

    def full(*size: Any, **options: Any) -> Any:
        if size[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*size, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(torch.OutOfMemoryError):
            both.plans._reserve_entries(9)
    assert both.plans.generation > generation  # what was launched with what was there is not any more
    both.step(batch_of_next([0, 1, 2, 3, 4, 5]), 6, seed=1)


def test_padding_alone_touches_nothing() -> None:
    both = Both()
    before = [cache.clone().view(torch.uint8) for cache in (both.kept.k_cache, both.kept.v_cache)]
    with HOST:
        tiles = both.plans.write(None, 8)
    assert tiles == (8,)
    q, k = normal(8, 6, 16), normal(8, 2, 16)
    both.kept.backend.run(q, k, k, both.kept.k_cache, both.kept.v_cache, both.plans.plan(8, tiles), spec=both.kept.spec)
    after = [cache.view(torch.uint8) for cache in (both.kept.k_cache, both.kept.v_cache)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_is_launched_follows_from_rows_and_rounded_tiles() -> None:
    """Nothing that the host tells a kernel differs between two steps of one shape."""
    both = Both()
    plans = []
    with HOST:
        for sequences in ([2, 5, 3], [3, 2, 5]):
            tiles = both.plans.write(batch_of_next(sequences), 4)
            plans.append(both.plans.plan(4, tiles))
    for name in ("members", "positions", "entries", "block_tables", "merged", "slots", "fresh_blocks", "fresh_from"):
        one, other = (getattr(plan, name) for plan in plans)
        assert one.data_ptr() == other.data_ptr() and one.shape == other.shape
        assert one.data_ptr() % 16 == 0
    assert plans[0].num_entries == plans[1].num_entries
    for one, other in zip(plans[0].groups, plans[1].groups, strict=True):
        assert (one.kind, one.most, len(one.count)) == (other.kind, other.most, len(other.count))
        assert one.count.data_ptr() == other.count.data_ptr() and one.count.data_ptr() % 16 == 0


def test_rounded_up() -> None:
    assert [rounded_up(n) for n in range(14)] == [0, 1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    for n in np.random.default_rng(0).integers(4, 1 << 20, 100).tolist():
        assert n <= rounded_up(n) < 1.5 * n
        assert rounded_up(rounded_up(n)) == rounded_up(n)
