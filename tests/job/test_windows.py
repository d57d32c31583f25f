"""Laws of cutting the input: every row once, names stable, sizes bounded, growth only at the end."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.job.windows import (
    MAX_CHUNK_ROWS,
    MAX_WINDOW_ROWS,
    FileShape,
    cut_windows,
    retry_windows,
)

sizes = st.lists(st.integers(0, 300_000), min_size=1, max_size=12)
weights = st.integers(0, 20_000)


def shapes(counts, row_bytes=0, text_bytes=0, generation=0, first=0):
    return [
        FileShape(
            index=first + i,
            num_rows=n,
            num_bytes=n * row_bytes,
            text_bytes=n * text_bytes,
            generation=generation,
        )
        for i, n in enumerate(counts)
    ]


@settings(max_examples=60, deadline=None)
@given(sizes, weights, weights)
def test_every_row_is_in_exactly_one_chunk_in_order(counts, row_bytes, text_bytes):
    windows = cut_windows(shapes(counts, row_bytes, text_bytes))
    chunks = [chunk for window in windows for chunk in window.chunks]
    assert [chunk.chunk for chunk in chunks] == list(range(len(chunks)))
    assert [window.window for window in windows] == list(range(len(windows)))
    assert len({chunk.part for chunk in chunks}) == len(chunks)
    assert sorted(chunks, key=lambda chunk: chunk.part) == chunks
    for index, count in enumerate(counts):
        mine = [chunk for chunk in chunks if chunk.file == index]
        assert mine[0].start == 0 and mine[-1].stop == count
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
        assert [chunk.in_file for chunk in mine] == list(range(len(mine)))
        assert count == 0 or all(chunk.num_rows > 0 for chunk in mine)


@settings(max_examples=60, deadline=None)
@given(sizes, weights, weights)
def test_sizes_are_bounded(counts, row_bytes, text_bytes):
    for window in cut_windows(shapes(counts, row_bytes, text_bytes)):
        assert window.num_rows <= MAX_WINDOW_ROWS * 1.25
        assert all(chunk.num_rows <= MAX_CHUNK_ROWS for chunk in window.chunks)
        if len(window.chunks) > 1 or window.num_rows > 1:
            assert window.num_rows * text_bytes <= 128 * 2**20 * 1.25 + text_bytes
        for chunk in window.chunks:
            assert chunk.num_rows <= 1 or chunk.num_rows * row_bytes <= 256 * 2**20


@settings(max_examples=60, deadline=None)
@given(sizes, weights, st.integers(1_000, 400_000))
def test_windows_can_be_made_smaller(counts, text_bytes, most):
    windows = cut_windows(shapes(counts, text_bytes=text_bytes), most)
    assert sum(window.num_rows for window in windows) == sum(counts)
    assert all(window.num_rows <= most * 1.25 for window in windows)
    if most >= MAX_WINDOW_ROWS:
        assert windows == cut_windows(shapes(counts, text_bytes=text_bytes))
    failed = {chunk.chunk: range(chunk.num_rows) for window in windows for chunk in window.chunks}
    again = retry_windows(windows, failed, most)
    assert [c for w in again for c in w.chunks] == [c for w in windows for c in w.chunks if c.num_rows]
    assert all(sum(chunk.num_rows for chunk in window.chunks[:-1]) < most for window in again)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, weights)
def test_extending_changes_no_earlier_number(counts, more, text_bytes):
    before = cut_windows(shapes(counts, text_bytes=text_bytes))
    extended = shapes(counts, text_bytes=text_bytes) + shapes(more, 0, text_bytes, 1, len(counts))
    after = cut_windows(extended)
    assert after[: len(before)] == before
    assert {chunk.file for window in after[len(before) :] for chunk in window.chunks} == set(
        range(len(counts), len(counts) + len(more))
    )


def test_first_window_is_small_then_they_double():
    windows = cut_windows(shapes([1_000_000]))
    assert [w.num_rows for w in windows] == [16_384, 32_768, 65_536, 131_072, 262_144, 262_144, 229_952]


def test_no_slivers():
    (window,) = cut_windows(shapes([17_000]))
    assert [chunk.num_rows for chunk in window.chunks] == [17_000]


def test_an_empty_file_and_an_empty_input_still_give_a_part():
    (window,) = cut_windows(shapes([0]))
    assert [chunk.num_rows for chunk in window.chunks] == [0]
    (window,) = cut_windows(shapes([3, 0, 1]))
    assert [chunk.num_rows for chunk in window.chunks] == [3, 0, 1]


def test_one_huge_row_makes_a_window_of_its_own():
    windows = cut_windows(shapes([3], row_bytes=10**9, text_bytes=10**9))
    assert [w.num_rows for w in windows] == [1, 1, 1]


def test_wide_columns_that_no_prompt_needs_do_not_shrink_windows():
    (window,) = cut_windows(shapes([1_000], row_bytes=5_000_000, text_bytes=100))
    assert window.num_rows == 1_000
    assert all(chunk.num_rows <= 53 for chunk in window.chunks)
