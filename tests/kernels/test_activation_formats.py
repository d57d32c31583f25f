"""Activations in eight bits: how far they are from what they stand for, and what becomes of what is no number."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels.activation_formats import FORMATS, GROUP, LEAST, dequantize, quantize


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("width", [1, GROUP, 3 * GROUP, 300])
def test_codes_are_the_nearest(name: str, width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(5, width) * torch.logspace(-3, 3, 5)[:, None]
    codes, scales = quantize(x, name)
    form = FORMATS[name]
    assert codes.dtype == form.dtype and codes.shape == x.shape
    assert scales.shape == (5,) if form.group is None else (5, form.num_scales(width))
    step = scales if form.group is None else scales.repeat_interleave(GROUP, 1)[:, :width]
    step = step[:, None].expand_as(x) if form.group is None else step
    # Half a step of int8; of e4m3, with three bits behind the point, a sixteenth of the value or half the least step.
    allowed = step / 2 if name == "int8" else torch.maximum(x.abs() / 16, step * 2**-10)
    assert ((dequantize(codes, scales, name) - x).abs() <= allowed * (1 + 1e-5)).all()
    largest = codes.float().abs().amax(-1)
    assert (largest == form.most).all(), "the largest value has the largest code"


def test_ties_go_to_even() -> None:
    codes, scales = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), "int8")
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]] and scales.tolist() == [1.0]


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_what_is_no_number(name: str) -> None:
    x = torch.ones(5, 2 * GROUP)
    x[0] = 0
    x[1] = LEAST / 2
    x[2, 3], x[3, 3], x[4, 3] = torch.nan, torch.inf, -torch.inf
    codes, scales = quantize(x, name)
    first = scales[:, 0] if FORMATS[name].group else scales
    assert first[:2].tolist() == [0, 0] and first[2:].isnan().all()
    assert not codes[:2].float().any()
    back = dequantize(codes, scales, name)
    assert back[2:, :GROUP].isnan().all() and back[:2].isfinite().all()
    if FORMATS[name].group:
        assert (back[2:, GROUP:] == 1).all(), "the other group is as it was"
