"""Copies of blocks: whole blocks, in every layer of their group and no other, in any layout."""

from __future__ import annotations

import pytest
import torch

from batchinfer.attention.context import LayerCache
from batchinfer.attention.spec import AttentionSpec
from batchinfer.runner.block_copies import copy_blocks
from batchinfer.types.step import BlockCopy

SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 2, 4, 2)])
def test_blocks_are_copied_in_the_layers_of_their_group(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def cache(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-99, 99, (6, *shape), generator=generator).to(dtype)

    layers = [
        LayerCache(group=group, spec=SPEC, k_cache=cache(2 * i), v_cache=cache(2 * i + 1))
        for i, group in enumerate([0, 1, 0])
    ]
    copy_blocks(layers, [BlockCopy(0, 1, 4), BlockCopy(1, 4, 0), BlockCopy(0, 1, 2), BlockCopy(0, 0, 5)])
    came_from = {0: [0, 1, 1, 3, 1, 0], 1: [4, 1, 2, 3, 4, 5]}
    for i, layer in enumerate(layers):
        assert torch.equal(layer.k_cache, cache(2 * i)[came_from[layer.group]])
        assert torch.equal(layer.v_cache, cache(2 * i + 1)[came_from[layer.group]])
