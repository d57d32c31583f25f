"""Planning attention: from a step's chunks and block tables to the index tensors that every layer uses.

Done once per step and KV group, in numpy on the host. A chunk's queries are cut into query tiles, a query tile and
each split of the KV that it sees make one tile, tiles of one shape make a class that runs as one batched product
(`batchinfer_kernels.cpu.attend_tiles`). How queries fall into tiles changes no bytes. See `backend` for the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from batchinfer_kernels.cpu import SUM_WIDTH
from batchinfer_kernels.probe import AttentionTiles, RowRule
from torch import Tensor

Ints = npt.NDArray[np.int64]

# Query tiles of a chunk longer than one token. Large tiles gather a split's keys less often, small ones waste fewer
# rows at a chunk's end.
QUERY_TILE = 32
SHORT_QUERY_TILE = 8
# A slab of tiles is gathered and multiplied before the next one, so that it stays in the caches of the CPU.
SLAB_BYTES = 3 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Chunks of one step, in the order of their tokens.

    starts, lengths  [S], first position and number of tokens of each chunk
    block_tables     [S, at least the most blocks that a chunk's end needs], valid block numbers everywhere in the
                     part that a chunk covers; what is beyond is not read
    """

    starts: Ints
    lengths: Ints
    block_tables: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a plan depends on beside the batch; equal for all layers of a KV group."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    split_size: int
    window: int | None
    row_rule: RowRule
    device: torch.device

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths at which a split may be computed."""
        return split_widths(self.split_size, self.block_size, self.row_rule)


def split_widths(split_size: int, block_size: int, rule: RowRule) -> tuple[int, ...]:
    """Ascending widths at which a split may be computed: whole blocks, and whole 64-token sums (see `cpu`)."""
    if rule.tile_rows is not None:
        return (split_size,)
    quarter = split_size // 4
    sizes = [w for w in (quarter, 2 * quarter) if w and w % block_size == 0 and w % SUM_WIDTH == 0]
    return (*sizes, split_size)


def query_tiles(rule: RowRule) -> tuple[int, ...]:
    """Ascending numbers of queries that tiles may have."""
    return (SHORT_QUERY_TILE,) if rule.tile_rows is not None else (1, SHORT_QUERY_TILE, QUERY_TILE)


def product_tiles(*, head_dim: int, group: int, split_size: int, block_size: int, rule: RowRule) -> AttentionTiles:
    """What the probe tries for heads that share KV heads in groups of `group`."""
    rows = tuple(queries * _rows_per_query(rule, group, queries) for queries in query_tiles(rule))
    return AttentionTiles(head_dim=head_dim, row_counts=rows, widths=split_widths(split_size, block_size, rule))


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
    result_rows  int64 [T * Hq], where each token and head finds its result, if it sees one split only
    merged       rows of the result that see several splits, and where each of those is (`cpu.merge_tiles`)
    kv_rows, fresh_blocks   the arguments of `kv_write`
    """

    slabs: tuple[Slab, ...]
    num_rows: int
    buffer_elements: int
    result_rows: Tensor
    merged_rows: Tensor | None
    merged: list[tuple[Tensor | None, Tensor]]
    kv_rows: Tensor
    fresh_blocks: Tensor


def _starts_of(counts: Ints) -> Ints:
    return np.cumsum(counts) - counts


def _ranges(counts: Ints) -> Ints:
    """0..counts[0]-1, 0..counts[1]-1, ... in one array."""
    return np.arange(counts.sum()) - np.repeat(_starts_of(counts), counts)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Query tiles and tiles of a step. A tile is (query tile, split)."""

    queries: Ints  # per query tile: rows it is padded to
    first_token: Ints  # per query tile: index of its first token in the step
    num_queries: Ints
    first_position: Ints
    chunk: Ints
    first_split: Ints
    first_tile: Ints  # per query tile: index of its first tile
    of_tile: Ints  # per tile: its query tile
    split: Ints  # per tile
    width: Ints  # per tile


def plan_attention(batch: StepBatch, shape: AttentionShape) -> AttentionPlan:
    """The plan of one step for one KV group."""
    tiles = _cut(batch, shape)
    slabs, tile_row, num_rows, buffer_elements = _make_slabs(batch, shape, tiles)
    result_rows, merged_rows, merged = _find_results(batch, shape, tiles, tile_row)
    kv_rows, fresh_blocks = _find_slots(batch, shape)
    return AttentionPlan(
        slabs=tuple(slabs),
        num_rows=num_rows,
        buffer_elements=buffer_elements,
        result_rows=result_rows,
        merged_rows=merged_rows,
        merged=merged,
        kv_rows=kv_rows,
        fresh_blocks=fresh_blocks,
    )


def _cut(batch: StepBatch, shape: AttentionShape) -> _Tiles:
    size = shape.split_size
    sizes = np.array(query_tiles(shape.row_rule))
    chunk_queries = sizes[np.minimum(np.searchsorted(sizes, batch.lengths), len(sizes) - 1)]
    per_chunk = -(-batch.lengths // chunk_queries)
    chunk = np.repeat(np.arange(len(batch.lengths)), per_chunk)
    queries = chunk_queries[chunk]
    offset = _ranges(per_chunk) * queries
    num_queries = np.minimum(batch.lengths[chunk] - offset, queries)
    first_position = batch.starts[chunk] + offset
    last_position = first_position + num_queries - 1
    first_split = np.zeros_like(first_position)
    if shape.window is not None:
        first_split = np.maximum(first_position - shape.window + 1, 0) // size
    splits = last_position // size - first_split + 1
    of_tile = np.repeat(np.arange(len(chunk)), splits)
    split = first_split[of_tile] + _ranges(splits)
    filled = np.minimum(last_position[of_tile] + 1 - split * size, size)
    widths = np.array(shape.widths)
    return _Tiles(
        queries=queries,
        first_token=_starts_of(batch.lengths)[chunk] + offset,
        num_queries=num_queries,
        first_position=first_position,
        chunk=chunk,
        first_split=first_split,
        first_tile=_starts_of(splits),
        of_tile=of_tile,
        split=split,
        width=widths[np.searchsorted(widths, filled)],
    )


def _rows_per_query(rule: RowRule, group: int, queries: int) -> int:
    """Rows of a tile per query: the heads of a group, more where a product would have too few rows."""
    rows = group
    while rule.padded(queries * rows) != queries * rows:
        rows += 1
    return rows


def _make_slabs(batch: StepBatch, shape: AttentionShape, tiles: _Tiles) -> tuple[list[Slab], Ints, int, int]:
    """Slabs, the first result row of each tile, the number of result rows, the size of the gather buffer."""
    heads, group, size = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.block_size
    slabs: list[Slab] = []
    tile_row = np.empty(len(tiles.of_tile), dtype=np.int64)
    tile_queries = tiles.queries[tiles.of_tile]
    num_rows = buffer_elements = 0
    for queries in np.unique(tile_queries):
        per_query = _rows_per_query(shape.row_rule, group, int(queries))
        row_query, row_head = np.divmod(np.arange(queries * per_query), per_query)
        row_head = np.minimum(row_head, group - 1)
        for width in np.unique(tiles.width[tile_queries == queries]):
            members = np.flatnonzero((tile_queries == queries) & (tiles.width == width))
            tile_elements = heads * int(width) * (shape.head_dim + int(queries) * per_query)
            step = max(1, SLAB_BYTES // (4 * tile_elements))
            for begin in range(0, len(members), step):
                at = members[begin : begin + step]
                of = tiles.of_tile[at]
                # Padding queries repeat a tile's last one.
                query = np.minimum(np.arange(queries), tiles.num_queries[of, None] - 1)  # [N, Q]
                token = tiles.first_token[of, None] + query
                head = np.arange(heads)[:, None] * group + row_head  # [Hk, M]
                query_rows = token[:, None, row_query] * shape.num_heads + head  # [N, Hk, M]
                slot = tiles.split[at, None] * shape.split_size + np.arange(width)
                block = slot[:, ::size] // size
                last = (batch.starts + batch.lengths - 1)[tiles.chunk[of], None] // size
                block_ids = batch.block_tables[tiles.chunk[of, None], np.minimum(block, last)]  # [N, W / S]
                block_rows = block_ids[:, None, :] * heads + np.arange(heads)[:, None]
                position = (tiles.first_position[of, None] + query)[:, :, None]
                hidden = slot[:, None, :] > position
                if shape.window is not None:
                    hidden |= slot[:, None, :] <= position - shape.window
                rows = len(at) * heads * len(row_query)
                tile_row[at] = num_rows + np.arange(len(at)) * heads * len(row_query)
                slabs.append(
                    Slab(
                        num_tiles=len(at),
                        query_rows=_tensor(query_rows.reshape(-1), shape.device),
                        block_rows=_tensor(block_rows.reshape(-1), shape.device),
                        hidden=_tensor(hidden[:, None, :, None, :], shape.device),
                        out_rows=slice(num_rows, num_rows + rows),
                    )
                )
                num_rows += rows
                buffer_elements = max(buffer_elements, len(at) * heads * int(width) * shape.head_dim)
    return slabs, tile_row, num_rows, buffer_elements


def _find_results(
    batch: StepBatch, shape: AttentionShape, tiles: _Tiles, tile_row: Ints
) -> tuple[Tensor, Tensor | None, list[tuple[Tensor | None, Tensor]]]:
    group = shape.num_heads // shape.num_kv_heads
    of = np.repeat(np.arange(len(tiles.queries)), tiles.num_queries)  # per token: its query tile
    query = _ranges(tiles.num_queries)
    position = tiles.first_position[of] + query
    last = position // shape.split_size
    first = np.zeros_like(last)
    if shape.window is not None:
        first = np.maximum(position - shape.window + 1, 0) // shape.split_size
    per_query = np.array([_rows_per_query(shape.row_rule, group, int(q)) for q in tiles.queries])[of]
    kv_head, head = np.divmod(np.arange(shape.num_heads), group)

    def rows_of(tokens: Ints, split: Ints) -> Ints:
        """Result rows [tokens * Hq] of tokens at one split each."""
        tile = tiles.first_tile[of[tokens]] + split - tiles.first_split[of[tokens]]
        rows_per_head = tiles.queries[of[tokens]] * per_query[tokens]
        in_tile = (query[tokens] * per_query[tokens])[:, None] + kv_head * rows_per_head[:, None] + head
        rows: Ints = (tile_row[tile][:, None] + in_tile).reshape(-1)
        return rows

    everyone = np.arange(len(position))
    result_rows = _tensor(rows_of(everyone, first), shape.device)
    several = np.flatnonzero(last > first)
    if not len(several):
        return result_rows, None, []
    merged: list[tuple[Tensor | None, Tensor]] = []
    for j in range(int((last - first).max()) + 1):
        has = np.flatnonzero(last[several] - first[several] >= j)
        rows = None if j == 0 else _tensor(_heads_of(has, shape.num_heads), shape.device)
        merged.append((rows, _tensor(rows_of(several[has], first[several[has]] + j), shape.device)))
    return result_rows, _tensor(_heads_of(several, shape.num_heads), shape.device), merged


def _heads_of(tokens: Ints, num_heads: int) -> Ints:
    """Rows of tokens in a [T * Hq, ...] tensor."""
    rows: Ints = (tokens[:, None] * num_heads + np.arange(num_heads)).reshape(-1)
    return rows


def _find_slots(batch: StepBatch, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    size = shape.block_size
    chunk = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    position = batch.starts[chunk] + _ranges(batch.lengths)
    block = batch.block_tables[chunk, position // size]
    rows = (block[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads)) * size
    kv_rows = (rows + (position % size)[:, None]).reshape(-1)
    ends = batch.starts + batch.lengths
    begun = (ends % size != 0) & (batch.starts <= ends // size * size)
    fresh = batch.block_tables[begun, (ends // size)[begun]]
    return _tensor(kv_rows, shape.device), _tensor(fresh, shape.device)


def _tensor(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
