"""Which files are the input, and what they are called."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.cursors import close_cursors
from batchinfer.data.dataset import open_dataset
from batchinfer.data.sources import find_sources
from batchinfer.errors import InputError

ROW = '{"a": 1}\n'


def names(path: str | Path, format: str = "auto") -> list[str]:
    return [source.name for source in find_sources(str(path), format, {})]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "sub/deep/d.json", "e.jsonl.gz", "sub2/F.JSONL"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(ROW)
    for name in (
        ".hidden.jsonl",
        "_SUCCESS",
        "_meta/x.jsonl",
        ".git/x.jsonl",
        "._x.jsonl",
        ".nfs000123",
        "x.jsonl.crc",
        "x.jsonl~",
        "README.md",
        "photo.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


ALL = ["a.jsonl", "b.jsonl", "e.jsonl.gz", "sub/c.jsonl", "sub/deep/d.json", "sub2/F.JSONL"]


def test_a_folder_by_name_hidden_and_foreign_files_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert names(folder) == ALL
    assert names(f"{folder}/") == ALL
    assert names(f"file://{folder}") == ALL
    assert "ignored 2 files that are no data files: README.md, photo.png" in caplog.text


def test_one_file(folder: Path) -> None:
    assert names(folder / "sub" / "c.jsonl") == ["c.jsonl"]
    (folder / "data.txt").write_text(ROW)
    with pytest.raises(InputError, match=r"no file that can be read, only data\.txt.*input\.format"):
        names(folder / "data.txt")
    assert names(folder / "data.txt", "jsonl") == ["data.txt"]
    (folder / "table.csv").write_text("text\none\n")
    with pytest.raises(InputError, match=r"only table\.csv.*CSV is not read: convert it"):
        names(folder / "table.csv")


def test_globs_name_files_from_their_fixed_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(f"{folder}/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{folder}/sub*/*") == ["sub/c.jsonl", "sub2/F.JSONL"]
    assert names(f"{folder}/**/*.jsonl") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert names(f"{folder}/[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    monkeypatch.chdir(folder)
    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("sub/*.jsonl") == ["c.jsonl"]
    assert names(".") == ALL
    with pytest.raises(InputError, match="matches no file"):
        names("*.parquet")


def test_a_format_selects_files(folder: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), folder / "z.parquet")
    assert names(folder, "parquet") == ["z.parquet"]
    assert names(folder, "jsonl") == ALL
    with pytest.raises(InputError, match="holds no arrow file"):
        names(folder, "arrow")
    with pytest.raises(InputError, match=r"input\.format is 'csv'; it must be one of auto, parquet, jsonl, arrow"):
        names(folder, "csv")


def test_descriptions_beside_data_are_no_data(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    for name in ("dataset_infos.json", "notes.json", "state.json"):
        (tmp_path / name).write_text('{"b": "x"}')
    assert names(tmp_path) == ["a.parquet"]
    (tmp_path / "a.parquet").rename(tmp_path / "a.bak")
    assert names(tmp_path) == ["notes.json"]


def test_what_is_not_there_is_said_with_what_is(folder: Path) -> None:
    with pytest.raises(InputError, match=r"no such file or folder.*holds README\.md, a\.jsonl, b\.jsonl, .*and 2 more"):
        names(folder / "aa.jsonl")
    with pytest.raises(InputError, match="empty"):
        names(" ")
    with pytest.raises(InputError, match="is not a saved dataset"):
        names(f"{folder}::train")
    (folder / "nothing").mkdir()
    with pytest.raises(InputError, match="holds no file that can be read: it is an empty folder"):
        names(folder / "nothing")


def test_urls() -> None:
    memory = fsspec.filesystem("memory")
    table = pa.table({"a": range(1000), "text": [f"row {i}" for i in range(1000)]})
    for name in ("x/a.parquet", "x/sub/b.parquet"):
        with memory.open(f"/{name}", "wb") as file:
            pq.write_table(table, file, row_group_size=100)
    memory.pipe("/x/c.jsonl.gz", gzip.compress(ROW.encode() * 3))
    memory.pipe("/x/_SUCCESS", b"")
    with memory.open("/x/d.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    assert names("memory://x") == ["a.parquet", "c.jsonl.gz", "d.arrow", "sub/b.parquet"]
    assert names("memory://x/*.parquet") == ["a.parquet"]
    assert names("memory://x/sub/b.parquet") == ["b.parquet"]
    dataset = open_dataset("memory://x")
    assert [file.num_rows for file in dataset.files] == [1000, 3, 1000, 1000]
    for file in (0, 2):
        (batch,) = dataset.read(file, 500, 503, ["text"])
        assert batch.table["text"].to_pylist() == ["row 500", "row 501", "row 502"]
    (batch,) = dataset.read(1, 1, 3)
    assert batch.table["a"].to_pylist() == [1, 1]
    close_cursors()
    with pytest.raises(InputError, match="nothing at this address"):
        names("memory://nowhere/a.parquet")
    with pytest.raises(InputError, match="nosuch://"):
        names("nosuch://x/a.parquet")


def test_storage_options_reach_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **options: object) -> None:
        raise PermissionError(f"{url} with {options}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(
        InputError,
        match=r"can't be listed: PermissionError: s3://b/x with {'key': 'k'}; check .*input\.storage_options",
    ):
        find_sources("s3://b/x", "auto", {"key": "k"})


def test_files_are_opened_once_only_when_read(folder: Path) -> None:
    (folder / "e.jsonl.gz").unlink()
    dataset = open_dataset(str(folder / "*.jsonl"))
    (folder / "a.jsonl").rename(folder / "moved.jsonl")
    with pytest.raises(InputError, match=r"a\.jsonl can't be read"):
        list(dataset.read(0))


def test_importing_the_readers_loads_no_datasets() -> None:
    code = (
        "import sys, batchinfer.data.dataset, batchinfer.data.parts;"
        "print([m for m in ('datasets', 'torch', 'pandas', 'dask') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_process_that_leaves_readers_open_ends_quietly(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(1000)}), tmp_path / "x.parquet")
    code = (
        "import sys; from batchinfer.data.dataset import open_dataset;"
        "d = open_dataset(sys.argv[1]); print(sum(b.table.num_rows for b in d.read(0, 0, 10)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("10\n", "")


def test_a_file_behind_a_link_is_what_the_link_is_called(tmp_path: Path) -> None:
    """As in a hub's cache: names with endings are links to blobs without."""
    blob = tmp_path / "blob-0123"
    pq.write_table(pa.table({"x": [1]}), blob)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "a.parquet").symlink_to(blob)
    for path in (tmp_path / "snapshot", tmp_path / "snapshot" / "a.parquet", tmp_path / "snapshot" / "*.parquet"):
        (file,) = open_dataset(str(path)).files
        assert (file.name, file.num_rows) == ("a.parquet", 1)


def test_the_only_split_of_a_saved_dataset_needs_no_name(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"x": [1, 2]})
    datasets.DatasetDict({"train": whole}).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "two"))
    one = open_dataset(str(tmp_path / "one"))
    assert [f.name for f in one.files] == [f.name for f in open_dataset(f"{tmp_path / 'one'}::train").files]
    with pytest.raises(InputError, match=r"two::train \(splits: train, test\)"):
        open_dataset(str(tmp_path / "two"))


def test_a_dataset_without_anything_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"\n \n")
    with pytest.raises(InputError, match="is empty: it holds no rows and no columns"):
        open_dataset(str(tmp_path)).check_columns(["prompt"])


def test_names_of_files_are_any_text(tmp_path: Path) -> None:
    odd = ["[1].jsonl", "a b.jsonl", "line\nbreak.jsonl", "p%20#?.jsonl", "{x}.jsonl", "\"é'漢.jsonl"]
    for name in odd:
        (tmp_path / name).write_text(ROW)
        assert names(tmp_path / name) == [name]  # not taken for a pattern where it is there
    assert names(tmp_path) == sorted(odd)
    assert open_dataset(str(tmp_path)).num_rows == len(odd)


def test_a_name_that_is_no_text_is_refused_with_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(ROW)
    (tmp_path / "bad\udcff.jsonl").write_text(ROW)
    for path in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(InputError, match=r"bad\\xff\.jsonl' is not UTF-8.*rename it"):
            names(path)
    (tmp_path / "bad\udcff.jsonl").rename(tmp_path / "bad\udcff.png")
    assert names(tmp_path) == ["good.jsonl"]  # what is no data does not matter
