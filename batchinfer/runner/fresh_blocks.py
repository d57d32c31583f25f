"""Memory for KV blocks before they are written for the first time.

Page by page, while a block is written, the system takes several times as long to give it. Blocks that were never used
are taken in order (`BlockManager`), so what is used says what comes next.

Huge pages make the cache faster to read, but some virtual machines, whose host takes back what is free, need a hundred
times as long to give one as others: what that costs is watched, and small ones are used instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from batchinfer_kernels.native import attention as native_attention
from batchinfer_kernels.native.attention import TileLayer

from batchinfer.attention.context import LayerCache
from batchinfer.runner.host import free_host_memory
from batchinfer.types.step import Chunk, KVGroup

# What is asked for at once: so many blocks, or fewer where that many bytes hold them, or AHEAD of the blocks in use.
LEAST_AT_ONCE = 64
LEAST_BYTES = 64 << 20
AHEAD = 1 / 32
# Nothing is asked for while less than this multiple of it is free: it would be given, and the process killed for it.
# (A huge page is given whole, for a part of it.)
FREE_FOR_EACH = 8
# More seconds than this for a huge page are slow; to clear one takes a tenth of it.
SLOW_HUGE_PAGE = 2e-3


class FreshBlocks:
    """Of caches that C code writes; the others are left to their libraries."""

    def __init__(self, layers: Sequence[LayerCache], groups: Sequence[KVGroup]) -> None:
        self._groups = []
        for number, group in enumerate(groups):
            in_c = [layer.in_c for layer in layers if layer.group == number and layer.in_c is not None]
            if in_c:
                block_bytes = sum(cache[0].nbytes for layer in in_c for cache in layer.caches)
                at_once = min(LEAST_AT_ONCE, 1 + LEAST_BYTES // block_bytes)
                self._groups.append((number, group.num_blocks, block_bytes, at_once, in_c))
        self._ready = [0] * len(groups)
        self._small_pages = False

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """These are about to be run."""
        for group, num_blocks, block_bytes, at_once, layers in self._groups:
            used, ready = 1 + max(chunk.block_tables[group][-1] for chunk in chunks), self._ready[group]
            if used > ready:
                stop = min(num_blocks, max(ready + at_once, used + int(used * AHEAD)))
                if free_host_memory() >= FREE_FOR_EACH * (stop - ready) * block_bytes:
                    self._fault_in(layers, ready, stop)
                self._ready[group] = stop

    def _fault_in(self, layers: Sequence[TileLayer], first: int, stop: int) -> None:
        """By layer, until huge pages are found to be slow."""
        if self._small_pages or stop <= native_attention.SMALL_BLOCKS:
            native_attention.fault_in(layers, first, stop)
            return
        for number, layer in enumerate(layers, 1):
            began = time.perf_counter()
            native_attention.fault_in([layer], first, stop)
            seconds = time.perf_counter() - began
            if seconds > SLOW_HUGE_PAGE * native_attention.huge_pages(layer, first, stop):
                self._small_pages = True
                for _, _, _, _, others in self._groups:
                    native_attention.want_small_pages(others)
                native_attention.fault_in(layers[number:], first, stop)
                return
