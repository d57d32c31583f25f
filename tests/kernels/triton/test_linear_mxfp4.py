"""MXFP4 products in the interpreter against their format's specification."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import mxfp4
from batchinfer_kernels.triton.linear_mxfp4 import linear_mxfp4
from torch import Tensor

from tests.kernels.triton.accuracy import AsType, check_close
from tests.kernels.triton.device import PRODUCTS, WIDE, least_ulps


def a_weight(features: int, groups: int) -> mxfp4.Packed:
    blocks = torch.randint(256, (features, groups, 16), dtype=torch.uint8)
    return mxfp4.pack(blocks, torch.randint(122, 128, (features, groups), dtype=torch.uint8))


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("rows, columns, groups", [(1, 8, 1), (65, 130, 2), (3, 300, 5)])
@pytest.mark.parametrize("extras", [False, True])
def test_linear_mxfp4(rows: int, columns: int, groups: int, dtype: torch.dtype, extras: bool) -> None:
    torch.manual_seed(rows)
    packed = a_weight(columns, groups)
    x = torch.randn(rows, packed.depth).to(dtype)
    bias = torch.randn(columns).to(dtype) if extras else None
    residual = torch.randn(rows, columns).to(dtype) if extras else None
    kept = None if residual is None else residual.clone()
    found = linear_mxfp4(x, packed, bias, kept)
    assert kept is None or found.data_ptr() == kept.data_ptr()

    def compute(as_type: AsType) -> Tensor:
        more = (None if bias is None else as_type(bias), None if residual is None else as_type(residual))
        return mxfp4.linear(as_type(x), packed, *more)

    check_close(found, compute, ulps=least_ulps(dtype))


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_weights_are_those_of_the_format_bit_by_bit(dtype: torch.dtype) -> None:
    packed = a_weight(20, 3)
    assert torch.equal(linear_mxfp4(torch.eye(96, dtype=dtype), packed).T, mxfp4.dequantize(packed, dtype))


def test_the_ends_of_the_scales() -> None:
    blocks = torch.full((3, 1, 16), 0x22, dtype=torch.uint8)  # ones
    packed = mxfp4.pack(blocks, torch.tensor([[0], [254], [255]]).to(torch.uint8))
    found = linear_mxfp4(torch.eye(32, dtype=WIDE)[:1].contiguous(), packed)
    assert found[0, 0] == 2.0**-127 and found[0, 1] == 2.0**127 and found[0, 2].isnan()


def test_a_row_does_not_depend_on_the_others() -> None:
    packed = a_weight(140, 4)
    x = torch.randn(150, 128).half()
    whole = linear_mxfp4(x, packed)
    for start, stop in ((0, 1), (63, 66), (149, 150)):
        assert torch.equal(whole[start:stop], linear_mxfp4(x[start:stop].contiguous(), packed))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # a weight of 0
def test_what_is_not_finite_stays_in_its_row() -> None:
    torch.manual_seed(1)
    packed = a_weight(9, 2)
    x = torch.randn(4, 64, dtype=WIDE)
    whole = linear_mxfp4(x, packed)
    x[2, 7] = torch.inf
    sick = linear_mxfp4(x, packed)
    assert not sick[2].isfinite().any()
    assert torch.equal(sick[[0, 1, 3]], whole[[0, 1, 3]])
