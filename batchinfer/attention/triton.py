"""Planned attention on NVIDIA GPUs, over the caches of `batchinfer_kernels.triton.kv_store`, or of latents.

The same tiles as `backend.TiledAttention`, of other sizes; a layer is three launches: keys and values are stored, tiles
attended to, splits merged. Nothing here waits for the GPU. This module imports triton, and is itself imported only
where such a backend is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from batchinfer_kernels.probe import STRICT
from batchinfer_kernels.triton import kv_store, mla
from batchinfer_kernels.triton.attention import (
    FEW,
    KIND,
    MANY,
    NOTHING,
    WHOLE,
    TileGroup,
    TilePlan,
    attend,
    launch_config,
)
from batchinfer_kernels.triton.merge import merge_splits
from batchinfer_kernels.triton_outlook import unfit_heads, unfit_int8_blocks, unfit_latents
from batchinfer_kernels.turning import Turning
from torch import Tensor

from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.staging import Staging
from batchinfer.attention.tiles import (
    AttentionShape,
    Ints,
    StepBatch,
    Tiles,
    cut_batch,
    cut_tiles,
    find_slots,
    ranges,
    starts_of,
)
from batchinfer.errors import ConfigError

# Arrays of a plan travel in one piece, and each begins at a multiple of so many numbers: kernels are compiled for
# aligned addresses.
ALIGNED = 32
# That partial results of a KV group may take at a time: those of a long chunk far behind in its sequence are many.
PARTIAL_BYTES = 2 << 30
_OF_STEP = ("slots", "fresh_blocks", "fresh_from")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan(TilePlan):
    """One with memory of its own for partial results: addresses in it stay what they are (see `kept_plans`)."""

    partial: Tensor
    log_sums: Tensor


class TritonAttention:
    """Attention of layers with equal head counts and window. Caches are made by `new_caches`.

    `deterministic`: a row's bytes do not depend on the batch, since all tiles run as one kind; else few and many
    queries each have a kind of their own.
    """

    name = "triton"

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        block_size: int,
        split_size: int,
        device: torch.device,
        kv_dtype: torch.dtype = torch.bfloat16,
        deterministic: bool = True,
    ) -> None:
        if split_size % block_size:
            raise ValueError(f"split_size {split_size} is not a multiple of block_size {block_size}")
        _refuse(unfit_heads(spec.head_dim))
        if kv_dtype == torch.int8:
            _refuse(unfit_int8_blocks(spec.head_dim, block_size))
        self.kv_dtype = kv_dtype
        group = spec.num_heads // spec.num_kv_heads
        self.kinds: dict[int, str] = {}
        for kind in (KIND,) if deterministic else (FEW, MANY):
            queries = launch_config(kind, spec.head_dim, device)["BLOCK_M"] // group
            self.kinds[max(queries, 1)] = kind
        self.shape = AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            split_size=split_size,
            window=spec.window,
            row_rule=STRICT,
            device=device,
            query_sizes=tuple(sorted(self.kinds)),
        )
        self._scratch = _Scratch(self.shape)
        self._staging = Staging(device, torch.int32)
        self._ones = torch.ones(spec.num_kv_heads, device=device)

    def new_caches(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Key and value caches of one layer, not initialised."""
        at = self.shape
        return kv_store.new_caches(
            num_blocks, at.num_kv_heads, at.block_size, at.head_dim, dtype=self.kv_dtype, device=at.device
        )

    def in_c(self, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec) -> None:
        return None

    def plan(self, batch: StepBatch) -> TilePlan:
        return plan_step(batch, self.shape, self.kinds, self._staging)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: TilePlan,
        *,
        spec: AttentionSpec,
        turning: Turning | None = None,
        sinks: Tensor | None = None,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
    ) -> Tensor:
        """Stores k, v [T, Hk, D] and returns attention of q [T, Hq, D] in q's dtype. Not thread-safe.

        turning: norms and rotary embedding that q and k have not had yet. sinks: float32 [Hq], as `attend` has them.
        k_scales, v_scales: float32 [Hk], for a cache in float8; ones where none are given.
        """
        if self.kv_dtype == torch.float8_e4m3fn:
            k_scales = self._ones if k_scales is None else k_scales
            v_scales = self._ones if v_scales is None else v_scales
        q = kv_store.store(
            q,
            k,
            v,
            k_cache,
            v_cache,
            plan,
            block_size=self.shape.block_size,
            turning=turning,
            k_scales=k_scales,
            v_scales=v_scales,
        )
        out = torch.empty_like(q)
        for part in (plan, *plan.more):
            partial, log_sums = self._scratch.of(part)
            attend(
                q,
                k_cache,
                v_cache,
                part,
                out,
                partial,
                log_sums,
                block_size=self.shape.block_size,
                scale=spec.scale,
                softcap=spec.softcap,
                sinks=sinks,
                k_scales=k_scales,
                v_scales=v_scales,
            )
            merge_splits(partial, log_sums, part, out, sinks)
        return out


class TritonLatentAttention:
    """Latent attention (`batchinfer_kernels.mla`) of layers with equal head counts: absorbed queries, one cache."""

    name = "triton"

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        block_size: int,
        split_size: int,
        device: torch.device,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if split_size % block_size:
            raise ValueError(f"split_size {split_size} is not a multiple of block_size {block_size}")
        assert spec.latent_rank is not None
        rank, self._width = spec.latent_rank, spec.head_dim
        _refuse(unfit_latents(rank, self._width - rank))
        self.kv_dtype = kv_dtype
        queries = max(mla.launch_config(device)["BLOCK_M"] // spec.num_heads, 1)
        self.kinds = {queries: mla.KIND}
        self.shape = AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=1,
            head_dim=rank,  # of partial results
            block_size=block_size,
            split_size=split_size,
            window=None,
            row_rule=STRICT,
            device=device,
            query_sizes=(queries,),
        )
        self._scratch = _Scratch(self.shape)
        self._staging = Staging(device, torch.int32)

    def new_caches(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """[B, S, C + R] of one layer, not initialised, twice."""
        at = self.shape
        cache = torch.empty(num_blocks, at.block_size, self._width, dtype=self.kv_dtype, device=at.device)
        return cache, cache

    def in_c(self, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec) -> None:
        return None

    def plan(self, batch: StepBatch) -> TilePlan:
        return plan_step(batch, self.shape, self.kinds, self._staging)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: TilePlan,
        *,
        spec: AttentionSpec,
        turning: Turning | None = None,
    ) -> Tensor:
        """Stores latents v [T, 1, C] and rotated parts k [T, 1, R] after `turning` (k_weight: of the latents' norm),
        and returns the weighted latents [T, H, C] of q [T, H, C + R], which is turned already. Not thread-safe."""
        assert v_cache is k_cache
        mla.store(v[:, 0], k[:, 0], k_cache, plan, turning)
        out = torch.empty(*q.shape[:2], self.shape.head_dim, dtype=q.dtype, device=q.device)
        for part in (plan, *plan.more):
            partial, log_sums = self._scratch.of(part)
            mla.attend(q, k_cache, part, out, partial, log_sums, scale=spec.scale)
            merge_splits(partial, log_sums, part, out)
        return out


def _refuse(unfit: str | None) -> None:
    if unfit is not None:
        raise ConfigError(f"engine.kernels triton can't be used here: {unfit}; use engine.kernels cpu")


class _Scratch:
    """Partial results, kept between steps."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._partial = torch.empty(0, device=shape.device)
        self._log_sums = torch.empty(0, device=shape.device)

    def of(self, plan: TilePlan) -> tuple[Tensor, Tensor]:
        """(partial, log_sums) for at least the plan's entries."""
        if isinstance(plan, KeptPlan):
            return plan.partial, plan.log_sums
        rows = plan.num_entries * self._shape.num_heads
        if self._log_sums.numel() < rows:
            rows += rows // 4
            self._partial = self._log_sums = torch.empty(0, device=self._shape.device)  # before there is more
            self._partial = torch.empty(rows * self._shape.head_dim, device=self._shape.device)
            self._log_sums = torch.empty(rows, device=self._shape.device)
        return self._partial, self._log_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """A plan of one KV group before it is on the device: int64 arrays by their names in TilePlan and, for each kind of
    tile, in TileGroup."""

    shared: Mapping[str, Ints]
    tiles: Mapping[str, Mapping[str, Ints]]
    num_entries: int


def plan_step(
    batch: StepBatch, shape: AttentionShape, kinds: Mapping[int, str], staging: Staging | None = None
) -> TilePlan:
    """The plan of one step for one KV group. kinds: of tiles, by the number of queries that they may have. staging: of
    int32, kept by who makes many plans."""
    most = PARTIAL_BYTES // (4 * shape.num_heads * (shape.head_dim + 1))
    parts = [(first, step_arrays(part, shape, kinds)) for first, part in cut_batch(batch, shape, most)]
    arrays = {name: np.concatenate([found.shared[name] for _, found in parts]) for name in _OF_STEP}
    for nth, (first, found) in enumerate(parts):
        own = {name: array for name, array in found.shared.items() if name not in _OF_STEP}
        own |= {"members": own["members"] + first, "merged": own["merged"] + first}
        for kind, of_kind in found.tiles.items():
            own |= {f"{kind}.{name}": array for name, array in of_kind.items()}
        arrays |= {f"{nth}.{name}": array for name, array in own.items()}
    tensors = _to_device(arrays, shape.device, staging or Staging(shape.device, torch.int32))
    of_step = {name: tensors.pop(name) for name in _OF_STEP}
    plans = []
    for nth, (_, found) in enumerate(parts):
        groups = tuple(
            TileGroup(kind=kind, most=queries, **{name: tensors[f"{nth}.{kind}.{name}"] for name in found.tiles[kind]})
            for queries, kind in kinds.items()
        )
        plan = TilePlan(
            groups=tuple(tiles for tiles in groups if len(tiles.start)),
            num_entries=found.num_entries,
            split_size=shape.split_size,
            window=shape.window,
            more=(),
            **{name: tensors[f"{nth}.{name}"] for name in found.shared if name not in _OF_STEP},
            **of_step,
        )
        plans.append(plan)
    return replace(plans[0], more=tuple(plans[1:])) if len(plans) > 1 else plans[0]


def step_arrays(batch: StepBatch, shape: AttentionShape, kinds: Mapping[int, str]) -> StepArrays:
    chunk = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    positions = batch.starts[chunk] + ranges(batch.lengths)
    tiles = cut_tiles(batch, shape)
    first_split = shape.first_split(positions)
    splits = positions // shape.split_size - first_split + 1
    several = np.flatnonzero(splits > 1)
    entry = np.full(len(positions), WHOLE, dtype=np.int64)
    entry[several] = starts_of(splits[several])

    tile_of = np.repeat(np.arange(len(tiles.count)), tiles.count)
    token, split = tiles.members, tiles.split[tile_of]
    nth = split - first_split[token]
    # Of a tile's queries the first ones do not reach as far as its last one, and the last ones, under a window, do
    # not see as far back as its first.
    sees = (nth >= 0) & (nth < splits[token])
    entries = np.where(sees, np.where(entry[token] == WHOLE, WHOLE, entry[token] + nth), NOTHING)

    slots, fresh_blocks = find_slots(batch, shape, chunk, positions)
    size = shape.block_size
    ends = batch.starts + batch.lengths
    fresh_from = (ends % size)[(ends % size != 0) & (batch.starts <= ends // size * size)]
    begin, end = _ranges_of_positions(tiles, positions, shape)
    of_tiles = {
        "start": tiles.start,
        "count": tiles.count,
        "chunk": tiles.chunk * batch.block_tables.shape[1],
        "begin": begin,
        "end": end,
    }
    return StepArrays(
        shared={
            "members": tiles.members,
            "positions": positions[token],
            "entries": entries,
            # Behind each other: kernels are compiled for a width of 1, whatever the longest table.
            "block_tables": batch.block_tables.reshape(-1, 1),
            "merged": several,
            "merged_entry": entry[several],
            "merged_splits": splits[several],
            "slots": slots,
            "fresh_blocks": fresh_blocks,
            "fresh_from": fresh_from,
        },
        tiles={
            kind: {name: array[tiles.queries == queries] for name, array in of_tiles.items()}
            for queries, kind in kinds.items()
        },
        num_entries=int(splits[several].sum()),
    )


def _ranges_of_positions(tiles: Tiles, positions: Ints, shape: AttentionShape) -> tuple[Ints, Ints]:
    """The first position that one of a tile's queries sees of its split, and what is behind the last."""
    of_members = positions[tiles.members]
    last = np.maximum.reduceat(of_members, tiles.start)
    begin = tiles.split * shape.split_size
    end: Ints = np.minimum(last + 1, begin + shape.split_size)
    if shape.window is not None:
        begin = np.maximum(begin, np.minimum.reduceat(of_members, tiles.start) - shape.window + 1)
    return begin, end


def _to_device(arrays: Mapping[str, Ints], device: torch.device, staging: Staging) -> dict[str, Tensor]:
    """The arrays as int32 tensors of their shapes, in one copy. What does not fit int32 is not read."""
    sizes = [-(-array.size // ALIGNED) * ALIGNED for array in arrays.values()]
    host = staging.write(sum(sizes))
    packed = host.numpy()
    starts = np.cumsum(sizes) - sizes
    for array, start in zip(arrays.values(), starts.tolist(), strict=True):
        packed[start : start + array.size] = array.reshape(-1)
    moved = torch.empty(len(packed), dtype=torch.int32, device=device)
    moved.copy_(host, non_blocking=True)
    staging.sent()
    return {
        name: moved[start : start + array.size].view(array.shape)
        for (name, array), start in zip(arrays.items(), starts.tolist(), strict=True)
    }
