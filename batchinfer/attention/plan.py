"""Planning attention: from a step's chunks and block tables to the index tensors that every layer uses.

Done once per step and KV group, in numpy on the host. `tiles` cuts the work into tiles; here tiles of one shape
become slabs that run as one batched product (`batchinfer_kernels.cpu.attend_tiles`), and every token learns where
its results will be. See `backend` for the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.attention.tiles import (
    AttentionShape,
    Ints,
    StepBatch,
    Tiles,
    cut_tiles,
    find_slots,
    ranges,
    rows_per_query,
    starts_of,
)

# A slab of tiles is gathered and multiplied before the next one, so that it stays in the caches of the CPU.
SLAB_BYTES = 3 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Tiles of one shape that run together; the arguments of `attend_tiles`. `out_rows` is a range of rows."""

    num_tiles: int
    query_rows: Tensor
    block_rows: Tensor
    hidden: Tensor
    out_rows: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Index tensors for one KV group and step.

    num_rows     rows of all tiles' results
    buffer_slots  keys, or values, of one head that are gathered at a time, at most
    result_rows  int64 [T * Hq], where each token and head finds its first split's result
    merged_rows  rows of the attention output that see several splits, and in `merged` where the result of each
                 of those is (`cpu.merge_tiles`)
    kv_rows, fresh_blocks   the arguments of `kv_write`
    """

    slabs: tuple[Slab, ...]
    num_rows: int
    buffer_slots: int
    result_rows: Tensor
    merged_rows: Tensor | None
    merged: list[tuple[Tensor | None, Tensor]]
    kv_rows: Tensor
    fresh_blocks: Tensor


def plan_attention(batch: StepBatch, shape: AttentionShape) -> AttentionPlan:
    """The plan of one step for one KV group."""
    chunk = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    positions = batch.starts[chunk] + ranges(batch.lengths)
    tiles = cut_tiles(batch, shape)
    slabs, tile_row, num_rows, buffer_slots = _make_slabs(batch, shape, tiles, positions)
    result_rows, merged_rows, merged = _find_results(shape, tiles, tile_row, positions)
    slots, fresh_blocks = find_slots(batch, shape, chunk, positions)
    head = np.arange(shape.num_kv_heads)
    block, offset = np.divmod(slots, shape.block_size)
    kv_rows = (block[:, None] * shape.num_kv_heads + head) * shape.block_size + offset[:, None]
    return AttentionPlan(
        slabs=tuple(slabs),
        num_rows=num_rows,
        buffer_slots=buffer_slots,
        result_rows=result_rows,
        merged_rows=merged_rows,
        merged=merged,
        kv_rows=_tensor(kv_rows.reshape(-1), shape.device),
        fresh_blocks=_tensor(fresh_blocks, shape.device),
    )


def _make_slabs(
    batch: StepBatch, shape: AttentionShape, tiles: Tiles, positions: Ints
) -> tuple[list[Slab], Ints, int, int]:
    """Slabs, the first result row of each tile, the number of result rows, the slots of the gather buffer."""
    heads, size = shape.num_kv_heads, shape.block_size
    last_block = (batch.starts + batch.lengths - 1) // size
    slabs: list[Slab] = []
    tile_row = np.empty(len(tiles.count), dtype=np.int64)
    num_rows = buffer_slots = 0
    for queries, width in sorted(set(zip(tiles.queries.tolist(), tiles.width.tolist(), strict=True))):
        per_query = rows_per_query(shape.row_rule, shape.group, queries)
        row_query, row_head = np.divmod(np.arange(queries * per_query), per_query)
        head = np.arange(heads)[:, None] * shape.group + np.minimum(row_head, shape.group - 1)  # [Hk, M]
        of_shape = np.flatnonzero((tiles.queries == queries) & (tiles.width == width))
        step = max(1, SLAB_BYTES // (4 * heads * width * (shape.head_dim + queries * per_query)))
        for begin in range(0, len(of_shape), step):
            at = of_shape[begin : begin + step]
            chunk = tiles.chunk[at, None]
            # Padding queries repeat a tile's last one.
            member = tiles.start[at, None] + np.minimum(np.arange(queries), tiles.count[at, None] - 1)
            token = tiles.members[member]  # [N, Q]
            query_rows = token[:, None, row_query] * shape.num_heads + head  # [N, Hk, M]
            slot = tiles.split[at, None] * shape.split_size + np.arange(width)
            block = batch.block_tables[chunk, np.minimum(slot[:, ::size] // size, last_block[chunk])]
            block_rows = block[:, None, :] * heads + np.arange(heads)[:, None]  # [N, Hk, W / S]
            position = positions[token][:, :, None]
            hidden = slot[:, None, :] > position  # [N, Q, W]
            if shape.window is not None:
                hidden |= slot[:, None, :] <= position - shape.window
            rows = query_rows[0].size
            tile_row[at] = num_rows + np.arange(len(at)) * rows
            slabs.append(
                Slab(
                    num_tiles=len(at),
                    query_rows=_tensor(query_rows.reshape(-1), shape.device),
                    block_rows=_tensor(block_rows.reshape(-1), shape.device),
                    hidden=_tensor(hidden[:, None, :, None, :], shape.device),
                    out_rows=slice(num_rows, num_rows + len(at) * rows),
                )
            )
            num_rows += len(at) * rows
            buffer_slots = max(buffer_slots, len(at) * heads * width)
    return slabs, tile_row, num_rows, buffer_slots


def _find_results(
    shape: AttentionShape, tiles: Tiles, tile_row: Ints, positions: Ints
) -> tuple[Tensor, Tensor | None, list[tuple[Tensor | None, Tensor]]]:
    first, last = shape.first_split(positions), positions // shape.split_size
    splits = last - first + 1
    entry = starts_of(splits)  # each token's splits stand together, in order
    # Where the result of an entry's first head is, and how many rows a KV head has in that tile.
    base = np.empty(splits.sum(), dtype=np.int64)
    rows_per_head = np.empty_like(base)
    per_query = {int(q): rows_per_query(shape.row_rule, shape.group, int(q)) for q in np.unique(tiles.queries)}
    tile_per_query = np.array([per_query[q] for q in tiles.queries.tolist()], dtype=np.int64)
    of = np.repeat(np.arange(len(tiles.count)), tiles.count)  # per member: its tile
    token, split = tiles.members, tiles.split[of]
    seen = (split >= first[token]) & (split <= last[token])  # a tile's later queries may see more than its first
    at = (entry[token] + split - first[token])[seen]
    base[at] = (tile_row[of] + ranges(tiles.count) * tile_per_query[of])[seen]
    rows_per_head[at] = (tiles.queries * tile_per_query)[of][seen]
    kv_head, head = np.divmod(np.arange(shape.num_heads), shape.group)

    def rows_of(entries: Ints) -> Tensor:
        """Result rows [entries * Hq]."""
        rows = base[entries, None] + kv_head * rows_per_head[entries, None] + head
        return _tensor(rows.reshape(-1), shape.device)

    result_rows = rows_of(entry)
    several = np.flatnonzero(splits > 1)
    if not len(several):
        return result_rows, None, []
    merged: list[tuple[Tensor | None, Tensor]] = []
    for j in range(int(splits.max())):
        has = np.flatnonzero(splits[several] > j)
        rows = None if j == 0 else _heads_of(has, shape)
        merged.append((rows, rows_of(entry[several[has]] + j)))
    return result_rows, _heads_of(several, shape), merged


def _heads_of(tokens: Ints, shape: AttentionShape) -> Tensor:
    """Rows of tokens in a [T * Hq, ...] tensor."""
    return _tensor((tokens[:, None] * shape.num_heads + np.arange(shape.num_heads)).reshape(-1), shape.device)


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
