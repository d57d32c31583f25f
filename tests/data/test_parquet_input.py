"""Parquet input: any cut gives the same rows, in bounded batches, in one united schema."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.data import dataset as dataset_module
from batchinfer.data import parquet as parquet_module
from batchinfer.data.cursors import close_cursors
from batchinfer.data.dataset import InputDataset, changes, new_files, open_dataset
from batchinfer.errors import InputError
from batchinfer.types.rows import ErrorClass


def rows_of(
    dataset: InputDataset, file: int = 0, start: int = 0, stop: int | None = None, columns: Any = None
) -> list[Any]:
    out: list[Any] = []
    for batch in dataset.read(file, start, stop, columns):
        assert batch.start == start + len(out)
        assert batch.table.num_rows <= dataset_module.MAX_BATCH_ROWS
        out += batch.to_rows()
    return out


TABLE = pa.table(
    {
        "id": range(100),
        "prompt": [f"prompt {i}" for i in range(100)],
        "messages": [[{"role": "user", "content": f"m{i}"}] * (i % 3) for i in range(100)],
        "a.b": [i * 10 for i in range(100)],
        "": ["empty name"] * 100,
        "large": pa.array([f"L{i}" for i in range(100)], pa.large_string()),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet")
    pq.write_table(TABLE, path / "a.parquet", row_group_size=33)
    pq.write_table(TABLE.slice(0, 0), path / "b.parquet")
    pq.write_table(TABLE.slice(7, 1), path / "c.parquet")
    return path


def test_files_rows_and_schema_come_from_footers(folder: Path) -> None:
    dataset = open_dataset(str(folder))
    assert [(f.index, f.name, f.num_rows) for f in dataset.files] == [
        (0, "a.parquet", 100),
        (1, "b.parquet", 0),
        (2, "c.parquet", 1),
    ]
    assert dataset.num_rows == 101
    assert dataset.num_bytes > 1000
    assert dataset.schema == TABLE.schema
    assert rows_of(dataset, 0) == TABLE.to_pylist()
    assert rows_of(dataset, 1) == []
    assert rows_of(dataset, 2) == TABLE.slice(7, 1).to_pylist()


@given(start=st.integers(0, 100), length=st.integers(0, 100), columns=st.sets(st.sampled_from(TABLE.column_names)))
@settings(max_examples=60, deadline=None)
def test_any_slice_of_any_columns(folder: Path, start: int, length: int, columns: set[str]) -> None:
    dataset = open_dataset(str(folder / "a.parquet"))
    wanted = sorted(columns)
    got = rows_of(dataset, 0, start, start + length, wanted)
    assert got == TABLE.select(wanted).slice(start, length).to_pylist() or (
        not wanted and len(got) == min(length, 100 - start)
    )


def test_slices_one_after_the_other_use_one_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_cursors()
    opened = []
    original = parquet_module.iter_parquet
    monkeypatch.setattr(parquet_module, "iter_parquet", lambda *a: opened.append(a[2]) or original(*a))
    dataset = open_dataset(str(folder / "a.parquet"))
    got = []
    for start in range(0, 100, 10):
        got += rows_of(dataset, 0, start, start + 10, ["id"])
    assert got == [{"id": i} for i in range(100)]
    assert opened == [0]
    assert rows_of(dataset, 0, 5, 6, ["id"]) == [{"id": 5}]  # going back opens anew
    assert opened == [0, 5]


def test_big_row_groups_are_read_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_BATCH_BYTES", 1 << 20)
    table = pa.table({"messages": [[{"role": "user", "content": f"{i:06d}" * 1000}] for i in range(2000)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2000, use_dictionary=False, compression="none")
    dataset = open_dataset(str(tmp_path))
    before = pa.total_allocated_bytes()
    peak = rows = 0
    for batch in dataset.read(0):
        rows += batch.table.num_rows
        assert batch.table.nbytes < 3 << 20
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert rows == 2000
    assert peak < 8 << 20  # of 12 MB


def test_limit_counts_over_all_files(folder: Path) -> None:
    assert [f.num_rows for f in open_dataset(str(folder), limit=40).files] == [40]
    assert [f.num_rows for f in open_dataset(str(folder), limit=101).files] == [100, 0, 1]
    assert open_dataset(str(folder), limit=0).num_rows == 0
    assert rows_of(open_dataset(str(folder), limit=3)) == TABLE.slice(0, 3).to_pylist()
    with pytest.raises(InputError, match=r"input\.limit is -1"):
        open_dataset(str(folder), limit=-1)


def test_it_travels_by_pickle_and_by_json(folder: Path) -> None:
    dataset = open_dataset(str(folder))
    assert pickle.loads(pickle.dumps(dataset)) == dataset
    described = json.loads(json.dumps(dataset.describe()))
    again = InputDataset.from_description(described)
    assert again == dataset
    assert rows_of(again, 2) == rows_of(dataset, 2)


def test_what_changed_is_named(folder: Path, tmp_path: Path) -> None:
    import shutil

    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    before = open_dataset(str(folder)).describe()
    assert changes(before, open_dataset(str(moved)).describe()) == []  # a folder may move
    changed = TABLE.set_column(0, "id", pa.array(range(1, 101)))
    pq.write_table(changed, moved / "a.parquet", row_group_size=33)
    (moved / "b.parquet").rename(moved / "d.parquet")
    after = open_dataset(str(moved)).describe()
    assert changes(before, after) == [
        "input file b.parquet is gone",
        "input file a.parquet changed (100 rows before, 100 now)",
        "new input file d.parquet (0 rows)",
    ]
    assert new_files(before, after) == ["d.parquet"]


def test_missing_columns_are_named_with_those_there(folder: Path) -> None:
    dataset = open_dataset(str(folder))
    with pytest.raises(InputError, match=r"no column 'promt'; its columns are: id, prompt, messages"):
        dataset.check_columns(["id", "promt"])


def test_bytes_of_columns(folder: Path) -> None:
    dataset = open_dataset(str(folder))
    (a, b, _), (all_a, _, _) = dataset.column_bytes(["prompt"]), dataset.column_bytes(TABLE.column_names)
    assert 0 < a < all_a
    assert b < a


@pytest.mark.parametrize("cut", [1, 8, 10_000])
def test_a_file_cut_short_is_refused_up_front(tmp_path: Path, cut: int) -> None:
    pq.write_table(TABLE, tmp_path / "x.parquet")
    data = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(data[:-cut])
    with pytest.raises(InputError, match=r"x\.parquet is not a complete Parquet file"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("in_file", "in_group"),
    [
        (1 << 40, 5_000),
        (5_001, 5_000),
        (0, 5_000),
        (5_000, 1 << 40),
        (5_000, 4_999),
        (1 << 40, 1 << 40),
        (6_000, 6_000),
    ],
)
def test_a_footer_that_claims_rows_which_are_not_there_is_refused(tmp_path: Path, in_file: int, in_group: int) -> None:
    """A job would be cut into millions of chunks before a row is read."""
    path, count = tmp_path / "x.parquet", 5_000
    pq.write_table(pa.table({"p": ["a"] * count, "l": [[1, 2]] * count}), path)
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer, own = data[-8 - size : -8], _rows_field(count)
    # The file's number comes first, its row group's last; between them are those of the columns' values.
    assert footer.count(own) >= 3
    head, tail = footer.split(own, 1)
    middle, end = tail.rsplit(own, 1)
    footer = head + _rows_field(in_file) + middle + _rows_field(in_group) + end
    path.write_bytes(data[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    metadata = pq.read_metadata(path)
    assert (metadata.num_rows, metadata.row_group(0).num_rows) == (in_file, in_group)
    assert path.stat().st_size < 6_000  # less than a byte to each row: the columns are asked
    with pytest.raises(InputError, match=rf"x\.parquet can't be read as Parquet: .* claims {in_file} rows"):
        open_dataset(str(tmp_path))


def _rows_field(number: int) -> bytes:
    """As footers have it: the header of an i64 field after the last but one, then the number as a zigzag varint."""
    out, number = bytearray(b"\x16"), number * 2
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def test_no_changed_byte_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """In a process of its own, since pyarrow itself would end it."""
    table = pa.table({"prompt": [None, "a", "b"], "messages": [[{"content": "m"}], None, []], "id": [1, 2, 3]})
    pq.write_table(table, tmp_path / "good.parquet")
    code = """if True:
        import collections, pathlib, sys
        from batchinfer.data.parquet import column_bytes, inspect_parquet, iter_parquet
        from batchinfer.errors import InputError
        import pyarrow as pa
        good, out = pathlib.Path(sys.argv[1]).read_bytes(), collections.Counter()
        path = pathlib.Path(sys.argv[1]).with_name("bad.parquet")
        footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
        for place in range(footer, len(good) - 8):
            for change in (1, 2, 0x80):
                path.write_bytes(good[:place] + bytes([good[place] ^ change]) + good[place + 1:])
                for columns in (["prompt", "messages", "id"], None):
                    try:
                        inspect_parquet("bad", str(path), {})
                        if columns:
                            column_bytes("bad", str(path), {}, columns)
                        rows = list(iter_parquet(str(path), {}, 0, columns, 8, 1 << 20))
                        out["read"] += 1
                    except InputError as error:
                        out["refused"] += 1
                    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                        out["broken"] += 1
                        out[str(error)[:40]] += 1
        print(dict(out))
    """
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "good.parquet")], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = ast.literal_eval(run.stdout)
    assert found["read"] and found["refused"] and found["broken"], found
    assert any("histogram" in words for words in found), found


def test_a_wide_footer_is_checked_once_for_each_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time grows with the square of the number of columns."""
    path, names = tmp_path / "x.parquet", [f"c{i}" for i in range(50)]
    pq.write_table(pa.table({name: [1, 2, 3] for name in names}), path, row_group_size=1)
    checks: list[list[str]] = []
    check = parquet_module._check_entries

    def counted(metadata: Any, group: int, paths: list[str]) -> None:
        checks.append(paths)
        check(metadata, group, paths)

    monkeypatch.setattr(parquet_module, "_check_entries", counted)
    metadata = pq.read_metadata(path)
    columns = [metadata.row_group(group).column(i) for group in range(3) for i in range(50)]
    assert parquet_module.column_bytes("x", str(path), {}, names) == sum(c.total_uncompressed_size for c in columns)
    assert checks == [names] * 3


def test_a_file_that_shrank_since_is_named(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "x.parquet")
    dataset = open_dataset(str(tmp_path))
    pq.write_table(TABLE.slice(0, 50), tmp_path / "x.parquet")
    close_cursors()
    with pytest.raises(InputError, match=r"x\.parquet ends at row 50"):
        rows_of(dataset)
    (tmp_path / "x.parquet").unlink()
    close_cursors()
    with pytest.raises(InputError, match=r"x\.parquet can't be read at row 0"):
        rows_of(dataset)


def test_native_values_reach_templates(tmp_path: Path) -> None:
    """Lists are lists, null and empty are told apart, numbers are Python's."""
    table = pa.table(
        {
            "messages": [[{"role": "user", "content": "x"}], None],
            "stop": [None, []],
            "enable_thinking": [True, False],
            "logit_bias": pa.array([[(1, 0.5)], []], pa.map_(pa.int32(), pa.float32())),
            "max_tokens": pa.array([5, None], pa.int8()),
            "temperature": pa.array([0.5, 1.0], pa.float32()),
            "when": pa.array([1, -(2**62)], pa.timestamp("ns")),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    first, second = rows_of(open_dataset(str(tmp_path)))
    assert first["messages"] == [{"role": "user", "content": "x"}] and type(first["messages"]) is list
    assert second["messages"] is None
    assert first["stop"] is None and second["stop"] == []
    assert first["enable_thinking"] is True
    assert first["logit_bias"] == [(1, 0.5)]
    assert type(first["max_tokens"]) is int and second["max_tokens"] is None
    assert type(first["temperature"]) is float
    assert "1970" in str(first["when"])


def test_ids_stay_exact(tmp_path: Path) -> None:
    ids = [9007199254740993, None, 9007199254740992, 1344800117571260417, -9223372036854775808]
    table = pa.table({"id": ids, "u": pa.array([18446744073709551615] * 5, pa.uint64()), "s": ["007"] * 5})
    pq.write_table(table, tmp_path / "x.parquet")
    dataset = open_dataset(str(tmp_path))
    assert [row["id"] for row in rows_of(dataset)] == ids
    assert rows_of(dataset)[0] == {"id": ids[0], "u": 18446744073709551615, "s": "007"}
    assert dataset.schema == table.schema


def test_broken_utf8_is_an_error_of_its_row_alone(tmp_path: Path) -> None:
    """Text columns written unchecked."""
    bad = pa.array([b"fine", b"\xff\xfe", None, b"also fine"]).view(pa.string())
    nested = pa.ListArray.from_arrays([0, 1, 2, 2, 3], pa.array([b"x", b"y", b"\xff"]).view(pa.string()))
    pq.write_table(pa.table({"prompt": bad, "tags": nested, "id": range(4)}), tmp_path / "x.parquet")
    (batch,) = open_dataset(str(tmp_path)).read(0)
    assert {row: e.error_class for row, e in batch.errors.items()} == dict.fromkeys((1, 3), ErrorClass.INVALID_ROW)
    assert "'prompt'" in batch.errors[1].message and "'tags'" in batch.errors[3].message
    assert batch.table["prompt"].to_pylist() == ["fine", "\ufffd\ufffd", None, "also fine"]
    assert batch.table["tags"].to_pylist() == [["x"], ["y"], [], None]
    assert batch.table["id"].to_pylist() == [0, 1, 2, 3]
    (batch,) = open_dataset(str(tmp_path)).read(0, 0, 4, ["id"])
    assert batch.errors == {}


def test_large_pieces_pass(tmp_path: Path) -> None:
    """One row of 30 MB among short ones."""
    prompts = ["short", "x" * 30_000_000, "short again"]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "x.parquet")
    assert [row["prompt"] for row in rows_of(open_dataset(str(tmp_path)))] == prompts
