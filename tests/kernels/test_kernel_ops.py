"""Operations against float64, and the law that a row's bytes do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from batchinfer_kernels import cpu, reference
from batchinfer_kernels.native import library
from batchinfer_kernels.probe import RULES, find_row_rule
from batchinfer_kernels.table import resolve
from torch import Tensor

ROWS = (1, 2, 3, 4, 5, 7, 16, 33, 64)
DEMO_SHAPES = ((960, 576), (3072, 576), (576, 1536))  # products of SmolLM2-135M


NATIVE = pytest.param("native", marks=pytest.mark.skipif(library.available() is not None, reason="no C kernels here"))


@pytest.fixture(params=(1, 2), ids=("1 thread", "2 threads"))
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("inner", [100, 1408, 1500, 33_000])
def test_a_gated_activation_does_not_depend_on_how_threads_share_its_rows(inner: int) -> None:
    """torch computes silu in another way where a thread's share ends."""
    run, x = resolve("cpu").silu_and_mul, normal(1001 if inner < 1000 else 60 if inner > 5000 else 301, 2 * inner)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run(x)
        for threads in (2, 3, 5, 8):
            torch.set_num_threads(threads)
            for rows in (len(x), len(x) - 1, 151, 20, 3, 1):
                assert torch.equal(run(x[:rows]), expected[:rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_stand_alone(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """run(x)[rows] == run(x[rows]), bitwise, for several numbers of rows and places."""
    whole = run(x)
    for rows in ROWS:
        for start in (0, 5):
            assert torch.equal(run(x[start : start + rows].clone()), whole[start : start + rows]), (rows, start)


def probed_ops(shapes: tuple[tuple[int, int], ...]):  # type: ignore[no-untyped-def]
    facts = find_row_rule(shapes)
    assert facts.holds
    return resolve(rows=facts.rule)


@pytest.mark.parametrize("shape", [*DEMO_SHAPES, (24, 40), (5000, 64)])
def test_linear_is_batch_invariant(shape: tuple[int, int], threads: int) -> None:
    weight, bias = normal(*shape, seed=1), normal(shape[0], seed=2)
    ops = probed_ops((shape,))
    assert_rows_stand_alone(lambda x: ops.linear(x, weight, bias), normal(80, shape[1]))


def test_linear_gives_the_same_for_any_number_of_threads() -> None:
    ops = probed_ops(DEMO_SHAPES)
    before = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append([ops.linear(normal(21, k), normal(n, k, seed=1)) for n, k in DEMO_SHAPES])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear_is_a_product_under_every_rule(rule, rows: int) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias = normal(rows, 48), normal(5000, 48, seed=1), normal(5000, seed=2)
    for out in (5000, 40):  # tiled as a head, and whole
        got = cpu.make_linear(rule)(x, weight[:out], bias[:out])
        expected = x.double() @ weight[:out].double().T + bias[:out].double()
        assert got.shape == (rows, out)
        assert (got - expected).abs().max() < 1e-4


def test_row_wise_operations_are_batch_invariant(threads: int) -> None:
    ops = resolve()
    weight = normal(576, seed=1)
    assert_rows_stand_alone(lambda x: ops.rms_norm(x.clone(), weight, 1e-5), normal(80, 576))
    assert_rows_stand_alone(lambda x: ops.silu_and_mul(x.clone()), normal(80, 3072))
    cos, sin = torch.tensor([0.6, 0.28] * 16), torch.tensor([0.8, 0.96] * 16)

    def rotate(x: Tensor) -> Tensor:
        heads = x.clone().view(-1, 9, 64)
        return ops.rope(heads, heads[:, :3].clone(), cos.expand(len(x), 32), sin.expand(len(x), 32))[0]

    assert_rows_stand_alone(rotate, normal(80, 576))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_norms_and_gate_equal_float64(backend: str) -> None:
    ops = resolve(backend)
    x, weight = normal(9, 64), normal(64, seed=2)

    def norm(value: Tensor) -> Tensor:
        wide = value.double()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert (ops.rms_norm(x.clone(), weight, 1e-5) - norm(x)).abs().max() < 1e-5
    gate, up = x.double().chunk(2, -1)
    assert (ops.silu_and_mul(x.clone()) - gate / (1 + torch.exp(-gate)) * up).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["reference", "cpu", NATIVE])
def test_rope_turns_pairs_and_leaves_the_rest(backend: str) -> None:
    q, k = normal(5, 3, 16), normal(5, 1, 16, seed=1)
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    turned_q, turned_k = resolve(backend).rope(q.clone(), k.clone(), angles.cos(), angles.sin())
    for before, after in ((q, turned_q), (k, turned_k)):
        as_complex = torch.complex(before[..., :4].double(), before[..., 4:8].double())
        expected = as_complex * torch.polar(torch.ones(()).double(), angles.double())[:, None]
        assert (after[..., :4] - expected.real).abs().max() < 1e-6
        assert (after[..., 4:8] - expected.imag).abs().max() < 1e-6
        assert torch.equal(after[..., 8:], before[..., 8:])


@pytest.mark.skipif(library.available() is not None, reason="no C kernels here")
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_native_rope_gives_the_bytes_of_the_plain_one_within_a_wider_product(tokens: int, threads: int) -> None:
    product = normal(tokens, 15 * 64)
    cos, sin = normal(tokens, 24, seed=1), normal(tokens, 24, seed=2)

    def turned(backend: str) -> tuple[Tensor, Tensor]:
        q, k, v = (x.view(tokens, -1, 64) for x in product.clone().split([576, 192, 192], -1))
        before = v.clone()
        q, k = resolve(backend).rope(q, k, cos, sin)
        assert torch.equal(v, before)
        return q, k

    for got, expected in zip(turned("native"), turned("cpu"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_kv_write_stores_by_head_row_and_clears_fresh_blocks(backend: str) -> None:
    k_cache, v_cache = torch.full((4, 2, 3, 5), torch.nan), torch.full((4, 2, 3, 5), torch.nan)
    k, v = normal(2, 2, 5), normal(2, 2, 5, seed=1)
    slots = [(3, 1), (0, 2)]  # (block, offset) of the two tokens
    rows = torch.tensor([(block * 2 + head) * 3 + offset for block, offset in slots for head in range(2)])
    resolve(backend).kv_write(k, v, k_cache, v_cache, rows, torch.tensor([3]))
    for token, (block, offset) in enumerate(slots):
        assert torch.equal(k_cache[block, :, offset], k[token])
        assert torch.equal(v_cache[block, :, offset], v[token])
    assert torch.equal(v_cache[3, :, 0], torch.zeros(2, 5))
    assert v_cache[1].isnan().all()
    assert v_cache[0, :, 0].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_kv_write_keeps_a_sick_token_from_those_before_it(backend: str, where: str, value: float) -> None:
    k_cache, v_cache = torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3, 5)
    k, v = normal(2, 2, 5), normal(2, 2, 5, seed=1)
    healthy_k, healthy_v = k.clone(), v.clone()
    (k if where == "key" else v)[1, 0, 3] = value
    rows = torch.tensor([head * 3 + offset for offset in range(2) for head in range(2)])
    resolve(backend).kv_write(k, v, k_cache, v_cache, rows, torch.tensor([0]))
    assert k_cache[0, 0, 1].isnan().all()
    assert v_cache.isfinite().all()
    for head, offset in ((0, 0), (1, 0), (1, 1)):
        assert torch.equal(k_cache[0, head, offset], healthy_k[offset, head])
        assert torch.equal(v_cache[0, head, offset], healthy_v[offset, head])


def test_reference_attention_in_splits_equals_float64() -> None:
    length, size, block = 23, 8, 4
    q, k, v = normal(length, 6, 10), normal(length, 2, 10, seed=1), normal(length, 2, 10, seed=2)
    table = torch.tensor([5, 0, 3, 1, 6, 2])
    k_cache, v_cache = torch.full((7, 2, block, 10), torch.nan), torch.full((7, 2, block, 10), torch.nan)
    at = torch.arange(length)
    k_cache[table[at // block], :, at % block] = k
    v_cache[table[at // block], :, at % block] = v
    for window in (None, 5):
        parts = [
            reference.split_attention(
                q, k_cache, v_cache, table, at, split=s, split_size=size, scale=0.3, window=window
            )
            for s in range(3)
        ]
        got = reference.merge_splits([out for out, _ in parts], [lse for _, lse in parts])
        behind = at[:, None] - at
        seen = (behind >= 0) & (behind < (window or length))
        keys, values = (x.double().repeat_interleave(3, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q.double(), keys) * 0.3
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        assert (got - torch.einsum("hts,shd->thd", weights, values)).abs().max() < 1e-5


def test_a_backend_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"'quantum' does not exist for cpu; there are: reference, .*triton"):
        resolve("quantum")
