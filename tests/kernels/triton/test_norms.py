"""Norms in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import reference
from batchinfer_kernels.triton.norms import rms_norm

from tests.kernels.triton.accuracy import check_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows, width", [(1, 1), (1, 64), (3, 576), (7, 100), (2, 4097)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, with_residual: bool) -> None:
    torch.manual_seed(rows * width)
    x, residual = torch.randn(2, rows, width).to(dtype)
    weight = torch.rand(width).to(dtype)
    kept = residual.clone() if with_residual else None
    found = rms_norm(x, weight, 1e-5, kept)
    summed = x + residual if with_residual else x
    if kept is not None:
        assert torch.equal(kept, summed)
    check_close(found, lambda as_type: reference.rms_norm(as_type(summed), as_type(weight), 1e-5))


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(5, 96), torch.rand(96)
    whole = rms_norm(x, weight, 1e-6)
    assert all(torch.equal(whole[i : i + 1], rms_norm(x[i : i + 1].contiguous(), weight, 1e-6)) for i in range(5))


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
