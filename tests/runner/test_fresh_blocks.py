"""Memory is given to blocks in time, to none twice, and what they hold stays as it is."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batchinfer_kernels.native import attention as native_attention
from batchinfer_kernels.native import library
from batchinfer_kernels.native.attention import SMALL_BLOCKS
from torch import Tensor

from batchinfer.runner import fresh_blocks
from batchinfer.runner.fresh_blocks import LEAST_AT_ONCE, LEAST_BYTES, SLOW_HUGE_PAGE, FreshBlocks
from batchinfer.types.step import Chunk, KVGroup


def chunk(seq_id: int, *tables: list[int]) -> Chunk:
    return Chunk(seq_id, 0, (1,), tables, 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int, int]]:
    """What `fault_in` is asked for: (layers, first, stop). No block is of those that may lie in huge pages."""
    calls: list[tuple[Any, int, int]] = []
    monkeypatch.setattr(native_attention, "SMALL_BLOCKS", 1 << 30)
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
    assert len(asked) < 60


def test_each_group_by_itself_and_none_without_code_in_c(asked: list[tuple[Any, int, int]]) -> None:
    groups = [KVGroup(num_blocks=60, block_size=16, window=window) for window in (None, 64, 128)]
    first, third = in_c(100), in_c(100)
    blocks = FreshBlocks([layer(0, first), layer(1, None), layer(2, third)], groups)
    blocks.expect([chunk(0, [1], [2], [50])])
    blocks.expect([chunk(0, [1, 9], [2, 3], [50, 51])])
    assert asked == [([first], 0, 60), ([third], 0, 60)]
    FreshBlocks((), ()).expect([chunk(0, [1])])


def test_large_blocks_are_asked_for_few_at_a_time(asked: list[tuple[Any, int, int]]) -> None:
    blocks = FreshBlocks([layer(0, in_c(LEAST_BYTES // 4))], [KVGroup(num_blocks=100, block_size=16, window=None)])
    blocks.expect([chunk(0, [0])])
    blocks.expect([chunk(0, [0, 40])])
    assert [call[1:] for call in asked] == [(0, 5), (5, 42)]


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


def untouched(heads: int, num_blocks: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Caches as `new_caches` makes them, in memory of their own that nobody has had before."""
    size = native_attention.block_size_of(head_dim, dtype)
    num_bytes = 2 * heads * num_blocks * size * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes + mmap.PAGESIZE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)  # of a huge page all is there as soon as any of it is
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype)
    return native_attention.caches_in(memory.view(heads, num_blocks, 2, size), head_dim)


def resident(cache: Tensor, head: int, first: int, stop: int) -> list[bool]:
    """By page that lies wholly in these blocks of a head, keys and values between each other."""
    stride = cache.stride(0) * cache.itemsize
    begin = cache[first, head].data_ptr()
    start, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, begin + (stop - first) * stride
    pages = (end - start) // mmap.PAGESIZE
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
        k_cache, v_cache = untouched(2, 900, 64, dtype)
        k_cache[5], v_cache[5] = 7 + number, 9 + number
        layers.append(native_attention.TileLayer(k_cache, v_cache, scale=0.125))
        caches.append((k_cache, v_cache))
    places = [(keys, head) for keys, _ in caches for head in range(2)]
    assert not any(any(resident(*place, 10, 600)) for place in places)
    native_attention.fault_in(layers, 0, 600)
    for place in places:
        assert all(resident(*place, 0, 600))
        assert not any(resident(*place, 640, 900)), "more than was asked for"
    for number, (keys, values) in enumerate(caches):
        assert (keys[5] == 7 + number).all() and (values[5] == 9 + number).all()
    native_attention.fault_in(layers, 600, 600)
    native_attention.fault_in(layers, 600, 900)
    assert all(all(resident(*place, 0, 900)) for place in places)


@pytest.fixture
def huge_page_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long a huge page takes, on a clock that only `fault_in` lets go on; behind it, how many layers were asked for
    at a time."""
    seconds, now = [0.0], [0.0]

    def fault_in(layers: list[Any], first: int, stop: int) -> None:
        seconds.append(len(layers))
        at_once = min(torch.get_num_threads(), layers[0].caches[0].shape[1])
        now[0] += seconds[0] * len(layers) * native_attention.huge_pages(layers[0], first, stop) / at_once

    monkeypatch.setattr(fresh_blocks, "free_host_memory", lambda: 1 << 50)
    monkeypatch.setattr(native_attention, "fault_in", fault_in)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return seconds


def layers_of(number: int, group: int = 0) -> list[Any]:
    caches = native_attention.new_caches(4000, 2, 64, torch.int8)  # memory that is not written is not there
    return [layer(group, native_attention.TileLayer(*caches, scale=1.0)) for _ in range(number)]


def test_huge_pages_that_are_slow_are_done_without(
    huge_page_seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back: list[list[Any]] = []
    monkeypatch.setattr(native_attention, "want_small_pages", lambda layers: taken_back.append(list(layers)))
    layers = [*layers_of(4), *layers_of(2, group=1)]
    groups = [KVGroup(num_blocks=4000, block_size=16, window=window) for window in (None, 64)]
    blocks, calls = FreshBlocks(layers, groups), huge_page_seconds
    calls[0] = SLOW_HUGE_PAGE * 100  # none of them is asked for yet
    blocks.expect([chunk(0, [SMALL_BLOCKS // 2], [1])])
    assert calls[1:] == [4, 2] and not taken_back
    calls[0] = SLOW_HUGE_PAGE * 0.9
    blocks.expect([chunk(0, [SMALL_BLOCKS + 500], [1])])
    assert calls[3:] == [1, 1, 2] and not taken_back
    calls[0] = SLOW_HUGE_PAGE * 1.1
    blocks.expect([chunk(0, [SMALL_BLOCKS + 1500], [SMALL_BLOCKS + 500])])
    assert calls[6:] == [1, 1, 2, 2], "two layers show it"
    assert taken_back == [[x.in_c for x in layers[:4]], [x.in_c for x in layers[4:]]]
    blocks.expect([chunk(0, [SMALL_BLOCKS + 2500], [SMALL_BLOCKS + 500])])
    assert calls[10:] == [4] and len(taken_back) == 2


def test_one_layer_that_waits_for_something_else_does_not_show_it(
    huge_page_seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back: list[Any] = []
    monkeypatch.setattr(native_attention, "want_small_pages", taken_back.append)
    blocks = FreshBlocks(layers_of(1), [KVGroup(num_blocks=4000, block_size=16, window=None)])
    for number, slow in enumerate([True, False, True, False, True, True]):
        huge_page_seconds[0] = SLOW_HUGE_PAGE * (1.1 if slow else 0.9)
        assert not taken_back
        blocks.expect([chunk(0, [SMALL_BLOCKS + 400 * number])])
    assert len(taken_back) == 1


@pytest.mark.skipif(library.available() is not None, reason="no native kernels on this machine")
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_whichever_layer_shows_it_the_others_have_their_memory(
    num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_blocks, "SLOW_HUGE_PAGE", 0.0)
    layers = layers_of(num_layers)
    blocks = FreshBlocks(layers, [KVGroup(num_blocks=4000, block_size=16, window=None)])
    for last in (SMALL_BLOCKS + 100, SMALL_BLOCKS + 900):
        blocks.expect([chunk(0, [last])])
        if can_be_populated():
            for one in layers:
                assert all(all(resident(one.in_c.caches[0], head, 0, last + 1)) for head in range(2))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_wish_for_huge_pages_is_taken_back_for_all_of_a_cache() -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this Python knows no huge pages")
    [one] = layers_of(1)
    wished = [head for head in range(2) if "hg" in flags_of(one.in_c.caches[0][3000, head].data_ptr())]
    native_attention.want_small_pages([one.in_c])
    for head in range(2):
        for block in (10, SMALL_BLOCKS + 10, 3990):
            flags = flags_of(one.in_c.caches[1][block, head].data_ptr())
            assert "hg" not in flags
            assert "nh" in flags or not wished  # where the system has no huge pages, it knows neither


def flags_of(address: int) -> list[str]:
    """What the system knows of the memory at an address: VmFlags of its mapping."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            here = begin <= address < end
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such mapping")


def test_a_run_of_blocks_is_counted_in_huge_pages() -> None:
    [one] = layers_of(1)
    per_block = 2 * native_attention.block_size_of(64, torch.int8)
    fit = native_attention.HUGE_PAGE // per_block
    assert native_attention.huge_pages(one.in_c, 0, fit) == 2 * 2
    assert native_attention.huge_pages(one.in_c, 100, 101 + fit) == 2 * 3
