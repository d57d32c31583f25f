"""FP8 products in the interpreter against their format's specification."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import fp8
from batchinfer_kernels.activation_formats import quantize
from batchinfer_kernels.triton.linear_fp8 import DEFAULTS, linear_fp8
from torch import Tensor
from triton.errors import TritonError

from tests.kernels.triton.accuracy import AsType, check_close
from tests.kernels.triton.device import PRODUCTS, WIDE, least_ulps


def operands(rows: int, columns: int, depth: int, kind: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """kind: of scales, and "wide" for activations that are not quantized."""
    x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    values, scales = fp8.quantize_blocks(weight) if "block" in kind else quantize(weight, "fp8")
    if "wide" in kind:
        return x, None, values, scales
    return *(quantize(x, "fp8_groups") if "block" in kind else quantize(x, "fp8")), values, scales


@pytest.mark.parametrize("kind", ["channel", "block", "wide channel", "wide block"])
@pytest.mark.parametrize("rows, columns, depth", [(1, 1, 1), (129, 140, 128), (2, 300, 200), (65, 128, 256)])
@pytest.mark.parametrize("dtype, extras", [(WIDE, False), (torch.float16, True)])
def test_linear_fp8(rows: int, columns: int, depth: int, kind: str, dtype: torch.dtype, extras: bool) -> None:
    torch.manual_seed(rows * columns + depth)
    x, x_scales, weight, scales = operands(rows, columns, depth, kind)
    x = x.to(dtype) if x_scales is None else x
    bias = torch.randn(columns).to(dtype) if extras else None
    residual = torch.randn(rows, columns).to(dtype) if extras else None
    kept = None if residual is None else residual.clone()
    found = linear_fp8(x, x_scales, weight, scales, bias, kept, dtype=dtype)
    assert kept is None or found.data_ptr() == kept.data_ptr()

    def compute(as_type: AsType) -> Tensor:
        more = (None if bias is None else as_type(bias), None if residual is None else as_type(residual))
        wide = as_type(torch.empty(0, dtype=dtype)).dtype
        return fp8.linear(
            x, None if x_scales is None else as_type(x_scales), weight, as_type(scales), *more, dtype=wide
        )

    check_close(found, compute, ulps=least_ulps(dtype))


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_every_weight_is_widened_exactly(dtype: torch.dtype) -> None:
    every = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    weight = every.view(fp8.TYPE)[:, None]
    found = linear_fp8(torch.ones(1, 1, dtype=dtype), None, weight, torch.ones(len(every)), dtype=dtype)
    assert torch.equal(found[0], weight[:, 0].to(dtype))


@pytest.mark.parametrize("kind", ["channel", "block", "wide block"])
def test_a_row_does_not_depend_on_the_others(kind: str) -> None:
    x, x_scales, weight, scales = operands(150, 140, 200, kind)
    x = x.half() if x_scales is None else x
    whole = linear_fp8(x, x_scales, weight, scales, dtype=torch.float16)
    for start, stop in ((0, 1), (63, 66), (127, 129), (149, 150)):
        some = None if x_scales is None else x_scales[start:stop].contiguous()
        alone = linear_fp8(x[start:stop].contiguous(), some, weight, scales, dtype=torch.float16)
        assert torch.equal(whole[start:stop], alone)


@pytest.mark.parametrize("kind", ["channel", "block"])
def test_a_sick_row_stays_alone(kind: str) -> None:
    x = torch.randn(3, 200)
    x[1, 4] = torch.inf
    _, _, weight, scales = operands(1, 9, 200, kind)
    values, x_scales = quantize(x, "fp8") if kind == "channel" else quantize(x, "fp8_groups")
    found = linear_fp8(values, x_scales, weight, scales, dtype=torch.float16)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


def test_a_program_has_columns_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a table of a device says."""
    for capability, launch in DEFAULTS.items():
        monkeypatch.setitem(DEFAULTS, capability, {**launch, "BLOCK_N": 256})
    x, x_scales, weight, scales = operands(1, 300, 128, "block")
    with pytest.raises(TritonError, match="one scale"):
        linear_fp8(x, x_scales, weight, scales, dtype=torch.float16)
