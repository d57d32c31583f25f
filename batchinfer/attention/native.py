"""Planned attention over the packed caches of `batchinfer_kernels.native.attention`.

The same tiles as `backend.TiledAttention`; a layer is one call, which stores keys and values, works through the tiles
on all threads and merges the splits.
"""

from __future__ import annotations

import numpy as np
import torch
from batchinfer_kernels.native import attention
from batchinfer_kernels.native.attention import TileLayer, TileStep
from batchinfer_kernels.probe import STRICT
from batchinfer_kernels.turning import Turning
from torch import Tensor

from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import AttentionShape, Ints, StepBatch, Tiles, cut_tiles, find_slots, ranges, starts_of

# A tile of less than one such part of a step's work is light.
_LIGHT_SHARE = 64


class NativeAttention:
    """Attention of layers with equal head counts and window. Caches are made by `new_caches`."""

    name = "native"

    def __init__(
        self, spec: AttentionSpec, *, block_size: int, split_size: int, kv_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        reason = attention.unsuited(head_dim=spec.head_dim, block_size=block_size, split_size=split_size)
        if reason is not None:
            raise ValueError(f"native attention can't be used: {reason}")
        self.kv_dtype = kv_dtype
        self._shape = AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            split_size=split_size,
            window=spec.window,
            row_rule=STRICT,
            device=torch.device("cpu"),
        )
        # Kept between steps: fresh memory would be paged in by the kernel in every layer.
        self._partial = torch.empty(0)

    def new_caches(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Key and value caches of one layer, not initialised."""
        return attention.new_caches(num_blocks, self._shape.num_kv_heads, self._shape.head_dim, self.kv_dtype)

    def in_c(self, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec) -> TileLayer:
        """A layer as the C code is told of it."""
        return TileLayer(k_cache, v_cache, scale=spec.scale, softcap=spec.softcap)

    def plan(self, batch: StepBatch) -> TileStep:
        return plan_step(batch, self._shape)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: TileStep,
        *,
        spec: AttentionSpec,
        turning: Turning | None = None,
    ) -> Tensor:
        """Stores k, v [T, Hk, D] and returns attention of q [T, Hq, D] in q's dtype. Not thread-safe."""
        assert turning is None
        size = attention.partial_size(plan)
        if self._partial.numel() < size:
            self._partial = torch.empty(size + size // 4)
        out = torch.empty(q.shape)
        layer = self.in_c(k_cache, v_cache, spec)
        attention.attend(q.float(), k.float(), v.float(), out, self._partial, plan, layer)
        return out.to(q.dtype)


def plan_step(batch: StepBatch, shape: AttentionShape) -> TileStep:
    """The plan of one step for one KV group."""
    chunk = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    positions = batch.starts[chunk] + ranges(batch.lengths)
    tiles = cut_tiles(batch, shape)
    splits = positions // shape.split_size - shape.first_split(positions) + 1
    several = np.flatnonzero(splits > 1)
    entry = np.full(len(positions), -1, dtype=np.int64)
    entry[several] = starts_of(splits[several])
    slots, fresh_blocks = find_slots(batch, shape, chunk, positions)
    items, num_heavy = _heavy_first(tiles, shape)
    return TileStep(
        num_entries=int(splits[several].sum()),
        num_heavy=num_heavy,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        split_size=shape.split_size,
        window=shape.window,
        tile_start=tiles.start,
        tile_count=tiles.count,
        tile_chunk=tiles.chunk,
        tile_split=tiles.split,
        members=tiles.members,
        items=items,
        positions=positions,
        block_tables=batch.block_tables,
        entry=entry,
        several=several,
        slots=slots,
        fresh_blocks=fresh_blocks,
    )


def _heavy_first(tiles: Tiles, shape: AttentionShape) -> tuple[Ints, int]:
    """(Tiles with their KV heads, how many of them are heavy). Those that could keep one thread busy when the others
    are done come first; the rest keep their order, in which sequences that share blocks stand together and find them in
    the CPU's caches."""
    weight = tiles.count * tiles.width
    is_light = weight * _LIGHT_SHARE <= weight.sum()
    order = np.argsort(is_light, kind="stable")
    items = order[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads)
    return items.reshape(-1), int((~is_light).sum()) * shape.num_kv_heads
