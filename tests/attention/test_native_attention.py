"""Attention in C: its packed caches, its error, sick tokens, processors without bfloat16, and when it is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from batchinfer_kernels import reference
from batchinfer_kernels.native import attention, library
from batchinfer_kernels.table import resolve
from torch import Tensor

from batchinfer.attention.backend import TiledAttention, make_attention, why_not_c
from batchinfer.attention.native import NativeAttention
from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import StepBatch

pytestmark = pytest.mark.skipif(library.available() is not None, reason="no C kernels here")

BLOCK = 16
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)


@pytest.fixture(scope="module")
def without_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the library as a processor without AVX512_BF16 would have it."""
    return tmp_path_factory.mktemp("shifts")


def use_shifts(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-mno-avx512bf16"))
    monkeypatch.setattr(library, "_loaded", library.open_library(cache=cache))
    attention._functions.cache_clear()


@pytest.fixture(params=["bf16 instructions", "shifts"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, without_bf16: Path) -> Iterator[None]:
    if request.param == "shifts":
        use_shifts(monkeypatch, without_bf16)
    yield
    attention._functions.cache_clear()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(starts: list[int], lengths: list[int], tables: list[list[int]]) -> StepBatch:
    return StepBatch(starts=np.array(starts), lengths=np.array(lengths), block_tables=np.array(tables, dtype=np.int64))


class Paged:
    """A backend with caches of its own."""

    def __init__(self, spec: AttentionSpec, num_blocks: int, *, split_size: int = 256) -> None:
        self.spec = spec
        self.backend = NativeAttention(spec, block_size=BLOCK, split_size=split_size)
        self.k_cache, self.v_cache = (x.fill_(torch.nan) for x in self.backend.new_caches(num_blocks))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        plan = self.backend.plan(batch)
        return self.backend.run(q, k, v, self.k_cache, self.v_cache, plan, spec=self.spec)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, coarse: bool) -> Tensor:
    """Causal attention in float64 over keys and values as the cache holds them; `coarse` rounds the scaled queries and
    the weights (before they are divided by their sum) to bfloat16 as well."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (rounded(x).repeat_interleave(group, 1) for x in (k, v))
    scale = spec.scale / (spec.softcap or 1.0)
    queries = rounded(q * scale) if coarse else q.double() * scale
    scores = torch.einsum("thd,shd->hts", queries, keys)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores)
    at = torch.arange(len(q))
    behind = at[:, None] - at
    seen = (behind >= 0) & (behind < (spec.window or len(q)))
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    if coarse:
        weights = rounded(weights.float())
    return torch.einsum("hts,shd->thd", weights / total, values)


def spec_of(head_dim: int, group: int = 3, **more: float | int | None) -> AttentionSpec:
    return AttentionSpec(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5, **more)  # type: ignore[arg-type]


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
def test_error_is_that_of_the_rounding(spec: AttentionSpec, instructions: None) -> None:
    length = 300
    q, k, v = (normal(length, heads, spec.head_dim, seed=i) for i, heads in enumerate((spec.num_heads, 2, 2)))
    table = torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()
    got = Paged(spec, 20)(3 * q, k, v, batch_of([0], [length], [table]))
    exact = dense(3 * q, k, v, spec, coarse=False)
    expected_error = (dense(3 * q, k, v, spec, coarse=True) - exact).abs()
    error = (got - exact).abs()
    assert error.max() < 2 * expected_error.max()
    assert error.mean() < 1.2 * expected_error.mean()


def test_both_kinds_of_instructions_give_nearly_the_same(monkeypatch: pytest.MonkeyPatch, without_bf16: Path) -> None:
    """They add in another order or take denormals as zero; what they round to bfloat16 is the same."""
    if "avx512_bf16" not in library.check_machine():
        pytest.skip("this processor has no AVX512_BF16")
    spec = spec_of(64)
    q, k, v = normal(70, 6, 64), normal(70, 2, 64, seed=1), normal(70, 2, 64, seed=2)
    batch = batch_of([0], [70], [[0, 1, 2, 3, 4]])
    with_instructions = Paged(spec, 5)
    results = [with_instructions(q, k, v, batch)]
    use_shifts(monkeypatch, without_bf16)
    shifting = Paged(spec, 5)
    results.append(shifting(q, k, v, batch))
    attention._functions.cache_clear()
    assert torch.equal(with_instructions.k_cache.nan_to_num(9.0), shifting.k_cache.nan_to_num(9.0))
    assert torch.equal(with_instructions.v_cache.nan_to_num(9.0), shifting.v_cache.nan_to_num(9.0))
    assert (results[0] - results[1]).abs().max() < 2e-3


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_and_values_are_packed_where_the_reference_writes_them(head_dim: int, instructions: None) -> None:
    spec = spec_of(head_dim)
    paged = Paged(spec, 4)
    plain = [torch.full((4, 2, BLOCK, head_dim), torch.nan, dtype=torch.bfloat16) for _ in "kv"]
    steps = [([0], [5]), ([5], [1]), ([6], [20]), ([26], [7])]  # ends within blocks, at odd and even offsets
    table = [2, 0, 3]
    for step, (starts, lengths) in enumerate(steps):
        tokens = lengths[0]
        k, v = normal(tokens, 2, head_dim, seed=step), normal(tokens, 2, head_dim, seed=10 + step)
        paged(normal(tokens, 6, head_dim), k, v, batch_of(starts, lengths, [table]))
        at = torch.arange(starts[0], starts[0] + tokens)
        blocks = torch.tensor(table)[at // BLOCK]
        rows = ((blocks[:, None] * 2 + torch.arange(2)) * BLOCK + (at % BLOCK)[:, None]).reshape(-1)
        begun = [table[int(a) // BLOCK] for a in at if int(a) % BLOCK == 0]
        reference.kv_write(k.bfloat16(), v.bfloat16(), *plain, rows, torch.tensor(begun, dtype=torch.int64))
    for packed, unpack, wanted in (
        (paged.k_cache, attention.unpack_keys, plain[0]),
        (paged.v_cache, attention.unpack_values, plain[1]),
    ):
        assert torch.equal(unpack(packed).nan_to_num(99.0), wanted.nan_to_num(99.0))


def test_packing_undone_is_what_was_packed() -> None:
    plain = normal(3, 2, BLOCK, 80).bfloat16()
    keys, values = attention.pack_keys(plain), attention.pack_values(plain)
    caches = attention.new_caches(3, 2, 80, torch.bfloat16)
    assert (keys.shape, values.shape) == (caches[0].shape, caches[1].shape)
    assert torch.equal(attention.unpack_keys(keys), plain)
    assert torch.equal(attention.unpack_values(values), plain)
    assert torch.equal(keys[1, 1, 7, 5], plain[1, 1, 5, 14:16])
    assert torch.equal(values[1, 1, 7, 5], plain[1, 1, 14:16, 5])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3.4e38])
@pytest.mark.parametrize("where", ["key", "value"])
def test_a_sick_token_is_kept_from_those_before_it(value: float, where: str, instructions: None) -> None:
    """Also one that is finite in float32 and not in bfloat16."""
    spec, length, sick = spec_of(64), 40, 21
    q, k, v = normal(length, 6, 64), normal(length, 2, 64, seed=1), normal(length, 2, 64, seed=2)
    batch = batch_of([0], [length], [[2, 1, 0]])
    healthy = Paged(spec, 3)(q, k, v, batch)
    (k if where == "key" else v)[sick, 0, 5] = value
    got = Paged(spec, 3)(q, k, v, batch)
    assert torch.equal(got[:sick], healthy[:sick])
    assert torch.equal(got[:, 3:], healthy[:, 3:])  # heads of the other KV head
    assert got[sick:, :3].isnan().all()


def test_items_that_could_keep_a_thread_busy_come_first_and_are_counted() -> None:
    """A chunk's, before those of many short sequences, of which threads take some at once."""
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125)
    backend = NativeAttention(spec, block_size=BLOCK, split_size=256)
    starts, lengths = [*[20] * 90, 0], [*[1] * 90, 70]
    plan = backend.plan(batch_of(starts, lengths, [[*range(5 * i, 5 * i + 5)] for i in range(91)]))
    chunk = plan.arrays["tile_chunk"][plan.arrays["items"] // 2]
    assert plan.struct.num_heavy == 2 * 3 and plan.struct.num_items == 2 * (90 + 3)
    assert (chunk[:6] == 90).all() and chunk[6:].tolist() == [i // 2 for i in range(180)]
    alone = backend.plan(batch_of([20], [1], [[0, 1]]))
    assert alone.struct.num_heavy == alone.struct.num_items == 2


def test_a_block_is_copied_by_its_index() -> None:
    """A sequence goes on from a copy of a block that another one has filled in part, with the same bytes."""
    spec = spec_of(64)
    q, k, v = normal(12, 6, 64), normal(12, 2, 64, seed=1), normal(12, 2, 64, seed=2)
    paged = Paged(spec, 2)
    paged(q[:9], k[:9], v[:9], batch_of([0], [9], [[0]]))
    paged.k_cache[1], paged.v_cache[1] = paged.k_cache[0].clone(), paged.v_cache[0].clone()
    outputs = [paged(q[9:], k[9:], v[9:], batch_of([9], [3], [[block]])) for block in (0, 1)]
    assert torch.equal(outputs[0], outputs[1])


def test_tokens_may_be_parts_of_a_wider_product() -> None:
    spec = spec_of(64)
    product = normal(20, (6 + 2 + 2) * 64)
    q, k, v = (x.view(20, -1, 64) for x in product.split([384, 128, 128], -1))
    batch = batch_of([0], [20], [[0, 1]])
    apart = Paged(spec, 2)(q, k, v, batch)
    assert torch.equal(apart, Paged(spec, 2)(q.contiguous(), k.contiguous(), v.contiguous(), batch))


def test_large_scores_and_softcap_stay_finite() -> None:
    for spec in (spec_of(64), spec_of(64, softcap=50.0)):
        q, k, v = 300 * normal(33, 6, 64), 300 * normal(33, 2, 64, seed=1), normal(33, 2, 64, seed=2)
        got = Paged(spec, 3)(q, k, v, batch_of([0], [33], [[0, 1, 2]]))
        assert got.isfinite().all()
        assert (got[0] - rounded(v[0]).repeat_interleave(3, 0)).abs().max() < 1e-5


def test_it_is_chosen_for_a_bfloat16_cache_that_fits() -> None:
    device, native = torch.device("cpu"), resolve("native")
    sizes = {"block_size": 16, "split_size": 256}
    spec = spec_of(64)
    chosen = make_attention(spec, native, kv_dtype=torch.bfloat16, device=device, **sizes)
    assert isinstance(chosen, NativeAttention)
    for reason, at, ops, kv_dtype, more in (
        ("kernels are cpu", spec, resolve("cpu"), torch.bfloat16, {}),
        ("the KV cache is float32", spec, native, torch.float32, {}),
        ("head_dim 24 is not a multiple of 16 up to 256", spec_of(24), native, torch.bfloat16, {}),
        ("head_dim 272 is not a multiple of 16 up to 256", spec_of(272), native, torch.bfloat16, {}),
        ("block_size is 32, not 16", spec, native, torch.bfloat16, {"block_size": 32}),
        ("split_size 2048 is not a multiple of 16 up to 1024", spec, native, torch.bfloat16, {"split_size": 2048}),
    ):
        other = make_attention(at, ops, kv_dtype=kv_dtype, device=device, **(sizes | more))
        assert isinstance(other, TiledAttention)
        assert other.new_caches(2)[0].dtype == kv_dtype
        assert why_not_c(at, ops, kv_dtype=kv_dtype, **(sizes | more)) == reason


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 24 is not a multiple of 16"):
        NativeAttention(spec_of(24), block_size=16, split_size=256)
