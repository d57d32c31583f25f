"""Gated activations in the interpreter against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from batchinfer_kernels import activation_formats, reference
from batchinfer_kernels.activation_formats import FORMATS
from batchinfer_kernels.triton.activations import KINDS, activation, activation_quantized
from torch import Tensor

from tests.kernels.triton.accuracy import check_close
from tests.kernels.triton.device import ROWS, on_gpu

REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": reference.silu_and_mul,
    "gelu_tanh": reference.gelu_tanh_and_mul,
    "clamped_swiglu": reference.clamped_swiglu,
}

# Of numpy: a power that is infinite, whose reciprocal is 0; and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("rows, inner", [(1, 1), (3, 576), (2, 1025)])
def test_activations(kind: str, dtype: torch.dtype, rows: int, inner: int) -> None:
    torch.manual_seed(inner)
    gate_up = (4 * torch.randn(rows, 2 * inner)).to(dtype)
    check_close(activation(gate_up, kind), lambda as_type: REFERENCES[kind](as_type(gate_up)))


@pytest.mark.parametrize("kind", KINDS)
def test_far_from_zero(kind: str) -> None:
    gate = torch.tensor([-3e4, -200.0, -88.0, -20.0, -0.0, 20.0, 88.0, 200.0, 3e4])
    gate_up = torch.cat((gate, gate.flip(0)))[None]
    torch.testing.assert_close(activation(gate_up, kind), REFERENCES[kind](gate_up), rtol=1e-5, atol=1e-30)


def test_the_clamped_one_by_hand() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([-9.0, 9.0, 0.5])
    wanted = [
        7 / (1 + torch.tensor(-1.702 * 7.0).exp()) * -6,
        -9 / (1 + torch.tensor(1.702 * 9.0).exp()) * 8,
        1.5 / (1 + torch.tensor(-1.702).exp()),
    ]
    torch.testing.assert_close(activation(torch.cat((gate, up))[None], "clamped_swiglu")[0], torch.stack(wanted))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype, rows, inner", [(torch.float16, 3, 576), (torch.float32, 2, 4200), *on_gpu((torch.bfloat16, 2, 576))]
)
def test_quantized_it_is_the_activation_quantized(
    kind: str, name: str, dtype: torch.dtype, rows: int, inner: int
) -> None:
    gate_up = torch.randn(rows, 2 * inner).to(dtype)
    gate_up[-1, 130] = torch.nan
    codes, scales = activation_quantized(gate_up, kind, name)
    wanted_codes, wanted_scales = activation_formats.quantize(activation(gate_up, kind), name)
    assert torch.equal(codes.float(), wanted_codes.float()) and codes.dtype == wanted_codes.dtype
    torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)
    assert wanted_scales[-1].isnan().any() and not scales[:-1].isnan().any()


def test_a_row_does_not_depend_on_the_others() -> None:
    gate_up = torch.randn(5, 2 * 300)
    codes, scales = activation_quantized(gate_up, "silu", "int8")
    for i in range(5):
        alone = activation_quantized(gate_up[i : i + 1], "silu", "int8")
        assert torch.equal(codes[i : i + 1], alone[0]) and torch.equal(scales[i : i + 1], alone[1])


def test_leading_dimensions_and_no_rows() -> None:
    gate_up = torch.randn(2, 3, 2 * 40)
    assert torch.equal(activation(gate_up, "silu").view(6, 40), activation(gate_up.view(6, 80), "silu"))
    for name in FORMATS:
        assert activation_quantized(gate_up[:0], "silu", name)[0].shape == (0, 3, 40)
