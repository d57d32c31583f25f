"""Sorting by token ids, prefixes of neighbours, cutting: against plain Python, and laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.job import token_order
from batchinfer.job.token_order import RaggedTokens, cut_positions, neighbour_lcp, sort_rows

token_rows = st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 65_536, 2**31 - 1]), max_size=12), max_size=60)


def ragged(rows):
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    values = np.array([t for r in rows for t in r], dtype=np.int32)
    return RaggedTokens(values, offsets)


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=150, deadline=None)
@given(token_rows)
def test_order_is_lexicographic_and_stable(rows):
    order = sort_rows(ragged(rows))
    assert order.tolist() == sorted(range(len(rows)), key=lambda i: (rows[i], i))


@settings(max_examples=150, deadline=None)
@given(token_rows, st.integers(1, 20))
def test_lcp_equals_plain_python_whatever_the_block(rows, block):
    data = ragged(rows)
    order = sort_rows(data)
    before = token_order._COMPARE_TOKENS
    token_order._COMPARE_TOKENS = block
    try:
        lcp = neighbour_lcp(data, order)
    finally:
        token_order._COMPARE_TOKENS = before
    for i in range(len(rows)):
        if i == 0:
            assert lcp[0] == 0
        else:
            assert lcp[i] == shared(rows[order[i - 1]], rows[order[i]])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3_000), st.integers(0, 2**32 - 1), st.sampled_from([1, 30, 400]))
def test_cuts_are_increasing_and_sizes_comparable(n, seed, mean):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 2 * mean, n)
    lcp = np.minimum(rng.integers(0, 2 * mean, n), lengths)
    if n:
        lcp[0] = 0
    output = rng.integers(1, 64, n)
    starts = cut_positions(lcp, lengths, output)
    if n == 0:
        assert len(starts) == 0
        return
    assert starts[0] == 0 and (np.diff(starts) > 0).all() and starts[-1] < n
    work = np.add.reduceat(lengths - lcp + output, starts)
    total, largest = int(work.sum()), int((lengths - lcp + output).max())
    least = max(token_order.MIN_UNIT_WORK, total // token_order.MIN_UNIT_SHARE)
    target = max(least, total // token_order.UNIT_SHARE)
    assert work.max() <= 1.5 * target + largest, "none is much larger than its share"
    assert len(starts) <= 2 * total / least + 1, "and there are not many"


def test_cuts_fall_where_neighbours_share_least():
    """200 groups of 50 rows; inside a group a prefix of 300 tokens is shared: no cut goes through a group."""
    lengths = np.full(10_000, 320)
    lcp = np.full(10_000, 300)
    lcp[::50] = 0
    starts = cut_positions(lcp, lengths, np.full(10_000, 10))
    assert len(starts) > 40
    assert (lcp[starts] == 0).all()


def test_first_units_are_large_and_last_ones_small():
    lengths = np.full(200_000, 64)
    starts = cut_positions(np.zeros(200_000, dtype=np.int64), lengths, np.full(200_000, 8))
    rows = np.diff([*starts.tolist(), 200_000])
    assert rows[0] > 5 * rows[-1]
    assert 60 < len(starts) < 200


@pytest.mark.parametrize("n", [1, 2, 50])
def test_small_jobs_are_one_unit(n):
    assert cut_positions(np.zeros(n, dtype=np.int64), np.full(n, 20), np.full(n, 8)).tolist() == [0]
