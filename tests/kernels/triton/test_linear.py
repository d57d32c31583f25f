"""Plain products in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import reference
from batchinfer_kernels.triton.linear import linear
from torch import Tensor

from tests.kernels.triton.accuracy import AsType, check_close
from tests.kernels.triton.device import PRODUCTS, WIDE, least_ulps


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(
    "rows, columns, depth", [(1, 1, 1), (1, 64, 32), (128, 128, 64), (129, 40, 33), (3, 300, 100), (300, 129, 64)]
)
@pytest.mark.parametrize("with_bias, with_residual", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_linear(
    rows: int, columns: int, depth: int, dtype: torch.dtype, with_bias: bool, with_residual: bool, deterministic: bool
) -> None:
    torch.manual_seed(rows * columns + depth)
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    bias = torch.randn(columns).to(dtype) if with_bias else None
    residual = torch.randn(rows, columns).to(dtype) if with_residual else None
    kept = None if residual is None else residual.clone()
    found = linear(x, weight, bias, kept, deterministic=deterministic)
    assert kept is None or found.data_ptr() == kept.data_ptr()

    def compute(as_type: AsType) -> Tensor:
        y = reference.linear(as_type(x), as_type(weight), None if bias is None else as_type(bias))
        return y if residual is None else as_type(residual) + y

    check_close(found, compute, ulps=least_ulps(dtype))


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(150, 96).half(), torch.randn(140, 96).half()
    whole = linear(x, weight)
    for start, stop in ((0, 1), (127, 129), (149, 150), (3, 150)):
        assert torch.equal(whole[start:stop], linear(x[start:stop].contiguous(), weight))


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = torch.randn(4, 40, dtype=WIDE), torch.randn(9, 40, dtype=WIDE)
    whole = linear(x, weight)
    x[2, 7] = torch.inf
    sick = linear(x, weight)
    assert not sick[2].isfinite().any()
    assert torch.equal(sick[[0, 1, 3]], whole[[0, 1, 3]])


def test_no_rows() -> None:
    assert linear(torch.empty(0, 8), torch.ones(5, 8)).shape == (0, 5)
