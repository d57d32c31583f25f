"""Activations to eight bits in the interpreter, against their specification."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import activation_formats
from batchinfer_kernels.activation_formats import FORMATS
from batchinfer_kernels.triton.quantize import quantize
from torch import Tensor


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert found[0].dtype == wanted[0].dtype and found[0].shape == wanted[0].shape
    assert found[1].dtype == torch.float32 and found[1].shape == wanted[1].shape
    assert torch.equal(found[0].float(), wanted[0].float())
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows, width", [(1, 1), (2, 128), (3, 200), (1, 16_384), (2, 5000)])
def test_codes_and_scales_are_those_of_the_specification(name: str, rows: int, width: int) -> None:
    torch.manual_seed(rows * width)
    x = torch.randn(rows, width, dtype=torch.float16 if width == 200 else torch.float32)
    same(quantize(x, name), activation_formats.quantize(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_what_is_no_number(name: str) -> None:
    x = torch.randn(6, 300)
    x[0], x[1] = 0, 1e-31
    x[2, 200], x[3, 0], x[4, 299] = torch.nan, torch.inf, -torch.inf
    same(quantize(x, name), activation_formats.quantize(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions_and_no_rows(name: str) -> None:
    x = torch.randn(2, 3, 130)
    codes, scales = quantize(x, name)
    flat = quantize(x.view(6, 130), name)
    same((codes.view(6, 130), scales.view(flat[1].shape)), flat)
    assert quantize(x[:0], name)[0].shape == (0, 3, 130)
