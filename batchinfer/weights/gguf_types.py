"""Dequantization of GGUF's block types to float32, through the `gguf` package's numpy code.

`gguf` is imported lazily: machines that run safetensors models need not have it.
"""

from __future__ import annotations

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


def dequantize(raw: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Values (flat, float32) of whole blocks (flat, uint8)."""
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize as dequantize_rows
    except ImportError as error:
        raise WeightError("GGUF weights need the `gguf` package: pip install gguf") from error
    _, block_bytes = DEQUANTIZED[dtype]
    num_blocks = raw.size // block_bytes
    rows = GROUP_ROWS if num_blocks % GROUP_ROWS == 0 else 1
    values: np.ndarray[Any, np.dtype[np.float32]] = dequantize_rows(raw.reshape(rows, -1), GGMLQuantizationType[dtype])
    return values.reshape(-1)
