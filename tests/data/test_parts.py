"""Parts: rows joined in order with values and types kept, checksums that notice change, folders that tools can read."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import random
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.data import dataset as dataset_module
from batchinfer.data import joining as joining_module
from batchinfer.data import parts as parts_module
from batchinfer.data import segments as segments_module
from batchinfer.data.dataset import open_dataset
from batchinfer.data.fs import temp_path_for
from batchinfer.data.layout import OutputLayout, output_schema
from batchinfer.data.parts import (
    BrokenPart,
    PartSummary,
    failed_rows,
    read_footer,
    read_part_results,
    verify_part,
    write_part,
)
from batchinfer.data.segments import (
    ChunkResults,
    ResultRow,
    merge_tables,
    results_table,
    write_compacted,
    write_segment,
)
from batchinfer.data.values import ValueHasher
from batchinfer.errors import BatchinferError
from batchinfer.types.request import CompletionOutput, TokenLogprobs
from batchinfer.types.rows import ErrorClass, RowError


def result(row: int, n: int = 1) -> ResultRow:
    if row % 7 == 3:
        return ResultRow(chunk=0, row=row, error=RowError(ErrorClass.INVALID_PROMPT, f"bad {row}"))
    outputs = tuple(
        CompletionOutput(
            index=i,
            text=f"out {row}.{i}",
            token_ids=(row, i, 9),
            finish_reason="stop",
            logprobs=tuple(TokenLogprobs(t, -0.5, 1, ((t, -0.5),)) for t in (row, i, 9)),
        )
        for i in range(n)
    )
    return ResultRow(chunk=0, row=row, outputs=outputs, prompt_tokens=10, cached_tokens=4)


def write_input(path: Path, table: pa.Table, batch_rows: int = 10) -> str:
    """As an Arrow stream, which keeps every type, and a dictionary for each batch."""
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return str(path)


def make_part(
    folder: Path,
    table: pa.Table,
    start: int = 0,
    stop: int | None = None,
    n: int = 1,
    part: str = "part.parquet",
    **options: Any,
) -> tuple[Path, PartSummary, OutputLayout]:
    dataset = open_dataset(write_input(folder / "input.arrow", table))
    layout = output_schema(dataset.schema, lists=n > 1, **options)
    stop = table.num_rows if stop is None else stop
    results = results_table([result(i, n) for i in range(start, stop)])
    path = folder / part
    summary = write_part(
        path,
        dataset=dataset,
        file=0,
        start=start,
        stop=stop,
        results=results,
        layout=layout,
        footer={"job": "j"},
        hash_columns=["id"],
    )
    return path, summary, layout


TABLE = pa.table({"id": range(50), "prompt": [f"p{i}" for i in range(50)]})


def test_rows_are_joined_in_order(tmp_path: Path) -> None:
    path, summary, layout = make_part(tmp_path, TABLE, 5, 45, token_ids=True, logprobs=True)
    table = pq.read_table(path)
    assert table.schema.remove_metadata() == layout.schema
    assert table["id"].to_pylist() == table["source_row"].to_pylist() == list(range(5, 45))
    assert set(table["source_file"].to_pylist()) == {"input.arrow"}
    good, bad = table.slice(0, 1).to_pylist()[0], table.slice(5, 1).to_pylist()[0]
    row = {"source_file": "input.arrow", "source_row": 5, "id": 5, "prompt": "p5", "error": None}
    logprobs = [
        {"token_id": t, "logprob": -0.5, "rank": 1, "top": [{"token_id": t, "logprob": -0.5}]} for t in (5, 0, 9)
    ]
    counts = {"prompt_tokens": 10, "completion_tokens": 3}
    assert good == {
        **(row | counts),
        "completion": "out 5.0",
        "finish_reason": "stop",
        "token_ids": [5, 0, 9],
        "logprobs": logprobs,
    }
    row = {"source_file": "input.arrow", "source_row": 10, "id": 10, "prompt": "p10"}
    nothing = dict.fromkeys(set(good) - set(row) - {"error"})
    assert bad == {**row, **nothing, "error": {"class": "invalid_prompt", "message": "bad 10"}}
    assert summary.num_rows == 40
    assert summary.failed == {"invalid_prompt": 5}
    assert (summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens) == (350, 140, 105)
    assert failed_rows(path) == [(row, "invalid_prompt") for row in range(10, 45, 7)]


def test_several_samples_are_lists(tmp_path: Path) -> None:
    path, summary, _ = make_part(tmp_path, TABLE, n=2, token_ids=True)
    rows = pq.read_table(path).to_pylist()
    assert rows[1]["completion"] == ["out 1.0", "out 1.1"]
    assert rows[1]["completion_tokens"] == [3, 3]
    assert rows[1]["token_ids"] == [[1, 0, 9], [1, 1, 9]]
    assert rows[3]["completion"] is rows[3]["token_ids"] is rows[3]["completion_tokens"] is None
    assert summary.completion_tokens == 6 * 43
    assert verify_part(path) == []


def test_the_footer_says_what_made_it(tmp_path: Path) -> None:
    path, summary, _ = make_part(tmp_path, TABLE)
    footer = read_footer(path)
    assert footer["job"] == "j"
    for name in PartSummary.__dataclass_fields__:
        assert footer[name] == getattr(summary, name)
    hasher = ValueHasher(["id"])
    hasher.update(TABLE)
    assert summary.input_hash == hasher.hexdigest()


def test_checksums_are_of_values_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first, _ = make_part(tmp_path, TABLE)
    monkeypatch.setattr(dataset_module, "MAX_BATCH_ROWS", 3)
    monkeypatch.setattr(parts_module, "ROW_GROUP_ROWS", 7)
    path, second, _ = make_part(tmp_path, TABLE, part="other.parquet")
    assert pq.read_metadata(path).num_row_groups > 3
    assert second == first
    assert verify_part(path) == []


def test_results_can_be_read_range_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out is the same, and no more than a range of results is in memory."""
    monkeypatch.setattr(segments_module, "BATCH_BYTES", 1_500)
    monkeypatch.setattr(joining_module, "FIRST_SPAN_ROWS", 4)
    monkeypatch.setattr(joining_module, "SPAN_BYTES", 2_000)
    monkeypatch.setattr(dataset_module, "MAX_BATCH_ROWS", 13)
    _, first, layout = make_part(tmp_path, TABLE, token_ids=True)
    rows = random.Random(0).sample(range(50), 50)
    paths = []
    for unit in range(2):
        paths.append(tmp_path / f"u{unit:05d}.arrow")
        write_compacted(paths[-1], merge_tables([(None, results_table([result(i) for i in rows[unit::2]]))]))
    plan = tmp_path / "plan-c000000-e000001.arrow"
    write_segment(
        plan, [ResultRow(chunk=1, row=5), ResultRow(chunk=0, row=3, error=RowError(ErrorClass.INTERNAL, "x"))]
    )
    with pa.ipc.open_file(str(paths[0])) as reader:
        assert reader.num_record_batches > 2
    dataset = open_dataset(str(tmp_path / "input.arrow"))
    asked, original = [], segments_module.read_chunk_results
    monkeypatch.setattr(segments_module, "read_chunk_results", lambda *a: asked.append(a[2:]) or original(*a))
    chunk = ChunkResults((*paths, plan), 0)
    where = {"dataset": dataset, "file": 0, "start": 0, "stop": 50, "layout": layout}
    second = write_part(tmp_path / "q", **where, results=chunk, footer={}, hash_columns=["id"])
    assert second == first
    assert len(asked) > 3 and asked[0] == (0, 4) and asked[-1][1] == 50
    assert pq.read_table(tmp_path / "q").equals(pq.read_table(tmp_path / "part.parquet"))
    with pytest.raises(BatchinferError, match="have no result"):
        write_part(tmp_path / "r", **where, results=ChunkResults((paths[0], plan), 0), footer={})


def test_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(parts_module, "ROW_GROUP_BYTES", 2 << 20)
    table = pa.table({"id": range(200), "wide": [random.Random(i).randbytes(100_000) for i in range(200)]})
    before, (path, _, _) = pa.total_allocated_bytes(), make_part(tmp_path, table)
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    assert max(sizes) < 3 << 20 and len(sizes) >= 9
    assert before < 64 << 20
    assert verify_part(path) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: r[:4] + r[5:], "1 of the rows 0 to 49 of input.arrow have no result, the first are 4"),
        (lambda r: r[::-1], "out of order"),
        (lambda r: [*r, r[-1]], "out of order, doubled or foreign"),
        (lambda r: [*r, ResultRow(chunk=0, row=50)], r"not in the range: \[50\]"),
        (lambda r: [], "50 of the rows 0 to 49"),
    ],
)
def test_each_row_must_have_one_result(tmp_path: Path, change: Any, problem: str) -> None:
    dataset = open_dataset(write_input(tmp_path / "input.arrow", TABLE))
    results = results_table(change([result(i) for i in range(50)]))
    layout = output_schema(dataset.schema)
    with pytest.raises(BatchinferError, match=problem):
        write_part(tmp_path / "p", dataset=dataset, file=0, start=0, stop=50, results=results, layout=layout, footer={})
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row(tmp_path: Path, rows: int) -> None:
    path, summary, layout = make_part(tmp_path, TABLE.slice(0, rows))
    assert summary.num_rows == rows
    assert pq.read_table(path).schema.remove_metadata() == layout.schema
    assert verify_part(path) == []
    assert read_part_results(path, 0).num_rows == rows


def test_a_changed_value_is_found(tmp_path: Path) -> None:
    path, _, layout = make_part(tmp_path, TABLE)
    table, footer = pq.read_table(path), pq.read_metadata(path).metadata[b"batchinfer"]

    def rewrite(changed: pa.Table) -> list[str]:
        with pq.ParquetWriter(path, layout.schema) as writer:
            writer.write_table(changed.cast(layout.schema))
            writer.add_key_value_metadata({b"batchinfer": footer})
        return verify_part(path)

    def with_value(name: str, row: int, value: Any) -> pa.Table:
        values = table[name].to_pylist()
        values[row] = value
        return table.set_column(table.schema.get_field_index(name), name, pa.array(values, table[name].type))

    assert rewrite(table) == []
    assert rewrite(with_value("completion", 5, "forged")) == [
        "part.parquet: the result columns do not match their checksum"
    ]
    assert rewrite(with_value("prompt", 5, "forged")) == [
        "part.parquet: the carried input columns do not match their checksum"
    ]
    assert "rows from 0 on are out of place" in rewrite(with_value("source_row", 5, 6))[0]
    assert "name another source file" in rewrite(with_value("source_file", 5, "x"))[0]
    assert "holds 49 rows, its footer says 50" in rewrite(table.slice(1))[0]


@pytest.mark.parametrize("cut", [1, 8, None])
def test_a_torn_part_says_so(tmp_path: Path, cut: int | None) -> None:
    path, _, _ = make_part(tmp_path, TABLE)
    path.write_bytes(path.read_bytes()[:-cut] if cut else b"")
    with pytest.raises(BrokenPart, match=r"part\.parquet is no complete Parquet file"):
        read_footer(path)
    assert len(verify_part(path)) == 1


def test_foreign_and_missing_files_say_so(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "foreign.parquet")
    with pytest.raises(BrokenPart, match="not one that batchinfer wrote"):
        read_footer(tmp_path / "foreign.parquet")
    with pytest.raises(BrokenPart, match="is not there"):
        read_footer(tmp_path / "gone.parquet")
    for text in (b"{", b"[]", b"\xff"):
        with pq.ParquetWriter(tmp_path / "odd.parquet", TABLE.schema) as writer:
            writer.write_table(TABLE)
            writer.add_key_value_metadata({b"batchinfer": text})
        with pytest.raises(BrokenPart, match="broken batchinfer footer"):
            read_footer(tmp_path / "odd.parquet")
    (tmp_path / "noise.parquet").write_bytes(random.Random(0).randbytes(5000) + b"PAR1")
    with pytest.raises(BrokenPart, match="no complete Parquet file"):
        read_footer(tmp_path / "noise.parquet")


def test_damage_inside_is_found(tmp_path: Path) -> None:
    path, _, _ = make_part(tmp_path, TABLE)
    data = bytearray(path.read_bytes())
    for at in range(50, 500, 90):
        data[at] ^= 0xFF
    path.write_bytes(data)
    read_footer(path)  # the footer is whole
    assert verify_part(path)


@pytest.mark.parametrize("n", [1, 2])
def test_results_come_back_for_a_retry(tmp_path: Path, n: int) -> None:
    path, _, _ = make_part(tmp_path, TABLE, n=n, token_ids=True, logprobs=True, prefix="o_")
    old = read_part_results(path, chunk=0)
    expected = results_table([result(i, n) for i in range(50)])
    same = [name for name in old.schema.names if name != "cached_tokens"]
    good = pa.compute.is_null(old["error_class"])
    assert old.filter(good).select(same) == expected.filter(good).select(same)
    assert old["error_message"].to_pylist() == expected["error_message"].to_pylist()
    new = results_table([ResultRow(chunk=0, row=3, outputs=result(4, n).outputs, prompt_tokens=1)])
    merged = merge_tables([(None, old), (None, new)])
    dataset = open_dataset(str(tmp_path / "input.arrow"))
    layout = output_schema(dataset.schema, lists=n > 1, token_ids=True, logprobs=True, prefix="o_")
    summary = write_part(path, dataset=dataset, file=0, start=0, stop=50, results=merged, layout=layout, footer={})
    assert summary.failed == {"invalid_prompt": 6}
    assert verify_part(path) == []
    assert pq.read_table(path)["o_completion"].to_pylist()[3] == ("out 4.0" if n == 1 else ["out 4.0", "out 4.1"])


# Values that must come through with their types.
SECOND, CATEGORY = pa.timestamp("s"), pa.dictionary(pa.int8(), pa.string())
PASSED = {
    "category": pa.chunked_array([pa.array(v, CATEGORY) for v in (["a", "b"], ["c", "a"])]),
    "nulls_first": pa.chunked_array([pa.array(v, CATEGORY) for v in ([None, None], ["c", None])]),
    "ns_utc": pa.array([1_000_000, None, -1, 2**62], pa.timestamp("ns", "UTC")),
    "us_far": pa.array([datetime.datetime(1, 1, 1), None, datetime.datetime(9999, 12, 31), None], pa.timestamp("us")),
    "date": pa.array([datetime.date(1, 1, 1), None, datetime.date(9999, 12, 31), None]),
    "time": pa.array([1, None, 86_399_999_999_999, 0], pa.time64("ns")),
    "money": pa.array(
        [decimal.Decimal("1234567890123456789012345678.0123456789"), None, decimal.Decimal(0), None],
        pa.decimal128(38, 10),
    ),
    "wide": pa.array([decimal.Decimal(10) ** 59, None, None, None], pa.decimal256(60, 0)),
    "half": pa.array(np.array([1.5, -0.0, np.inf, np.nan], np.float16)),
    "bytes": pa.array([b"\xff\xfe", b"", None, b"x"]),
    "fixed": pa.array([[0.5] * 768, None, [1.5] * 768, None], pa.list_(pa.float32(), 768)),
    "map": pa.array([[("k", 1)], [], None, [("a", None)]], pa.map_(pa.string(), pa.int32())),
    "nothings": pa.array([[None], [], None, [None, None]], pa.list_(pa.null())),
    "nothing": pa.nulls(4),
    "duration": pa.array([1, None, -5, 0], pa.duration("ns")),
    "large_list": pa.array([["x"], [], None, [None]], pa.large_list(pa.large_string())),
    "messages": pa.array([[{"role": "user", "content": "x"}], [], None, [None]]),
    "id": pa.array([9007199254740993, None, 9007199254740992, -9223372036854775808]),
    "unsigned": pa.array([18446744073709551615, None, 0, 1], pa.uint64()),
    "zeros": pa.array(["007", "7", None, ""]),
    "int8": pa.array([1, None, -128, 127], pa.int8()),
    "": pa.array(["empty name", None, "", "x"]),
    "a.b": pa.array([{"c.d": 1}, None, {"c.d": None}, {"c.d": 2}]),
}


def test_carried_columns_keep_values_and_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_BATCH_ROWS", 2)
    table = pa.table(PASSED)
    dataset = open_dataset(write_input(tmp_path / "in.arrow", table, 2))
    layout = output_schema(dataset.schema)
    results = results_table([result(i) for i in range(4)])
    write_part(tmp_path / "p", dataset=dataset, file=0, start=0, stop=4, results=results, layout=layout, footer={})
    back = pq.read_table(tmp_path / "p")
    for name, column in PASSED.items():
        assert back[name].type == column.type, name
        assert str(back[name].to_pylist()) == str(column.to_pylist()) or back[name].equals(pa.chunked_array(column)), (
            name
        )
    assert verify_part(tmp_path / "p") == []


def test_types_that_parquet_changes_keep_their_values(tmp_path: Path) -> None:
    table = pa.table(
        {
            "s": pa.array([0, None, 4_000_000_000], SECOND),
            "t": pa.array([0, None, 86_399], pa.time32("s")),
            "d": pa.array([0, None, 86_400_000], pa.date64()),
            "c": pa.array([5, None, 5]).dictionary_encode(),
            "l": pa.array(["x", None, "y"], pa.large_string()).dictionary_encode(),
            "e": pa.RunEndEncodedArray.from_arrays([2, 3], ["a", None]),
            "n": pa.array([[{"s": 1}], None, []], pa.list_(pa.struct([("s", SECOND)]))),
            "id": [1, 2, 3],
        }
    )
    path, _, _ = make_part(tmp_path, table)
    back = pq.read_table(path)
    for name in table.column_names:
        assert [str(v) for v in back[name].to_pylist()] == [str(v) for v in table[name].to_pylist()], name
    assert verify_part(path) == []


def test_many_values_in_a_narrow_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More values than an int8 index counts, over several batches of which each has few."""
    kind = pa.dictionary(pa.int8(), pa.string())
    batches = [pa.array([f"{b}-{i}" for i in range(50)], pa.string()).dictionary_encode().cast(kind) for b in range(8)]
    table = pa.table({"id": range(400), "c": pa.chunked_array(batches)})
    dataset = open_dataset(write_input(tmp_path / "in.arrow", table, 50))
    results = results_table([result(i) for i in range(400)])
    path = tmp_path / "p.parquet"
    layout = output_schema(dataset.schema)
    write_part(path, dataset=dataset, file=0, start=0, stop=400, results=results, layout=layout, footer={})
    assert pq.read_metadata(path).num_row_groups == 4
    back = pq.read_table(path)
    assert back["c"].type == kind
    assert back["c"].to_pylist() == table["c"].to_pylist()
    assert verify_part(path) == []
    again = open_dataset(str(path))
    assert [row["c"] for batch in again.read(0) for row in batch.to_rows()] == table["c"].to_pylist()


LEAVES = st.sampled_from(
    [
        *(pa.string(), pa.large_string(), pa.int8(), pa.uint64(), pa.bool_(), pa.float64(), pa.binary(), pa.date32()),
        *(pa.null(), pa.timestamp("us", "UTC"), pa.timestamp("s"), pa.duration("ms"), pa.decimal128(20, 3)),
        pa.dictionary(pa.int16(), pa.string()),
    ]
)
TYPES = st.recursive(
    LEAVES,
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(pa.large_list)
        | inner.map(lambda kind: pa.list_(kind, 2))
        | st.lists(inner, min_size=1, max_size=2).map(
            lambda kinds: pa.struct([(f"f{i}", k) for i, k in enumerate(kinds)])
        )
        | inner.map(lambda kind: pa.map_(pa.string(), kind))
    ),
    max_leaves=4,
)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    t = pa.types
    if t.is_null(kind):
        return st.none()
    if t.is_dictionary(kind):
        return values(kind.value_type)
    if t.is_struct(kind):
        own: st.SearchStrategy[Any] = st.fixed_dictionaries({f.name: values(f.type) for f in kind})
    elif t.is_fixed_size_list(kind):
        own = st.lists(values(kind.value_type), min_size=2, max_size=2)
    elif t.is_list(kind) or t.is_large_list(kind):
        own = st.lists(values(kind.value_type), max_size=3)
    elif t.is_map(kind):
        own = st.dictionaries(st.text(max_size=2), values(kind.item_type), max_size=2).map(lambda d: list(d.items()))
    elif t.is_boolean(kind):
        own = st.booleans()
    elif t.is_floating(kind):
        own = st.floats(allow_nan=False)
    elif t.is_decimal(kind):
        own = st.decimals(-(10**16), 10**16, places=3)
    elif t.is_binary(kind):
        own = st.binary(max_size=4)
    elif t.is_integer(kind):
        own = st.integers(-128, 127) if t.is_int8(kind) else st.integers(0, 2**64 - 1)
    elif t.is_string(kind) or t.is_large_string(kind):
        own = st.text(max_size=4)
    else:
        own = st.integers(-10_000, 10_000)
    return st.none() | own


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_type_round_trips(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    kind = data.draw(TYPES)
    column = pa.array(data.draw(st.lists(values(kind), min_size=1, max_size=12)), kind)
    table = pa.table({"id": range(len(column)), "x": column})
    path, _, layout = make_part(folder, table)
    back = pq.read_table(path)
    assert back["x"].type == layout.schema.field("x").type
    assert back["x"].to_pylist() == table["x"].to_pylist()
    if layout.schema.field("x").type == kind:
        before, after = ValueHasher(), ValueHasher()
        before.update(table)
        after.update(back.select(["id", "x"]))
        assert before.hexdigest() == after.hexdigest()
    assert verify_part(path) == []


def test_tools_read_the_folder(tmp_path: Path) -> None:
    import datasets

    out = tmp_path / "out"
    state = out / "__batchinfer"  # `datasets` skips folders in `__` and `.` only, pyarrow also those in `_`
    (state / "segments").mkdir(parents=True)
    (state / "manifest.json").write_text("{}")
    (state / "segments" / "x.arrow").write_bytes(b"not data")
    temp_path_for(out / "part-00000-00002.parquet").write_bytes(b"half")
    table = pa.table({**{k: v for k, v in PASSED.items() if k in ("id", "zeros", "messages", "date", "category")}})
    for i in range(2):
        make_part(tmp_path, table, 2 * i, 2 * i + 2, part=f"out/part-00000-0000{i}.parquet")
    assert pa.dataset.dataset(str(out), format="parquet").to_table().num_rows == 4
    loaded = datasets.load_dataset("parquet", data_dir=str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 4
    assert loaded["completion"][:] == ["out 0.0", "out 1.0", "out 2.0", None]
    query = f"SELECT count(*), count(completion), sum(completion_tokens), max(error.class) FROM '{out}/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(4, 3, 9, "invalid_prompt")]
    frame = pd.read_parquet(out)
    assert frame["source_row"].tolist() == [0, 1, 2, 3]
    assert frame["error"].tolist()[3]["message"] == "bad 3"


def test_lost_values_are_logged_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A normal part says nothing."""
    with caplog.at_level(logging.WARNING):
        make_part(tmp_path, TABLE)
    assert caplog.text == ""


def test_a_carried_value_that_its_column_can_not_hold_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody's prompt: the row keeps its completion, the value is null."""
    pq.write_table(pa.table({"x": pa.array([0.5], pa.float32())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.array([3, 2**60 + 1, 4], pa.int64())}), tmp_path / "b.parquet")
    dataset = open_dataset(str(tmp_path))
    path = tmp_path / "part"
    with caplog.at_level(logging.WARNING):
        write_part(
            path,
            dataset=dataset,
            file=1,
            start=0,
            stop=3,
            results=results_table([result(row) for row in range(3)]),
            layout=output_schema(dataset.schema),
            footer={},
        )
    table = pq.read_table(path)
    assert table["x"].to_pylist() == [3.0, None, 4.0] and table["error"].null_count == 3
    assert "b.parquet: 1 rows from row 0 on lose a value" in caplog.text and "column 'x'" in caplog.text


def test_footers_are_small(tmp_path: Path) -> None:
    """Very wide inputs."""
    table = pa.table({"id": range(3), **{f"c{i}": [1, 2, 3] for i in range(1_000)}})
    path, _, _ = make_part(tmp_path, table)
    assert verify_part(path) == []
    assert len(json.dumps(read_footer(path))) < 2_000
    assert path.stat().st_size < 1_000_000
