"""Running planned attention: one object per KV group, `plan` once per step, `run` once per layer.

`AttentionBackend` is what a runner needs of one, `make_attention` picks one. `TiledAttention` is plain torch on any
device, `native.NativeAttention` C over a packed cache in bfloat16 or int8, `triton.TritonAttention` for GPUs; for
latent attention there are `TiledLatentAttention` and `triton.TritonLatentAttention`. What is computed is said in
`batchinfer_kernels.reference`, `kv8` and `mla`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from batchinfer_kernels import kv8, mla
from batchinfer_kernels.cpu import attend_tiles, merge_tiles
from batchinfer_kernels.native import attention as native_attention
from batchinfer_kernels.native.attention import TileLayer
from batchinfer_kernels.table import Ops
from batchinfer_kernels.turning import Turning
from torch import Tensor

from batchinfer.attention.native import NativeAttention
from batchinfer.attention.plan import AttentionPlan, plan_attention
from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import AttentionShape, StepBatch


class AttentionBackend(Protocol):
    """Attention of layers with equal head counts and window. Only a backend knows what its plans and caches hold.

    Caches have the block first, so that a block is copied by index. `name` and `kv_dtype` are for reports and for
    the size of a block.
    """

    @property
    def name(self) -> str: ...

    @property
    def kv_dtype(self) -> torch.dtype: ...

    def new_caches(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Key and value caches of one layer, not initialised: a slot that was not written is never seen. In latent
        attention both are the same tensor."""
        ...

    def in_c(self, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec) -> TileLayer | None:
        """A layer as C code is told of it, which then takes this backend's plans; None where `run` is not C."""
        ...

    def plan(self, batch: StepBatch) -> Any: ...

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Any,
        *,
        spec: AttentionSpec,
        turning: Turning | None = None,
    ) -> Tensor:
        """Stores k, v [T, Hk, D] and returns attention of q [T, Hq, D] in q's dtype. Not thread-safe. In latent
        attention, of absorbed queries q [T, Hq, C + R]: v [T, 1, C] are latents, k [T, 1, R] the rotated parts of keys,
        and weighted latents [T, Hq, C] come back.

        turning: see `ForwardContext.attend`."""
        ...


def make_attention(
    spec: AttentionSpec,
    ops: Ops,
    *,
    kv_dtype: torch.dtype,
    block_size: int,
    split_size: int,
    device: torch.device,
    deterministic: bool = True,
) -> AttentionBackend:
    """Attention with KV caches in kv_dtype: Triton's with Triton's operations, else in C where `why_not_c` has nothing
    against it. `deterministic`: see `TritonAttention`; the others always are. Raises ConfigError."""
    sizes: dict[str, Any] = {"block_size": block_size, "split_size": split_size}
    if spec.latent_rank is not None:
        if ops.backend != "triton":
            return TiledLatentAttention(spec, ops, device=device, kv_dtype=kv_dtype, **sizes)
        from batchinfer.attention.triton import TritonLatentAttention  # imports triton, which need not be there

        return TritonLatentAttention(spec, device=device, kv_dtype=kv_dtype, **sizes)
    if ops.backend == "triton":
        from batchinfer.attention.triton import TritonAttention

        return TritonAttention(spec, device=device, kv_dtype=kv_dtype, deterministic=deterministic, **sizes)
    if why_not_c(spec, ops, kv_dtype=kv_dtype, block_size=block_size, split_size=split_size) is None:
        return NativeAttention(spec, kv_dtype=kv_dtype, **sizes)
    return TiledAttention(spec, ops, device=device, kv_dtype=kv_dtype, **sizes)


def why_not_c(spec: AttentionSpec, ops: Ops, *, kv_dtype: torch.dtype, block_size: int, split_size: int) -> str | None:
    """Why a KV group's attention does not run in C, or None where it does."""
    if ops.backend != "native":
        return f"kernels are {ops.backend}"
    if spec.latent_rank is not None:
        return "it is latent attention"
    if kv_dtype not in native_attention.FORMATS:
        return f"the KV cache is {str(kv_dtype).removeprefix('torch.')}"
    return native_attention.unsuited(head_dim=spec.head_dim, block_size=block_size, split_size=split_size)


def kv_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that a token's key or value of one head takes in a cache."""
    return head_dim * dtype.itemsize + (kv8.SCALE_BYTES if dtype == torch.int8 else 0)


class TiledAttention:
    """Attention of layers with equal head counts and window, over caches [B, Hk, S, D], or rows of `kv8` in int8."""

    name = "tiled"

    def __init__(
        self,
        spec: AttentionSpec,
        ops: Ops,
        *,
        block_size: int,
        split_size: int,
        device: torch.device,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        if split_size % block_size:
            raise ValueError(f"split_size {split_size} is not a multiple of block_size {block_size}")
        self.kv_dtype = kv_dtype
        self._ops = ops
        self._shape = AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            split_size=split_size,
            window=spec.window,
            row_rule=ops.row_rule,
            device=device,
        )
        # Kept between steps: fresh memory would be paged in by the kernel in every layer, at more than the cost of
        # the copy into it.
        self._buffer = torch.empty(0)
        self._out = torch.empty(0, spec.head_dim)
        self._lse = torch.empty(0)

    def new_caches(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Key and value caches of one layer, not initialised."""
        at = self._shape
        row_size = kv_bytes(at.head_dim, self.kv_dtype) // self.kv_dtype.itemsize
        shape = (num_blocks, at.num_kv_heads, at.block_size, row_size)
        k_cache = torch.empty(shape, dtype=self.kv_dtype, device=at.device)
        return k_cache, torch.empty_like(k_cache)

    def in_c(self, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec) -> None:
        return None

    def plan(self, batch: StepBatch) -> AttentionPlan:
        return plan_attention(batch, self._shape)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan,
        *,
        spec: AttentionSpec,
        turning: Turning | None = None,
    ) -> Tensor:
        """Stores k, v [T, Hk, D] and returns attention of q [T, Hq, D] in q's dtype. Not thread-safe."""
        assert turning is None
        self._reserve(plan, k_cache)
        dtype = q.dtype
        if k_cache.dtype == torch.int8:
            k, v = kv8.to_rows(k, v)
            q = kv8.turn(q.float())
        else:
            k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        self._ops.kv_write(k, v, k_cache, v_cache, plan.kv_rows, plan.fresh_blocks)
        return self._attention(q, k_cache, v_cache, plan, spec).view(q.shape).to(dtype)

    def _attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, spec: AttentionSpec
    ) -> Tensor:
        """float32 [T * Hq, D] of q [T, Hq, D], whose keys and values are stored."""
        scaled = q.reshape(-1, spec.head_dim).float() * spec.scale
        out, lse = self._out[: plan.num_rows], self._lse[: plan.num_rows]
        for slab in plan.slabs:
            attend_tiles(
                scaled,
                k_cache,
                v_cache,
                slab.query_rows,
                slab.block_rows,
                slab.hidden,
                out[slab.out_rows],
                lse[slab.out_rows] if plan.merged else None,
                self._buffer,
                num_tiles=slab.num_tiles,
                softcap=spec.softcap,
            )
        result = out.index_select(0, plan.result_rows)
        if plan.merged_rows is not None:
            result.index_copy_(0, plan.merged_rows, merge_tiles(out, lse, plan.merged))
        return result

    def _reserve(self, plan: AttentionPlan, k_cache: Tensor) -> None:
        device = k_cache.device
        elements = plan.buffer_slots * k_cache.shape[3]
        if self._buffer.numel() < elements or self._buffer.dtype != k_cache.dtype:
            self._buffer = torch.empty(elements, dtype=k_cache.dtype, device=device)
        if self._out.shape[0] < plan.num_rows or self._out.device != device:
            rows = plan.num_rows + plan.num_rows // 4
            self._out = torch.empty(rows, self._out.shape[1], device=device)
            self._lse = torch.empty(rows, device=device)


class TiledLatentAttention(TiledAttention):
    """Latent attention of layers with equal head counts, over caches [B, 1, S, C + R]: see `batchinfer_kernels.mla`."""

    def new_caches(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        cache, _ = super().new_caches(num_blocks)
        return cache, cache

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan,
        *,
        spec: AttentionSpec,
        turning: Turning | None = None,
    ) -> Tensor:
        """Stores v [T, 1, C] and k [T, 1, R]; weighted latents [T, Hq, C] of q [T, Hq, C + R]. Not thread-safe."""
        assert turning is None and v_cache is k_cache
        self._reserve(plan, k_cache)
        mla.write(v[:, 0], k[:, 0], k_cache[:, 0], plan.kv_rows, plan.fresh_blocks)
        # Rows are multiplied whole: what their last R numbers add up to is left out.
        return self._attention(q, k_cache, v_cache, plan, spec).view(q.shape)[..., : spec.latent_rank].to(q.dtype)
