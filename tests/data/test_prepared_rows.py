"""Prepared rows: columns in, the same columns out of the file."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.data import fs
from batchinfer.data import prepared as prepared_module
from batchinfer.data.prepared import PreparedRows, iter_prepared, read_prepared, write_prepared
from batchinfer.errors import BatchinferError

TOKENS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=20)


def as_lists(rows: PreparedRows) -> list[tuple[int, int, list[int], str | None]]:
    params = rows.params_list()
    return [(int(rows.chunks[i]), int(rows.rows[i]), rows.token_ids(i).tolist(), params[i]) for i in range(len(rows))]


def make(tokens: list[list[int]], with_params: bool = True) -> PreparedRows:
    params = [f'{{"n": {i}}}' if i % 3 == 0 else None for i in range(len(tokens))] if with_params else None
    return PreparedRows.from_lists(
        [i // 4 for i in range(len(tokens))], range(10**10, 10**10 + len(tokens)), tokens, params
    )


@given(tokens=TOKENS, params=st.booleans(), batch=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[list[int]], params: bool, batch: int
) -> None:
    rows = make(tokens, params)
    path = tmp_path_factory.mktemp("p") / "x.arrow"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_module, "MAX_BATCH_ROWS", batch)
        assert write_prepared(path, rows)
    assert as_lists(read_prepared(path)) == as_lists(rows)
    assert all(len(piece) <= batch for piece in iter_prepared(path))
    back = read_prepared(path)
    assert (back.chunks.dtype, back.rows.dtype, back.tokens.dtype) == (np.int32, np.int64, np.int32)
    assert back.offsets[0] == 0 and back.num_tokens == sum(map(len, tokens))


@given(tokens=TOKENS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_take_slice_and_concat(tokens: list[list[int]], data: st.DataObject) -> None:
    rows = make(tokens, data.draw(st.booleans()))
    expected = as_lists(rows)
    order = data.draw(st.permutations(range(len(tokens))))
    assert as_lists(rows.take(order)) == [expected[i] for i in order]
    cut = data.draw(st.integers(0, len(tokens)))
    pieces = [rows.slice(0, cut), make(tokens, False), rows.slice(cut, len(tokens))]
    assert as_lists(PreparedRows.concat(pieces)) == expected[:cut] + as_lists(make(tokens, False)) + expected[cut:]
    assert as_lists(rows.slice(cut, len(tokens)).take(range(len(tokens) - cut))) == expected[cut:]


def test_batches_stay_below_32_bit_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module, "MAX_BATCH_TOKENS", 10)
    rows = PreparedRows.from_lists(0, range(6), [[1] * 4, [2] * 4, [3] * 25, [], [4] * 10, [5]])
    write_prepared(tmp_path / "x.arrow", rows)
    assert [piece.num_tokens for piece in iter_prepared(tmp_path / "x.arrow")] == [8, 25, 10, 1]
    assert as_lists(read_prepared(tmp_path / "x.arrow")) == as_lists(rows)


def test_one_chunk_for_all_and_no_rows(tmp_path: Path) -> None:
    assert as_lists(PreparedRows.from_lists(7, [3], [[1]])) == [(7, 3, [1], None)]
    write_prepared(tmp_path / "x.arrow", PreparedRows.empty())
    assert len(read_prepared(tmp_path / "x.arrow")) == 0


def test_pieces_can_be_written_as_they_come(tmp_path: Path) -> None:
    rows = make([[1], [2, 3], [], [4]])
    write_prepared(tmp_path / "x.arrow", (rows.slice(i, i + 1) for i in range(4)))
    assert as_lists(read_prepared(tmp_path / "x.arrow")) == as_lists(rows)


def test_the_first_writer_wins_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.arrow"
    assert write_prepared(path, make([[1]]))
    assert not write_prepared(path, make([[2]]))
    assert read_prepared(path).tokens.tolist() == [1]
    assert [p.name for p in path.parent.iterdir()] == ["x.arrow"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def pieces():  # type: ignore[no-untyped-def]
        yield make([[1]])
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_prepared(tmp_path / "x.arrow", pieces())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [1, 8, 1000])
def test_a_torn_file_is_an_error(tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "VISIBLE_LIMIT_S", 0.05)
    path = tmp_path / "x.arrow"
    write_prepared(path, make([[1, 2, 3]] * 50))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(BatchinferError, match=r"x\.arrow can't be read"):
        read_prepared(path)
    with pytest.raises(BatchinferError, match=r"gone\.arrow can't be read"):
        read_prepared(tmp_path / "gone.arrow")


def test_a_file_that_another_machine_has_just_published_is_waited_for(tmp_path: Path) -> None:
    timer = threading.Timer(0.2, lambda: write_prepared(tmp_path / "x.arrow", make([[1, 2]])))
    timer.start()
    assert read_prepared(tmp_path / "x.arrow").tokens.tolist() == [1, 2]
    timer.join()
