"""Rows sorted by their token ids, what neighbours share, and where to cut: arrays in, arrays out.

Responsible for: the order, longest common prefixes (LCP) of neighbours, cutting into units of comparable work at
the shallowest LCPs. Pure and deterministic. Not for files (`job.units`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

# One unit is at least this much work (tokens), so that files stay few; at most, so that a lost unit costs little.
MIN_UNIT_WORK = 4_096
MAX_UNIT_WORK = 2_000_000
# A unit takes this part of the work that is left: about 100 units a window, enough for any number of workers.
UNIT_SHARE = 32
MIN_UNIT_SHARE = 256
# How much is done at once: bounds memory.
_COMPARE_TOKENS = 500_000
_KEY_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class RaggedTokens:
    """Many rows of token ids in one array: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Tokens
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)


def sort_rows(rows: RaggedTokens) -> Ints:
    """Order of the rows by token ids, lexicographic, a prefix before what it is a prefix of; ties in given order.

    Big-endian bytes compare as the unsigned ids do, so that the comparison is one memcmp.
    """
    keys: list[bytes] = []
    for begin in range(0, len(rows), _KEY_ROWS):  # in blocks, so that no second copy of all tokens is made
        bounds = rows.offsets[begin : begin + _KEY_ROWS + 1]
        data = rows.values[bounds[0] : bounds[-1]].astype(">u4").tobytes()
        places = ((bounds - bounds[0]) * 4).tolist()
        keys += [data[start:stop] for start, stop in itertools.pairwise(places)]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def neighbour_lcp(rows: RaggedTokens, order: Ints) -> Ints:
    """[n]: how many first tokens row order[i] shares with row order[i - 1]; 0 at i = 0.

    Whole rows at a time, in blocks of about half a million tokens.
    """
    n = len(order)
    lcp = np.zeros(n, dtype=np.int64)
    if n < 2:
        return lcp
    starts, lengths = rows.offsets[:-1][order], rows.lengths[order]
    shorter = np.minimum(lengths[:-1], lengths[1:])
    ends = np.cumsum(shorter)
    begin = 0
    while begin < n - 1:
        base = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, base + _COMPARE_TOKENS, side="right"))
        end = min(max(end, begin + 1), n - 1)
        size = shorter[begin:end]
        firsts = np.cumsum(size) - size
        inner = np.arange(int(size.sum()), dtype=np.int64) - np.repeat(firsts, size)
        left = rows.values[inner + np.repeat(starts[begin:end], size)]
        right = rows.values[inner + np.repeat(starts[begin + 1 : end + 1], size)]
        differ = np.flatnonzero(left != right)
        at = np.searchsorted(differ, firsts)
        found = np.full(end - begin, np.iinfo(np.int64).max)
        inside = at < len(differ)
        found[inside] = differ[at[inside]]
        lcp[begin + 1 : end + 1] = np.minimum(found - firsts, size)
        begin = end
    return lcp


def cut_positions(lcp: Ints, lengths: Ints, output_tokens: Ints) -> Ints:
    """Starts of the units in token order (first is 0), for rows with `lengths` in that order.

    A row's work is the tokens that it does not share with the row before it plus its output. A unit's target is 1/32
    of the work that is left, so that sizes fall along the way; the cut is made within half a target of it, where
    neighbours share least.
    """
    n = len(lcp)
    if n == 0:
        return np.zeros(0, dtype=np.int64)
    ends = np.cumsum(lengths - lcp + output_tokens)
    total = int(ends[-1])
    least = min(max(MIN_UNIT_WORK, total // MIN_UNIT_SHARE), MAX_UNIT_WORK)
    starts = [0]
    while True:
        begin = starts[-1]
        done = int(ends[begin - 1]) if begin else 0
        left = total - done
        target = min(max(least, left // UNIT_SHARE), MAX_UNIT_WORK)
        if left <= target + target // 2:
            return np.array(starts, dtype=np.int64)
        # Cutting before row i leaves rows begin .. i - 1 in the unit: their work is ends[i - 1] - done.
        low = max(int(np.searchsorted(ends, done + target // 2)) + 1, begin + 1)
        high = max(int(np.searchsorted(ends, done + target + target // 2, side="right")) + 1, low + 1)
        candidates = lcp[low : min(high, n)]
        if len(candidates) == 0:
            return np.array(starts, dtype=np.int64)
        places = np.flatnonzero(candidates == candidates.min()) + low
        distance = np.abs(ends[places - 1] - (done + target))
        starts.append(int(places[np.argmin(distance)]))
