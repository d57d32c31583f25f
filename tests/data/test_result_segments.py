"""Result segments: one result a row whatever was written twice, torn files skipped, chunks read alone."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.data.segments import (
    RESULT_SCHEMA,
    ResultRow,
    SegmentName,
    compact_unit,
    done_rows,
    merge_segments,
    merge_tables,
    read_chunk_results,
    read_segment,
    results_table,
    unit_file_name,
    write_segment,
)
from batchinfer.errors import BatchinferError
from batchinfer.types.request import CompletionOutput, RequestOutput, TokenLogprobs
from batchinfer.types.rows import ErrorClass, RowError


def done(chunk: int, row: int, text: str = "x", n: int = 1) -> ResultRow:
    outputs = tuple(
        CompletionOutput(index=i, text=f"{text}{i}", token_ids=(row, i), finish_reason="stop") for i in range(n)
    )
    return ResultRow(chunk=chunk, row=row, outputs=outputs, prompt_tokens=5, cached_tokens=2)


def failed(chunk: int, row: int, message: str = "bad") -> ResultRow:
    return ResultRow(chunk=chunk, row=row, error=RowError(ErrorClass.ENGINE_CRASH, message))


def test_rows_become_columns() -> None:
    table = results_table([done(1, 2, "a", n=2), failed(1, 3), done(1, 4, "b")])
    assert table.schema == RESULT_SCHEMA
    assert table.to_pylist() == [
        {
            "chunk": 1,
            "row": 2,
            "completion": ["a0", "a1"],
            "finish_reason": ["stop", "stop"],
            "token_ids": [[2, 0], [2, 1]],
            "completion_tokens": [2, 2],
            "logprobs": None,
            "prompt_tokens": 5,
            "cached_tokens": 2,
            "error_class": None,
            "error_message": None,
        },
        {
            "chunk": 1,
            "row": 3,
            "completion": [],
            "finish_reason": [],
            "token_ids": [],
            "completion_tokens": [],
            "logprobs": None,
            "prompt_tokens": None,
            "cached_tokens": 0,
            "error_class": "engine_crash",
            "error_message": "bad",
        },
        table.slice(2).to_pylist()[0],
    ]
    assert results_table([]).schema == RESULT_SCHEMA


def test_logprobs_and_request_outputs() -> None:
    logprobs = (TokenLogprobs(7, -0.5, 1, ((7, -0.5), (8, -1.5))), TokenLogprobs(9, float("-inf"), 3))
    output = CompletionOutput(index=0, text="t", token_ids=(7, 9), finish_reason="length", logprobs=logprobs)
    request = RequestOutput(request_id=0, prompt_token_ids=[1, 2, 3], outputs=(output,), num_cached_tokens=1)
    rows = [ResultRow.of(4, 5, request), done(4, 6)]
    first, second = results_table(rows).to_pylist()
    assert (first["chunk"], first["row"], first["prompt_tokens"], first["cached_tokens"]) == (4, 5, 3, 1)
    assert first["logprobs"] == [
        [
            {
                "token_id": 7,
                "logprob": -0.5,
                "rank": 1,
                "top": [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.5}],
            },
            {"token_id": 9, "logprob": float("-inf"), "rank": 3, "top": []},
        ]
    ]
    assert second["logprobs"] == [None]
    error = RequestOutput(request_id=0, prompt_token_ids=[1], error=RowError(ErrorClass.INTERNAL, "lone \ud800 half"))
    (row,) = results_table([ResultRow.of(0, 0, error)]).to_pylist()
    assert row["error_message"] == "lone \ufffd half"
    assert row["prompt_tokens"] == 1


def test_names() -> None:
    name = SegmentName(unit=12, epoch=1, lease=3, number=1)
    assert str(name) == "u00012-e000001-l000003-0001.arrow"
    assert SegmentName.parse(str(name)) == name
    assert SegmentName.parse(unit_file_name(12)) is None
    assert SegmentName.parse("plan-c000001-e000001.arrow") is None
    big = SegmentName(unit=1234567, epoch=12345678, lease=1, number=123456)
    assert SegmentName.parse(str(big)) == big


def write(folder: Path, name: SegmentName | str, *rows: ResultRow) -> Path:
    path = folder / str(name)
    write_segment(path, rows)
    return path


def texts(table: pa.Table) -> list[tuple[int, int, Any]]:
    return [(r["chunk"], r["row"], r["error_message"] or r["completion"][0]) for r in table.to_pylist()]


def test_a_completion_beats_an_error_then_the_older_one_wins(tmp_path: Path) -> None:
    n = SegmentName
    paths = [
        write(tmp_path, n(1, 2, 1, 0), done(0, 1, "epoch 2 "), done(0, 2, "only "), failed(0, 3, "later error")),
        write(tmp_path, n(1, 1, 2, 0), done(0, 1, "lease 2 "), failed(0, 2), failed(0, 3, "early error")),
        write(tmp_path, n(1, 1, 1, 1), done(0, 1, "number 1 ")),
        write(tmp_path, n(1, 1, 1, 0), failed(0, 1)),
    ]
    for order in itertools.permutations(paths):
        assert texts(merge_segments(order)) == [(0, 1, "number 1 0"), (0, 2, "only 0"), (0, 3, "early error")]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans(), st.integers(1, 4)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_merging_is_one_result_a_row_by_the_rule(entries: list[tuple[int, int, bool, int]]) -> None:
    tables = []
    best: dict[tuple[int, int], tuple[bool, int]] = {}
    for chunk, row, good, epoch in entries:
        result = done(chunk, row, f"{epoch}-") if good else failed(chunk, row, f"{epoch}")
        tables.append((SegmentName(0, epoch, 0, 0), results_table([result])))
        key = (not good, epoch)
        best[chunk, row] = min(best.get((chunk, row), key), key)
    merged = merge_tables(tables)
    expected = [(c, r, f"{epoch}" if bad else f"{epoch}-0") for (c, r), (bad, epoch) in sorted(best.items())]
    assert texts(merged) == expected
    random.shuffle(tables)
    assert texts(merge_tables(tables)) == expected


def test_torn_segments_are_logged_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = write(tmp_path, SegmentName(0, 1, 1, 0), done(0, 0), done(0, 1))
    for i, cut in enumerate((1, 8, 300)):
        torn = write(tmp_path, SegmentName(0, 1, 1, i + 1), *(done(0, 10 + j) for j in range(20)))
        torn.write_bytes(torn.read_bytes()[:-cut])
    (tmp_path / str(SegmentName(0, 1, 1, 9))).write_bytes(b"")
    with caplog.at_level(logging.WARNING, "batchinfer.data"):
        assert texts(merge_segments(tmp_path.iterdir())) == [(0, 0, "x0"), (0, 1, "x0")]
    assert caplog.text.count("is broken and ignored, its rows will run again") == 4
    assert read_segment(tmp_path / "gone.arrow") is None
    chunks, rows = done_rows(tmp_path.iterdir())
    assert (chunks.tolist(), rows.tolist()) == ([0, 0], [0, 1])
    assert good.exists()


def test_a_segment_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "plan-c000000-e000001.arrow"
    assert write_segment(path, [failed(0, 0, "first")])
    assert not write_segment(path, [failed(0, 0, "second")])
    assert texts(read_segment(path) or pa.table({})) == [(0, 0, "first")]
    assert write_segment(path, [failed(0, 0, "third")], replace=True)
    assert texts(read_segment(path) or pa.table({})) == [(0, 0, "third")]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_columns_alone_can_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, SegmentName(0, 1, 1, 0), done(3, 4))
    table = read_segment(path, ["chunk", "row", "error_class"])
    assert table is not None
    assert table.to_pylist() == [{"chunk": 3, "row": 4, "error_class": None}]


def test_compacting_sorts_by_chunk_and_keeps_one_batch_each(tmp_path: Path) -> None:
    rows = [done(c, r, f"{c}.{r} ") for c in (0, 2, 5) for r in range(30)]
    shuffled = random.Random(0).sample(rows, len(rows))
    paths = [
        write(tmp_path, SegmentName(7, 1, 1, i), *shuffled[i * 20 : i * 20 + 20]) for i in range(-(-len(rows) // 20))
    ]
    write(tmp_path, SegmentName(7, 2, 1, 0), done(5, 3, "twice"), failed(0, 0))
    paths.append(tmp_path / str(SegmentName(7, 2, 1, 0)))
    target = tmp_path / unit_file_name(7)
    summary = compact_unit(paths, target)
    assert (summary.num_rows, summary.num_failed, summary.chunks) == (90, 0, (0, 2, 5))
    assert summary.num_bytes == target.stat().st_size
    assert compact_unit(paths, target) == summary  # twice is harmless
    with pa.ipc.open_file(str(target)) as reader:
        assert reader.num_record_batches == 3
    for chunk in (0, 2, 5):
        assert texts(read_chunk_results([target], chunk)) == [(chunk, r, f"{chunk}.{r} 0") for r in range(30)]
    assert read_chunk_results([target], 1).num_rows == 0
    # Segments and compacted files of several units together.
    other = write(tmp_path, SegmentName(8, 1, 1, 0), done(2, 40), done(0, 41))
    plan = write(tmp_path, "plan-c000002-e000001.arrow", failed(2, 50, "planned"))
    got = texts(read_chunk_results([target, other, plan], 2))
    assert got == [*((2, r, f"2.{r} 0") for r in range(30)), (2, 40, "x0"), (2, 50, "planned")]


def test_an_empty_unit_compacts(tmp_path: Path) -> None:
    summary = compact_unit([], tmp_path / "u00000.arrow")
    assert (summary.num_rows, summary.chunks) == (0, ())
    assert read_chunk_results([tmp_path / "u00000.arrow"], 0).num_rows == 0


def test_a_broken_compacted_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "u00000.arrow"
    compact_unit([write(tmp_path, SegmentName(0, 1, 1, 0), done(0, 0))], path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(BatchinferError, match=r"u00000\.arrow can't be read"):
        read_chunk_results([path], 0)


def test_long_results_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [done(0, r, "y" * 1000) for r in range(200)]
    table = results_table(random.Random(1).sample(rows, 200))
    monkeypatch.setattr("batchinfer.data.segments.TAKE_BYTES", 10_000)
    merged = merge_tables([(None, table)])
    assert merged["row"].to_pylist() == list(range(200))
    assert merged["completion"].num_chunks > 1
