"""Plans of steps in which every chunk is one token, in memory that is kept: what was launched with one such plan can be
launched again, as it was, when the next step's plan has been written over it.

So what a launch is told by the host must not follow from the step: rows and tiles are rounded up, and what pads them
does nothing. A padded row is stored nowhere and merged from no splits, a padded tile has no queries. This module
imports triton, as `triton` does.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from batchinfer_kernels.triton.attention import TileGroup
from torch import Tensor

from batchinfer.attention.staging import Staging
from batchinfer.attention.tiles import Ints, StepBatch
from batchinfer.attention.triton import (
    ALIGNED,
    KeptPlan,
    StepArrays,
    TritonAttention,
    TritonLatentAttention,
    step_arrays,
)

# By row of the step, with what stands in those that pad it; fresh_from of a padded block is its end.
_OF_ROWS = {"slots": -1, "merged": 0, "merged_entry": 0, "merged_splits": 0, "fresh_blocks": 0, "fresh_from": 0}
_OF_TILES = ("start", "count", "chunk", "begin", "end")
_RAGGED = ("members", "positions", "entries", "block_tables")  # read only where tiles say so: nothing pads them
_NONE: Ints = np.zeros(0, dtype=np.int64)


def rounded_up(count: int) -> int:
    """The least of 0, 1, 2, 3, 4, 6, 8, 12, 16, ... that is not smaller: so few that plans come again, so near that a
    third of what is launched does nothing at most."""
    if count < 2:
        return count
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power


class KeptPlans:
    """Plans of one KV group, for up to max_rows rows, of sequences of up to max_len tokens. They are all the same
    memory: the last one written is there.

    generation   changes when memory had to be made anew: plans of before must not be used again
    """

    def __init__(self, attention: TritonAttention | TritonLatentAttention, *, max_rows: int, max_len: int) -> None:
        self._shape, self._kinds = attention.shape, attention.kinds
        self._staging = Staging(self._shape.device, torch.int32)
        self.generation = 0
        self._memory: dict[str, Tensor] = {}
        self._partial = self._log_sums = torch.empty(0, device=self._shape.device)
        self._num_entries = 0
        at = self._shape
        self._most_entries = most = max_rows * -(-max_len // at.split_size)
        tiles = _aligned(rounded_up(most))
        self._reserve("fixed", len(_OF_ROWS) * _aligned(max_rows) + len(self._kinds) * len(_OF_TILES) * tiles)
        for name in _RAGGED:
            self._reserve(name, most if name != "block_tables" else max_rows * -(-max_len // at.block_size))
        # These are large: more where steps have more.
        self._reserve_entries(min(most, 4 * max_rows))

    def write(self, batch: StepBatch | None, rows: int) -> tuple[int, ...]:
        """Writes a step's plan, padded to so many rows, or only what pads it. Returns how many tiles of each kind it
        has now: with `rows` that is all that `plan` needs to know."""
        found = None if batch is None else step_arrays(batch, self._shape, self._kinds)
        fixed, tiles = self._fixed(found, rows)
        arrays = {"fixed": fixed}
        if found is not None:
            arrays |= {name: found.shared[name].reshape(-1) for name in _RAGGED}
            self._reserve_entries(found.num_entries)
        host = self._staging.write(sum(map(len, arrays.values())))
        begin = 0
        for name, array in arrays.items():
            self._reserve(name, len(array))
            piece = host[begin : begin + len(array)]
            piece.numpy()[:] = array  # what does not fit int32 is not read
            self._memory[name][: len(array)].copy_(piece, non_blocking=True)
            begin += len(array)
        self._staging.sent()
        return tiles

    def _fixed(self, found: StepArrays | None, rows: int) -> tuple[Ints, tuple[int, ...]]:
        """(by-row arrays, then by-tile arrays of each kind, each at a multiple of ALIGNED numbers; tiles by kind)."""
        pads = _OF_ROWS | {"fresh_from": self._shape.block_size}
        own: Mapping[str, Ints] = dict.fromkeys(pads, _NONE) if found is None else found.shared
        parts = [_padded(own[name], rows, pad) for name, pad in pads.items()]
        tiles = []
        for nth, (_, kind) in enumerate(sorted(self._kinds.items())):
            of_kind = dict.fromkeys(_OF_TILES, _NONE) if found is None else found.tiles[kind]
            # One row's split is at least one tile, mostly of the smallest kind.
            count = rounded_up(max(len(of_kind["count"]), rows if nth == 0 else 0))
            parts += [_padded(of_kind[name], count, 0) for name in _OF_TILES]
            tiles.append(count)
        return np.concatenate(parts), tuple(tiles)

    def plan(self, rows: int, tiles: tuple[int, ...]) -> KeptPlan:
        """Of so many rows, and tiles of each kind."""
        fixed, begin = self._memory["fixed"], 0

        def take(count: int) -> Tensor:
            nonlocal begin
            begin += _aligned(count)
            return fixed[begin - _aligned(count) :][:count]

        by_row = {name: take(rows) for name in _OF_ROWS}
        groups = [
            TileGroup(kind=kind, most=queries, **{name: take(count) for name in _OF_TILES})
            for (queries, kind), count in zip(sorted(self._kinds.items()), tiles, strict=True)
        ]
        return KeptPlan(
            groups=tuple(groups),
            members=self._memory["members"],
            positions=self._memory["positions"],
            entries=self._memory["entries"],
            block_tables=self._memory["block_tables"][:, None],
            **by_row,
            num_entries=self._num_entries,
            split_size=self._shape.split_size,
            window=self._shape.window,
            more=(),
            partial=self._partial,
            log_sums=self._log_sums,
        )

    def _reserve(self, name: str, size: int) -> None:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            size = size if memory is None else 2 * size
            self._memory[name] = torch.empty(size, dtype=torch.int32, device=self._shape.device)
            self.generation += 1

    def _reserve_entries(self, entries: int) -> None:
        if entries > self._num_entries:
            most = max(entries, min(2 * entries, self._most_entries)) if self._num_entries else entries
            # What was there goes before there is more, and is gone also where there can't be.
            self.generation += 1
            self._num_entries = 0
            self._partial = self._log_sums = torch.empty(0, device=self._shape.device)
            rows = most * self._shape.num_heads
            self._partial = torch.empty(rows * self._shape.head_dim, device=self._shape.device)
            self._log_sums = torch.empty(rows, device=self._shape.device)
            self._num_entries = most


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def _padded(array: Ints, size: int, pad: int) -> Ints:
    out: Ints = np.full(_aligned(size), pad, dtype=np.int64)
    out[: len(array)] = array
    return out
