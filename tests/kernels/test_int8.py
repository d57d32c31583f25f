"""The specification of int8 layers against float64; the largest output of a wide product, tile by tile."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import cpu
from batchinfer_kernels.int8 import (
    FINER,
    LEAST,
    MOST_BLOCKS,
    TURNED,
    ZERO,
    QuantizedRows,
    ReferenceInt8,
    group_of,
    turn,
)
from batchinfer_kernels.probe import STRICT, find_row_rule
from batchinfer_kernels.table import resolve
from torch import Tensor

OPS = ReferenceInt8(STRICT)
WIDTHS = (64, 100, 576, 1, 128, 1344)  # one group and several, of one length and with a shorter one


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def activations(rows: int, width: int) -> Tensor:
    """Rows of different sizes, with outliers of one sign."""
    x = normal(rows, width) * torch.logspace(-3, 3, rows)[:, None]
    x[:, :: max(1, width // 3)] += 20.0
    return x


def layer(features: int, width: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """values int8 [N, Kp], scales [N]."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (features, padded(width)), generator=draw, dtype=torch.int8)
    return values, torch.rand(features, generator=draw) + 0.01


def padded(width: int) -> int:
    return -(-width // TURNED) * TURNED


def dense(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales.double()[:, None]


def finer(features: int, width: int, seed: int = 6) -> Tensor:
    """fine int8 [Nf, Kp]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (features, padded(width)), generator=draw, dtype=torch.int8)


def steps(x: QuantizedRows) -> Tensor:
    return x.scales.double().repeat_interleave(group_of(x.values.shape[1]), 1)[:, : x.values.shape[1]]


def dequantized(x: QuantizedRows) -> Tensor:
    """float64 [T, Kp], turned."""
    return (x.values.double() - ZERO) * steps(x)


def left_of(x: QuantizedRows) -> Tensor:
    """What `dequantized` lacks, float64 [T, Kp], turned."""
    assert x.fine is not None
    return (x.fine.double() - ZERO) / FINER * steps(x)


def hadamard(width: int) -> Tensor:
    """What blocks are turned by, as float64 [Kp, Kp]."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < TURNED:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.block_diag(*[block / TURNED**0.5] * (padded(width) // TURNED))


@pytest.mark.parametrize("blocks", [*range(1, 40), 64, 224, 1000])
def test_groups_are_few_and_even(blocks: int) -> None:
    for width in (blocks * TURNED, blocks * TURNED - 5):
        group = group_of(width) // TURNED
        assert group_of(width) % TURNED == 0 and 1 <= group <= MOST_BLOCKS
        groups = -(-blocks // group)
        assert groups == -(-blocks // MOST_BLOCKS)
        assert -(-blocks // groups) == group  # none smaller would do


@pytest.mark.parametrize("width", [64, 192])
def test_turning_is_orthogonal_and_leaves_a_product_as_it_is(width: int) -> None:
    x, weight = activations(9, width), normal(20, width, seed=1)
    turned = turn(x)
    assert (turned - x.double() @ hadamard(width).T).abs().max() <= 1e-6 * x.abs().max()
    assert (turn(turned) - x).abs().max() <= 1e-6 * x.abs().max()
    product, expected = turned.double() @ turn(weight).double().T, x.double() @ weight.double().T
    assert (product - expected).abs().max() <= 1e-6 * (x.double().norm(dim=1).max() * weight.double().norm(dim=1).max())
    unit = torch.zeros(1, width)
    unit[0, 3] = 8.0
    assert turn(unit)[0, :TURNED].abs().eq(1).all() and not turn(unit)[0, TURNED:].any()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_quantized_row_is_near_the_row(width: int) -> None:
    x = activations(9, width)
    group = group_of(width)
    x[3, :group] = 0
    rows = OPS.quantize(x, fine=True, plain=True)
    assert rows.values.shape == (9, padded(width)) and rows.values.is_contiguous()
    assert rows.scales.shape == (9, -(-padded(width) // group)) and len(rows) == 9
    whole = torch.nn.functional.pad(x, (0, padded(width) - width))
    assert ((dequantized(rows) - turn(whole).double()).abs() <= 0.5001 * steps(rows)).all()
    # (float32 itself is not much finer than that.)
    nearer = dequantized(rows) + left_of(rows) - turn(whole).double()
    assert (nearer.abs() <= 0.6 / FINER * steps(rows)).all()
    assert rows.fine is not None and (rows.fine[3, :group] == ZERO).all()
    # Turned back, what was not there is within the error of the others.
    back = dequantized(rows) @ hadamard(width)
    assert ((back - whole).norm(dim=1) <= 0.5001 * steps(rows).norm(dim=1)).all()
    assert not rows.scales[3, 0] and (rows.values[3, :group] == ZERO).all()
    assert rows.plain is not None and torch.equal(rows.plain[:, :width], x.bfloat16())


def test_the_largest_of_a_group_is_a_whole_number_of_steps_and_zero_is_zero() -> None:
    turned = torch.zeros(2, 6 * TURNED)
    assert group_of(6 * TURNED) == 3 * TURNED
    at = [0, 5, 70, 200]
    turned[0, at] = torch.tensor([127.0, -3.0, 64.0, -2.0])
    turned[1, 191] = LEAST / 2
    rows = OPS.quantize(turn(turned))
    assert (rows.values[0, at].int() - ZERO).tolist() == [127, -3, 64, -127]
    assert rows.scales[0].tolist() == [1, pytest.approx(2 / 127)]
    assert (rows.values == ZERO).sum() == rows.values.numel() - 4 and not rows.scales[1].any()


def test_only_what_is_asked_for_is_made() -> None:
    x = normal(5, 100)
    assert OPS.quantize(x).plain is OPS.quantize(x).fine is None
    rows = OPS.quantize(x, values=False, plain=True)
    assert len(rows) == 5 and rows.values.numel() == rows.scales.numel() == 0 and rows.fine is None
    assert rows.plain is not None and rows.plain.shape == (5, 128)
    normed = OPS.rms_norm(x, torch.ones(100), 1e-5)
    assert torch.equal(normed.values, OPS.quantize(resolve("reference").rms_norm(x, torch.ones(100), 1e-5)).values)


@pytest.mark.parametrize("sick", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(sick: float) -> None:
    x = activations(6, 384)
    healthy = OPS.quantize(x)
    assert group_of(384) == 192
    x[2, 200] = sick
    rows = OPS.quantize(x, fine=True, plain=True)
    assert rows.scales[2].isnan().tolist() == [False, True]
    y = OPS.linear(rows, OPS.pack(*layer(40, 384), normal(8, 384).bfloat16(), finer(20, 384)), None, None)
    others = [0, 1, 3, 4, 5]
    assert not y[2].isfinite().any() and y[others].isfinite().all()
    assert torch.equal(rows.values[others], healthy.values[others])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_product_is_that_of_the_dequantized_factors(width: int) -> None:
    values, scales = layer(50, width)
    plain, bias, x = normal(7, width).bfloat16(), normal(57, seed=4), activations(9, width)
    rows = OPS.quantize(x, plain=True)
    y = OPS.linear(rows, OPS.pack(values, scales, plain), bias, None)
    assert y.dtype == torch.float32
    left, right = dequantized(rows), dense(values, scales)
    magnitude = left.abs() @ right.T.abs() + bias[:50].abs()
    assert ((y[:, :50].double() - left @ right.T - bias[:50]).abs() <= 1e-6 * magnitude).all()
    wide = x.bfloat16().double()
    magnitude = wide.abs() @ plain.double().T.abs() + bias[50:].abs()
    assert ((y[:, 50:].double() - wide @ plain.double().T - bias[50:]).abs() <= 1e-5 * magnitude).all()
    residual = normal(9, 57, seed=5)
    expected = residual + y
    added = OPS.linear(rows, OPS.pack(values, scales, plain), bias, residual)
    assert added is residual and torch.equal(added, expected)
    alone = OPS.linear(rows, OPS.pack(None, None, plain), bias[50:], None)
    assert torch.equal(alone, y[:, 50:])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_fine_product_is_that_of_bytes_and_of_what_is_left_of_one_of_them(width: int) -> None:
    values, scales = layer(50, width)
    fine, x = finer(20, width), activations(9, width)
    rows = OPS.quantize(x, fine=True)
    y = OPS.linear(rows, OPS.pack(values, scales, None, fine), None, None)
    assert torch.equal(y[:, :30], OPS.linear(rows, OPS.pack(values[:30], scales[:30], None), None, None))
    weights, left = dense(values, scales)[30:], fine.double() / FINER * scales[30:, None].double()
    bytes_, bytes_left = dequantized(rows), left_of(rows)
    expected = bytes_ @ weights.T + bytes_ @ left.T + bytes_left @ weights.T
    magnitude = bytes_.abs() @ weights.abs().T
    assert ((y[:, 30:].double() - expected).abs() <= 1e-6 * magnitude + 1e-30).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_fine_features_are_nearly_those_of_numbers_that_were_never_rounded(width: int) -> None:
    weight, x = normal(30, width, seed=3), activations(9, width)
    values, fine = (torch.empty(30, padded(width), dtype=torch.int8) for _ in range(2))
    scales = torch.empty(30)
    OPS.quantize_weight(weight.clone(), values, scales, fine)
    assert ((values.double() + fine.double() / FINER) * scales[:, None] - turn(_whole(weight))).abs().max() < 1e-3
    y = OPS.linear(OPS.quantize(x, fine=True), OPS.pack(values, scales, None, fine), None, None)
    exact = x.double() @ weight.double().T
    rough = OPS.linear(OPS.quantize(x), OPS.pack(values, scales, None), None, None)
    error, rough_error = (y - exact).norm() / exact.norm(), (rough - exact).norm() / exact.norm()
    assert error < 2e-4 and (width == 1 or error < rough_error / 50)


def _whole(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, padded(x.shape[1]) - x.shape[1]))


def test_gated_is_silu_of_the_gate_times_up() -> None:
    gate, up = layer(100, 128, seed=2), layer(100, 128, seed=3)
    x, bias = OPS.quantize(activations(5, 128) * 1e-3), normal(200)
    rows = OPS.gated(x, OPS.pack_gated(*gate, *up), bias)
    left = dequantized(x)
    gates, ups = (left @ dense(*part).T + b for part, b in zip((gate, up), bias.chunk(2), strict=True))
    expected = torch.nn.functional.pad(torch.nn.functional.silu(gates) * ups, (0, 28)) @ hadamard(100).T
    assert ((dequantized(rows) - expected).abs() <= 0.51 * steps(rows)).all()


def test_rows_have_the_same_bytes_in_any_batch() -> None:
    ops = ReferenceInt8(find_row_rule([(40, 192)]).rule)
    packed = ops.pack(*layer(50, 192), normal(40, 192).bfloat16(), finer(20, 192))
    x = activations(40, 192)
    whole = ops.linear(ops.rms_norm(x, normal(192), 1e-5, fine=True, plain=True), packed, None, None)
    for start, stop in ((0, 1), (3, 5), (7, 8), (11, 40)):
        rows = ops.rms_norm(x[start:stop], normal(192), 1e-5, fine=True, plain=True)
        assert torch.equal(ops.linear(rows, packed, None, None), whole[start:stop])


def test_argmax_of_the_specification() -> None:
    weight = normal(30, 64).bfloat16()
    weight[[7, 12, 29]] = 5.0
    x = OPS.quantize(torch.rand(6, 64, generator=torch.Generator().manual_seed(2)) + 0.1, values=False, plain=True)
    index, finite = OPS.argmax(x, OPS.pack(None, None, weight))
    assert index.tolist() == [7] * 6 and finite.all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("outputs", [1, 50, 3 * cpu.HEAD_TILE - 5])
def test_linear_argmax_is_that_of_the_logits(backend: str, outputs: int) -> None:
    ops = resolve(backend)
    x, weight = normal(33, 40), normal(outputs, 40, seed=1)
    logits = ops.linear(x, weight)
    index, finite = ops.linear_argmax(x, weight)
    assert torch.equal(index, logits.argmax(-1)) and finite.all()
    for at in (0, 7, 32):
        assert torch.equal(ops.linear_argmax(x[at : at + 1], weight)[0], index[at : at + 1])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_linear_argmax_of_equal_sick_and_huge_outputs(backend: str) -> None:
    ops = resolve(backend)
    outputs = 3 * cpu.HEAD_TILE
    x, weight = torch.ones(8, 4), normal(outputs, 4)
    x[4:] *= 3e37  # finite outputs whose sum is not
    weight[[600, cpu.HEAD_TILE + 3, outputs - 1]] = 2.0
    index, finite = ops.linear_argmax(x, weight)
    assert index.tolist() == [600] * 8 and finite.all()
    for sick in (torch.nan, torch.inf, -torch.inf):
        x[2, 1] = sick
        index, finite = ops.linear_argmax(x, weight)
        assert finite.tolist() == [row != 2 for row in range(8)]
        assert index[[0, 1, 3]].tolist() == [600] * 3
    x[2, 1] = 1
    weight[-2, 0] = torch.nan  # one output of the last tile is enough
    assert not ops.linear_argmax(x, weight)[1].any()
