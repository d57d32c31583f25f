"""Sequences over paged caches, for tests of attention: runs steps through a backend, and says what is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from batchinfer_kernels import kv8, kv_fp8, reference
from batchinfer_kernels.triton.attention import TilePlan
from batchinfer_kernels.triton.kv_store import int8_parts
from torch import Tensor

from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import StepBatch
from batchinfer.attention.triton import TritonAttention
from tests.kernels.triton.device import DEVICE, HOST, WIDE

BLOCK, SPLIT = 4, 16


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = WIDE) -> Tensor:
    """The same numbers on any device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=HOST).to(DEVICE, dtype)


def spec_of(head_dim: int = 16, group: int = 3, num_kv_heads: int = 2, **more: Any) -> AttentionSpec:
    heads = group * num_kv_heads
    return AttentionSpec(num_heads=heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5, **more)


def batch_of(starts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> StepBatch:
    """What is beyond a table's end is nonsense."""
    array = np.full((len(tables), max(map(len, tables))), -(1 << 40), dtype=np.int64)
    for row, table in zip(array, tables, strict=True):
        row[: len(table)] = table
    return StepBatch(starts=np.array(starts), lengths=np.array(lengths), block_tables=array)


class Paged:
    """A backend with caches of its own, in which every byte is that of a NaN (or, in int8, -1)."""

    def __init__(
        self,
        spec: AttentionSpec,
        num_blocks: int,
        *,
        kv_dtype: torch.dtype = WIDE,
        split_size: int = SPLIT,
        block_size: int = BLOCK,
        deterministic: bool = True,
        **more: Tensor,
    ) -> None:
        self.spec, self.more, self.split_size = spec, more, split_size
        self.backend = TritonAttention(
            spec,
            block_size=block_size,
            split_size=split_size,
            device=DEVICE,
            kv_dtype=kv_dtype,
            deterministic=deterministic,
        )
        self.k_cache, self.v_cache = self.backend.new_caches(num_blocks)
        for cache in (self.k_cache, self.v_cache):
            cache.view(torch.uint8).fill_(255)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        plan = self.plan(batch)
        return self.backend.run(q, k, v, self.k_cache, self.v_cache, plan, spec=self.spec, **self.more)

    def plan(self, batch: StepBatch) -> TilePlan:
        with HOST:  # where plans are made
            return self.backend.plan(batch)

    def in_steps(self, q: Tensor, k: Tensor, v: Tensor, table: Sequence[int], steps: Sequence[int]) -> Tensor:
        """One sequence, so many tokens in each step."""
        outputs, start = [], 0
        for tokens in steps:
            at = slice(start, start + tokens)
            outputs.append(self(q[at], k[at], v[at], batch_of([start], [tokens], [table])))
            start += tokens
        return torch.cat(outputs)

    def numbers(self) -> tuple[Tensor, Tensor]:
        """What the caches' codes stand for, [B, Hk, S, D]; int8 keys are turned."""
        caches = (self.k_cache, self.v_cache)
        if self.k_cache.dtype == torch.int8:
            parts = (int8_parts(cache, self.spec.head_dim) for cache in caches)
            keys, values = (codes.double() * scales.double()[..., None] for codes, scales in parts)
            return keys, values
        if self.k_cache.dtype == torch.float8_e4m3fn:
            ones = torch.ones(self.spec.num_kv_heads)
            scales = (self.more.get(name, ones).double() for name in ("k_scales", "v_scales"))
            keys, values = (kv_fp8.numbers(cache, s) for cache, s in zip(caches, scales, strict=True))
            return keys, values
        return caches

    def expected(self, q: Tensor, table: Sequence[int], start: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """Attention of a sequence's queries q [T, Hq, D] at positions from start on, over what the caches hold, by the
        reference: every split, then merged."""
        keys, values = (x.to(dtype) for x in self.numbers())
        q = kv8.turn(q.to(dtype)) if self.k_cache.dtype == torch.int8 else q.to(dtype)
        positions = torch.arange(start, start + len(q))
        splits = -(-(start + len(q)) // self.split_size)
        parts = [
            reference.split_attention(
                q,
                keys,
                values,
                torch.tensor(table),
                positions,
                split=split,
                split_size=self.split_size,
                scale=self.spec.scale,
                window=self.spec.window,
                softcap=self.spec.softcap,
            )
            for split in range(splits)
        ]
        sinks = self.more.get("sinks")
        return reference.merge_splits(
            [out for out, _ in parts], [lse for _, lse in parts], None if sinks is None else sinks.to(dtype)
        )
