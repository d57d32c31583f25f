"""int8 products in the interpreter against their format's specification."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import w8
from batchinfer_kernels.activation_formats import quantize
from batchinfer_kernels.triton.linear_int8 import linear_int8
from torch import Tensor

from tests.kernels.triton.accuracy import AsType, check_close
from tests.kernels.triton.device import ROWS


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("rows, columns, depth", [(1, 1, 1), (128, 128, 128), (129, 40, 100), (3, 300, 64)])
@pytest.mark.parametrize("extras", [False, True])
def test_linear_int8(rows: int, columns: int, depth: int, dtype: torch.dtype, extras: bool) -> None:
    torch.manual_seed(rows * columns + depth)
    x, x_scales = quantize(torch.randn(rows, depth), "int8")
    weight, scales = quantize(torch.randn(columns, depth), "int8")
    bias = torch.randn(columns).to(dtype) if extras else None
    residual = torch.randn(rows, columns).to(dtype) if extras else None
    kept = None if residual is None else residual.clone()
    found = linear_int8(x, x_scales, weight, scales, bias, kept, dtype=dtype)
    assert kept is None or found.data_ptr() == kept.data_ptr()

    def compute(as_type: AsType) -> Tensor:
        more = (None if bias is None else as_type(bias), None if residual is None else as_type(residual))
        wide = as_type(torch.empty(0, dtype=dtype)).dtype
        return w8.linear(x, as_type(x_scales), weight, as_type(scales), *more, dtype=wide)

    check_close(found, compute)


def test_sums_are_exact() -> None:
    x, weight = torch.full((2, 4096), 127, dtype=torch.int8), torch.full((3, 4096), -127, dtype=torch.int8)
    found = linear_int8(x, torch.ones(2), weight, torch.ones(3), dtype=torch.float32)
    assert found.eq(-127 * 127 * 4096).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    x, x_scales = quantize(torch.randn(150, 96), "int8")
    weight, scales = quantize(torch.randn(140, 96), "int8")
    whole = linear_int8(x, x_scales, weight, scales, dtype=torch.float16)
    for start, stop in ((0, 1), (127, 129), (149, 150)):
        some = linear_int8(
            x[start:stop].contiguous(), x_scales[start:stop].contiguous(), weight, scales, dtype=torch.float16
        )
        assert torch.equal(whole[start:stop], some)


def test_a_sick_row_stays_alone() -> None:
    x = torch.randn(3, 40)
    x[1, 4] = torch.inf
    weight, scales = quantize(torch.randn(9, 40), "int8")
    found = linear_int8(*quantize(x, "int8"), weight, scales, dtype=torch.float16)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
