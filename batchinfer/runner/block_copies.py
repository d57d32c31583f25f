"""Copies of KV blocks, for prefixes that end inside a block (`StepPlan.copies`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchinfer.attention.context import LayerCache
from batchinfer.types.step import BlockCopy


def copy_blocks(layers: Sequence[LayerCache], copies: Sequence[BlockCopy]) -> None:
    """Copies blocks in every layer of their group, keys and values, whatever a block's layout is: the caches' first
    dimension is the block. Sources are all read before a destination is written."""
    pairs: dict[int, tuple[list[int], list[int]]] = {}
    for copy in copies:
        sources, destinations = pairs.setdefault(copy.group, ([], []))
        sources.append(copy.source)
        destinations.append(copy.destination)
    device = layers[0].k_cache.device
    indices = {group: torch.tensor(pair, dtype=torch.int64, device=device) for group, pair in pairs.items()}
    for layer in layers:
        found = indices.get(layer.group)
        if found is not None:
            for cache in (layer.k_cache, layer.v_cache):
                cache.index_copy_(0, found[1], cache.index_select(0, found[0]))
