"""The C kernels of int8 layers against their specification (`batchinfer_kernels.int8.ReferenceInt8`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from batchinfer_kernels.int8 import MOST, TURNED, ZERO, Int8Ops, QuantizedRows, ReferenceInt8, group_of
from batchinfer_kernels.native import library
from batchinfer_kernels.probe import STRICT
from torch import Tensor

pytestmark = pytest.mark.skipif(library.available() is not None, reason=f"native kernels: {library.available()}")

# One, parts of register blocks and of tiles, whole ones, several row blocks.
ROWS = (1, 2, 5, 6, 7, 13, 16, 31, 32, 49, 200)
SHAPES = ((64, 32), (576, 960), (100, 50), (130, 257), (1, 1), (64, 33), (704, 40))  # inputs, outputs


@pytest.fixture(params=["tiles", "registers"])
def native(request: pytest.FixtureRequest) -> Iterator[Int8Ops]:
    """With products in AMX's tiles, where this processor has them, and without."""
    from batchinfer_kernels.native.int8 import NativeInt8

    functions = library.load()
    if functions.batchinfer_use_tiles(request.param == "tiles") != (request.param == "tiles"):
        pytest.skip("no tiles here")
    yield NativeInt8()
    functions.batchinfer_use_tiles(1)


@pytest.fixture(scope="module")
def reference() -> Int8Ops:
    return ReferenceInt8(STRICT)


def activations(rows: int, width: int, seed: int = 0) -> Tensor:
    """With outliers of one sign, as models have them, rows of different sizes, and a group of zeros."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draw) * torch.logspace(-3, 3, rows)[:, None]
    x[:, :: max(1, width // 3)] += 20.0
    x[rows // 2, : group_of(width)] = 0.0
    return x


def weights(features: int, width: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (features, -(-width // TURNED) * TURNED), generator=draw, dtype=torch.int8)
    values[0] = 127  # the largest sums that there are
    return values, torch.rand(features, generator=draw) + 0.01


def finer(features: int, width: int, seed: int = 8) -> Tensor:
    return weights(features, width, seed)[0]


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dequantized(x: QuantizedRows) -> Tensor:
    """Turned."""
    steps = x.scales.double().repeat_interleave(group_of(x.values.shape[1]), 1)[:, : x.values.shape[1]]
    return (x.values.double() - ZERO) * steps


def dense(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales.double()[:, None]


def close(ours: QuantizedRows, theirs: QuantizedRows) -> None:
    """What was computed in another order may fall on the other side of a rounding border."""
    assert (ours.values.int() - theirs.values.int()).abs().max() <= 1


def same(a: QuantizedRows, b: QuantizedRows) -> None:
    assert (a.fine is None) == (b.fine is None)
    for name in ("values", "scales", "fine") if a.fine is not None else ("values", "scales"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [64, 128, 576, 704, 100, 1])
def test_quantize_is_the_reference_bit_by_bit(native: Int8Ops, reference: Int8Ops, rows: int, width: int) -> None:
    x = activations(rows, width)
    ours, theirs = (ops.quantize(x, fine=True, plain=True) for ops in (native, reference))
    same(ours, theirs)
    assert ours.plain is not None and theirs.plain is not None
    assert torch.equal(ours.plain, theirs.plain)


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(native: Int8Ops, reference: Int8Ops, sick: float) -> None:
    x = activations(9, 384)
    x[4, 200] = sick
    same(native.quantize(x, fine=True), reference.quantize(x, fine=True))
    values, scales = weights(64, 384)
    y = native.linear(native.quantize(x, fine=True), native.pack(values, scales, None, finer(20, 384)), None, None)
    assert y[4].isnan().all() and y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_the_smallest_and_the_largest_numbers(native: Int8Ops, reference: Int8Ops) -> None:
    x = torch.zeros(8, 64)
    x[0], x[1, 3], x[2, 3], x[3] = 1e-38, 1e-31, -1e-29, 3e38
    x[4, 0], x[4, 1] = 3e38, -3e38  # the range itself is beyond float32
    x[5], x[6, ::2] = -0.0, 1e-45
    same(native.quantize(x, fine=True), reference.quantize(x, fine=True))


@pytest.mark.parametrize("width", [64, 576, 100, 1])
def test_weights_are_quantized_as_the_reference_does_bit_by_bit(
    native: Int8Ops, reference: Int8Ops, width: int
) -> None:
    rows = activations(40, width, seed=7)
    rows[3, 0], rows[4, 0], rows[5] = torch.nan, torch.inf, 1e-40
    found = []
    for ops in (native, reference):
        values, fine = (torch.empty(40, -(-width // TURNED) * TURNED, dtype=torch.int8) for _ in range(2))
        scales, alone = torch.empty(40), torch.empty_like(values)
        ops.quantize_weight(rows.clone(), values, scales, fine)
        ops.quantize_weight(rows.clone(), alone, scales)
        assert torch.equal(values, alone)
        found.append((values, fine, scales))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [64, 576, 100])
def test_rms_norm(native: Int8Ops, reference: Int8Ops, rows: int, width: int) -> None:
    x, weight = activations(rows, width), uniform(width, seed=2) + 0.5
    ours, theirs = (ops.rms_norm(x, weight, 1e-5, fine=True) for ops in (native, reference))
    close(ours, theirs)  # the mean is summed in another order
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("rows", "features", "threads"), [(1675, 32, 2), (1675, 64, 4), (1801, 192, 8), (1801, 384, 16)]
)
def test_steps_of_many_rows_and_few_features(
    native: Int8Ops, reference: Int8Ops, rows: int, features: int, threads: int
) -> None:
    """Rows are cut into blocks and these into pieces: more than the last, shorter block has rows for."""
    values, scales = weights(features, 64)
    x = reference.quantize(activations(rows, 64))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = native.linear(x, native.pack(values, scales, None), None, None)
        gated = native.gated(x, native.pack_gated(values, scales, values, scales), None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, reference.linear(x, reference.pack(values, scales, None), None, None))
    close(gated, reference.gated(x, reference.pack_gated(values, scales, values, scales), None))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "features"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(native: Int8Ops, reference: Int8Ops, rows: int, width: int, features: int, with_bias: bool) -> None:
    values, scales = weights(features, width)
    fine, plain = finer(features // 2, width) if features > 1 else None, normal(40, width, seed=4).bfloat16()
    bias = normal(features + 40, seed=5) if with_bias else None
    x = reference.quantize(activations(rows, width), fine=True, plain=True)
    y = native.linear(x, native.pack(values, scales, plain, fine), bias, None)
    theirs = reference.linear(x, reference.pack(values, scales, plain, fine), bias, None)
    # Per row and feature group by group in one order, and exact within a group.
    assert torch.equal(y[:, :features], theirs[:, :features])
    assert x.plain is not None
    whole = x.plain[:, :width].double() @ plain.double().T
    if bias is not None:
        whole += bias[features:]
    error, their_error = ((found[:, features:] - whole).abs().max() for found in (y, theirs))
    assert error <= 2 * their_error + 1e-6 * whole.abs().max()
    residual = normal(rows, features + 40, seed=6)
    expected = residual + y
    added = native.linear(x, native.pack(values, scales, plain, fine), bias, residual)
    assert added is residual and torch.equal(added, expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "inner"), [(64, 64), (576, 1536), (100, 72), (64, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated(native: Int8Ops, reference: Int8Ops, rows: int, width: int, inner: int, with_bias: bool) -> None:
    gate, up = weights(inner, width, 2), weights(inner, width, 3)
    scale = 1e-5  # so that silu is bent
    parts = (gate[0], gate[1] * scale, up[0], up[1] * scale)
    bias = normal(2 * inner, seed=4) if with_bias else None
    x = reference.quantize(activations(rows, width))
    y = native.gated(x, native.pack_gated(*parts), bias)
    theirs = reference.gated(x, reference.pack_gated(*parts), bias)
    assert y.values.shape == theirs.values.shape and y.scales.shape == theirs.scales.shape
    torch.testing.assert_close(dequantized(y), dequantized(theirs), rtol=0, atol=float(1.01 * y.scales.max()))
    close(y, theirs)


def test_silu_is_as_near_as_its_table_says(native: Int8Ops) -> None:
    """Of gates that come from a bias alone; turned, 64 equal outputs are one number, whose step says what it is."""
    nothing = torch.zeros(64, 64, dtype=torch.int8), torch.ones(64)
    packed, x = native.pack_gated(*nothing, *nothing), native.quantize(torch.zeros(1, 64))
    gates = torch.cat((torch.linspace(-15.5, 20, 7101), torch.logspace(-25, 0, 50), -torch.logspace(-25, 0, 50)))
    steps = [
        native.gated(x, packed, torch.cat((gate.expand(64), torch.ones(64)))).scales.item() for gate in gates.unbind()
    ]
    expected = torch.nn.functional.silu(gates.double()).abs()
    found = torch.tensor(steps, dtype=torch.float64) * MOST / 8
    assert ((found / expected - 1).abs() < 7e-4).all()
    beyond = [-16.0, -30.0, -1000.0]
    for gate in beyond:
        step = native.gated(x, packed, torch.cat((torch.full((64,), gate), torch.ones(64)))).scales.item()
        assert step * MOST / 8 <= -2e-7 * gate
    sick = native.gated(x, packed, torch.cat((torch.full((64,), torch.nan), torch.ones(64))))
    assert sick.scales.isnan().all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kept", ["bytes", "plain"])
@pytest.mark.parametrize("features", [1000, 31, 1])
def test_argmax_is_that_of_the_logits(native: Int8Ops, rows: int, kept: str, features: int) -> None:
    values, scales = weights(features, 96)
    packed = native.pack(values, scales, None) if kept == "bytes" else native.pack(None, None, dense(values, scales))
    x = native.quantize(activations(rows, 96), plain=True)
    index, finite = native.argmax(x, packed)
    assert torch.equal(index, native.linear(x, packed, None, None).argmax(-1))
    assert finite.all()


@pytest.mark.parametrize("copies", [3, 400, 5000])
def test_argmax_among_outputs_that_bytes_cant_tell_apart(native: Int8Ops, copies: int) -> None:
    """Up to so many that all outputs are candidates."""
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(5000, 128, generator=draw)
    at = torch.randperm(5000, generator=draw)[:copies]
    weight[at] = 3 + torch.randint(-1, 2, (copies, 128), generator=draw) * 2**-7
    packed = native.pack(None, None, weight)
    x = native.quantize(torch.rand(37, 128, generator=draw), values=False, plain=True)
    y = native.linear(x, packed, None, None)
    index, finite = native.argmax(x, packed)
    largest = y.max(-1, keepdim=True).values
    lowest = torch.where(y == largest, torch.arange(5000), 5000).amin(-1)
    assert torch.equal(index, lowest) and finite.all()


@pytest.mark.parametrize("kept", ["bytes", "plain"])
def test_of_equal_logits_the_lowest_index_wins(native: Int8Ops, kept: str) -> None:
    values = torch.full((500, 64), -3, dtype=torch.int8)
    values[[77, 130, 131, 499]] = 5
    scales = torch.ones(500)
    packed = native.pack(values, scales, None) if kept == "bytes" else native.pack(None, None, dense(values, scales))
    index, _ = native.argmax(native.quantize(uniform(20, 64, seed=2) + 0.1, plain=True), packed)
    assert index.tolist() == [77] * 20


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), 3e38])
def test_argmax_of_a_row_that_is_not_finite(native: Int8Ops, sick: float) -> None:
    packed = native.pack(None, None, 2 + uniform(300, 128, seed=2))
    x = normal(9, 128, seed=3)
    x[4, 70:72] = sick  # the outputs of 3e38 are infinite
    index, finite = native.argmax(native.quantize(x, values=False, plain=True), packed)
    assert finite.tolist() == [row != 4 for row in range(9)]
    y = native.linear(native.quantize(x, values=False, plain=True), packed, None, None)
    assert torch.equal(index[5:], y[5:].argmax(-1))


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), -float("inf")])
def test_argmax_with_a_weight_that_is_not_finite(native: Int8Ops, reference: Int8Ops, sick: float) -> None:
    weight = uniform(300, 128, seed=8).bfloat16()
    weight[7, 3] = sick
    x = native.quantize(normal(9, 128, seed=9), plain=True)
    packed = native.pack(None, None, weight)
    index, finite = native.argmax(x, packed)
    _, expected = reference.argmax(x, reference.pack(None, None, weight))
    assert torch.equal(finite, expected) and not finite.any()
    assert torch.equal(index, native.linear(x, packed, None, None).argmax(-1))


def test_argmax_of_long_sums_whose_roundings_add_up(native: Int8Ops) -> None:
    """Each product of the first output is a little more than half a unit in the last place of their sum, and rounded up
    to a whole one, 8000 times; their exact sum is below the second output."""
    width = 8192
    weight = torch.zeros(64, width)
    x = torch.zeros(1, width)
    x[:, 0], x[:, 64], x[:, 128:] = 1.0, 2**-5, 2**-12
    weight[0, 0], weight[0, 128:] = 1.0, 2**-12 * (1 + 2**-6)
    weight[1, 0], weight[1, 64] = 1.0, 2**5 * 0.0008
    weight = weight.bfloat16()
    exact = x.double() @ weight.double().T
    assert exact.argmax() == 1
    packed = native.pack(None, None, weight)
    rows = native.quantize(x, plain=True)
    y = native.linear(rows, packed, None, None)
    assert y.argmax() == 0 and y[0, 0] > exact[0, 1] + 1e-4
    index, finite = native.argmax(rows, packed)
    assert index.tolist() == [0] and finite.all()


@pytest.mark.parametrize("width", [64, 8192])
def test_argmax_of_narrow_and_wide_rows(native: Int8Ops, width: int) -> None:
    packed = native.pack(None, None, normal(3000, width, seed=10))
    x = native.quantize(normal(20, width, seed=11), plain=True)
    index, finite = native.argmax(x, packed)
    assert torch.equal(index, native.linear(x, packed, None, None).argmax(-1)) and finite.all()


def test_argmax_takes_a_fraction_of_what_logits_would_with_any_number_of_threads() -> None:
    from batchinfer_kernels.native.int8 import NativeInt8

    native, features = NativeInt8(), 5000
    packed = native.pack(None, None, normal(features, 96, seed=12))
    x = native.quantize(normal(200, 96, seed=13), plain=True)
    expected = native.linear(x, packed, None, None).argmax(-1)
    threads = torch.get_num_threads()
    try:
        for number in (1, 3, 16):
            torch.set_num_threads(number)
            assert torch.equal(native.argmax(x, packed)[0], expected)
            assert native._scratch.numel() < len(x) * features * 4 / 10
    finally:
        torch.set_num_threads(threads)


def test_a_row_has_the_same_bytes_in_any_batch(native: Int8Ops) -> None:
    values, scales = weights(300, 576)
    packed = native.pack(values, scales, normal(64, 576, seed=2).bfloat16(), finer(100, 576))
    # Outputs in several groups: a thread makes one at a time, several threads all of them.
    many, of_many = weights(800, 576, seed=5)
    gated = native.pack_gated(many[:400], of_many[:400], many[400:], of_many[400:] * 1e-4)
    norm = uniform(576, seed=3)
    x = activations(200, 576)
    whole = native.rms_norm(x, norm, 1e-6, fine=True, plain=True)
    y, inner = native.linear(whole, packed, None, None), native.gated(whole, gated, None)
    threads = torch.get_num_threads()
    try:
        for some in (slice(3, 4), slice(0, 7), slice(11, 200)):
            for number in (1, 2, 3, 16):
                torch.set_num_threads(number)
                rows = native.rms_norm(x[some], norm, 1e-6, fine=True, plain=True)
                assert torch.equal(native.linear(rows, packed, None, None), y[some])
                part = native.gated(rows, gated, None)
                assert torch.equal(part.values, inner.values[some]) and torch.equal(part.scales, inner.scales[some])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("width", [64, 128, 576, 704])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [*range(1, 34), 48, 63, 64, 100, 193])
def test_tiles_give_the_bytes_that_registers_give(rows: int, threads: int, width: int) -> None:
    """Also where rows end within a tile, and groups within a row; of zeros, of numbers that are not finite, and of the
    largest sums that there are."""
    from batchinfer_kernels.native.int8 import NativeInt8

    functions, ops, found = library.load(), NativeInt8(), []
    values, scales = weights(96, width)
    values[5], values[60] = 127, -127
    sick = scales.clone()
    sick[7] = torch.nan
    packed = ops.pack(values, sick, normal(40, width, seed=3).bfloat16(), finer(50, width))
    many, of_many = weights(704, width, seed=5)
    gated = ops.pack_gated(many[:352], of_many[:352] * 1e-4, many[352:], of_many[352:])
    floats = activations(rows, width)
    if rows > 3:
        floats[1], floats[2, width // 2] = 0.0, torch.inf
    x = ops.quantize(floats, fine=True, plain=True)
    assert x.fine is not None
    x.values[-1] = x.fine[-1] = 255
    bias, of_gated, residual = normal(136, seed=4), normal(704, seed=6), normal(rows, 136, seed=5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for wanted in (True, False):
            if functions.batchinfer_use_tiles(wanted) != wanted:
                pytest.skip("no tiles here")
            y = ops.gated(x, gated, of_gated)
            found.append((ops.linear(x, packed, bias, residual.clone()), y.values, y.scales))
    finally:
        functions.batchinfer_use_tiles(1)
        torch.set_num_threads(before)
    for tiled, plain in zip(*found, strict=True):
        assert torch.equal(tiled.contiguous().view(torch.uint8), plain.contiguous().view(torch.uint8))
    assert found[0][0].isnan().any() and found[0][0].isfinite().any()
