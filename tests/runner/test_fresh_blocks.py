"""Memory is given to blocks in time, to none twice, and what they hold stays as it is."""

from __future__ import annotations

import ctypes
import mmap
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batchinfer_kernels.native import attention as native_attention
from batchinfer_kernels.native import library
from torch import Tensor

from batchinfer.runner import fresh_blocks
from batchinfer.runner.fresh_blocks import LEAST_AT_ONCE, LEAST_BYTES, FreshBlocks
from batchinfer.types.step import Chunk, KVGroup


def chunk(seq_id: int, *tables: list[int]) -> Chunk:
    return Chunk(seq_id, 0, (1,), tables, 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int, int]]:
    """What `fault_in` is asked for: (layers, first, stop)."""
    calls: list[tuple[Any, int, int]] = []
    monkeypatch.setattr(fresh_blocks, "free_host_memory", lambda: 1 << 50)
    monkeypatch.setattr(native_attention, "fault_in", lambda *call: calls.append(call))
    return calls


def layer(group: int, in_c: Any) -> Any:
    return SimpleNamespace(group=group, in_c=in_c)


def in_c(block_bytes: int) -> Any:
    return SimpleNamespace(caches=(torch.empty(2, block_bytes // 2, dtype=torch.int8, device="meta"),) * 2)


def test_ranges_follow_each_other_and_hold_what_is_used(asked: list[tuple[Any, int, int]]) -> None:
    layers = [in_c(100), in_c(100)]
    blocks = FreshBlocks([layer(0, x) for x in layers], [KVGroup(num_blocks=5000, block_size=16, window=None)])
    generator = torch.Generator().manual_seed(1)
    highest = 0
    for _ in range(300):
        highest = min(4999, highest + int(torch.randint(0, 60, (1,), generator=generator)))
        blocks.expect([chunk(0, [3, 1]), chunk(1, [0, highest]), chunk(2, [highest // 2])])
        assert asked[-1][2] > highest
    assert [call[1] for call in asked] == [0, *(call[2] for call in asked[:-1])]
    assert all(call[0] == layers and call[2] - call[1] >= LEAST_AT_ONCE for call in asked[:-1])
    assert asked[-1][2] == 5000
    assert len(asked) < 20


def test_each_group_by_itself_and_none_without_code_in_c(asked: list[tuple[Any, int, int]]) -> None:
    groups = [KVGroup(num_blocks=100, block_size=16, window=window) for window in (None, 64, 128)]
    first, third = in_c(100), in_c(100)
    blocks = FreshBlocks([layer(0, first), layer(1, None), layer(2, third)], groups)
    blocks.expect([chunk(0, [1], [2], [70])])
    blocks.expect([chunk(0, [1, 9], [2, 3], [70, 71])])
    assert asked == [([first], 0, 100), ([third], 0, 100)]
    FreshBlocks((), ()).expect([chunk(0, [1])])


def test_large_blocks_are_asked_for_few_at_a_time(asked: list[tuple[Any, int, int]]) -> None:
    blocks = FreshBlocks([layer(0, in_c(LEAST_BYTES // 4))], [KVGroup(num_blocks=100, block_size=16, window=None)])
    blocks.expect([chunk(0, [0])])
    blocks.expect([chunk(0, [0, 40])])
    assert [call[1:] for call in asked] == [(0, 5), (5, 46)]


def test_nothing_is_asked_for_where_memory_is_short(
    asked: list[tuple[Any, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = KVGroup(num_blocks=100, block_size=16, window=None)
    free = 8 * 5 * (LEAST_BYTES // 4)
    monkeypatch.setattr(fresh_blocks, "free_host_memory", lambda: free - 1)
    blocks = FreshBlocks([layer(0, in_c(LEAST_BYTES // 4))], [group])
    blocks.expect([chunk(0, [0])])
    assert not asked
    monkeypatch.setattr(fresh_blocks, "free_host_memory", lambda: free)
    blocks.expect([chunk(0, [0, 3])])
    assert not asked, "these blocks' turn was before"
    blocks.expect([chunk(0, [0, 5])])
    assert [call[1:] for call in asked] == [(5, 10)]


def untouched(cache: Tensor) -> Tensor:
    """As the cache is, in memory of its own that nobody has had before."""
    pages = mmap.mmap(-1, cache.nbytes + mmap.PAGESIZE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)  # of a huge page all is there as soon as any of it is
    memory = torch.frombuffer(pages, dtype=torch.uint8)[: cache.nbytes]
    return memory.view(cache.dtype).view(cache.transpose(0, 1).shape).transpose(0, 1)


def resident(memory: Tensor) -> list[bool]:
    """By page that lies wholly in `memory`."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (memory.data_ptr() + memory.nbytes - start) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0
    return [bool(page & 1) for page in found]


def can_be_populated() -> bool:
    if sys.platform != "linux":
        return False
    memory = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(mmap.PAGESIZE), 23) == 0


@pytest.mark.skipif(library.available() is not None, reason="no native kernels on this machine")
@pytest.mark.skipif(not can_be_populated(), reason="needs Linux 5.14")
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_blocks_have_memory_and_keep_what_they_hold(dtype: torch.dtype) -> None:
    layers, caches = [], []
    for number in range(2):
        k_cache, v_cache = (untouched(cache) for cache in native_attention.new_caches(900, 2, 64, dtype))
        k_cache[5], v_cache[5] = 7 + number, 9 + number
        layers.append(native_attention.TileLayer(k_cache, v_cache, scale=0.125))
        caches += [k_cache, v_cache]
    assert not any(any(resident(cache[10:600, head])) for cache in caches for head in range(2))
    native_attention.fault_in(layers, 0, 600)
    for cache in caches:
        for head in range(2):
            assert all(resident(cache[:600, head]))
            assert not any(resident(cache[640:, head])), "more than was asked for"
    for number in range(2):
        assert (caches[2 * number][5] == 7 + number).all() and (caches[2 * number + 1][5] == 9 + number).all()
    native_attention.fault_in(layers, 600, 600)
    native_attention.fault_in(layers, 600, 900)
    assert all(all(resident(cache[:, head])) for cache in caches for head in range(2))
