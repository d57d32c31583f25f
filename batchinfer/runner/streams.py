"""The vectorised twin of `types.streams.uniform`, with equal bits (held by a test)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchinfer.types.streams import GOLDEN

_GOLDEN = np.uint64(GOLDEN)


def uniform(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for streams `keys` at output `positions` (from 0); float64 of the same shape."""
    z = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN  # wraps, as it should
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    numbers: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))
    return numbers
