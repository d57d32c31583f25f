"""MXFP4: what the bytes of a checkpoint mean, number by number."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import mxfp4
from torch import Tensor


def number(code: int) -> float:
    """e2m1 by its definition: a sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


def stored(features: int, groups: int, experts: int | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(features)
    shape = (features, groups) if experts is None else (experts, features, groups)
    return torch.randint(256, (*shape, 16), dtype=torch.uint8), torch.randint(100, 140, shape, dtype=torch.uint8)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_a_checkpoint(groups: int) -> None:
    blocks, scales = stored(3, groups)
    weights = mxfp4.dequantize(mxfp4.pack(blocks, scales), torch.float64)
    assert weights.shape == (3, 32 * groups)
    for n in range(3):
        for k in range(32 * groups):
            byte = int(blocks[n, k // 32, k % 32 // 2])
            meant = number(byte >> 4 if k % 2 else byte & 15) * 2.0 ** (int(scales[n, k // 32]) - 127)
            assert weights[n, k] == meant
    x, bias = torch.randn(2, 32 * groups, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(
        mxfp4.linear(x, mxfp4.pack(blocks, scales), bias, x[:, :3]), x @ weights.T + bias + x[:, :3]
    )


def test_experts_are_their_weights_one_by_one() -> None:
    blocks, scales = stored(4, 3, experts=2)
    whole = mxfp4.dequantize(mxfp4.pack(blocks, scales), torch.float32)
    for expert in range(2):
        alone = mxfp4.pack(blocks[expert], scales[expert])
        assert torch.equal(whole[expert], mxfp4.dequantize(alone, torch.float32))


def test_the_ends_of_the_scales() -> None:
    blocks = torch.full((1, 3, 16), 0x22, dtype=torch.uint8)  # ones
    weights = mxfp4.dequantize(mxfp4.pack(blocks, torch.tensor([[0, 254, 255]]).to(torch.uint8)), torch.bfloat16)
    assert weights[0, 0] == 2.0**-127 and weights[0, 32] == 2.0**127 and weights[0, 64:].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    blocks, scales = stored(3, 2)
    for wrong in ((blocks[..., :8], scales), (blocks, scales[:, :1])):
        with pytest.raises(ValueError, match="MXFP4"):
            mxfp4.pack(*wrong)
