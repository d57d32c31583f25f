"""Attention in C over a KV cache that is packed for 512-bit registers: `reference.split_attention`, or `kv8`.

A block has LANES tokens. Its keys of one head are [D / n, LANES, n]: a register holds n neighbouring dimensions of all
tokens, as many as make 4 bytes. Its values are [LANES / n, D, n]: a register holds 16 dimensions of n neighbouring
tokens. In int8 LANES float32 follow: keys' scales, and of values' scales -log2. Keys are 128 above their value, as
unsigned bytes. `pack_keys`, `pack_values` and `unpack_int8` say so in torch, for tests; `attention_*.c` write and read
the caches.

A `TileStep` says what is attended to, for all layers of a step, a `TileLayer` where a layer's KV lies, for all steps;
`attend` runs one layer.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer_kernels import kv8
from batchinfer_kernels.native import library

LANES = 16
MAX_SPLIT = 1024
MAX_HEAD_DIM = 256
# Numbers that the C code has for the caches' formats.
FORMATS = {torch.bfloat16: 0, torch.int8: 1}
# A head's first blocks lie in small pages: a small job would spend most of its time with clearing huge ones.
SMALL_BLOCKS = 1024
HUGE_PAGE = 2 << 20

Ints = npt.NDArray[np.int64]

_ARRAYS = (
    "tile_start",
    "tile_count",
    "tile_chunk",
    "tile_split",
    "members",
    "items",
    "positions",
    "block_tables",
    "entry",
    "several",
    "slots",
    "fresh_blocks",
)
_COUNTS = ("num_tokens", "num_items", "num_heavy", "num_several", "num_fresh", "table_width")
_SHAPE = ("num_heads", "num_kv_heads", "head_dim", "split_size", "window")


class _Step(ctypes.Structure):
    """`struct step`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_int64) for name in (*_COUNTS, *_SHAPE)),
    ]


class _Layer(ctypes.Structure):
    """`struct layer`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache")),
        *((name, ctypes.c_int64) for name in ("block_stride", "head_stride", "format")),
        *((name, ctypes.c_void_p) for name in ("out", "part", "part_top_sum", "queries", "read")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class TileStep:
    """What the C code is told about a step; all arrays are int64.

    tile_*         per tile: where its queries stand in members, how many, the row of block_tables through which its
                   split is found, and the split's number
    members        tokens of all tiles
    items          tile * num_kv_heads + KV head, in the order in which they are begun
    num_heavy      items, the first, that threads take one by one; of others they take some at once
    positions      per token
    block_tables   [chunks, width]
    entry          per token: its first row of partial results (one for each split that it sees, in order), or -1
                   where it sees one split only
    several        tokens whose entry is not -1
    slots          per token: block * LANES + offset, where its key and value are stored
    fresh_blocks   blocks whose values are cleared first
    num_entries    rows of partial results
    """

    def __init__(
        self,
        *,
        num_entries: int,
        num_heavy: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        split_size: int,
        window: int | None,
        **arrays: Ints,
    ) -> None:
        assert set(arrays) == set(_ARRAYS)
        self.num_entries = num_entries
        self.arrays = {name: np.ascontiguousarray(array, dtype=np.int64) for name, array in arrays.items()}
        self.struct = _Step(
            **{name: array.ctypes.data for name, array in self.arrays.items()},
            num_tokens=len(arrays["positions"]),
            num_items=len(arrays["items"]),
            num_heavy=num_heavy,
            num_several=len(arrays["several"]),
            num_fresh=len(arrays["fresh_blocks"]),
            table_width=arrays["block_tables"].shape[1],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            split_size=split_size,
            window=window or 0,
        )

    @property
    def num_tiles(self) -> int:
        return len(self.arrays["tile_start"])


class TileLayer:
    """What the C code is told about one layer, for all steps: its caches, and what becomes of scores."""

    __slots__ = ("caches", "struct")

    def __init__(self, k_cache: Tensor, v_cache: Tensor, *, scale: float, softcap: float | None = None) -> None:
        assert k_cache[0, 0].is_contiguous() and v_cache[0, 0].is_contiguous()
        assert k_cache.stride()[:2] == v_cache.stride()[:2]
        assert v_cache.data_ptr() - k_cache.data_ptr() == k_cache[0, 0].nbytes
        assert k_cache.dtype == v_cache.dtype
        # Scores in units of log 2, so that weights are powers of two; under a softcap that comes after it.
        in_bits = math.log2(math.e)
        self.caches = (k_cache, v_cache)
        self.struct = _Layer(
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            block_stride=k_cache.stride(0) * k_cache.itemsize,
            head_stride=k_cache.stride(1) * k_cache.itemsize,
            format=FORMATS[k_cache.dtype],
            scale=scale * in_bits if softcap is None else scale / softcap,
            softcap=0.0 if softcap is None else softcap * in_bits,
        )

    def use_scratch(self, partial: Tensor, step: TileStep) -> None:
        """For one step: float32 of at least `partial_size` numbers."""
        part, top_sum, queries = _partial_sizes(step)
        assert partial.numel() >= part + top_sum + queries
        self.struct.part = partial.data_ptr()
        self.struct.part_top_sum = partial[part:].data_ptr()
        self.struct.queries = partial[part + top_sum :].data_ptr()


def unsuited(*, head_dim: int, block_size: int, split_size: int) -> str | None:
    """Why attention of these sizes can't run here, or None."""
    if head_dim % LANES or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of {LANES} up to {MAX_HEAD_DIM}"
    if block_size != LANES:
        return f"block_size is {block_size}, not {LANES}"
    if split_size % LANES or split_size > MAX_SPLIT:
        return f"split_size {split_size} is not a multiple of {LANES} up to {MAX_SPLIT}"
    return library.available()


def new_caches(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Key and value caches, not initialised: bfloat16 [B, Hk, D / 2, LANES, 2] and [B, Hk, LANES / 2, D, 2], or int8
    [B, Hk, LANES * (D + 4)] twice.

    In memory a head's blocks lie together, and a block's keys and values: what one head reads of a sequence is then one
    run where the sequence's blocks follow each other, as they mostly do. Memory gave such runs twice as fast as pieces
    of 2 KiB. They are wished to lie in huge pages: with those of 4 KiB, looking up addresses costs up to every fifth
    byte that memory could give.
    """
    keys, values = caches_in(
        torch.empty(num_kv_heads, num_blocks, 2, block_size_of(head_dim, dtype), dtype=dtype), head_dim
    )
    for of_head in _runs((keys, values), SMALL_BLOCKS, num_blocks):
        _advise(of_head, "MADV_HUGEPAGE")
    return keys, values


def block_size_of(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of a block's keys of one head, or of its values."""
    return LANES * (head_dim + (kv8.SCALE_BYTES if dtype == torch.int8 else 0))


def caches_in(memory: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """What `new_caches` returns, in memory [Hk, B, 2, block_size_of]."""
    keys, values = memory.transpose(0, 1).unbind(2)
    if memory.dtype == torch.int8:
        return keys, values
    own = keys.shape[:2]
    return keys.view(*own, head_dim // 2, LANES, 2), values.view(*own, LANES // 2, head_dim, 2)


def want_small_pages(layers: Sequence[TileLayer]) -> None:
    """Takes back the wish for huge pages; where there are some already, they stay."""
    for layer in layers:
        of_heads = _runs(layer.caches, 0, layer.caches[0].shape[0])  # they follow each other
        _advise(range(of_heads[0].start, of_heads[-1].stop), "MADV_NOHUGEPAGE")


def huge_pages(layer: TileLayer, first: int, stop: int) -> int:
    """How many huge pages blocks first .. stop of a layer lie in at most."""
    return sum(1 + -(-len(run) // HUGE_PAGE) for run in _runs(layer.caches, first, stop))


def _runs(caches: tuple[Tensor, Tensor], first: int, stop: int) -> list[range]:
    """The addresses of blocks first .. stop, by head."""
    keys = caches[0]
    block, head = (stride * keys.itemsize for stride in keys.stride()[:2])
    begins = [keys.data_ptr() + head * number + block * min(first, stop) for number in range(keys.shape[1])]
    return [range(begin, begin + block * max(0, stop - first)) for begin in begins]


def _advise(run: range, advice: str) -> None:
    """A wish about the pages that lie wholly in a run, which the system may ignore."""
    madvise, number = getattr(ctypes.CDLL(None), "madvise", None), getattr(mmap, advice, None)
    start, stop = -(-run.start // mmap.PAGESIZE) * mmap.PAGESIZE, run.stop // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and number is not None and start < stop:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), number)


def pack_keys(keys: Tensor) -> Tensor:
    """[B, Hk, LANES, D] to [B, Hk, D / n, LANES, n]."""
    return keys.view(*keys.shape[:3], -1, 4 // keys.itemsize).transpose(2, 3).contiguous()


def pack_values(values: Tensor) -> Tensor:
    """[B, Hk, LANES, D] to [B, Hk, LANES / n, D, n]."""
    return values.view(*values.shape[:2], -1, 4 // values.itemsize, values.shape[3]).transpose(3, 4).contiguous()


def unpack_keys(cache: Tensor) -> Tensor:
    """`pack_keys` undone."""
    return cache.transpose(2, 3).flatten(3).contiguous()


def unpack_values(cache: Tensor) -> Tensor:
    """`pack_values` undone."""
    return cache.transpose(3, 4).flatten(2, 3).contiguous()


def unpack_int8(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys int8 [B, Hk, LANES, D] and their scales float32 [B, Hk, LANES], values and theirs, of which those of zeros
    mean nothing."""
    dim = k_cache.shape[2] // LANES - kv8.SCALE_BYTES
    codes, scales = zip(*((x[..., : LANES * dim], x[..., LANES * dim :]) for x in (k_cache, v_cache)), strict=True)
    keys = unpack_keys((codes[0] ^ -128).reshape(*k_cache.shape[:2], dim // 4, LANES, 4))
    values = unpack_values(codes[1].reshape(*v_cache.shape[:2], LANES // 4, dim, 4))
    key_scales, minus_logarithms = (x.contiguous().view(torch.float32) for x in scales)
    return keys, key_scales, values, torch.exp2(-minus_logarithms.double()).float()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    partial: Tensor,
    step: TileStep,
    layer: TileLayer,
) -> None:
    """Stores k, v float32 [T, Hk, D] and writes attention of q float32 [T, Hq, D] to out float32 [T, Hq, D].

    Tokens of q, k and v may lie apart (parts of a wider product), each one's heads may not. `partial` is float32
    scratch of at least `partial_size` numbers. Runs in torch.get_num_threads() threads.
    """
    shape, at = step.struct, layer.struct
    assert out.is_contiguous()
    assert all(x.dtype == torch.float32 and x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in (q, k, v))
    assert q.shape[0] == shape.num_tokens
    at.q, at.k, at.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    at.q_stride, at.k_stride, at.v_stride = q.stride(0), k.stride(0), v.stride(0)
    at.out = out.data_ptr()
    layer.use_scratch(partial, step)
    _functions().batchinfer_attention(ctypes.byref(shape), ctypes.byref(at), torch.get_num_threads())


def copy_blocks(layers: Sequence[TileLayer], sources: Ints, destinations: Ints) -> None:
    """Copies blocks sources[i] to destinations[i], int64, in all layers, whose caches have one shape and dtype. All
    sources are read before a destination is written."""
    cache = layers[0].caches[0]
    assert all(layer.caches[0].shape == cache.shape and layer.caches[0].dtype == cache.dtype for layer in layers)
    assert sources.dtype == destinations.dtype == np.int64 and sources.shape == destinations.shape
    num_bytes, threads = cache[0, 0].nbytes, torch.get_num_threads()
    scratch = np.empty(threads * len(sources) * num_bytes, dtype=np.int8)
    structs = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
    _functions().batchinfer_copy_blocks(
        structs,
        len(layers),
        cache.shape[1],
        sources.ctypes.data,
        destinations.ctypes.data,
        len(sources),
        num_bytes,
        scratch.ctypes.data,
        threads,
    )


def fault_in(layers: Sequence[TileLayer], first: int, stop: int) -> None:
    """Has the system give memory to blocks first .. stop of all layers, whose caches have one shape and dtype."""
    cache = layers[0].caches[0]
    assert all(layer.caches[0].shape == cache.shape and layer.caches[0].dtype == cache.dtype for layer in layers)
    assert 0 <= first <= stop <= cache.shape[0]
    structs = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
    _functions().batchinfer_fault_in(structs, len(layers), cache.shape[1], first, stop, torch.get_num_threads())


def partial_size(step: TileStep) -> int:
    """Numbers of scratch."""
    return sum(_partial_sizes(step))


def _partial_sizes(step: TileStep) -> tuple[int, int, int]:
    """Numbers for the values of partial results, their highest scores and sums of weights, and prepared queries of
    2 * D bytes."""
    shape = step.struct
    entries, queries = step.num_entries * shape.num_heads, shape.num_tokens * shape.num_heads
    return entries * shape.head_dim, entries * 2, queries * shape.head_dim // 2


@cache
def _functions() -> Any:
    """The library, its functions' types declared."""
    found = library.load()
    pointer, number = ctypes.c_void_p, ctypes.c_long
    found.batchinfer_attention.argtypes = [pointer, pointer, ctypes.c_int]
    found.batchinfer_copy_blocks.argtypes = [
        *(pointer, number, number, pointer, pointer),
        *(number, number, pointer, ctypes.c_int),
    ]
    found.batchinfer_fault_in.argtypes = [pointer, *[number] * 4, ctypes.c_int]
    found.batchinfer_fault_in.restype = None
    found.batchinfer_attention.restype = found.batchinfer_copy_blocks.restype = None
    return found
