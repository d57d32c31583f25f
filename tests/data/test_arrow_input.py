"""Arrow IPC input: files and streams, as written by pyarrow and by `datasets`, from any row on."""

from __future__ import annotations

import ast
import decimal
import struct
import subprocess
import sys
import types
from pathlib import Path
from random import Random
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.data import arrow as arrow_module
from batchinfer.data import dataset as dataset_module
from batchinfer.data.dataset import InputDataset, open_dataset
from batchinfer.data.rows import check_text
from batchinfer.errors import InputError
from batchinfer.testing.fuzzing.arrow_values import any_type, array_of

TABLE = pa.table(
    {
        "id": range(100),
        "text": [f"t{i}" for i in range(100)],
        "kind": pa.array([["a", "b", None][i % 3] for i in range(100)]).dictionary_encode(),
        "messages": [[{"role": "user", "content": f"m{i}"}] * (i % 3) for i in range(100)],
    }
)


def rows_of(dataset: InputDataset, *args: Any) -> list[Any]:
    return [row for batch in dataset.read(*(args or (0,))) for row in batch.to_rows()]


def write(path: Path, table: pa.Table, kind: str, rows: int, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=False)
    opener = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with opener(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)


@pytest.fixture(scope="module", params=["file", "stream", "file-lz4", "stream-zstd", "stream-plain"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    kind, _, option = request.param.partition("-")
    path = tmp_path_factory.mktemp("arrow") / "x.arrow"
    table = TABLE.drop_columns("kind") if option == "plain" else TABLE
    write(path, table, kind, 7, option if option in ("lz4", "zstd") else None)
    return str(path)


@given(
    start=st.integers(0, 100),
    length=st.integers(0, 100),
    columns=st.none() | st.sets(st.sampled_from(["id", "text", "messages"])),
)
@settings(max_examples=25, deadline=None)
def test_any_slice_of_any_columns(path: str, start: int, length: int, columns: set[str] | None) -> None:
    dataset = open_dataset(path)
    assert dataset.num_rows == 100
    expected = (
        TABLE.select(dataset.schema.names if columns is None else sorted(columns)).slice(start, length).to_pylist()
    )
    got = rows_of(dataset, 0, start, start + length, None if columns is None else sorted(columns))
    if columns == set():
        expected = [{} for _ in range(min(length, 100 - start))]
    assert got == expected


def test_big_record_batches_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(arrow_module, "COPIED_BATCH_BYTES", 1 << 20)
    table = pa.table({"text": [f"{i:06d}" * 1000 for i in range(2000)]})
    write(tmp_path / "x.arrow", table, "file", 2000)
    before = pa.total_allocated_bytes()
    rows = 0
    for batch in open_dataset(str(tmp_path)).read(0):
        assert batch.table.nbytes < 2 << 20
        rows += batch.table.num_rows
        assert pa.total_allocated_bytes() - before < 1 << 20  # of 12 MB: the rest is only mapped
    assert rows == 2000


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_file_cut_short_is_refused(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "x.arrow", TABLE, kind, 7)
    data = (tmp_path / "x.arrow").read_bytes()
    (tmp_path / "x.arrow").write_bytes(data[:-500])
    with pytest.raises(InputError, match=r"x\.arrow can't be read as Arrow IPC"):
        open_dataset(str(tmp_path))
    (tmp_path / "x.arrow").write_bytes(b"")
    with pytest.raises(InputError, match=r"x\.arrow can't be read as Arrow IPC"):
        open_dataset(str(tmp_path))


def stream_of(batch: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


ROWS = 0x1F3  # a number that is nowhere else in the files
CLAIMS = (1 << 50, (1 << 31) - 1, 1 << 20, ROWS + 1, -1)
COLUMNS = {
    "text": pa.array(["abc"] * ROWS),
    "large_text": pa.array(["abc"] * ROWS, pa.large_string()),
    "text_view": pa.array(["longer than twelve bytes"] * ROWS, pa.string_view()),
    "flags": pa.array([True, None, False] * (ROWS // 3) + [True]),
    "list": pa.array([[1, 2]] * ROWS),
    "list_view": pa.array([[1, 2]] * ROWS, pa.list_view(pa.int8())),
    "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int64())),
    "fixed": pa.array([[1, 2, 3]] * ROWS, pa.list_(pa.int16(), 3)),
    "struct": pa.array([{"a": [{"b": 1}], "c": decimal.Decimal(1)}] * ROWS),
    "dictionary": pa.array(["a", "b"] * (ROWS // 2) + ["a"]).dictionary_encode(),
    "runs": pa.RunEndEncodedArray.from_arrays([ROWS], ["a"]),
    "union": pa.UnionArray.from_sparse(
        pa.array([0] * ROWS, pa.int8()), [pa.array(["a"] * ROWS), pa.array([1.5] * ROWS)]
    ),
}


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_batch_that_claims_more_rows_than_it_has_is_refused(
    tmp_path: Path, name: str, compression: str | None
) -> None:
    """Whether the batch alone claims them or its columns, too; a job would be cut into millions of chunks."""
    path = tmp_path / "x.arrow"
    columns = {"nothing": pa.nulls(ROWS), name: COLUMNS[name], "id": pa.array([7] * ROWS, pa.int64())}
    good = stream_of(pa.record_batch(columns), compression)
    path.write_bytes(good)
    assert open_dataset(str(path)).num_rows == ROWS
    own = struct.pack("<q", ROWS)
    places = [at for at in range(0, len(good), 8) if good[at : at + 8] == own]
    assert len(places) >= 4
    for claim in CLAIMS:
        changed = struct.pack("<q", claim)
        refused = 0
        for at in places:
            path.write_bytes(good[:at] + changed + good[at + 8 :])
            try:
                assert open_dataset(str(path)).num_rows == ROWS  # the number of a nested array: reading tells
            except InputError as error:
                assert "x.arrow can't be read as Arrow IPC" in str(error)
                assert "write it again" in str(error)
                refused += 1
        assert refused >= 4  # the batch's and those of the three columns
        if claim != ROWS + 1:  # which is no danger, and reading tells
            path.write_bytes(good.replace(own, changed))
            with pytest.raises(InputError, match=f"claims {claim} rows"):
                open_dataset(str(path))


def test_no_changed_byte_makes_a_file_of_millions_of_rows(tmp_path: Path) -> None:
    """In a process of its own, since pyarrow itself might end it."""
    table = pa.table({"prompt": [None, "a", "b"], "messages": [[{"content": "m"}], None, []], "id": [1, 2, 3]})
    code = """if True:
        import collections, pathlib, sys
        from batchinfer.data.arrow import inspect_arrow
        from batchinfer.errors import InputError
        good, out = pathlib.Path(sys.argv[1]).read_bytes(), collections.Counter()
        path = pathlib.Path(sys.argv[1]).with_name("bad.arrow")
        for place in range(len(good)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 0xff]) + good[place + 1:])
            try:
                out[inspect_arrow("bad", str(path), {})[1]] += 1
            except InputError:
                out["refused"] += 1
        print(dict(out))
    """
    for kind in ("file", "stream"):
        write(tmp_path / f"{kind}.arrow", table, kind, 2, "lz4")
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / f"{kind}.arrow")], capture_output=True, text=True, timeout=300
        )
        assert run.returncode == 0, run.stderr[-2000:]
        found = ast.literal_eval(run.stdout)
        assert found.pop("refused") and found[3], found
        assert max(found) == 3 and min(found) >= 0, found


def test_rows_of_any_types_are_counted(tmp_path: Path) -> None:
    """Types of every kind, nested at will: what is whole is never refused, however little a row takes."""
    path, counted = tmp_path / "x.arrow", 0
    for seed in range(150):
        rng = Random(seed)
        size = rng.choice((0, 1, 9, 2000))
        try:
            batch = pa.record_batch({str(i): array_of(rng, any_type(rng), size) for i in range(3)})
            data = stream_of(batch, rng.choice((None, "lz4", "zstd")))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue  # pyarrow can't make or write it
        path.write_bytes(data)
        try:
            whole = pa.ipc.open_stream(data).read_next_batch().num_rows == size
        except pa.ArrowException:
            continue
        assert whole and arrow_module.inspect_arrow("x", str(path), {})[1] == size, (seed, batch.schema)
        counted += 1
    assert counted > 100
    path.write_bytes(stream_of(pa.record_batch({"nothing": pa.nulls(1 << 30)})))
    assert arrow_module.inspect_arrow("x", str(path), {})[1] == 1 << 30


def test_a_saved_dataset(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"q": ["a", "b", "c"], "label": [0, 1, 0]})
    saved = saved.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    saved.filter(lambda row: row["q"] != "b", load_from_cache_file=False).save_to_disk(
        str(tmp_path / "one"), num_shards=2
    )
    dataset = open_dataset(str(tmp_path / "one"))
    assert [file.name for file in dataset.files] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert dataset.schema == pa.schema([("q", pa.string()), ("label", pa.int64())])
    assert rows_of(dataset, 0) + rows_of(dataset, 1) == [{"q": "a", "label": 0}, {"q": "c", "label": 0}]


def test_of_several_splits_one_is_named(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"q": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "all"))
    with pytest.raises(InputError, match=r"holds several splits; name one.*all::train \(splits: train, test\)"):
        open_dataset(str(tmp_path / "all"))
    with pytest.raises(InputError, match=r"has no split 'dev'.*train, test"):
        open_dataset(f"{tmp_path / 'all'}::dev")
    dataset = open_dataset(f"{tmp_path / 'all'}::test")
    assert rows_of(dataset) == [{"q": "test"}]
    assert dataset.files[0].name == "test/data-00000-of-00001.arrow"


def test_a_saved_dataset_without_its_files_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"q": ["a"]}).save_to_disk(str(tmp_path / "one"))
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(InputError, match="lacks its files data-00000"):
        open_dataset(str(tmp_path / "one"))
    (tmp_path / "one" / "state.json").write_text("[]")
    with pytest.raises(InputError, match="not what save_to_disk writes"):
        open_dataset(str(tmp_path / "one"))


def test_a_hub_id_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "demo-train.arrow"
    write(cached, TABLE, "stream", 50)
    asked = []

    def load(name: str, config: str | None, **options: Any) -> dict[str, Any]:
        asked.append((name, config, options))
        return {"train": types.SimpleNamespace(cache_files=[{"filename": str(cached)}])}

    monkeypatch.setattr(datasets, "load_dataset", load)
    dataset = open_dataset("org/demo:main::train", storage_options={"token": "x"})
    assert asked == [("org/demo", "main", {"token": "x"})]
    assert dataset.files[0].name == "train/demo-train.arrow"
    assert rows_of(dataset) == TABLE.to_pylist()
    with pytest.raises(InputError, match=r"has the splits train; name one.*org/demo::train"):
        open_dataset("org/demo")


def test_a_hub_id_without_a_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'org/demo' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match=r"'org/demo' is no local file or folder.*Couldn't reach.*network"):
        open_dataset("org/demo::train")


@pytest.mark.parametrize("kind", [pa.list_view(pa.int64()), pa.large_list_view(pa.int64()), pa.list_(pa.int64())])
@pytest.mark.parametrize("what", ["places", "number of values"])
def test_what_lies_far_outside_ends_no_process(tmp_path: Path, kind: pa.DataType, what: str) -> None:
    """In a process of its own, since pyarrow itself might end it."""
    array = pa.array([[1, None, 3]] * ROWS, kind)
    good = stream_of(pa.record_batch({"x": array, "prompt": ["a"] * ROWS}))
    width = "<3q" if "large" in str(kind) else "<3i"
    own, wrong = (struct.pack(width, *numbers) for numbers in ((3, 6, 9), (3, (1 << 31) - 1, 1 << 30)))
    if what == "number of values":  # and of nulls, that it be counted
        own, wrong = struct.pack("<2q", 3 * ROWS, ROWS), struct.pack("<2q", (1 << 33) + 1, -1)
    assert own in good
    path = tmp_path / "x.arrow"
    path.write_bytes(good.replace(own, wrong))
    code = """if True:
        import sys
        from batchinfer.data.dataset import open_dataset
        from batchinfer.errors import InputError
        try:
            print(sum(batch.table.num_rows for batch in open_dataset(sys.argv[1]).read(0)))
        except InputError as error:
            print(error)
    """
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "x.arrow can't be read at row 0" in run.stdout


def test_a_broken_value_does_not_hide_a_shorter_field_of_its_struct() -> None:
    offsets = pa.py_buffer(np.arange(ROWS + 1, dtype=np.int32))
    text = pa.Array.from_buffers(pa.string(), ROWS, [None, offsets, pa.py_buffer(b"\xff" * ROWS)])
    column = pa.StructArray.from_arrays([text, pa.array([7] * ROWS)], names=["a", "b"])
    good = stream_of(pa.record_batch({"x": column}))
    own, shorter = struct.pack("<2q", ROWS, 0), struct.pack("<2q", ROWS - 1, 0)
    at = good.rindex(own)  # the last field's
    batch = pa.ipc.open_stream(good[:at] + shorter + good[at + len(own) :]).read_next_batch()
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        batch.validate(full=True)
    with pytest.raises(pa.ArrowInvalid, match="not all values that it speaks of are there"):
        check_text(0, batch)
