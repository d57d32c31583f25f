"""FP8: what quantizing loses, by channel and by block, and how scales of fused layers are spread."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import fp8
from batchinfer_kernels.activation_formats import quantize

# The largest error of e4m3 is half of the last of 3 bits of mantissa, or of the smallest subnormal number.
RELATIVE, LEAST = 2.0**-4, 2.0**-10


def check_quantized(x: torch.Tensor, dequantized: torch.Tensor, scales: torch.Tensor) -> None:
    error = (x - dequantized).abs()
    assert (error <= x.abs() * RELATIVE * 1.0001 + scales * LEAST).all()
    assert error.max() > 0


def test_by_channel() -> None:
    x = torch.randn(5, 200, dtype=torch.float64) * torch.tensor([1e-20, 1e-3, 1, 1e3, 1e20])[:, None]
    values, scales = quantize(x, "fp8")
    assert values.dtype == fp8.TYPE and values.float().abs().amax(-1).eq(448).all()
    check_quantized(x, fp8.dequantize(values, scales), scales[:, None])


def test_odd_rows() -> None:
    x = torch.ones(4, 3)
    x[1], x[2, 1], x[3, 0] = 0, torch.nan, torch.inf
    values, scales = quantize(x, "fp8")
    assert values.float().tolist() == [[448] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert scales[1] == 0 and scales[2:].isnan().all()


@pytest.mark.parametrize("features, depth", [(128, 128), (1, 1), (130, 257), (300, 384)])
def test_by_block(features: int, depth: int) -> None:
    torch.manual_seed(features)
    weight = torch.randn(2, features, depth, dtype=torch.float64)
    weight[0, features // 2] *= 1000
    values, scales = fp8.quantize_blocks(weight)
    assert values.shape == weight.shape and scales.shape == (2, -(-features // 128), -(-depth // 128))
    each = scales.repeat_interleave(128, 1)[:, :features].repeat_interleave(128, 2)[..., :depth]
    if depth > 1:
        check_quantized(weight, fp8.dequantize(values, scales), each)
    assert torch.equal(fp8.dequantize(values, scales), values.double() * each)
    for n in range(scales.shape[1]):
        for k in range(scales.shape[2]):
            most = weight[:, n * 128 : (n + 1) * 128, k * 128 : (k + 1) * 128].abs().amax((1, 2))
            assert torch.equal(scales[:, n, k], most / 448)


def test_groups_of_a_token_are_its_blocks_of_inputs() -> None:
    x = torch.randn(3, 300)
    values, scales = quantize(x, "fp8_groups")
    assert values.shape == x.shape and scales.shape == (3, 3)
    for group in range(3):
        span = slice(group * 128, (group + 1) * 128)
        alone = quantize(x[:, span], "fp8")
        assert torch.equal(values[:, span].float(), alone[0].float()) and torch.equal(scales[:, group], alone[1])


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_the_product_is_that_of_the_values(kind: str) -> None:
    x, weight = torch.randn(4, 200, dtype=torch.float64), torch.randn(140, 200, dtype=torch.float64)
    values, scales = quantize(weight, "fp8") if kind == "channel" else fp8.quantize_blocks(weight)
    bias, residual = torch.randn(140).double(), torch.randn(4, 140).double()
    wide = fp8.linear(x, None, values, scales, bias, residual, dtype=torch.float64)
    torch.testing.assert_close(wide, x @ fp8.dequantize(values, scales).T + bias + residual)
    narrow = fp8.linear(
        *(quantize(x, "fp8") if kind == "channel" else quantize(x, "fp8_groups")), values, scales, dtype=torch.float64
    )
    exact = x @ weight.T
    assert (narrow - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_weight_that_is_nan_is_refused() -> None:
    values = torch.tensor([[448.0, -448.0, 0.0]]).to(fp8.TYPE)
    fp8.check_weight(values)
    for sick in (0x7F, 0xFF):
        values.view(torch.uint8)[0, 1] = sick
        with pytest.raises(ValueError, match="NaN"):
            fp8.check_weight(values)
