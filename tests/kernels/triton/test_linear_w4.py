"""4-bit products in the interpreter against their format's specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batchinfer_kernels import w4
from batchinfer_kernels.triton.linear_w4 import linear_w4
from torch import Tensor

from tests.kernels.triton.accuracy import AsType, check_close
from tests.kernels.triton.device import PRODUCTS, WIDE, least_ulps


def a_weight(features: int, depth: int, group: int, dtype: torch.dtype, has_zeros: bool, turned: bool) -> w4.Packed:
    num_groups = -(-depth // group) if group else 1
    return w4.pack(
        torch.randint(16, (features, depth), dtype=torch.uint8),
        torch.rand(num_groups, features).to(dtype) / 8,
        torch.randint(16, (num_groups, features)) if has_zeros else None,
        group=group,
        order=torch.randperm(depth) if turned else None,
    )


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(
    "rows, columns, depth, group",
    [(1, 8, 32, 32), (65, 130, 128, 32), (3, 40, 192, 64), (64, 128, 256, 128), (2, 24, 200, 128), (5, 300, 72, 0)],
)
@pytest.mark.parametrize("extras", [False, True])
def test_linear_w4(rows: int, columns: int, depth: int, group: int, dtype: torch.dtype, extras: bool) -> None:
    torch.manual_seed(rows * columns + depth)
    packed = a_weight(columns, depth, group, dtype, has_zeros=extras, turned=extras)
    x = torch.randn(rows, depth).to(dtype)
    bias = torch.randn(columns).to(dtype) if extras else None
    residual = torch.randn(rows, columns).to(dtype) if extras else None
    kept = None if residual is None else residual.clone()
    found = linear_w4(x, packed, bias, kept)
    assert kept is None or found.data_ptr() == kept.data_ptr()

    def compute(as_type: AsType) -> Tensor:
        more = (None if bias is None else as_type(bias), None if residual is None else as_type(residual))
        return w4.linear(as_type(x), replace(packed, scales=as_type(packed.scales)), *more)

    check_close(found, compute, ulps=least_ulps(dtype))


@pytest.mark.parametrize("group", [32, 0])
def test_weights_are_those_of_the_format_bit_by_bit(group: int) -> None:
    packed = a_weight(20, 160, group, torch.float16, has_zeros=True, turned=False)
    found = linear_w4(torch.eye(160).half(), packed)
    assert torch.equal(found.T, w4.dequantize(packed, torch.float16))


def test_a_row_does_not_depend_on_the_others() -> None:
    packed = a_weight(140, 128, 64, torch.float16, has_zeros=True, turned=False)
    x = torch.randn(150, 128).half()
    whole = linear_w4(x, packed)
    for start, stop in ((0, 1), (63, 66), (149, 150)):
        assert torch.equal(whole[start:stop], linear_w4(x[start:stop].contiguous(), packed))


def test_inputs_are_those_of_the_weights() -> None:
    packed = a_weight(8, 64, 32, torch.float16, has_zeros=False, turned=True)
    with pytest.raises(AssertionError, match="70"):
        linear_w4(torch.ones(2, 70).half(), packed)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # a weight of 0
def test_what_is_not_finite_stays_in_its_row() -> None:
    torch.manual_seed(1)
    packed = a_weight(9, 72, 32, WIDE, has_zeros=True, turned=True)
    x = torch.randn(4, 72, dtype=WIDE)
    whole = linear_w4(x, packed)
    x[2, 7] = torch.inf
    sick = linear_w4(x, packed)
    assert not sick[2].isfinite().any()
    assert torch.equal(sick[[0, 1, 3]], whole[[0, 1, 3]])
