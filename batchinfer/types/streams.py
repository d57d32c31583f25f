"""Random streams by row identity: pure functions, the same on every machine, batch and attempt.

A uniform number at an output position is `uniform(sample_key(row_key(seed, file, row), sample), position)`.
The generator is SplitMix64 used as a counter-based hash (Steele, Lea, Flood 2014: "Fast splittable
pseudorandom number generators"). Vectorised twins must give the same bits; this module is their specification.
"""

from __future__ import annotations

import hashlib

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    """SplitMix64's finalizer, a bijection on 64-bit integers."""
    z &= MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def row_key(seed: int, file: str, row: int) -> int:
    """64-bit key of a row's stream from the job's seed and the row's identity."""
    data = f"{seed}\0{file}\0{row}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def sample_key(key: int, sample: int) -> int:
    """64-bit key of sample number `sample` (from 0) of a row."""
    return mix64(key + (sample + 1) * GOLDEN)


def uniform(key: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for output position `position` (from 0)."""
    return (mix64(key + (position + 1) * GOLDEN) >> 11) * (1.0 / (1 << 53))
