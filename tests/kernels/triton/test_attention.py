"""Attention to splits, and their merge, in the interpreter: against the reference, and the laws of batch-invariance.

The interpreter's products are numpy's, of blocks of one shape whatever the tile, so that here too a row's bytes are its
own. They are wrong for bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import reference
from batchinfer_kernels.table import resolve
from batchinfer_kernels.triton.attention import FEW, KIND, MANY, TilePlan, attend
from torch import Tensor

from batchinfer.attention.backend import TiledAttention
from batchinfer.attention.context import DenseContext
from batchinfer.attention.spec import AttentionSpec
from batchinfer.errors import ConfigError
from tests.kernels.triton.accuracy import check_close
from tests.kernels.triton.device import DEVICE, HOST, ON_GPU, WIDE, least_ulps, on_gpu
from tests.kernels.triton.paged import BLOCK, SPLIT, Paged, batch_of, normal, spec_of

TABLE = [7, 3, 12, 0, 9, 4, 1, 11, 5, 2]
LENGTH = 37  # into the third split, and not to a block's end


def inputs(spec: AttentionSpec, length: int, seed: int = 0, dtype: torch.dtype = WIDE) -> list[Tensor]:
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [normal(length, n, spec.head_dim, seed=seed + i, dtype=dtype) for i, n in enumerate(heads)]


def check_against_reference(paged: Paged, dtype: torch.dtype, steps: list[int], ulps: float | None = None) -> Tensor:
    q, k, v = inputs(paged.spec, sum(steps), dtype=dtype)
    found = paged.in_steps(q, k, v, TABLE, steps)
    check_close(
        found,
        lambda as_type: paged.expected(as_type(q), TABLE, dtype=as_type(torch.empty(0)).dtype),
        ulps=ulps or least_ulps(dtype),
    )
    return found


@pytest.mark.parametrize(
    "spec, dtype, steps",
    [
        (spec_of(16), WIDE, [LENGTH]),
        (spec_of(64, group=1), torch.float16, [18, 1, 1]),
        (spec_of(80, group=5, num_kv_heads=1), WIDE, [LENGTH]),
        (spec_of(96, group=4, num_kv_heads=1), torch.float16, [LENGTH]),
        (spec_of(128, group=8, num_kv_heads=1), torch.float16, [20]),
        (spec_of(192, group=2, num_kv_heads=1), WIDE, [18]),
        (spec_of(256, group=2, num_kv_heads=1), torch.float16, [18]),
        (spec_of(16, group=71, num_kv_heads=1), WIDE, [3]),  # more heads than a tile has rows
        (spec_of(16, window=5), WIDE, [LENGTH]),
        (spec_of(16, window=17), WIDE, [20, 17]),
        (spec_of(16, softcap=2.0), WIDE, [LENGTH]),
        (spec_of(16), WIDE, [1]),
        (spec_of(16), WIDE, [SPLIT]),
    ],
    ids=lambda x: f"{x.num_heads // x.num_kv_heads}x{x.head_dim}" if isinstance(x, AttentionSpec) else None,
)
def test_against_the_reference(spec: AttentionSpec, dtype: torch.dtype, steps: list[int]) -> None:
    check_against_reference(Paged(spec, 13, kv_dtype=dtype), dtype, steps)


@pytest.mark.parametrize("sink, window", [(-torch.inf, None), (0.0, 8), (5.0, None), (50.0, 8)])
def test_sinks(sink: float, window: int | None) -> None:
    """Once for each query, also where it sees several splits, and where it sees one."""
    spec = spec_of(16, window=window)
    sinks = torch.tensor([sink, 0.5, sink, -1.0, sink, 3.0])
    check_against_reference(Paged(spec, 13, sinks=sinks), WIDE, [19])


@pytest.mark.parametrize(
    "kv_dtype, head_dim, dtype",
    [
        (torch.float8_e4m3fn, 16, WIDE),
        (torch.float8_e4m3fn, 64, torch.float16),
        (torch.int8, 16, torch.float16),
        (torch.int8, 48, WIDE),
    ],
)
def test_coarse_caches(kv_dtype: torch.dtype, head_dim: int, dtype: torch.dtype) -> None:
    """To the numbers that their codes stand for."""
    scales = {"k_scales": torch.tensor([0.5, 2.0]), "v_scales": torch.tensor([0.03, 1.0])}
    more = scales if kv_dtype == torch.float8_e4m3fn else {}
    paged = Paged(spec_of(head_dim), 13, kv_dtype=kv_dtype, **more)
    # In int8 queries are turned, in float32, which is one more sum.
    found = check_against_reference(paged, dtype, [18, 1], ulps=8.0 if dtype == torch.float32 else 2.0)
    q, k, v = inputs(paged.spec, 19, dtype=dtype)
    error = (found - DenseContext([paged.spec], 19).attend(0, q, k, v)).abs()
    most = 0.3 if kv_dtype == torch.float8_e4m3fn else 0.05
    assert error.max() < (most + 0.05 if dtype == torch.bfloat16 else most)


@pytest.mark.parametrize(("head_dim", "block_size"), [(20, 5), (18, 6)])
def test_int8_codes_in_blocks_of_an_odd_size(head_dim: int, block_size: int) -> None:
    """Their scales stand behind them, at addresses of float32."""
    paged = Paged(spec_of(head_dim), 13, kv_dtype=torch.int8, block_size=block_size, split_size=3 * block_size)
    check_against_reference(paged, WIDE, [18, 1], ulps=8.0)


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "what"),
    [
        (264, WIDE, "heads have 264 dimensions, and at most 256"),
        (18, torch.int8, "heads of 18 dimensions needs blocks of a multiple of 2 tokens, not of 5"),
        (15, torch.int8, "heads of 15 dimensions needs blocks of a multiple of 4 tokens, not of 5"),
    ],
)
def test_heads_that_tiles_can_not_have_are_refused(head_dim: int, kv_dtype: torch.dtype, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"kernels triton can't be used here: .*{what}.*; use .* cpu"):
        Paged(spec_of(head_dim), 1, kv_dtype=kv_dtype, block_size=5, split_size=15)


@pytest.mark.parametrize("split_size", [4, 80])
def test_splits_of_any_size(split_size: int) -> None:
    check_against_reference(Paged(spec_of(16, window=21), 25, split_size=split_size), WIDE, [26])


def test_partial_results_and_their_log_sums() -> None:
    """As the reference has them for every split."""
    spec = spec_of(16)
    paged = Paged(spec, 13)
    q, k, v = inputs(spec, LENGTH)
    paged.in_steps(q, k, v, TABLE, [LENGTH])
    plan = paged.plan(batch_of([LENGTH - 1], [1], [TABLE]))
    assert plan.num_entries == 3
    partial, log_sums = torch.empty(3, 6, 16), torch.empty(3, 6)
    last = q[-1:].contiguous()
    attend(
        last,
        paged.k_cache,
        paged.v_cache,
        plan,
        torch.empty_like(last),
        partial,
        log_sums,
        block_size=BLOCK,
        scale=spec.scale,
    )
    for split in range(3):
        for name, found in (("out", partial), ("lse", log_sums * torch.log(torch.tensor(2.0)))):

            def compute(as_type, split=split, name=name):  # type: ignore[no-untyped-def]
                out, lse = reference.split_attention(
                    as_type(last),
                    as_type(paged.k_cache),
                    as_type(paged.v_cache),
                    torch.tensor(TABLE),
                    torch.tensor([LENGTH - 1]),
                    split=split,
                    split_size=SPLIT,
                    scale=spec.scale,
                )
                return out[0] if name == "out" else lse[0]

            # Rounded as what was multiplied is: weights are, before they meet values.
            check_close(found[split].to(WIDE), compute, ulps=2.0)


def ragged(deterministic: bool) -> tuple[Tensor, Tensor, TilePlan]:
    """(what a step of several sequences gives, what the torch backend gives, the plan): a prompt, a chunk of one behind
    what it has, and tokens of sequences of which three share a split."""
    spec = spec_of(16)
    shared = list(range(100, 100 + SPLIT // BLOCK))
    tables = [
        [0, 1, 2, 3, 4, 5],
        [10, 11, 12, 13, 14, 15, 16, 17, 18],
        [*shared, 20],
        [*shared, 21, 22],
        [*shared, 23],
        [30, 31],
    ]
    before = [0, 18, 16, 20, 17, 0]
    now = [22, 16, 1, 1, 1, 1]
    ours = Paged(spec, 110, deterministic=deterministic)
    tiled = TiledAttention(spec, resolve("cpu"), block_size=BLOCK, split_size=SPLIT, device=DEVICE)
    caches = [cache.fill_(torch.nan) for cache in tiled.new_caches(110)]
    prefix = inputs(spec, SPLIT, seed=50)
    outputs, plan = [], None
    for starts, lengths in (([0] * 6, before), (before, now)):
        at = [i for i in range(6) if lengths[i]]
        sequences = [inputs(spec, before[i] + now[i], seed=10 * i) for i in range(6)]
        for i in (2, 3, 4):
            for x, of_prefix in zip(sequences[i], prefix, strict=True):
                x[:SPLIT] = of_prefix
        q, k, v = (torch.cat([sequences[i][j][starts[i] : starts[i] + lengths[i]] for i in at]) for j in range(3))
        batch = batch_of([starts[i] for i in at], [lengths[i] for i in at], [tables[i] for i in at])
        plan = ours.plan(batch)
        with HOST:
            of_tiled = tiled.plan(batch)
        outputs = [ours(q, k, v, batch), tiled.run(q, k, v, *caches, of_tiled, spec=spec)]
    assert plan is not None
    return outputs[0], outputs[1], plan


@pytest.mark.parametrize("deterministic", [True, False])
def test_equals_the_torch_backend_on_a_ragged_batch(deterministic: bool) -> None:
    found, expected, plan = ragged(deterministic)
    assert (found - expected).abs().max() < (0.03 if ON_GPU else 2e-6)
    assert {tiles.kind for tiles in plan.groups} == ({KIND} if deterministic else {FEW, MANY})
    counts = torch.cat([tiles.count for tiles in plan.groups]).tolist()
    assert 3 in counts  # the shared split
    # Other tiles: 21 + 1 queries in 2 splits, 16 in 3, what is behind the shared split, and a sequence of one token.
    assert not deterministic or len(counts) == 1 + 2 * 2 + 3 + 3 + 1


def test_a_sequence_does_not_depend_on_its_batch_or_its_chunks() -> None:
    spec = spec_of(16)
    q, k, v = inputs(spec, LENGTH)
    whole = Paged(spec, 13).in_steps(q, k, v, TABLE, [LENGTH])
    for steps in ([16, 16, 5], [1, 30, 1, 1, 4], [22, 15]):
        assert torch.equal(Paged(spec, 13).in_steps(q, k, v, TABLE, steps), whole), steps
    # Among others, in other blocks.
    paged = Paged(spec, 60)
    others = [inputs(spec, 20, seed=7), inputs(spec, 1, seed=17), inputs(spec, 33, seed=27)]
    tables = [[40, 41, 42, 43, 44], [45], [46, 47, 48, 49, 50, 51, 52, 53, 54], [20 + b for b in TABLE]]
    q, k, v = (torch.cat([*(other[i] for other in others), x]) for i, x in enumerate((q, k, v)))
    among = paged(q, k, v, batch_of([0] * 4, [20, 1, 33, LENGTH], tables))
    assert torch.equal(among[-LENGTH:], whole)


@pytest.mark.parametrize("window", [None, 20])
def test_parts_of_a_step_change_no_bytes(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """A chunk behind what its sequence has, one that begins a block which it does not fill, and single tokens: where
    there is room for few partial results, one part after the other."""
    spec = spec_of(16, window=window)
    tables = [list(range(10)), list(range(20, 27)), list(range(30, 39)), list(range(40, 51))]
    before, now = [10, 0, 33, 40], [30, 26, 1, 1]
    whole, cut = Paged(spec, 60), Paged(spec, 60)
    for paged in (whole, cut):
        at = [0, 2, 3]
        paged(*inputs(spec, sum(before)), batch_of([0] * 3, [before[i] for i in at], [tables[i] for i in at]))
    batch, step = batch_of(before, now, tables), inputs(spec, sum(now), seed=9)
    expected = whole(*step, batch)
    assert not whole.plan(batch).more
    monkeypatch.setattr("batchinfer.attention.triton.PARTIAL_BYTES", 20 * 4 * spec.num_heads * (spec.head_dim + 1))
    plan = cut.plan(batch)
    sizes = [part.num_entries for part in (plan, *plan.more)]
    assert len(sizes) > 2 and max(sizes) <= 20
    assert torch.equal(cut(*step, batch), expected)
    for ours, theirs in ((cut.k_cache, whole.k_cache), (cut.v_cache, whole.v_cache)):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
def test_a_shared_split_changes_no_bytes(kv_dtype: torch.dtype) -> None:
    """Many sequences at the same token behind the same prefix, beside one that has it in blocks of its own."""
    spec = spec_of(16, num_kv_heads=1)
    per_split = SPLIT // BLOCK
    q, k, v = inputs(spec, SPLIT + 1, dtype=torch.float16)
    paged = Paged(spec, 60, kv_dtype=kv_dtype)
    for table in (range(per_split), range(10, 10 + per_split)):
        paged(q[:SPLIT], k[:SPLIT], v[:SPLIT], batch_of([0], [SPLIT], [table]))
    tables = [[*range(per_split), 30 + i] for i in range(23)] + [[*range(10, 10 + per_split), 20]]
    last = [x[SPLIT:].repeat(24, 1, 1) for x in (q, k, v)]
    batch = batch_of([SPLIT] * 24, [1] * 24, tables)
    # Tiles have 64 rows, 21 queries of 3 heads: the prefix in two, its copy, and everyone's own split.
    assert len(paged.plan(batch).groups[0].count) == 2 + 1 + 24
    out = paged(*last, batch)
    assert out.isfinite().all()
    assert all(torch.equal(row, out[0]) for row in out)


@pytest.mark.parametrize("kv_dtype", [WIDE, torch.int8, *on_gpu(torch.float8_e4m3fn)])
@pytest.mark.parametrize("where", [0, 1], ids=["key", "value"])
def test_a_sick_token_is_kept_from_those_before_it(where: int, kv_dtype: torch.dtype) -> None:
    """In float8 on GPUs only: the interpreter reads its NaN as 480."""
    spec, length, sick = spec_of(16), 21, 18
    q, k, v = inputs(spec, length)
    healthy = Paged(spec, 13, kv_dtype=kv_dtype).in_steps(q, k, v, TABLE, [length])
    (k, v)[where][sick, 0, 5] = torch.inf
    found = Paged(spec, 13, kv_dtype=kv_dtype).in_steps(q, k, v, TABLE, [length])
    assert torch.equal(found[:sick], healthy[:sick])
    assert torch.equal(found[:, 3:], healthy[:, 3:])  # heads of the other KV head
    assert found[sick:, :3].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # in tanh, which then is 1
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_large_scores_stay_finite(softcap: float | None) -> None:
    spec = spec_of(16, softcap=softcap)
    q, k, v = inputs(spec, 18)
    found = Paged(spec, 13).in_steps(300 * q, 300 * k, v, TABLE, [18])
    assert found.isfinite().all()
    assert (found[0] - v[0].repeat_interleave(3, 0)).abs().max() < 1e-5


def test_split_must_hold_whole_blocks() -> None:
    with pytest.raises(ValueError, match="split_size 10 is not a multiple of block_size 4"):
        Paged(spec_of(16), 1, split_size=10)


def test_what_has_left_the_window_is_not_read() -> None:
    """Whatever stands for it in the block table: here a block full of NaN."""
    spec, length = spec_of(16, window=3), 31
    q, k, v = inputs(spec, length)
    whole = Paged(spec, 13).in_steps(q, k, v, TABLE, [length])
    paged = Paged(spec, 13)
    paged.in_steps(q[:-1], k[:-1], v[:-1], TABLE, [length - 1])
    blocks = (length - 3) // BLOCK  # before the one with the first key that the last query sees
    table = [6] * blocks + TABLE[blocks:]
    assert torch.equal(paged(q[-1:], k[-1:], v[-1:], batch_of([length - 1], [1], [table])), whole[-1:])
