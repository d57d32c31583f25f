"""The int8 format of GPUs: what quantizing loses, and what it does with odd rows."""

from __future__ import annotations

import torch
from batchinfer_kernels import w8
from batchinfer_kernels.activation_formats import quantize


def test_each_value_is_within_half_a_step() -> None:
    x = torch.randn(5, 33) * torch.tensor([1e-20, 1e-3, 1, 1e3, 1e20])[:, None]
    values, scales = quantize(x, "int8")
    assert values.dtype == torch.int8 and scales.dtype == torch.float32
    error = (values.double() * scales.double()[:, None] - x).abs().amax(-1)
    assert (error <= scales.double() * 0.5001).all()
    assert (values.abs().amax(-1) == 127).all()


def test_odd_rows() -> None:
    x = torch.ones(4, 3)
    x[1], x[2, 1], x[3, 0] = 0, torch.nan, -torch.inf
    values, scales = quantize(x, "int8")
    assert values.tolist() == [[127] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert scales[1] == 0 and scales[2:].isnan().all()


def test_the_product_is_that_of_the_values() -> None:
    x, weight = torch.randn(4, 20, dtype=torch.float64), torch.randn(6, 20, dtype=torch.float64)
    (x_values, x_scales), (values, scales) = quantize(x, "int8"), quantize(weight, "int8")
    bias, residual = torch.randn(6).double(), torch.randn(4, 6).double()
    y = w8.linear(x_values, x_scales, values, scales, bias, residual, dtype=torch.float64)
    meant = (x_values * x_scales[:, None]) @ (values * scales[:, None]).T + bias + residual
    torch.testing.assert_close(y, meant)
    assert (y - (x @ weight.T + bias + residual)).abs().max() < 0.2
