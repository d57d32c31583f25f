"""Weights of 4 bits with a scale for each group of inputs (and zero points): one layout, the ways into it from GPTQ and
AWQ checkpoints, and the specification of products with them, in torch.

A weight is (code - zero) * scale. Inputs come in blocks of 2 H. The layout has for each block and output feature H
bytes: byte j has the code of input j of the block in its low four bits and that of input j + H in the high ones. H is
at most a group, so that each of those halves has one scale for an output feature. What inputs
beyond K have is of no consequence: x is 0 there.

With activation order (GPTQ's desc_act) the inputs of a group lie anywhere. They are sorted by group here; `order` says
which input of x each one is.

Legend: K inputs, Kp = K padded to whole blocks and groups, N output features, G groups, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPS = (32, 64, 128)
MIDDLE = 8  # the zero point of symmetric weights
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_ONES = 0x11111111  # 1 in each of the eight numbers of a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Weights W [N, K], or of experts with a dimension E before all of these.

    codes   uint8 [Kp / 2H, N, H]
    scales  [G, N], of the activations' type
    zeros   uint8 [G, N], 0 to 15; None: 8 everywhere
    order   int64 [K]: input i of these weights is order[i] of x; None: i
    depth   K
    group   inputs that share a scale; 0: all of them
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    depth: int
    group: int


def half(group: int) -> int:
    """H for a size of groups."""
    return 32 if group == 32 else 64


def planes(values: Tensor, half: int) -> Tensor:
    """Values uint8 [.., N, Kp] below 16 as uint8 [.., Kp / 2H, N, H]: see above."""
    blocks = torch.unflatten(values, -1, (-1, 2, half))
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).transpose(-3, -2).contiguous()


def from_planes(packed: Tensor) -> Tensor:
    """What `planes` was given, from its result [.., Kp / 2H, N, H]: [.., N, Kp]."""
    both = torch.stack((packed & 15, packed >> 4), dim=-2)  # [.., Kp / 2H, N, 2, H]
    return both.movedim(-4, -3).flatten(-3)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, *, group: int, order: Tensor | None = None) -> Packed:
    """Codes uint8 [N, K], sorted by group; scales [G, N]; zeros integers [G, N] or None; `group` and `order` as in
    `Packed`.

    Raises ValueError for groups of another size, or of another number than the scales say.
    """
    features, depth = codes.shape
    if group not in (0, *GROUPS):
        raise ValueError(f"4-bit weights: groups of {group} inputs; known are {GROUPS} and whole rows")
    num_groups = -(-depth // group) if group else 1
    if scales.shape != (num_groups, features) or (zeros is not None and zeros.shape != scales.shape):
        raise ValueError(
            f"4-bit weights: scales of shape {tuple(scales.shape)}; {depth} inputs in groups of {group or depth} and "
            f"{features} output features need ({num_groups}, {features})"
        )
    if zeros is not None and bool((zeros == MIDDLE).all()):
        zeros = None
    block = 2 * half(group)
    padding = -depth % max(block, group)
    codes = F.pad(codes, (0, padding))
    missing = (depth + padding) // group - num_groups if group else 0
    if missing:
        scales = F.pad(scales, (0, 0, 0, missing))
        zeros = None if zeros is None else F.pad(zeros, (0, 0, 0, missing))
    return Packed(
        codes=planes(codes.contiguous(), block // 2),
        scales=scales.contiguous(),
        zeros=None if zeros is None else zeros.to(torch.uint8).contiguous(),
        order=order,
        depth=depth,
        group=group,
    )


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None,
    *,
    group: int,
    dtype: torch.dtype,
    act_order: bool,
    zero_offset: int = 1,
) -> Packed:
    """A layer of a GPTQ checkpoint, 4 bits: qweight int32 [K / 8, N], eight inputs in a word, the first lowest; qzeros
    int32 [G, N / 8], eight features in a word; scales [G, N]; g_idx [K], each input's group, read with `act_order`
    only (others are stored with zeros there).

    group        inputs in a group; -1: all
    dtype        of the activations
    zero_offset  what is added to stored zero points: 1, and 0 for checkpoint_format "gptq_v2". It was taken away from
                 whole words, where a zero point of 0 borrows from the next one, and is added to whole words

    Raises ValueError where shapes do not fit, or where g_idx does not fill its groups one after the other.
    """
    codes = _nibbles(qweight.T)  # [N, K]
    depth = codes.shape[1]
    zeros = _nibbles(qzeros.to(torch.int32) + zero_offset * _ONES)  # what passes 32 bits is dropped
    group = _group(group, depth)
    order = None
    if act_order and g_idx is not None and group:
        if g_idx.shape != (depth,):
            raise ValueError(f"GPTQ: g_idx of shape {tuple(g_idx.shape)} for {depth} inputs")
        order = torch.argsort(g_idx, stable=True)
        if not torch.equal(g_idx[order].long(), torch.arange(depth, device=g_idx.device) // group):
            raise ValueError(f"GPTQ: g_idx does not put {group} inputs in each group")
        codes = codes[:, order]
        if bool((order[1:] > order[:-1]).all()):
            order = None  # activation order was asked for and changed nothing
    return pack(codes, scales.to(dtype), zeros, group=group, order=order)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group: int, dtype: torch.dtype) -> Packed:
    """A layer of an AWQ checkpoint ("gemm"), 4 bits: qweight int32 [K, N / 8], eight features in a word, in the order
    0, 2, 4, 6, 1, 3, 5, 7 from the lowest; qzeros int32 [G, N / 8] likewise; scales [G, N].

    group, dtype and errors as of `from_gptq`.
    """
    codes = _in_order(_nibbles(qweight)).T.contiguous()
    return pack(codes, scales.to(dtype), _in_order(_nibbles(qzeros)), group=_group(group, codes.shape[1]), order=None)


def concatenate(parts: Sequence[Packed]) -> Packed:
    """Layers with the same inputs as one, output features one after the other.

    Raises ValueError where groups or the order of inputs differ: such layers can't be one product.
    """
    first = parts[0]
    for other in parts[1:]:
        same_order = (
            first.order is other.order
            if first.order is None or other.order is None
            else torch.equal(first.order, other.order)
        )
        if (first.depth, first.group) != (other.depth, other.group) or not same_order:
            raise ValueError("4-bit weights: fused layers differ in their groups or in the order of their inputs")
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts], dim=1),
        scales=torch.cat([part.scales for part in parts], dim=1),
        zeros=_joined(parts, lambda zeros: torch.cat(zeros, dim=1)),
    )


def stack(experts: Sequence[Packed]) -> Packed:
    """Experts' weights as one. Raises ValueError where groups differ, or with an order of inputs, which each expert
    would have of its own."""
    first = experts[0]
    if any((part.depth, part.group) != (first.depth, first.group) for part in experts):
        raise ValueError("4-bit weights: experts differ in their groups")
    if any(part.order is not None for part in experts):
        raise ValueError("4-bit weights: experts with activation order can't be multiplied together")
    return replace(
        first,
        codes=torch.stack([part.codes for part in experts]),
        scales=torch.stack([part.scales for part in experts]),
        zeros=_joined(experts, torch.stack),
    )


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """W [.., N, K] in x's order of inputs: (code - zero) * scale, computed in `dtype`."""
    codes = from_planes(packed.codes)
    size = packed.group or codes.shape[-1]
    scales = packed.scales.to(dtype).transpose(-1, -2).repeat_interleave(size, dim=-1)[..., : packed.depth]
    zeros: Tensor | int = MIDDLE
    if packed.zeros is not None:
        wide = packed.zeros.to(torch.int16).transpose(-1, -2)
        zeros = wide.repeat_interleave(size, dim=-1)[..., : packed.depth]
    sorted_weights = (codes[..., : packed.depth].to(torch.int16) - zeros).to(dtype) * scales
    if packed.order is None:
        return sorted_weights
    weights = torch.empty_like(sorted_weights)
    weights[..., packed.order] = sorted_weights
    return weights


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """y [T, N] = x [T, K] W^T + bias [N] + residual [T, N], of x's type."""
    y = F.linear(x, dequantize(packed, x.dtype), bias)
    return y if residual is None else residual + y


def _nibbles(words: Tensor) -> Tensor:
    """int32 [A, B] as uint8 [A, 8 B]: four bits each, the lowest first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.to(torch.int32)[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def _in_order(nibbles: Tensor) -> Tensor:
    """Features of AWQ's words as they count."""
    places = torch.tensor(_AWQ_ORDER, device=nibbles.device).argsort()
    return torch.unflatten(nibbles, -1, (-1, 8))[..., places].flatten(-2)


def _group(group: int, depth: int) -> int:
    return 0 if group in (-1, depth) and group not in GROUPS else group


def _joined(parts: Sequence[Packed], join: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    """Zero points of all, as soon as one has some."""
    if all(part.zeros is None for part in parts):
        return None
    middle = [torch.full_like(part.scales, MIDDLE, dtype=torch.uint8) for part in parts]
    return join([other if part.zeros is None else part.zeros for part, other in zip(parts, middle, strict=True)])
