"""Memory for KV blocks before they are written for the first time.

Page by page, while a block is written, the system takes several times as long to give it. Blocks that were never used
are taken in order (`BlockManager`), so what is used says what comes next.

Huge pages make the cache faster to read, but some virtual machines, whose host takes back what is free, need a hundred
times as long to give one as others: what that costs is watched, and small ones are used instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
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
# So many layers are timed when memory is asked for, the rest asked for together. As many in a row must be slow: any one
# may have waited for something else.
TIMED_LAYERS = 2

_log = logging.getLogger(__name__)


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
        self._num_slow = 0  # layers in a row
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
        if not self._small_pages and stop > native_attention.SMALL_BLOCKS:
            timed, layers = layers[:TIMED_LAYERS], layers[TIMED_LAYERS:]
            for layer in timed:
                begin = time.perf_counter()
                native_attention.fault_in([layer], first, stop)
                self._watch(layer, first, stop, time.perf_counter() - begin)
        if layers:
            native_attention.fault_in(layers, first, stop)

    def _watch(self, layer: TileLayer, first: int, stop: int, seconds: float) -> None:
        """Does without huge pages once they are found to be slow."""
        at_once = min(torch.get_num_threads(), layer.caches[0].shape[1])  # heads
        per_page = seconds * at_once / native_attention.huge_pages(layer, first, stop)
        self._num_slow = self._num_slow + 1 if per_page > SLOW_HUGE_PAGE else 0
        if self._num_slow == TIMED_LAYERS:
            self._small_pages = True
            for _, _, _, _, layers in self._groups:
                native_attention.want_small_pages(layers)
            _log.info("the system takes %.1f ms to give a huge page: the KV cache does without", per_page * 1e3)
