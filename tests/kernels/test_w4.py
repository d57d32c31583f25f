"""4-bit weights: the layout, and what GPTQ and AWQ checkpoints mean, against the words built bit by bit."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import w4
from torch import Tensor


def words(nibbles: Tensor) -> Tensor:
    """[A, 8 B] below 16 as int32 [A, B], the first lowest."""
    shifted = nibbles.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    whole = shifted.sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def a_layer(depth: int, features: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [K, N], zeros [G, N] from 0 to 15 and scales float16 [G, N]."""
    torch.manual_seed(seed)
    num_groups = 1 if group == -1 else -(-depth // group)
    codes = torch.randint(16, (depth, features))
    return codes, torch.randint(16, (num_groups, features)), torch.rand(num_groups, features).half()


def meant(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """W [N, K], of the scales' type, for the group of each input."""
    return ((codes - zeros[groups]).to(scales.dtype) * scales[groups]).T


def in_turn(depth: int, group: int) -> Tensor:
    return torch.zeros(depth, dtype=torch.long) if group == -1 else torch.arange(depth) // group


@pytest.mark.parametrize("group, depth", [(32, 64), (32, 96), (64, 192), (128, 256), (128, 200), (-1, 72), (-1, 256)])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_gptq(group: int, depth: int, act_order: bool, zero_offset: int) -> None:
    codes, zeros, scales = a_layer(depth, 24, group)
    groups = in_turn(depth, group)
    if act_order:
        groups = groups[torch.randperm(depth)]
    packed = w4.from_gptq(
        words(codes.T).T,
        words(zeros - zero_offset),
        scales,
        groups.int(),
        group=group,
        dtype=torch.float16,
        act_order=act_order,
        zero_offset=zero_offset,
    )
    assert torch.equal(w4.dequantize(packed, torch.float16), meant(codes, zeros, scales, groups))
    x = torch.randn(3, depth, dtype=torch.float64)
    torch.testing.assert_close(w4.linear(x, packed), x @ meant(codes, zeros, scales.double(), groups).T)


def test_gptq_symmetric_has_no_zero_points() -> None:
    codes, zeros, scales = a_layer(128, 16, 64)
    zeros[:] = 8
    stored = (words(codes.T).T, words(zeros - 1), scales)
    # g_idx is stored with zeros where there is no activation order, and in turn where it changed nothing.
    for g_idx, act_order in ((torch.zeros(128).int(), False), (in_turn(128, 64).int(), True), (None, False)):
        packed = w4.from_gptq(*stored, g_idx, group=64, dtype=torch.float16, act_order=act_order)
        assert packed.zeros is None and packed.order is None
        assert torch.equal(w4.dequantize(packed, torch.float16), meant(codes, zeros, scales, in_turn(128, 64)))


def test_zero_points_of_0_borrow_from_their_neighbours() -> None:
    """1 was taken away from whole words: a 0 is stored as 15, and the next one is less by one more."""
    codes, _, scales = a_layer(64, 8, 64)
    zeros = torch.tensor([[0, 8, 15, 0, 0, 1, 0, 15]])
    stored = torch.tensor([[0xF0100F80 - 0x11111111 - (1 << 32)]]).int()
    assert torch.equal(stored, words(zeros - 1))
    packed = w4.from_gptq(words(codes.T).T, stored, scales, None, group=64, dtype=torch.float16, act_order=False)
    assert packed.zeros is not None and packed.zeros[0].tolist() == zeros[0].tolist()
    assert torch.equal(w4.dequantize(packed, torch.float16), meant(codes, zeros, scales, in_turn(64, 64)))


@pytest.mark.parametrize("group, depth", [(32, 96), (128, 256), (-1, 80)])
def test_awq(group: int, depth: int) -> None:
    codes, zeros, scales = a_layer(depth, 16, group)
    stored_at = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word has feature stored_at[i]
    mixed = [word * 8 + i for word in range(2) for i in stored_at]
    packed = w4.from_awq(words(codes[:, mixed]), words(zeros[:, mixed]), scales, group=group, dtype=torch.float16)
    assert torch.equal(w4.dequantize(packed, torch.float16), meant(codes, zeros, scales, in_turn(depth, group)))


def test_the_layout() -> None:
    """Byte j of a block has input j below and input j + H above."""
    codes = torch.randint(16, (5, 256), dtype=torch.uint8)
    packed = w4.planes(codes, 64)
    assert packed.shape == (2, 5, 64)
    assert packed[1, 3, 7] == codes[3, 128 + 7] | codes[3, 128 + 64 + 7] << 4
    assert torch.equal(w4.from_planes(packed), codes)


def one(group: int = 32, depth: int = 64, zeros: int = 3, order: Tensor | None = None) -> w4.Packed:
    codes = torch.randint(16, (4, depth), dtype=torch.uint8)
    shape = (depth // group, 4)
    return w4.pack(codes, torch.rand(shape), torch.full(shape, zeros), group=group, order=order)


def test_fused_layers_and_experts() -> None:
    first, second = one(zeros=3), one(zeros=8)
    fused, stacked = w4.concatenate((first, second)), w4.stack((first, second))
    parts = [w4.dequantize(part, torch.float32) for part in (first, second)]
    assert torch.equal(w4.dequantize(fused, torch.float32), torch.cat(parts))
    assert torch.equal(w4.dequantize(stacked, torch.float32), torch.stack(parts))
    assert w4.concatenate((second, second)).zeros is None and w4.stack((second, second)).zeros is None


def test_what_is_refused() -> None:
    turned = one(order=torch.arange(64).flip(0))
    for parts in ((one(), one(group=64)), (one(), turned), (turned, one(order=torch.arange(64)))):
        with pytest.raises(ValueError, match="differ"):
            w4.concatenate(parts)
    with pytest.raises(ValueError, match="activation order"):
        w4.stack((turned, turned))
    with pytest.raises(ValueError, match="groups of 48"):
        w4.pack(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(2, 4), None, group=48)
    with pytest.raises(ValueError, match="need \\(3, 4\\)"):
        w4.pack(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(2, 4), None, group=32)
    codes, zeros, scales = a_layer(64, 8, 32)
    uneven = torch.tensor([0] * 40 + [1] * 24)
    with pytest.raises(ValueError, match="g_idx"):
        w4.from_gptq(words(codes.T).T, words(zeros), scales, uneven, group=32, dtype=torch.float16, act_order=True)
