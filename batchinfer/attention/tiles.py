"""Cutting a step's queries and KV splits into tiles.

A chunk's queries are cut into query tiles; a query tile and one split of the KV that it sees make a tile. Single
queries of several sequences that attend to a split in the same physical blocks (a shared prefix) make one tile too,
so that its keys and values are gathered once for all of them. How queries fall into tiles changes no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from batchinfer_kernels.cpu import SUM_WIDTH
from batchinfer_kernels.probe import AttentionTiles, RowRule

Ints = npt.NDArray[np.int64]

# Queries of a tile where there are several. Large tiles gather a split's keys less often, small ones waste fewer
# rows at a chunk's end.
QUERY_TILE = 32
SHORT_QUERY_TILE = 8


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
    query_sizes: tuple[int, ...] | None = None

    @property
    def query_tiles(self) -> tuple[int, ...]:
        """Ascending numbers of queries that tiles may have: those asked for, or those that the CPU's products want."""
        return self.query_sizes or query_tiles(self.row_rule)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def first_split(self, positions: Ints) -> Ints:
        """The first split that queries at these positions see."""
        if self.window is None:
            return np.zeros_like(positions)
        first: Ints = np.maximum(positions - self.window + 1, 0) // self.split_size
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tiles of a step. A tile's queries are the tokens members[start : start + count].

    queries  rows that count is padded to: one of `query_tiles`
    chunk    a chunk through whose block table the split is found
    width    slots that are computed: one of `split_widths`
    """

    queries: Ints
    start: Ints
    count: Ints
    chunk: Ints
    split: Ints
    width: Ints
    members: Ints


def query_tiles(rule: RowRule) -> tuple[int, ...]:
    """Ascending numbers of queries that tiles may have."""
    return (SHORT_QUERY_TILE,) if rule.tile_rows is not None else (1, SHORT_QUERY_TILE, QUERY_TILE)


def rows_per_query(rule: RowRule, group: int, queries: int) -> int:
    """Rows of a tile per query: the heads of a group, more where a product would have too few rows."""
    rows = group
    while rule.padded(queries * rows) != queries * rows:
        rows += 1
    return rows


def split_widths(split_size: int, block_size: int, rule: RowRule) -> tuple[int, ...]:
    """Ascending widths at which a split may be computed: whole blocks, and whole 64-token sums (see `cpu`)."""
    if rule.tile_rows is not None:
        return (split_size,)
    quarter = split_size // 4
    sizes = [w for w in (quarter, 2 * quarter) if w and w % block_size == 0 and w % SUM_WIDTH == 0]
    return (*sizes, split_size)


def product_tiles(
    *, head_dim: int, group: int, split_size: int, block_size: int, rule: RowRule, num_kv_heads: int = 2
) -> AttentionTiles:
    """What the probe tries for heads that share KV heads in groups of `group`."""
    rows = tuple(queries * rows_per_query(rule, group, queries) for queries in query_tiles(rule))
    widths = split_widths(split_size, block_size, rule)
    return AttentionTiles(head_dim=head_dim, row_counts=rows, widths=widths, single=num_kv_heads == 1)


def starts_of(counts: Ints) -> Ints:
    starts: Ints = np.cumsum(counts) - counts
    return starts


def ranges(counts: Ints) -> Ints:
    """0..counts[0]-1, 0..counts[1]-1, ... in one array."""
    return np.arange(counts.sum()) - np.repeat(starts_of(counts), counts)


def cut_tiles(batch: StepBatch, shape: AttentionShape) -> Tiles:
    """All tiles of a step: every token is in one for each split that it sees."""
    size = shape.split_size
    sizes = np.array(shape.query_tiles)
    chunk_queries = sizes[np.minimum(np.searchsorted(sizes, batch.lengths), len(sizes) - 1)]
    per_chunk = -(-batch.lengths // chunk_queries)
    chunk = np.repeat(np.arange(len(batch.lengths)), per_chunk)
    queries = chunk_queries[chunk]
    offset = ranges(per_chunk) * queries
    num_queries = np.minimum(batch.lengths[chunk] - offset, queries)
    first_position = batch.starts[chunk] + offset
    last_position = first_position + num_queries - 1
    first_split = shape.first_split(first_position)
    splits = last_position // size - first_split + 1
    of_tile = np.repeat(np.arange(len(chunk)), splits)
    split = first_split[of_tile] + ranges(splits)
    filled = np.minimum(last_position[of_tile] + 1 - split * size, size)
    widths = np.array(split_widths(size, shape.block_size, shape.row_rule))
    count = num_queries[of_tile]
    first_token = (starts_of(batch.lengths)[chunk] + offset)[of_tile]
    tiles = Tiles(
        queries=queries[of_tile],
        start=starts_of(count),
        count=count,
        chunk=chunk[of_tile],
        split=split,
        width=widths[np.searchsorted(widths, filled)],
        members=np.repeat(first_token, count) + ranges(count),
    )
    return _share(tiles, batch, shape, full=filled == size)


def _share(tiles: Tiles, batch: StepBatch, shape: AttentionShape, *, full: npt.NDArray[np.bool_]) -> Tiles:
    """Puts single queries that attend to all of a split in the same blocks into common tiles."""
    if shape.window is not None:
        return tiles
    single = np.flatnonzero((tiles.count == 1) & full)
    if len(single) < 2:
        return tiles
    per_split = shape.split_size // shape.block_size
    at = tiles.split[single, None] * per_split + np.arange(per_split)
    blocks = batch.block_tables[tiles.chunk[single, None], at]
    factors = np.arange(1, 2 * per_split, 2, dtype=np.int64) * 0x2545F4914F6CDD1D
    _, first, group = np.unique((blocks * factors).sum(1), return_index=True, return_inverse=True)
    same = (blocks == blocks[first[group]]).all(1)  # a sum of products is only a guess
    shared = same & (np.bincount(group[same], minlength=len(first))[group] > 1)
    if not shared.any():
        return tiles
    order = np.argsort(group[shared], kind="stable")
    moved = single[shared][order]
    counts = np.bincount(group[shared])
    counts = counts[counts > 0]
    sizes = np.array(shape.query_tiles)
    queries = sizes[np.minimum(np.searchsorted(sizes, counts), len(sizes) - 1)]
    pieces = -(-counts // queries)
    of_piece = np.repeat(np.arange(len(counts)), pieces)
    offset = ranges(pieces) * queries[of_piece]
    count = np.minimum(counts[of_piece] - offset, queries[of_piece])
    model = moved[starts_of(counts)[of_piece] + offset]  # a tile that says which split and whose blocks
    members = tiles.members[tiles.start[moved]]
    stays = np.ones(len(tiles.count), dtype=np.bool_)
    stays[moved] = False
    rest = np.flatnonzero(stays)
    all_counts = np.concatenate((count, tiles.count[rest]))
    rest_members = np.repeat(tiles.start[rest], tiles.count[rest]) + ranges(tiles.count[rest])
    return Tiles(
        queries=np.concatenate((queries[of_piece], tiles.queries[rest])),
        start=starts_of(all_counts),
        count=all_counts,
        chunk=np.concatenate((tiles.chunk[model], tiles.chunk[rest])),
        split=np.concatenate((tiles.split[model], tiles.split[rest])),
        width=np.concatenate((tiles.width[model], tiles.width[rest])),
        members=np.concatenate((members, tiles.members[rest_members])),
    )


def cut_batch(batch: StepBatch, shape: AttentionShape, most: int) -> list[tuple[int, StepBatch]]:
    """(number of its first token, part) of parts of a step that follow each other: with at most so many partial results
    each, one for each split of a token that sees several, where that can be. They are cut between chunks or blocks, so
    that a block is begun and left by one of them."""
    chunk = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    positions = batch.starts[chunk] + ranges(batch.lengths)
    splits = positions // shape.split_size - shape.first_split(positions) + 1
    results = np.cumsum(np.where(splits > 1, splits, 0))
    if not len(results) or results[-1] <= most:
        return [(0, batch)]
    cuts = np.append(np.flatnonzero((np.diff(chunk) != 0) | (positions[1:] % shape.block_size == 0)) + 1, len(chunk))
    chunk_ends = np.cumsum(batch.lengths)
    parts: list[tuple[int, StepBatch]] = []
    begin = 0
    while begin < len(chunk):
        before = int(results[begin - 1]) if begin else 0
        wanted = np.searchsorted(results, before + most, side="right")
        last = int(np.searchsorted(cuts, wanted, side="right")) - 1
        end = int(cuts[max(last, int(np.searchsorted(cuts, begin, side="right")))])
        here = slice(int(chunk[begin]), int(chunk[end - 1]) + 1)
        firsts = chunk_ends[here] - batch.lengths[here]
        skipped = np.maximum(begin - firsts, 0)
        part = StepBatch(
            starts=batch.starts[here] + skipped,
            lengths=np.minimum(chunk_ends[here], end) - firsts - skipped,
            block_tables=batch.block_tables[here],
        )
        parts.append((begin, part))
        begin = end
    return parts


def find_slots(batch: StepBatch, shape: AttentionShape, chunk: Ints, positions: Ints) -> tuple[Ints, Ints]:
    """(block * block_size + offset of each token; blocks that a sequence starts in this step and does not fill).

    chunk, positions  [T], each token's chunk and its position in its sequence
    """
    size = shape.block_size
    slots: Ints = batch.block_tables[chunk, positions // size] * size + positions % size
    ends = batch.starts + batch.lengths
    begun = (ends % size != 0) & (batch.starts <= ends // size * size)
    return slots, batch.block_tables[begun, (ends // size)[begun]]
