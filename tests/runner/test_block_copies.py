"""Copies of blocks: whole blocks, in every layer of their group and no other, in any layout."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels.native import library

from batchinfer.attention.context import LayerCache
from batchinfer.attention.native import NativeAttention
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


def test_a_cache_that_is_keys_and_values_is_copied_once() -> None:
    """A second copy would read what the first one wrote."""
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5, latent_rank=3)
    before = torch.arange(24.0).view(3, 2, 4)
    cache = before.clone()
    copy_blocks(
        [LayerCache(group=0, spec=spec, k_cache=cache, v_cache=cache)], [BlockCopy(0, 0, 1), BlockCopy(0, 1, 2)]
    )
    assert torch.equal(cache, before[[0, 0, 1]])


@pytest.mark.skipif(library.available() is not None, reason="needs the native kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_caches_are_copied_alike(dtype: torch.dtype, threads: int) -> None:
    """Also where a block is the source of one copy and the destination of another."""
    spec = AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=64, scale=0.5)
    backend = NativeAttention(spec, block_size=16, split_size=256, kv_dtype=dtype)
    torch.manual_seed(1)
    caches = [backend.new_caches(6) for _ in range(4)]
    for cache in (cache for pair in caches for cache in pair):
        cache.copy_(torch.randint(-99, 99, cache.shape).to(dtype))
    kept = [[cache.clone() for cache in pair] for pair in caches]
    groups = [0, 1, 0, 1]
    layers = [
        LayerCache(group=group, spec=spec, k_cache=k, v_cache=v, in_c=backend.in_c(k, v, spec))
        for group, (k, v) in zip(groups, caches, strict=True)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy_blocks(layers, [BlockCopy(0, 1, 4), BlockCopy(0, 4, 1), BlockCopy(0, 4, 0), BlockCopy(1, 5, 2)])
    finally:
        torch.set_num_threads(before)
    came_from = {0: [4, 4, 2, 3, 1, 5], 1: [0, 1, 5, 3, 4, 5]}
    for group, pair, old in zip(groups, caches, kept, strict=True):
        for cache, was in zip(pair, old, strict=True):
            assert torch.equal(cache, was[came_from[group]])
