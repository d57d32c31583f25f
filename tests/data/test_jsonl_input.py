"""JSON Lines: types over all rows, exact numbers, bad lines as error rows, encodings, compressed files."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.data import jsonl as jsonl_module
from batchinfer.data.cursors import close_cursors
from batchinfer.data.dataset import InputDataset, RowBatch, open_dataset
from batchinfer.errors import InputError
from batchinfer.types.rows import ErrorClass


def put(path: Path, *rows: Any) -> str:
    """Rows as lines: text and bytes as they are, everything else as JSON."""
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def read(dataset: InputDataset, start: int = 0, stop: int | None = None, columns: Any = None) -> list[RowBatch]:
    batches = list(dataset.read(0, start, stop, columns))
    at = start
    for batch in batches:
        assert batch.start == at
        at = batch.stop
    return batches


def rows_of(dataset: InputDataset, *args: Any) -> list[Any]:
    return [row for batch in read(dataset, *args) for row in batch.to_rows()]


def errors_of(dataset: InputDataset, *args: Any) -> dict[int, str]:
    found = {row: e for batch in read(dataset, *args) for row, e in batch.errors.items()}
    assert {e.error_class for e in found.values()} <= {ErrorClass.INVALID_ROW}
    return {row: e.message for row, e in found.items()}


def test_plain_rows(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x"}, {"b": None, "c": [1.5]}, {"a": 2, "c": []}]
    dataset = open_dataset(put(tmp_path / "x.jsonl", *rows))
    assert dataset.schema == pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.list_(pa.float64()))])
    assert rows_of(dataset) == [{"a": None, "b": None, "c": None} | row for row in rows]
    assert rows_of(dataset, 1, 3, ["c"]) == [{"c": [1.5]}, {"c": []}]
    assert errors_of(dataset) == {}
    (file,) = dataset.files
    assert (file.name, file.format, file.num_rows) == ("x.jsonl", "jsonl", 3)
    assert file.num_bytes == (tmp_path / "x.jsonl").stat().st_size


def test_types_come_from_all_rows(tmp_path: Path) -> None:
    """A column that is empty for the first 20 MB."""
    filler = "x" * 20_000
    rows = [{"tags": [], "system": None, "meta": {}, "x": filler} for _ in range(1200)]
    rows += [{"tags": ["late"], "system": "s", "meta": {"k": 1}, "x": ""}]
    dataset = open_dataset(put(tmp_path / "x.jsonl", *rows))
    assert dataset.schema.field("tags").type == pa.list_(pa.string())
    assert dataset.schema.field("system").type == pa.string()
    assert dataset.schema.field("meta").type == pa.struct([("k", pa.int64())])
    assert rows_of(dataset, 1199, 1201, ["tags", "system", "meta"]) == [
        {"tags": [], "system": None, "meta": {"k": None}},
        {"tags": ["late"], "system": "s", "meta": {"k": 1}},
    ]


def test_numbers_are_exact_and_text_stays_text(tmp_path: Path) -> None:
    ids = [9007199254740993, None, 9007199254740992, 1344800117571260417, -9223372036854775808]
    rows = [
        {"id": i, "u": 18446744073709551615, "big": 10**30, "s": "007", "date": "2020-01-01", "num": "12"} for i in ids
    ]
    dataset = open_dataset(put(tmp_path / "x.jsonl", *rows))
    kinds = {field.name: field.type for field in dataset.schema}
    assert kinds == {
        "id": pa.int64(),
        "u": pa.uint64(),
        "big": pa.decimal128(38, 0),
        "s": pa.string(),
        "date": pa.string(),
        "num": pa.string(),
    }
    got = rows_of(dataset)
    assert [row["id"] for row in got] == ids
    assert {(row["u"], int(row["big"]), row["s"], row["date"]) for row in got} == {
        (18446744073709551615, 10**30, "007", "2020-01-01")
    }


def test_whole_and_fractional_numbers_are_one_kind(tmp_path: Path) -> None:
    dataset = open_dataset(put(tmp_path / "x.jsonl", {"a": 1}, {"a": 1.5}, {"a": 2**53 + 1}, {"a": 2**53}))
    assert dataset.schema.field("a").type == pa.float64()
    assert [row["a"] for row in rows_of(dataset)] == [1.0, 1.5, None, 2.0**53]
    assert list(errors_of(dataset)) == [2]  # a double can't hold it: said, not rounded


@pytest.mark.parametrize("huge", [10**76, -(10**76), 10**400])
@pytest.mark.parametrize("others", [[1, -3], [1.5, 2], [2**64, 3], [10**76 - 1, 1 - 10**76]])
def test_a_number_beyond_all_types_is_an_error_of_its_row(tmp_path: Path, others: list[Any], huge: int) -> None:
    rows = [{"a": value, "b": {"c": [value]}} for value in [others[0], huge, others[1]]]
    dataset = open_dataset(put(tmp_path / "x.jsonl", *rows))
    assert list(errors_of(dataset)) == [1]
    got = [row["a"] for row in rows_of(dataset)]
    assert got == [others[0], None, others[1]] == [row["b"]["c"][0] for row in rows_of(dataset)]
    # Where there are no others, it is kept as text.
    dataset = open_dataset(put(tmp_path / "y.jsonl", {"a": huge}))
    assert [row["a"] for row in rows_of(dataset)] == [str(huge)] and list(errors_of(dataset)) == [0]


def test_prompts_of_all_kinds(tmp_path: Path) -> None:
    """Wrong kinds are errors of their rows; "nan", "null" and "None" are ordinary text."""
    prompts = ["hi", None, "", "   ", "\n", float("nan"), 123, True, [], {"a": 1}, "nan", "null", "None"]
    dataset = open_dataset(put(tmp_path / "x.jsonl", *({"prompt": p, "id": i} for i, p in enumerate(prompts))))
    assert dataset.schema.field("prompt").type == pa.string()
    errors = errors_of(dataset, 0, None, ["prompt"])
    assert list(errors) == [5, 6, 7, 8, 9]
    assert errors[6].startswith("column 'prompt' holds a number (123)")
    good = [row["prompt"] for i, row in enumerate(rows_of(dataset)) if i not in errors]
    assert good == ["hi", None, "", "   ", "\n", "nan", "null", "None"]
    assert errors_of(dataset, 0, None, ["id"]) == {}  # who does not ask for the column has no trouble
    assert rows_of(dataset)[7:10] == [
        {"prompt": "true", "id": 7},
        {"prompt": "[]", "id": 8},
        {"prompt": '{"a": 1}', "id": 9},
    ]  # as text nothing is lost


def test_one_odd_value_does_not_turn_a_column_into_text(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": [{"role": "user", "content": "x"}], "n": i} for i in range(20)]
    rows[3] = {"messages": "just text", "n": "many"}
    dataset = open_dataset(put(tmp_path / "x.jsonl", *rows))
    assert dataset.schema.field("messages").type == pa.list_(
        pa.struct([("role", pa.string()), ("content", pa.string())])
    )
    assert dataset.schema.field("n").type == pa.int64()
    assert list(errors_of(dataset, 0, None, ["messages"])) == [3]
    assert list(errors_of(dataset)) == [3]
    assert rows_of(dataset)[3] == {"messages": None, "n": None}
    assert rows_of(dataset)[4]["n"] == 4


def test_content_as_text_or_as_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "x"}]
    rows = [{"messages": [{"role": "user", "content": c}]} for c in ("plain", parts)]
    dataset = open_dataset(put(tmp_path / "x.jsonl", *rows))
    assert errors_of(dataset) == {
        1: "column 'messages' holds a list at [].content ("
        + json.dumps(parts)
        + ") where other rows make the type string"
    }
    assert json.loads(rows_of(dataset)[1]["messages"][0]["content"]) == parts


BAD_LINES = [
    (b'{"a": 1', "not JSON: Expecting ',' delimiter at character 8 of the line"),
    (b'{"a": 1 \r', "not JSON: Expecting ',' delimiter at character 8 of the line"),
    (b"[1, 2]", "not a JSON object but list"),
    (b"null", "not a JSON object but NoneType"),
    (b'"text"', "not a JSON object but str"),
    (b'{"a": "\xff\xfe"}', "not UTF-8: byte 0xff at position 7"),
    (b'{"a": "x\xc3"}', "not UTF-8"),
    (b"{" * 10, "not JSON"),
    (b'{"a": ' + b"[" * 100_000, "not JSON"),
    (b'{"a": ' + b"9" * 3_000 + b"}", "not JSON"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=[problem for _, problem in BAD_LINES])
def test_bad_lines_are_errors_of_their_rows(tmp_path: Path, line: bytes, problem: str) -> None:
    rows = [{"a": f"ok {i}", "b": i} for i in range(5)]
    dataset = open_dataset(put(tmp_path / "x.jsonl", *rows[:2], line, *rows[2:]))
    assert dataset.num_rows == 6
    errors = errors_of(dataset, 0, None, ["a"])
    assert list(errors) == [2]
    assert problem in errors[2]
    assert rows_of(dataset) == [*rows[:2], {"a": None, "b": None}, *rows[2:]]


def test_surrogates(tmp_path: Path) -> None:
    """Pairs become one character, lone halves U+FFFD; NUL, U+FFFE and combining marks stay."""
    marks = "e" + "\u0301" * 10_000
    lines = [
        r'{"a": "\ud800"}',
        r'{"a": "a\udc80b"}',
        r'{"a": "\ud83d\ude00"}',
        r'{"a": "\u0000"}',
        '{"a": "\ufffe"}',
        json.dumps({"a": marks}),
        r'{"a": "\ud83d", "k\ud800": ["\udc00"]}',
    ]
    dataset = open_dataset(put(tmp_path / "x.jsonl", *lines))
    got = rows_of(dataset)
    assert [row["a"] for row in got] == ["\ufffd", "a\ufffdb", "\U0001f600", "\0", "\ufffe", marks, "\ufffd"]
    assert got[-1]["k\ufffd"] == ["\ufffd"]
    for batch in read(dataset):
        batch.table.validate(full=True)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    dataset = open_dataset(put(tmp_path / "x.jsonl", b'\xef\xbb\xbf{"a": 1}', {"a": 2}))
    assert rows_of(dataset) == [{"a": 1}, {"a": 2}]
    assert errors_of(dataset) == {}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_unicode_encodings_are_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": "é"}\n', encoding=encoding)
    with pytest.raises(InputError, match=r"x\.jsonl is in UTF-.*byte offset 0.*iconv"):
        open_dataset(str(tmp_path))


def test_latin_1_is_refused_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": "plain"}\n{"a": "café"}\n{"a": "müde"}\n', encoding="latin-1")
    with pytest.raises(InputError, match=r"x\.jsonl is not UTF-8: byte offset 25 "):
        open_dataset(str(tmp_path))


def test_a_few_broken_lines_are_no_other_encoding(tmp_path: Path) -> None:
    broken = b'{"a": "\xff"}'
    assert open_dataset(put(tmp_path / "a.jsonl", broken, broken, {"a": "x"}, '{"a": "é"}')).num_rows == 4
    assert open_dataset(put(tmp_path / "b.jsonl", broken, *({"a": "x"} for _ in range(4)))).num_rows == 5


def test_what_is_no_json_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[\n {"a": 1},\n {"a": 2}\n]\n')
    with pytest.raises(InputError, match=r"x\.json is not JSON Lines.*jq"):
        open_dataset(str(tmp_path / "x.json"))


def test_blank_lines_are_no_rows_and_the_last_newline_may_lack(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'\n{"a": 1}\r\n  \n\n{"a": 2}')
    dataset = open_dataset(str(tmp_path))
    assert rows_of(dataset) == [{"a": 1}, {"a": 2}]
    assert rows_of(dataset, 1) == [{"a": 2}]


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"")
    dataset = open_dataset(str(tmp_path))
    assert dataset.num_rows == 0
    assert rows_of(dataset) == []


ROWS = [{"id": i, "text": f"row {i} " + "x" * (i % 50), "é": [i]} for i in range(3_000)]


@pytest.fixture(scope="module", params=["", ".gz", ".zst", "two.gz", "two.zst"])
def big(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    halves = [data] if "two" not in request.param else [data[:100_001], data[100_001:]]
    pack = {"": bytes, "gz": gzip.compress, "zst": zstandard.compress}[request.param.rpartition(".")[2]]
    path = tmp_path_factory.mktemp("big") / f"x.jsonl{request.param.removeprefix('two')}"
    path.write_bytes(b"".join(pack(half) for half in halves))
    return str(path)


@given(start=st.integers(0, 3_000), length=st.integers(0, 2_000))
@settings(max_examples=8, deadline=None)
def test_any_slice(big: str, start: int, length: int) -> None:
    dataset = open_dataset(big)
    assert dataset.num_rows == 3_000
    assert rows_of(dataset, start, start + length) == ROWS[start : start + length]


def test_the_seek_index_is_used_and_kept(big: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    dataset = open_dataset(big, cache_dir=str(cache))
    (index,) = cache.iterdir()
    monkeypatch.setattr(jsonl_module, "_scan", lambda *_: pytest.fail("scanned again"))
    assert open_dataset(big, cache_dir=str(cache)) == dataset
    close_cursors()
    parsed = []
    parse = jsonl_module.parse_line
    monkeypatch.setattr(jsonl_module, "parse_line", lambda line: parsed.append(1) or parse(line))
    assert rows_of(dataset, 2_900, 2_910, ["id"]) == [{"id": i} for i in range(2_900, 2_910)]
    assert len(parsed) == 100  # lines on the way are not parsed
    index.unlink()  # a lost index costs time only
    close_cursors()
    assert rows_of(dataset, 2_900, 2_910, ["id"]) == [{"id": i} for i in range(2_900, 2_910)]


def test_a_seek_index_that_does_not_fit_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchinfer.data.sources.EDGE_BYTES", 1_000)
    path = put(tmp_path / "x.jsonl", *ROWS)
    dataset = open_dataset(path, cache_dir=str(tmp_path / "cache"))
    text = Path(path).read_text()
    early, late = text.index("\n", len(text) // 4), text.index(": ", len(text) // 4 * 3) + 1
    # The same size and ends; lines between lie one byte further on.
    Path(path).write_text(text[:early] + " \n" + text[early + 1 : late] + text[late + 1 :])
    assert open_dataset(path).files[0].fingerprint == dataset.files[0].fingerprint
    close_cursors()
    assert rows_of(dataset, 2_000, 2_010) == ROWS[2_000:2_010]
    assert "does not fit its file" in caplog.text


def test_without_a_seek_index_rising_slices_are_one_pass(big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(big)
    close_cursors()
    opened = []
    original = jsonl_module.iter_jsonl
    monkeypatch.setattr(jsonl_module, "iter_jsonl", lambda *a: opened.append(a[3].row) or original(*a))
    for start in range(0, 3_000, 1_000):
        assert rows_of(dataset, start, start + 500, ["id"])[0] == {"id": start}
    assert opened == [0]


def test_limit_stops_the_scan(big: str, tmp_path: Path) -> None:
    for _ in range(2):
        dataset = open_dataset(big, limit=10, cache_dir=str(tmp_path))
        assert rows_of(dataset) == ROWS[:10]
    assert open_dataset(big, cache_dir=str(tmp_path)).num_rows == 3_000


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_cut_short_is_refused(tmp_path: Path, ending: str) -> None:
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    packed = gzip.compress(data) if ending == ".gz" else zstandard.compress(data)
    (tmp_path / f"x.jsonl{ending}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=rf"x\.jsonl{ending} can't be read"):
        open_dataset(str(tmp_path))


def test_mixed_columns_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "batchinfer.data"):
        open_dataset(put(tmp_path / "x.jsonl", {"a": 1, "b": 1}, {"a": "x", "b": 2}))
    assert "column 'a' has values of several kinds; it is read as string" in caplog.text
    assert "'b'" not in caplog.text


def test_a_changed_file_has_another_fingerprint(tmp_path: Path) -> None:
    before = open_dataset(put(tmp_path / "x.jsonl", *ROWS)).files[0].fingerprint
    assert open_dataset(put(tmp_path / "x.jsonl", *ROWS)).files[0].fingerprint == before
    assert open_dataset(put(tmp_path / "x.jsonl", *ROWS[1:])).files[0].fingerprint != before
    assert open_dataset(put(tmp_path / "x.jsonl", *ROWS[:-1])).files[0].fingerprint != before


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), JSON_VALUES, min_size=1), min_size=1, max_size=12))
@settings(max_examples=80, deadline=None)
def test_any_json_can_be_read(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("any") / "x.jsonl"
    dataset = open_dataset(put(path, *rows))
    assert dataset.num_rows == len(rows)
    got, errors = rows_of(dataset), errors_of(dataset)
    for batch in read(dataset):
        batch.table.validate(full=True)
    assert len(got) == len(rows)
    for i, (row, out) in enumerate(zip(rows, got, strict=True)):
        for name, value in row.items():
            if value is None or isinstance(value, (bool, int, str)):
                assert out[name] == value or i in errors


@pytest.mark.parametrize(
    ("used_as", "good", "bad"),
    [
        ("objects", [{"role": "user", "content": "hi"}], ["text", 3, {"role": "user"}, ["text"], True]),
        ("numbers", [1, 2], ["1", 2, ["x"], ["x", "y"], {"a": 1}, [1, 10**80]]),
        ("text", "hi", [3, 1.5, True, ["x"], {"a": 1}]),
        ("number", 5, ["5", True, [5], {"a": 1}, 10**80, -(10**90)]),
        ("object", {"a": 1}, ["x", 1, [[1, 2]]]),
    ],
)
def test_wrong_values_in_a_used_column_spoil_no_good_row(
    tmp_path: Path, used_as: Any, good: Any, bad: list[Any]
) -> None:
    """Even where the wrong ones are many more: the column's kind is what it is used as."""
    rows = [{"x": good}, *({"x": value} for value in bad), {"x": None}, {"x": good}]
    path = put(tmp_path / "x.jsonl", *rows)
    dataset = open_dataset(path, used_as={"x": used_as})
    assert sorted(errors_of(dataset)) == list(range(1, len(bad) + 1))
    got = [row["x"] for row in rows_of(dataset)]
    assert got[0] == got[-1] and got[-2] is None
    assert good == (got[0] if used_as != "objects" else [{k: v for k, v in got[0][0].items() if v is not None}])


def test_how_a_column_is_used_belongs_to_the_seek_index(tmp_path: Path) -> None:
    path = put(tmp_path / "x.jsonl", {"x": 1}, {"x": "a"}, {"x": "b"})
    for used_as, kind in (({}, pa.string()), ({"x": "number"}, pa.int64()), ({}, pa.string())):
        assert open_dataset(path, cache_dir=str(tmp_path / "c"), used_as=used_as).schema.field("x").type == kind  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [47, 49, 400, 900, 5_000])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
def test_rows_nested_without_end_are_rows_with_an_error(tmp_path: Path, depth: int, opens: str, closes: str) -> None:
    deep = '{"prompt": "a", "x": ' + opens * depth + "1" + closes * depth + "}"
    dataset = open_dataset(put(tmp_path / "x.jsonl", {"prompt": "b"}, deep, {"prompt": "c"}))
    assert [row["prompt"] for row in rows_of(dataset)] == ["b", "a" if depth < 48 else None, "c"]
    assert list(errors_of(dataset)) == ([] if depth < 48 else [1])
    pa.ipc.read_schema(dataset.schema.serialize())


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("x.jsonl", b"PAR1....PAR1", "is a Parquet file, not JSON Lines"),
        ("x.jsonl", b"ARROW1\0\0", "is an Arrow file, not JSON Lines"),
        ("x.jsonl", gzip.compress(b'{"a": 1}\n'), r"is packed by gzip, not JSON Lines; name it \.jsonl\.gz"),
        ("x.jsonl", zstandard.compress(b'{"a": 1}\n'), r"is packed by zstd, not JSON Lines; name it \.jsonl\.zst"),
        ("x.json", b"PK\x03\x04", "is a zip archive"),
        ("x.jsonl.gz", b'{"a": 1}\n', "can't be read: .*; it is no whole gzip file"),
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n') + b"junk", "it is no whole gzip file"),
        ("x.jsonl.zst", b'{"a": 1}\n', "it is no whole zstd file"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=says) as caught:
        open_dataset(str(tmp_path))
    assert name in str(caught.value)
