"""KV in int8: its rounding, the C code against the specification, sick tokens, and where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from batchinfer_kernels import kv8, reference
from batchinfer_kernels.native import attention, library
from batchinfer_kernels.table import resolve
from torch import Tensor

from batchinfer.attention.backend import AttentionBackend, TiledAttention, kv_bytes, make_attention
from batchinfer.attention.context import LayerCache
from batchinfer.attention.native import NativeAttention
from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import StepBatch
from batchinfer.runner.block_copies import copy_blocks
from batchinfer.types.step import BlockCopy

needs_c = pytest.mark.skipif(library.available() is not None, reason="no C kernels here")
BLOCK, SPLIT, DEVICE = 16, 256, torch.device("cpu")
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spec_of(head_dim: int, group: int = 3, **more: float | int | None) -> AttentionSpec:
    return AttentionSpec(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5, **more)  # type: ignore[arg-type]


def batch_of(start: int, length: int, table: list[int]) -> StepBatch:
    return StepBatch(starts=np.array([start]), lengths=np.array([length]), block_tables=np.array([table]))


def backend_of(kind: str, spec: AttentionSpec) -> AttentionBackend:
    ops = resolve("native" if kind == "native" else "cpu")
    return make_attention(spec, ops, kv_dtype=torch.int8, block_size=BLOCK, split_size=SPLIT, device=DEVICE)


class Paged:
    """A backend with caches of its own; what was never written is NaN where it is a scale."""

    def __init__(self, spec: AttentionSpec, num_blocks: int, kind: str = "native") -> None:
        self.spec, self.backend = spec, backend_of(kind, spec)
        self.k_cache, self.v_cache = (x.fill_(-1) for x in self.backend.new_caches(num_blocks))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        plan = self.backend.plan(batch)
        return self.backend.run(q, k, v, self.k_cache, self.v_cache, plan, spec=self.spec)


@contextmanager
def products_in(where: str) -> Iterator[None]:
    """With AMX's tiles, or without; skips the test where there are none."""
    functions, wanted = library.load(), where == "tiles"
    try:
        if functions.batchinfer_use_tiles(wanted) != wanted:
            pytest.skip("no tiles here")
        yield
    finally:
        functions.batchinfer_use_tiles(1)


@pytest.fixture(params=["tiles", "registers"])
def products(request: pytest.FixtureRequest) -> Iterator[None]:
    with products_in(request.param):
        yield


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "tiled":
        yield "tiled"
        return
    with products_in(request.param.split()[1]):
        yield "native"


both = pytest.mark.parametrize(
    "kind",
    ["tiled", *(pytest.param(f"native {where}", marks=needs_c) for where in ("tiles", "registers"))],
    indirect=True,
)


@pytest.mark.parametrize(("head_dim", "together"), [(64, 64), (48, 16), (80, 16), (96, 32), (4, 4)])
def test_turning_keeps_products_of_queries_and_keys(head_dim: int, together: int) -> None:
    q, k = normal(5, head_dim).double(), normal(7, head_dim, seed=1).double()
    assert kv8.turned_together(head_dim) == together
    assert torch.allclose(kv8.turn(q) @ kv8.turn(k).T, together * (q @ k.T))
    ones = kv8.turn(torch.eye(head_dim))
    assert set(ones.abs().unique().tolist()) <= {0.0, 1.0} and (ones != 0).sum() == head_dim * together


def test_a_large_dimension_costs_the_others_little() -> None:
    k = normal(40, 64)
    k[:, 5] *= 30
    rows, _ = kv8.to_rows(k[:, None], k[:, None])
    turned_back = kv8.turn(kv8.numbers(rows)[:, 0])
    plain, steps = kv8.quantize(k)
    error, plain_error = (turned_back - k).square().mean(), (plain * steps[:, None] - k).square().mean()
    assert error < plain_error / 5


def test_codes_are_within_half_a_step_and_zeros_stay_zeros() -> None:
    x = normal(50, 80) * torch.logspace(-20, 20, 50)[:, None]
    codes, steps = kv8.quantize(x)
    assert (codes.abs().amax(-1) == 127).all()
    assert ((codes * steps[:, None] - x).abs() <= 0.501 * steps[:, None]).all()
    for tiny in (0.0, 1e-31):
        codes, steps = kv8.quantize(torch.full((2, 16), tiny))
        assert not codes.any() and not steps.any()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@needs_c
def test_c_writes_the_rows_of_the_specification(head_dim: int, products: None) -> None:
    paged, table = Paged(spec_of(head_dim), 4), [2, 0, 3]
    plain = torch.full((4, 2, BLOCK, kv_bytes(head_dim, torch.int8)), -1, dtype=torch.int8)
    rows_of = [plain, plain.clone()]
    for start, tokens in ((0, 5), (5, 1), (6, 20), (26, 7)):  # ends within blocks, at offsets of all kinds
        k, v = normal(tokens, 2, head_dim, seed=start), normal(tokens, 2, head_dim, seed=start + 1)
        v[0, 1], v[-1, 0], k[0, 0] = 0, 1e-31, 1e-33  # the last two, even turned, are too small for a step
        paged(normal(tokens, 6, head_dim), k, v, batch_of(start, tokens, table))
        at = torch.arange(start, start + tokens)
        rows = ((torch.tensor(table)[at // BLOCK, None] * 2 + torch.arange(2)) * BLOCK + at[:, None] % BLOCK).view(-1)
        begun = torch.tensor([table[int(a) // BLOCK] for a in at if int(a) % BLOCK == 0], dtype=torch.int64)
        reference.kv_write(*kv8.to_rows(k, v), *rows_of, rows, begun)
    written = torch.tensor(table)[torch.arange(33) // BLOCK], torch.arange(33) % BLOCK
    got = attention.unpack_int8(paged.k_cache, paged.v_cache)
    at = written[0], slice(None), written[1]
    wanted = *kv8.split_rows(rows_of[0]), *kv8.split_rows(rows_of[1])
    for mine, specified in zip(got[:3], wanted, strict=False):
        assert torch.equal(mine[at], specified[at])
    zero = wanted[3] == 0  # whose scales mean nothing
    assert zero[at].sum() >= 8 and not got[2][at][zero[at]].any()
    assert torch.allclose(got[3][at][~zero[at]], wanted[3][at][~zero[at]], rtol=5e-6, atol=0)
    assert got[3][3].isfinite().all()  # also where nothing was written


def specified(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What `kv8` says of up to 320 tokens that attend to each other, over two splits."""
    rows, at = kv8.to_rows(k, v), torch.arange(len(q))
    k_rows, v_rows = (torch.zeros(20, 2, BLOCK, kv_bytes(spec.head_dim, torch.int8), dtype=torch.int8) for _ in "kv")
    k_rows[at // BLOCK, :, at % BLOCK], v_rows[at // BLOCK, :, at % BLOCK] = rows
    parts = [
        kv8.split_attention(
            q, k_rows, v_rows, torch.arange(20), at,
            split=split, split_size=SPLIT, scale=spec.scale, window=spec.window, softcap=spec.softcap,
        )
        for split in range(2)
    ]  # fmt: skip
    return reference.merge_splits(*(list(x) for x in zip(*parts, strict=True)))


@pytest.mark.parametrize(
    "spec",
    [
        *(spec_of(head_dim) for head_dim in HEAD_DIMS),
        *(spec_of(64, group) for group in (1, 2, 4, 5, 7, 8)),
        spec_of(64, softcap=3.0),
        spec_of(80, window=40),
    ],
    ids=lambda s: f"{s.num_heads // 2} x {s.head_dim}{' window' if s.window else ''}{' softcap' if s.softcap else ''}",
)
@needs_c
def test_c_gives_what_the_specification_says(spec: AttentionSpec, products: None) -> None:
    """But for weights that it rounds the other way, half a step apart. Over two splits."""
    length, dim = 300, spec.head_dim
    q, k, v = (normal(length, heads, dim, seed=i) for i, heads in enumerate((spec.num_heads, 2, 2)))
    q *= 3
    table = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    got = Paged(spec, 20)(q, k, v, batch_of(0, length, table.tolist()))
    wanted = specified(spec, q, k, v)
    error = (got - wanted).abs()
    assert error.max() < 0.02 and error.mean() < 2e-5
    # The rounding of weights alone, which it might have left out, is more.
    [tiled] = [Paged(spec, 20, "tiled")(q, k, v, batch_of(0, length, table.tolist()))]
    assert (got - tiled).abs().mean() > 10 * error.mean()


@pytest.mark.parametrize("odd", ["zeros", "small beside zeros", "sizes", "equal", "far", "tiny", "huge"])
@pytest.mark.parametrize("window", [None, 40])
@needs_c
def test_c_gives_what_the_specification_says_of_odd_scores_and_values(
    odd: str, window: int | None, products: None
) -> None:
    """Codes of weights are as fine as they can be, whatever the sizes of values and of those that weigh nothing
    (beside values 2^100 times as large a token counts as nothing)."""
    q, k, v = (normal(300, heads, 64, seed=i) for i, heads in enumerate((6, 2, 2)))
    if odd in ("zeros", "small beside zeros"):
        v[::3], k[::3] = 0, 2 * k[::3]
    if odd == "small beside zeros":
        v *= 1e-4
    if odd == "sizes":
        v *= torch.logspace(-12, 12, 300)[torch.randperm(300, generator=torch.Generator().manual_seed(5)), None, None]
    if odd == "equal":
        q[:] = 0
    if odd == "far":
        q *= 100  # many weights of less than 2^-126
    if odd in ("tiny", "huge"):
        v *= 1e-28 if odd == "tiny" else 1e35
    spec = spec_of(64, window=window)
    got, wanted = Paged(spec, 20)(q, k, v, batch_of(0, 300, [*range(20)])), specified(spec, q, k, v)
    error, size = (got - wanted).abs(), wanted.abs().amax(-1, keepdim=True)
    assert (error <= 0.02 * size).all()
    assert (error / size.clamp(min=1e-37)).mean() < 2e-4  # a row that sees zeros only has no size


@needs_c
def test_denormals_are_what_they_were_for_who_attends(products: None) -> None:
    q, k, v = normal(33, 6, 64), normal(33, 2, 64, seed=1), normal(33, 2, 64, seed=2)
    Paged(spec_of(64), 3)(q, k, v, batch_of(0, 33, [0, 1, 2]))
    small = torch.full((4_000_000,), 1e-39)  # so many that all threads have a part
    assert ((small * 0.5) > 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@both
def test_a_sick_token_is_kept_from_those_before_it(kind: str, value: float, where: str) -> None:
    spec, length, sick = spec_of(64), 300, 21
    q, k, v = normal(length, 6, 64), normal(length, 2, 64, seed=1), normal(length, 2, 64, seed=2)
    batch = batch_of(0, length, [*range(19)][::-1])
    healthy = Paged(spec, 19, kind)(q, k, v, batch)
    (k if where == "key" else v)[sick, 0, 5] = value
    got = Paged(spec, 19, kind)(q, k, v, batch)
    assert torch.equal(got[:sick], healthy[:sick])
    assert torch.equal(got[:, 3:], healthy[:, 3:])  # heads of the other KV head
    assert got[sick:, :3].isnan().all()


@both
def test_a_sick_query_spoils_its_own_result_only(kind: str) -> None:
    spec, length = spec_of(64), 40
    q, k, v = normal(length, 6, 64), normal(length, 2, 64, seed=1), normal(length, 2, 64, seed=2)
    batch = batch_of(0, length, [2, 1, 0])
    healthy = Paged(spec, 3, kind)(q, k, v, batch)
    q[7, 1, 3], q[9, 4, 0] = torch.nan, torch.inf
    got = Paged(spec, 3, kind)(q, k, v, batch)
    sick = torch.zeros(length, 6, dtype=torch.bool)
    sick[7, 1] = sick[9, 4] = True
    assert got[sick].isnan().all()
    assert torch.equal(got[~sick], healthy[~sick])


@both
def test_zeros_and_large_scores_stay_finite(kind: str) -> None:
    for spec in (spec_of(64), spec_of(64, softcap=50.0)):
        q, k, v = 300 * normal(33, 6, 64), 300 * normal(33, 2, 64, seed=1), normal(33, 2, 64, seed=2)
        q[5:9], k[3:8], v[4:12] = 0, 0, 0
        got = Paged(spec, 3, kind)(q, k, v, batch_of(0, 33, [0, 1, 2]))
        assert got.isfinite().all()
        assert (got[0] - v[0].repeat_interleave(3, 0)).abs().max() < 0.02
    assert not Paged(spec_of(64), 1, kind)(q[:3], k[:3], 0 * v[:3], batch_of(0, 3, [0])).any()


@both
@pytest.mark.parametrize("size", [3e4, 1e6, 1e12])
def test_a_token_that_sees_itself_only_gets_its_value_however_large_its_score(kind: str, size: float) -> None:
    """Float32 numbers are 256 apart there: a difference that is rounded once only may be that far above zero."""
    q, k, v = size * normal(40, 6, 64), size * normal(40, 2, 64, seed=1), normal(40, 2, 64, seed=2)
    got = Paged(spec_of(64, window=1), 3, kind)(q, k, v, batch_of(0, 40, [0, 1, 2]))
    assert (got - v.repeat_interleave(3, 1)).abs().max() < 0.02
    assert Paged(spec_of(64), 3, kind)(q, k, v, batch_of(0, 40, [0, 1, 2])).isfinite().all()


@both
def test_blocks_are_copied_as_the_runner_does(kind: str) -> None:
    """A sequence goes on from a copy of a block that another one has filled in part, with the same bytes. In native
    caches, whose heads lie apart, as in those of torch."""
    q, k, v = normal(12, 6, 64), normal(12, 2, 64, seed=1), normal(12, 2, 64, seed=2)
    paged = Paged(spec_of(64), 4, kind)
    paged(q[:9], k[:9], v[:9], batch_of(0, 9, [2]))
    before = [cache.clone() for cache in (paged.k_cache, paged.v_cache)]
    in_c = paged.backend.in_c(paged.k_cache, paged.v_cache, paged.spec)
    assert (in_c is not None) == (kind == "native")
    layer = LayerCache(group=0, spec=paged.spec, k_cache=paged.k_cache, v_cache=paged.v_cache, in_c=in_c)
    copy_blocks([layer], [BlockCopy(0, 2, 0)])
    for cache, old in zip((paged.k_cache, paged.v_cache), before, strict=True):
        assert cache.is_contiguous() == (kind == "tiled")
        assert torch.equal(cache, old[[2, 1, 2, 3]])
    outputs = [paged(q[9:], k[9:], v[9:], batch_of(9, 3, [block])) for block in (2, 0)]
    assert torch.equal(outputs[0], outputs[1])


def test_a_block_takes_what_is_said_of_it() -> None:
    for kind in ("tiled", *(["native"] if library.available() is None else [])):
        for cache in backend_of(kind, spec_of(80)).new_caches(7):
            assert cache.nbytes == 7 * 2 * BLOCK * kv_bytes(80, torch.int8) == 7 * 2 * BLOCK * 84


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 80])
@pytest.mark.parametrize("rows", range(1, 41))
@needs_c
def test_tiles_give_the_bytes_that_registers_give(rows: int, head_dim: int) -> None:
    """Of chunks of all lengths, which end within a tile's rows and within blocks: over two splits, with windows that
    begin within blocks, under a softcap; also of queries and keys that are not finite."""
    found: dict[str, list[Tensor]] = {}
    start = 240 + 3 * rows  # some chunks cross the end of a split, others lie behind it
    table = torch.randperm(40, generator=torch.Generator().manual_seed(rows)).tolist()
    for where in ("tiles", "registers"):
        with products_in(where):
            found[where] = []
            for more in ({}, {"window": 37}, {"window": 270}, {"softcap": 3.0}):
                spec = spec_of(head_dim, 1, **more)
                paged = Paged(spec, 40)
                for first, tokens in ((0, start), (start, rows)):
                    q, k, v = (normal(tokens, 2, head_dim, seed=i) for i in range(3))
                    k[tokens // 2] *= 50  # a weight that makes others' codes 0
                    found[where].append(paged(3 * q, k, v, batch_of(first, tokens, table)))
                k[0, 0, 3], q[rows // 2, 1, 1] = torch.nan, torch.inf
                found[where].append(paged(q, k, v, batch_of(start, rows, table)))
    for tiled, plain in zip(found["tiles"], found["registers"], strict=True):
        assert torch.equal(tiled.view(torch.int32), plain.view(torch.int32))
    assert found["tiles"][1].isfinite().all() and found["tiles"][2].isnan().any()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [5, 9, 16])
@needs_c
def test_tiles_give_the_bytes_that_registers_give_to_more_rows_than_are_given_at_once(
    group: int, head_dim: int
) -> None:
    """Groups whose queries have 100 to 512 rows, with any rest; windows that begin in any block of four."""
    found: dict[str, list[Tensor]] = {}
    table = torch.randperm(40, generator=torch.Generator().manual_seed(group)).tolist()
    for where in ("tiles", "registers"):
        with products_in(where):
            found[where] = []
            for more in ({}, {"window": 37}, {"window": 100}, {"softcap": 3.0}):
                spec = spec_of(head_dim, group, **more)
                paged = Paged(spec, 40)
                begin = 0
                for tokens in (290, 20, 23, 26, 29, 32):
                    q, k, v = (normal(tokens, heads, head_dim, seed=i) for i, heads in enumerate((2 * group, 2, 2)))
                    found[where].append(paged(q, k, v, batch_of(begin, tokens, table)))
                    begin += tokens
    for tiled, plain in zip(found["tiles"], found["registers"], strict=True):
        assert tiled.isfinite().all() and torch.equal(tiled, plain)


@pytest.mark.parametrize("split", [16, 48, 256, 1024])
@needs_c
def test_tiles_give_the_bytes_that_registers_give_in_splits_of_any_size(split: int) -> None:
    """Also to single queries of sequences that share splits."""
    found = []
    for where in ("tiles", "registers"):
        with products_in(where):
            backend = NativeAttention(spec_of(64), block_size=BLOCK, split_size=split, kv_dtype=torch.int8)
            caches = [x.fill_(-1) for x in backend.new_caches(100)]
            shared = [*range(70)]
            tables = [[*shared, 70 + 3 * i, 71 + 3 * i, 72 + 3 * i] for i in range(9)]
            for starts, lengths, own in (
                ([0], [1120], tables[:1]),
                ([1120] * 9, [5 * i + 1 for i in range(9)], tables),
                ([1121 + 5 * i for i in range(9)], [1] * 9, tables),
            ):
                tokens = sum(lengths)
                q, k, v = (normal(tokens, heads, 64, seed=i) for i, heads in enumerate((6, 2, 2)))
                batch = StepBatch(starts=np.array(starts), lengths=np.array(lengths), block_tables=np.array(own))
                found.append(backend.run(q, k, v, *caches, backend.plan(batch), spec=spec_of(64)))
    for tiled, plain in zip(found[:3], found[3:], strict=True):
        assert tiled.isfinite().all() and torch.equal(tiled, plain)


@needs_c
def test_it_runs_in_c_where_sizes_fit_and_in_torch_elsewhere() -> None:
    assert isinstance(backend_of("native", spec_of(64)), NativeAttention)
    assert isinstance(backend_of("native", spec_of(24)), TiledAttention)
