"""Planned attention over a paged cache: against dense attention, and the laws of batch-invariance, for every backend.

`test_native_attention` has what only the C backend needs.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from batchinfer_kernels.native import library
from batchinfer_kernels.native.attention import TileStep
from batchinfer_kernels.probe import RULES, RowRule, find_row_rule
from batchinfer_kernels.table import resolve
from torch import Tensor

from batchinfer.attention.backend import AttentionBackend, TiledAttention
from batchinfer.attention.context import DenseContext
from batchinfer.attention.native import NativeAttention
from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import StepBatch, product_tiles

NUM_BLOCKS, BLOCK, SPLIT = 220, 16, 256
# Largest difference from dense attention in float32: bfloat16 is thousands of times coarser, int8 again several times.
TOLERANCE = {"tiled": 5e-6, "tiled int8": 5e-2, "native": 2e-2, "native int8": 8e-2}

needs_c = pytest.mark.skipif(library.available() is not None, reason="no C kernels here")
NATIVE = [pytest.param(kind, marks=needs_c) for kind in ("native", "native int8")]
every = pytest.mark.parametrize("kind", ["tiled", "tiled int8", *NATIVE])


def make(
    kind: str,
    spec: AttentionSpec,
    *,
    rule: RowRule = RULES[0],
    split_size: int = SPLIT,
    dtype: torch.dtype = torch.float32,
) -> AttentionBackend:
    name, *other = kind.split()
    if name == "native":
        kv_dtype = torch.int8 if other else torch.bfloat16
        return NativeAttention(spec, block_size=BLOCK, split_size=split_size, kv_dtype=kv_dtype)
    device = torch.device("cpu")
    ops = resolve("cpu", rows=rule)
    kv_dtype = torch.int8 if other else dtype
    return TiledAttention(spec, ops, block_size=BLOCK, split_size=split_size, device=device, kv_dtype=kv_dtype)


def caches(backend: AttentionBackend, num_blocks: int, value: float = torch.nan) -> tuple[Tensor, Tensor]:
    """Filled with a number; as int8 with the bytes of one in float32, as which its scales are read."""
    k_cache, v_cache = backend.new_caches(num_blocks)
    for cache in (k_cache, v_cache):
        if cache.dtype == torch.int8:
            cache.copy_(torch.full((cache.shape[-1] // 4,), value).view(torch.int8))
        else:
            cache.fill_(value)
    return k_cache, v_cache


class Sequence:
    """Random q, k, v of one sequence and its blocks."""

    def __init__(self, spec: AttentionSpec, length: int, blocks: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int) -> Tensor:
            return torch.randn(length, heads, spec.head_dim, generator=generator)

        self.q, self.k, self.v = normal(spec.num_heads), normal(spec.num_kv_heads), normal(spec.num_kv_heads)
        self.length = length
        self.blocks = blocks
        self.done = 0
        self.outputs: list[Tensor] = []


def run(
    spec: AttentionSpec,
    lengths: list[int],
    steps: list[dict[int, int]],
    *,
    kind: str,
    rule: RowRule = RULES[0],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    split_size: int = SPLIT,
) -> list[Tensor]:
    """Attention of sequences of the given lengths; steps[i] = {sequence: tokens}. The caches start as NaN."""
    order = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sequences = []
    for i, length in enumerate(lengths):
        blocks, order = order[: -(-length // BLOCK)], order[-(-length // BLOCK) :]
        sequences.append(Sequence(spec, length, blocks, seed=100 + i))
    backend = make(kind, spec, rule=rule, split_size=split_size, dtype=dtype)
    k_cache, v_cache = caches(backend, NUM_BLOCKS)
    for step in steps:
        chunks = [(sequences[s], min(n, sequences[s].length - sequences[s].done)) for s, n in step.items()]
        chunks = [(s, n) for s, n in chunks if n > 0]
        if not chunks:
            continue
        tables = np.full((len(chunks), max(len(s.blocks) for s, _ in chunks)), -(1 << 40), dtype=np.int64)
        for row, (s, n) in zip(tables, chunks, strict=True):
            covered = -(-(s.done + n) // BLOCK)
            row[:covered] = s.blocks[:covered]
        batch = StepBatch(
            starts=np.array([s.done for s, _ in chunks]),
            lengths=np.array([n for _, n in chunks]),
            block_tables=tables,
        )
        q, k, v = (
            torch.cat([getattr(s, name)[s.done : s.done + n] for s, n in chunks]).to(dtype) for name in ("q", "k", "v")
        )
        out = backend.run(q, k, v, k_cache, v_cache, backend.plan(batch), spec=spec)
        for (s, n), part in zip(chunks, out.split([n for _, n in chunks]), strict=True):
            s.outputs.append(part)
            s.done += n
    return [torch.cat(s.outputs) for s in sequences]


def dense(spec: AttentionSpec, length: int, index: int) -> Tensor:
    s = Sequence(spec, length, [], seed=100 + index)
    return DenseContext([spec], length).attend(0, s.q, s.k, s.v)


SPECS = {
    "gqa": AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125),
    "mha": AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=48, scale=0.15),
    "mqa": AttentionSpec(num_heads=8, num_kv_heads=1, head_dim=16, scale=0.25),
    "window": AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=8),
    "wide window": AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=300),
    "softcap": AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, softcap=2.0),
}
LENGTH = 530  # into the third split


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *(("tiled", rule) for rule in RULES),
        ("tiled int8", RULES[0]),
        *(pytest.param(kind, RULES[0], marks=needs_c) for kind in ("native", "native int8")),
    ],
)
def test_equals_dense_attention_and_does_not_depend_on_chunks(kind: str, name: str, rule: RowRule) -> None:
    spec = SPECS[name]
    [whole] = run(spec, [LENGTH], [{0: LENGTH}], kind=kind, rule=rule)
    assert (whole - dense(spec, LENGTH, 0)).abs().max() < TOLERANCE[kind]
    cuts = ([7] * 80, [16] * 40, [255, 1, 1, 1, 260, 8, 9], [300] + [1] * 230)
    for chunks in cuts if rule == RULES[0] else cuts[2:3]:
        [cut] = run(spec, [LENGTH], [{0: n} for n in chunks], kind=kind, rule=rule, seed=len(chunks))
        assert torch.equal(cut, whole), chunks[:3]


@pytest.mark.parametrize("name", ["gqa", "mha", "wide window"])
@every
def test_a_sequence_does_not_depend_on_its_batch(kind: str, name: str) -> None:
    spec = SPECS[name]
    lengths = [LENGTH, 1, 40, 257, 256, 90]
    together = run(spec, lengths, [dict(enumerate(lengths))], kind=kind)
    staggered = run(
        spec,
        lengths,
        [{0: 200}, {0: 1, 3: 100}, {5: 90, 0: 1, 2: 13}] + [{0: 33, 1: 1, 2: 1, 3: 17, 4: 64}] * 40,
        kind=kind,
        seed=3,
    )
    for a, b in zip(together, staggered, strict=True):
        assert torch.equal(a, b)


@every
def test_any_number_of_threads_gives_the_same_bytes(kind: str) -> None:
    """Also more threads than there are tiles."""
    spec, steps = SPECS["gqa"], [{0: 200, 1: 60}, {0: 1, 1: 1}, {0: 1}, {0: 120, 1: 1}]
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(run(spec, [322, 62], steps, kind=kind))
    torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@every
def test_any_number_of_threads_gives_the_same_bytes_where_much_work_is_light(kind: str) -> None:
    """Beside a long chunk, so many short sequences that threads take some of their tiles at once."""
    spec, lengths = SPECS["gqa"], [300, *(17 + i % 12 for i in range(90))]
    steps = [{0: 200}, {i: n - 1 for i, n in enumerate(lengths) if i}, {0: 100, **dict.fromkeys(range(1, 91), 1)}]
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(run(spec, lengths, steps, kind=kind))
    torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@every
def test_many_decode_rows_have_the_same_bytes_as_each_alone(kind: str) -> None:
    spec = SPECS["gqa"]
    lengths = [40 + i for i in range(40)]
    prefill = {i: n - 2 for i, n in enumerate(lengths)}
    ones = dict.fromkeys(range(40), 1)
    together = run(spec, lengths, [prefill, ones, ones], kind=kind)
    apart = run(
        spec,
        lengths,
        [{i: n} for i, n in prefill.items()] + [{i: 1} for i in (*range(40), *range(40))],
        kind=kind,
        seed=1,
    )
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@every
def test_a_shared_prefix_is_read_once_and_changes_no_bytes(kind: str) -> None:
    """Sequences whose first two splits lie in the same blocks, beside one that has them in blocks of its own."""
    spec, shared, tail = SPECS["gqa"], 2 * SPLIT, 3
    prefix = Sequence(spec, shared + 40, [], seed=1)
    results = []
    for num_shared in (0, 2, 11, 40):
        backend = make(kind, spec)
        k_cache, v_cache = caches(backend, NUM_BLOCKS * 6)

        def attend(q: Tensor, k: Tensor, v: Tensor, starts: list[int], lengths: list[int], tables: list[list[int]]):  # type: ignore[no-untyped-def]
            batch = StepBatch(
                starts=np.array(starts), lengths=np.array(lengths), block_tables=np.array(tables, dtype=np.int64)
            )
            plan = backend.plan(batch)  # noqa: B023
            return plan, backend.run(q, k, v, k_cache, v_cache, plan, spec=spec)  # noqa: B023

        blocks = shared // BLOCK
        owners = max(num_shared, 1)
        tables = [[*range(blocks), blocks + 2 * i, blocks + 2 * i + 1] for i in range(owners)]
        tables.append([1000 + i for i in range(blocks + 2)])
        for table in (tables[0], tables[-1]):
            at = slice(0, shared)
            attend(prefix.q[at], prefix.k[at], prefix.v[at], [0], [shared], [table])
        outputs = []
        for step in range(tail):
            at = slice(shared + step, shared + step + 1)
            q, k, v = (x[at].repeat(len(tables), 1, 1) for x in (prefix.q, prefix.k, prefix.v))
            plan, out = attend(q, k, v, [shared + step] * len(tables), [1] * len(tables), tables)
            assert all(torch.equal(row, out[0]) for row in out)
            outputs.append(out[0])
            if isinstance(plan, TileStep):
                num_tiles = plan.num_tiles
            else:
                num_tiles = sum(slab.num_tiles for slab in plan.slabs)
            # Two shared splits, in tiles of up to 32 queries, two of the sequence on its own, and everyone's last one.
            assert num_tiles == 2 * (1 if owners <= 32 else 2) + 2 + owners + 1
        results.append(torch.stack(outputs))
    assert all(torch.equal(r, results[0]) for r in results)


@every
def test_queries_in_bfloat16_give_bfloat16(kind: str) -> None:
    spec = SPECS["gqa"]
    [got] = run(spec, [300], [{0: 290}, {0: 10}], kind=kind, dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert (got.float() - dense(spec, 300, 0)).abs().max() < 1e-2 + max(TOLERANCE[kind], 2e-2)


@every
def test_what_a_block_held_before_does_not_matter(kind: str) -> None:
    """The second owner of a block gives the same bytes over NaN, infinity and zeros."""
    spec = SPECS["gqa"]
    backend = make(kind, spec)
    s = Sequence(spec, 21, [2, 0], seed=0)
    results = []
    for stale in (0.0, torch.nan, torch.inf, -1e30):
        k_cache, v_cache = caches(backend, 3, stale)
        parts = []
        for start, n in ((0, 5), (5, 1), (6, 11), (17, 4)):
            batch = StepBatch(
                starts=np.array([start]), lengths=np.array([n]), block_tables=np.array([s.blocks], dtype=np.int64)
            )
            at = slice(start, start + n)
            plan = backend.plan(batch)
            parts.append(backend.run(s.q[at], s.k[at], s.v[at], k_cache, v_cache, plan, spec=spec))
        results.append(torch.cat(parts))
    assert results[0].isfinite().all()
    assert all(torch.equal(r, results[0]) for r in results[1:])


@pytest.mark.parametrize("split_size", [16, 80, 144, 208, 256, 512, 1024])
@every
def test_splits_of_any_size(kind: str, split_size: int) -> None:
    """Under the rule that the probe finds for this size, as in an engine: wide products need not obey the first."""
    spec = SPECS["gqa"]
    tiles = partial(product_tiles, head_dim=64, group=3, split_size=split_size, block_size=BLOCK)
    facts = find_row_rule([(64, 64)], attention=lambda rule: tiles(rule=rule))
    assert facts.holds
    [whole] = run(spec, [LENGTH], [{0: LENGTH}], kind=kind, rule=facts.rule, split_size=split_size)
    assert (whole - dense(spec, LENGTH, 0)).abs().max() < 2 * TOLERANCE[kind]
    steps = [{0: n} for n in (7, 1, 130, 1, 391)]
    [cut] = run(spec, [LENGTH], steps, kind=kind, rule=facts.rule, split_size=split_size)
    assert torch.equal(whole, cut)


def test_split_must_hold_whole_blocks() -> None:
    with pytest.raises(ValueError, match="split_size 100 is not a multiple of block_size 16"):
        TiledAttention(SPECS["mha"], resolve(), block_size=16, split_size=100, device=torch.device("cpu"))
