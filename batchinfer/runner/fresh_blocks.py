"""Memory for KV blocks before they are written for the first time.

Page by page, while a block is written, the system takes several times as long to give it. Blocks that were never used
are taken in order (`BlockManager`), so what is used says what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchinfer_kernels.native import attention as native_attention

from batchinfer.attention.context import LayerCache
from batchinfer.types.step import Chunk, KVGroup

LEAST_AT_ONCE = 256  # blocks
AHEAD = 1 / 8  # of the blocks in use


class FreshBlocks:
    """Of caches that C code writes; the others are left to their libraries."""

    def __init__(self, layers: Sequence[LayerCache], groups: Sequence[KVGroup]) -> None:
        self._groups = []
        for number, group in enumerate(groups):
            in_c = [layer.in_c for layer in layers if layer.group == number and layer.in_c is not None]
            if in_c:
                self._groups.append((number, group.num_blocks, in_c))
        self._ready = [0] * len(groups)

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """These are about to be run."""
        for group, num_blocks, layers in self._groups:
            used, ready = 1 + max(chunk.block_tables[group][-1] for chunk in chunks), self._ready[group]
            if used > ready:
                stop = min(num_blocks, max(ready + LEAST_AT_ONCE, used + int(used * AHEAD)))
                native_attention.fault_in(layers, ready, stop)
                self._ready[group] = stop
