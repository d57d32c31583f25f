"""Dequantization of GGUF's block types to float32: the common ones here, the others through the `gguf` package.

Values are `gguf`'s, to the last bit; those done here take a fifth of its time, and loading a model is mostly that.
`gguf` is imported lazily: machines that run other models need not have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from batchinfer.weights.rules import WeightError

# Elements in a block, bytes in a block: also the list of what is supported.
DEQUANTIZED: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# `gguf` works on 16 rows at a time, in Python; so rows are made long enough for its share to be small.
GROUP_ROWS = 16


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)


def dequantize(raw: Bytes, dtype: str, out: Floats | None = None) -> Floats:
    """Values (flat, float32) of whole blocks (flat, uint8). They go to `out` (flat) where it is given.

    Raises WeightError where the type needs the `gguf` package and it is not there.
    """
    own = _OWN.get(dtype)
    if own is None:
        values = _by_gguf(raw, dtype)
        if out is None:
            return values
        np.copyto(out, values)
        return out
    elements, block_bytes = DEQUANTIZED[dtype]
    blocks = raw.reshape(-1, block_bytes)
    if out is None:
        out = np.empty(len(blocks) * elements, dtype=np.float32)
    own(blocks, out.reshape(-1, elements))
    return out


def _nibbles(packed: Bytes, out: Floats) -> None:
    """[n, 16] bytes to [n, 32] values 0 .. 15: the low halves, then the high ones. Eight bytes at a time."""
    words = np.ascontiguousarray(packed).view(np.uint64)
    split = np.empty((len(words), 4), np.uint64)
    np.bitwise_and(words, _LOW_NIBBLES, out=split[:, :2])
    np.right_shift(words, np.uint64(4), out=words)
    np.bitwise_and(words, _LOW_NIBBLES, out=split[:, 2:])
    np.copyto(out, split.view(np.uint8))


def _halves(blocks: Bytes, count: int) -> Floats:
    """The first `count` float16 numbers of each block: [n, count] float32."""
    return np.ascontiguousarray(blocks[:, : 2 * count]).view(np.float16).astype(np.float32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8.0
    out *= _halves(blocks, 1)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    scale_and_least = _halves(blocks, 2)
    _nibbles(blocks[:, 4:], out)
    out *= scale_and_least[:, :1]
    out += scale_and_least[:, 1:]


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.copyto(out, blocks[:, 2:].view(np.int8))
    out *= _halves(blocks, 1)


_OWN: dict[str, Callable[[Bytes, Floats], None]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def _by_gguf(raw: Bytes, dtype: str) -> Floats:
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize as dequantize_rows
    except ImportError as error:
        raise WeightError("GGUF weights need the `gguf` package: pip install gguf") from error
    _, block_bytes = DEQUANTIZED[dtype]
    num_blocks = raw.size // block_bytes
    rows = GROUP_ROWS if num_blocks % GROUP_ROWS == 0 else 1
    values: Floats = dequantize_rows(raw.reshape(rows, -1), GGMLQuantizationType[dtype])
    return values.reshape(-1)
