"""Copies of KV blocks, for prefixes that end inside a block (`StepPlan.copies`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from batchinfer_kernels.native import attention as native_attention

from batchinfer.attention.context import LayerCache
from batchinfer.types.step import BlockCopy


def copy_blocks(layers: Sequence[LayerCache], copies: Sequence[BlockCopy]) -> None:
    """Copies blocks in every layer of their group, keys and values, whatever a block's layout is: the caches' first
    dimension is the block. Sources are all read before a destination is written (of a cache that is both, once)."""
    pairs: dict[int, tuple[list[int], list[int]]] = {}
    for copy in copies:
        sources, destinations = pairs.setdefault(copy.group, ([], []))
        sources.append(copy.source)
        destinations.append(copy.destination)
    for group, pair in pairs.items():
        own = [layer for layer in layers if layer.group == group]
        in_c = [layer.in_c for layer in own if layer.in_c is not None]
        if len(in_c) == len(own):
            native_attention.copy_blocks(in_c, *(np.array(blocks, dtype=np.int64) for blocks in pair))
            continue
        index = torch.tensor(pair, dtype=torch.int64, device="cpu")
        if own[0].k_cache.is_cuda:  # from pinned memory, so that the host does not wait for the step under way
            index = index.pin_memory().to(own[0].k_cache.device, non_blocking=True)
        for layer in own:
            for cache in (layer.k_cache, layer.v_cache)[: 1 if layer.v_cache is layer.k_cache else 2]:
                cache.index_copy_(0, index[1], cache.index_select(0, index[0]))
