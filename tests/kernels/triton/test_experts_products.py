"""Experts' products in every format, and their sum, in the interpreter against the specification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from batchinfer_kernels import experts, fp8, mxfp4, reference, w4, w8
from batchinfer_kernels.activation_formats import quantize
from batchinfer_kernels.experts import Aligned
from batchinfer_kernels.triton import routing
from batchinfer_kernels.triton.experts import (
    block_size,
    combine,
    experts_linear,
    experts_linear_fp8,
    experts_linear_int8,
    experts_linear_mxfp4,
    experts_linear_w4,
)
from torch import Tensor

from tests.kernels.triton.accuracy import AsType, check_close
from tests.kernels.triton.device import ROWS, WIDE, least_ulps

FORMATS = ("plain", "int8", "w4", "w4 whole rows", "fp8 channel", "fp8 block", "fp8 wide", "mxfp4")
E = 5


@dataclass(frozen=True)
class Layer:
    """run: rows of x [.., K] as given, aligned, bias. product: of these rows and expert, by the specification."""

    run: Callable[[Tensor, Aligned, Tensor | None], Tensor]
    product: Callable[[AsType, Tensor, int], Tensor]


def of_expert(packed, expert: int):
    names = [name for name in ("codes", "scales", "zeros") if getattr(packed, name, None) is not None]
    return replace(packed, **{name: getattr(packed, name)[expert] for name in names})


def layer(form: str, features: int, depth: int, dtype: torch.dtype) -> Layer:
    weight = torch.randn(E, features, depth)
    if form == "plain":
        plain = weight.to(dtype)
        return Layer(
            lambda x, aligned, bias: experts_linear(x, plain, aligned, bias),
            lambda as_type, x, expert: reference.linear(as_type(x), as_type(plain[expert])),
        )
    if form == "int8":
        values, scales = quantize(weight, "int8")

        def product(as_type: AsType, x: Tensor, expert: int) -> Tensor:
            x_values, x_scales = quantize(x, "int8")
            wide = as_type(x).dtype
            return w8.linear(x_values, as_type(x_scales), values[expert], as_type(scales[expert]), dtype=wide)

        return Layer(
            lambda x, aligned, bias: experts_linear_int8(
                *quantize(x, "int8"), values, scales, aligned, bias, dtype=dtype
            ),
            product,
        )
    if form.startswith("w4"):
        group = 0 if "whole" in form else 32
        groups = depth // group if group else 1
        packed = w4.stack(
            [
                w4.pack(
                    torch.randint(16, (features, depth), dtype=torch.uint8),
                    torch.rand(groups, features).to(dtype) / 8,
                    torch.randint(16, (groups, features)) if group else None,
                    group=group,
                )
                for _ in range(E)
            ]
        )

        def product(as_type: AsType, x: Tensor, expert: int) -> Tensor:
            mine = of_expert(packed, expert)
            return w4.linear(as_type(x), replace(mine, scales=as_type(mine.scales)))

        return Layer(lambda x, aligned, bias: experts_linear_w4(x, packed, aligned, bias), product)
    if form == "mxfp4":
        blocks = torch.randint(256, (E, features, depth // 32, 16), dtype=torch.uint8)
        mx = mxfp4.pack(blocks, torch.randint(122, 128, blocks.shape[:-1], dtype=torch.uint8))
        return Layer(
            lambda x, aligned, bias: experts_linear_mxfp4(x, mx, aligned, bias),
            lambda as_type, x, expert: mxfp4.linear(as_type(x), of_expert(mx, expert)),
        )
    in_blocks = form != "fp8 channel"
    values, scales = fp8.quantize_blocks(weight) if in_blocks else quantize(weight, "fp8")

    def rows(x: Tensor) -> tuple[Tensor, Tensor | None]:
        if form == "fp8 wide":
            return x, None
        return quantize(x, "fp8_groups") if in_blocks else quantize(x, "fp8")

    def product(as_type: AsType, x: Tensor, expert: int) -> Tensor:
        x_values, x_scales = rows(x)
        wide = as_type(x).dtype
        x_scales = None if x_scales is None else as_type(x_scales)
        return fp8.linear(x_values, x_scales, values[expert], as_type(scales[expert]), dtype=wide)

    return Layer(
        lambda x, aligned, bias: experts_linear_fp8(*rows(x), values, scales, aligned, bias, dtype=dtype), product
    )


def ids_of(kind: str) -> Tensor:
    """Expert 2 has nothing in most of them."""
    return {
        "one token": torch.tensor([[4, 0]]),
        "all to one": torch.full((70, 1), 3),
        "mixed": torch.tensor([0, 1, 3, 4, -1])[torch.randint(5, (45, 3))],
    }[kind].to(torch.int32)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["one token", "all to one", "mixed"])
@pytest.mark.parametrize("per_slot", [False, True])
def test_experts_linear(form: str, kind: str, per_slot: bool) -> None:
    torch.manual_seed(len(form) + per_slot)
    features, depth, dtype = (140, 96, torch.float16) if per_slot else (40, 128, WIDE)
    found_by = layer(form, features, depth, dtype)
    ids = ids_of(kind)
    x = torch.randn(ids.numel() if per_slot else len(ids), depth).to(dtype)
    bias = torch.randn(E, features).to(dtype) if per_slot else None
    size = block_size(form.split()[0], x.device)
    found = found_by.run(x, routing.align(ids, E, size), bias)
    there = ids.flatten() >= 0

    def compute(as_type: AsType) -> Tensor:
        def product(rows: Tensor, expert: int) -> Tensor:
            y = found_by.product(as_type, x[rows], expert)
            return y if bias is None else y + as_type(bias[expert])

        out = torch.zeros(ids.numel(), features, dtype=as_type(x).dtype)
        return experts.linear(ids, product, out, per_slot=per_slot)[there]

    check_close(found[there], compute, ulps=least_ulps(dtype))


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    torch.manual_seed(3)
    by = layer(form, 136, 128, torch.float16)
    ids = ids_of("mixed").clamp(min=0)
    x = torch.randn(len(ids), 128).half()
    size = block_size(form.split()[0], x.device)
    whole = by.run(x, routing.align(ids, E, size), None).unflatten(0, ids.shape)
    for start, stop in ((0, 1), (7, 40)):
        some = ids[start:stop].contiguous()
        alone = by.run(x[start:stop].contiguous(), routing.align(some, E, size), None)
        assert torch.equal(whole[start:stop], alone.unflatten(0, some.shape))


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("rows, k, width", [(1, 1, 1), (7, 3, 1030), (2, 8, 64)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_combine(rows: int, k: int, width: int, dtype: torch.dtype, with_residual: bool) -> None:
    torch.manual_seed(rows)
    y, weights = torch.randn(rows * k, width).to(dtype), torch.rand(rows, k)
    ids = torch.randint(-1, 3, (rows, k), dtype=torch.int32)
    y[ids.flatten() < 0] = torch.nan  # what was never written
    residual = torch.randn(rows, width).to(dtype) if with_residual else None
    kept = None if residual is None else residual.clone()
    found = combine(y, weights, ids, kept)
    assert kept is None or found.data_ptr() == kept.data_ptr()

    def compute(as_type: AsType) -> Tensor:
        return experts.combine(as_type(y), as_type(weights), ids, None if residual is None else as_type(residual))

    check_close(found, compute)


def test_no_tokens() -> None:
    ids, x = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 8)
    aligned = routing.align(ids, E, block_size("plain", x.device))
    y = experts_linear(x, torch.ones(E, 4, 8), aligned)
    assert y.shape == (0, 4) and combine(y, torch.empty(0, 2), ids).shape == (0, 4)
