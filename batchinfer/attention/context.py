"""What a model's forward is handed beside its tokens: made once per step by the runner, by tests by hand.

A model knows nothing of sequences, blocks or steps; it calls `ctx.attend(layer, q, k, v)` and gets the attention
output of every token. `PagedContext` is the real one, `DenseContext` the smallest, for tests of a model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from batchinfer_kernels.native.attention import TileLayer, TileStep
from batchinfer_kernels.turning import Turning
from torch import Tensor

from batchinfer.attention.backend import AttentionBackend
from batchinfer.attention.spec import AttentionSpec


class ForwardContext(Protocol):
    """num_tokens T; positions int64 [T], each token's position in its own sequence; wanted int64 [W], the tokens whose
    hidden states are read in the end, ascending, or None for all."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def wanted(self) -> Tensor | None: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turning: Turning | None = None) -> Tensor:
        """Stores k, v [T, Hk, D] (after rotation) for a layer; attention of q [T, Hq, D], in q's shape and dtype. For
        latent attention see `AttentionBackend.run`.

        turning: norms and rotation that q and k have not had yet, where `Ops.turns` says that attention does them."""
        ...

    def in_c(self) -> list[tuple[TileLayer, TileStep]] | None:
        """By layer, what C code that runs whole layers is told instead; None where attention is not in C."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Where a layer's KV lies: its KV group and its caches, [blocks, ...] as its backend made them, one tensor twice
    where attention is latent. `in_c` says it to C code, where the backend is C."""

    group: int
    spec: AttentionSpec
    k_cache: Tensor
    v_cache: Tensor
    in_c: TileLayer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedContext:
    """One step over paged caches. `backends` and `plans` are by KV group, `layers` by layer."""

    num_tokens: int
    positions: Tensor
    layers: Sequence[LayerCache]
    backends: Sequence[AttentionBackend]
    plans: Sequence[Any]
    wanted: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turning: Turning | None = None) -> Tensor:
        at = self.layers[layer]
        backend, plan = self.backends[at.group], self.plans[at.group]
        return backend.run(q, k, v, at.k_cache, at.v_cache, plan, spec=at.spec, turning=turning)

    def in_c(self) -> list[tuple[TileLayer, TileStep]] | None:
        found = []
        for at in self.layers:
            if at.in_c is None:
                return None
            found.append((at.in_c, self.plans[at.group]))
        return found


class DenseContext:
    """One whole sequence in one step, without a cache: plain causal attention in float32."""

    def __init__(self, specs: Sequence[AttentionSpec], num_tokens: int) -> None:
        self.specs = specs
        self.num_tokens = num_tokens
        self.positions = torch.arange(num_tokens)
        self.wanted: Tensor | None = None

    def in_c(self) -> None:
        return None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turning: Turning | None = None) -> Tensor:
        assert turning is None
        spec = self.specs[layer]
        if spec.latent_rank is not None:
            k = torch.cat((v, k), dim=-1)
        group = spec.num_heads // spec.num_kv_heads
        keys = k.float().repeat_interleave(group, dim=1)
        values = v.float().repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", q.float(), keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        behind = self.positions[:, None] - self.positions[None, :]
        seen = behind >= 0
        if spec.window is not None:
            seen &= behind < spec.window
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        return torch.einsum("hts,shd->thd", weights, values).to(q.dtype)
