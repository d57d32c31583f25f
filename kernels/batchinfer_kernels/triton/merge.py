"""Attention over all splits from each split's result and log-sum-exp; `reference.merge_splits` is the specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.triton.attention import TilePlan, finish
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES, config

DEFAULTS = {capability: {"BLOCK_H": 8, "num_warps": 4, "num_stages": 2} for capability in CAPABILITIES}


@triton.jit
def _merge(
    partial_ptr,  # float32 [E, H, D]
    log_sums_ptr,  # float32 [E, H], in base 2
    sinks_ptr,  # float32 [H]
    out_ptr,  # [T, H, D]
    tokens_ptr,  # [Q]
    entry_ptr,  # [Q]
    splits_ptr,  # [Q]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    item = tl.program_id(0) // blocks
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < HEADS
    dim = tl.arange(0, BLOCK_D)
    is_number = is_head[:, None] & (dim < DIM)
    splits = tl.load(splits_ptr + item)
    if splits == 0:
        return
    first = tl.load(entry_ptr + item).to(tl.int64) * HEADS + head

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(log_sums_ptr + first + split * HEADS, mask=is_head, other=0.0))
    total = tl.zeros([BLOCK_H], tl.float32)
    sums = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    base = tl.where(top == float("-inf"), 0.0, top)
    for split in range(splits):
        at = first + split * HEADS
        weight = tl.exp2(tl.load(log_sums_ptr + at, mask=is_head, other=0.0) - base)
        part = tl.load(partial_ptr + at[:, None] * DIM + dim, mask=is_number, other=0.0)
        sums += part * weight[:, None]
        total += weight

    sink = tl.full([BLOCK_H], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=float("-inf")) * 1.4426950408889634
    factor, _ = finish(top, total, sink)
    out_at = (tl.load(tokens_ptr + item).to(tl.int64) * HEADS + head)[:, None] * DIM + dim
    tl.store(out_ptr + out_at, (sums * factor[:, None]).to(out_ptr.dtype.element_ty), mask=is_number)


def merge_splits(partial: Tensor, log_sums: Tensor, plan: TilePlan, out: Tensor, sinks: Tensor | None = None) -> None:
    """Writes rows plan.merged of out [T, H, D] from partial float32 [E, H, D] and log_sums float32 [E, H] in base 2,
    added in the order of the splits; sinks float32 [H] as in `attention.attend`."""
    heads, dim = out.shape[1:]
    assert out.is_contiguous()
    assert partial.dtype == log_sums.dtype == torch.float32
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (heads,))
    if len(plan.merged):
        launch: dict[str, Any] = dict(config("merge", DEFAULTS, out.device))
        _merge[(len(plan.merged) * triton.cdiv(heads, launch["BLOCK_H"]),)](
            partial,
            log_sums,
            log_sums if sinks is None else sinks,
            out,
            plan.merged,
            plan.merged_entry,
            plan.merged_splits,
            heads,
            dim,
            sinks is not None,
            triton.next_power_of_2(dim),
            **launch,
        )


def variants() -> Iterator[Variant]:
    for dim in (64, 80, 128, 256, 512):
        for has_sinks in (False, True):
            yield Variant(
                name=f"merge.{dim}" + ".sinks" * has_sinks,
                kernel=_merge,
                signature={
                    **dict.fromkeys(("partial_ptr", "log_sums_ptr", "sinks_ptr"), "*fp32"),
                    "out_ptr": "*bf16",
                    **dict.fromkeys(("tokens_ptr", "entry_ptr", "splits_ptr"), "*i32"),
                },
                constants={
                    "HEADS": 32,
                    "DIM": dim,
                    "HAS_SINKS": has_sinks,
                    "BLOCK_D": triton.next_power_of_2(dim),
                },
                configs=DEFAULTS,
                is_default=dim == 128 and has_sinks,
            )
