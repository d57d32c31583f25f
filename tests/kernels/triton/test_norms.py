"""Norms in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import activation_formats, reference
from batchinfer_kernels.activation_formats import FORMATS
from batchinfer_kernels.triton.norms import rms_norm, rms_norm_quantized

from tests.kernels.triton.accuracy import check_close
from tests.kernels.triton.device import ROWS


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("rows, width", [(1, 1), (1, 64), (3, 576), (7, 100), (2, 4097), (1, 16_384)])
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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 576), (2, 300), (1, 16_384)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_quantized_it_is_the_norm_quantized(
    rows: int, width: int, name: str, dtype: torch.dtype, with_residual: bool
) -> None:
    torch.manual_seed(rows * width)
    x, residual = torch.randn(2, rows, width).to(dtype)
    weight = torch.rand(width).to(dtype)
    kept, other = (residual.clone(), residual.clone()) if with_residual else (None, None)
    codes, scales = rms_norm_quantized(x, weight, 1e-5, name, kept)
    wanted_codes, wanted_scales = activation_formats.quantize(rms_norm(x, weight, 1e-5, other), name)
    assert torch.equal(codes.float(), wanted_codes.float()) and torch.equal(scales, wanted_scales)
    if kept is not None:
        assert torch.equal(kept, x + residual)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = torch.randn(5, 96), torch.rand(96)
    whole = rms_norm(x, weight, 1e-6)
    assert all(torch.equal(whole[i : i + 1], rms_norm(x[i : i + 1].contiguous(), weight, 1e-6)) for i in range(5))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_sick_row_harms_no_other() -> None:
    x, weight = torch.randn(4, 300), torch.rand(300)
    healthy = rms_norm_quantized(x, weight, 1e-6, "int8")
    x[2, 5] = torch.inf
    codes, scales = rms_norm_quantized(x, weight, 1e-6, "int8")
    assert scales[2].isnan() and not codes[2].any()
    others = [0, 1, 3]
    assert torch.equal(codes[others], healthy[0][others]) and torch.equal(scales[others], healthy[1][others])


def test_no_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    codes, scales = rms_norm_quantized(torch.empty(0, 200), torch.ones(200), 1e-6, "fp8_groups")
    assert codes.shape == (0, 200) and scales.shape == (0, 2)
