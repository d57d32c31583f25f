"""Files of one dataset with different schemas: widened where possible, else refused with names."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.dataset import open_dataset
from batchinfer.data.rows import check_text
from batchinfer.data.schema import TypeClash, conform, plain_type, unite, unite_types
from batchinfer.errors import InputError
from batchinfer.testing.fuzzing.arrow_values import any_type, array_of
from batchinfer.types.rows import ErrorClass


def message(*names: str) -> pa.DataType:
    return pa.list_(pa.struct([(name, pa.string()) for name in names]))


def test_the_four_files(tmp_path: Path) -> None:
    chat = [[{"role": "user", "content": "x"}]]
    extra = [[{"role": "user", "content": "x", "name": "n"}]]
    files = {
        "f1": pa.table(
            {"prompt": ["a"], "system": pa.nulls(1), "id": [1], "messages": pa.array(chat, message("role", "content"))}
        ),
        "f2": pa.table({"id": [2], "prompt": ["b"], "system": ["s"]}),
        "f3": pa.table(
            {
                "prompt": pa.array(["c"], pa.large_string()),
                "src": ["web"],
                "messages": pa.array(extra, message("content", "role", "name")),
                "id": [3],
            }
        ),
        "f4": pa.table(
            {"prompt": pa.array(["d"]).dictionary_encode(), "system": ["t"], "id": pa.array([4], pa.int32())}
        ),
    }
    for name, table in files.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
    dataset = open_dataset(str(tmp_path))
    assert dataset.schema == pa.schema(
        [
            ("prompt", pa.large_string()),
            ("system", pa.string()),
            ("id", pa.int64()),
            ("messages", message("role", "content", "name")),
            ("src", pa.string()),
        ]
    )
    rows = []
    for file in dataset.files:
        for batch in dataset.read(file.index):
            assert batch.table.schema == dataset.schema
            assert not batch.errors
            batch.table.validate(full=True)
            rows += batch.to_rows()
    chat_out = [{"role": "user", "content": "x", "name": None}]
    assert rows == [
        {"prompt": "a", "system": None, "id": 1, "messages": chat_out, "src": None},
        {"prompt": "b", "system": "s", "id": 2, "messages": None, "src": None},
        {"prompt": "c", "system": None, "id": 3, "messages": extra[0], "src": "web"},
        {"prompt": "d", "system": "t", "id": 4, "messages": None, "src": None},
    ]


def test_incompatible_types_are_refused_with_file_column_and_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": [1]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"column 'prompt': int64 in b\.parquet, but string in a\.parquet"):
        open_dataset(str(tmp_path))
    with pytest.raises(InputError, match=r"'m' \(field \[\]\.content\): int64 in two, but string in one"):
        content = [pa.schema([("m", pa.list_(pa.struct([("content", t)])))]) for t in (pa.string(), pa.int64())]
        unite([("one", content[0]), ("two", content[1])])


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match=r"x\.parquet has two columns called 'a'"):
        unite([("x.parquet", pa.schema([("a", pa.int8()), ("a", pa.int8())]))])


S, D = pa.string(), pa.dictionary
WIDENINGS = [
    (pa.null(), S, S),
    (pa.int8(), pa.int64(), pa.int64()),
    (pa.uint8(), pa.int8(), pa.int16()),
    (pa.uint32(), pa.int32(), pa.int64()),
    (pa.uint64(), pa.int64(), pa.decimal128(20, 0)),
    (pa.float16(), pa.float32(), pa.float32()),
    (pa.int32(), pa.float32(), pa.float64()),
    (S, pa.large_string(), pa.large_string()),
    (pa.string_view(), S, S),
    (pa.binary(), pa.binary(4), pa.binary()),
    (D(pa.int8(), S), S, S),
    (D(pa.int8(), S), D(pa.int32(), S), D(pa.int32(), S)),
    (D(pa.int8(), S), D(pa.int8(), pa.large_string()), pa.large_string()),
    (D(pa.int8(), S), pa.null(), D(pa.int8(), S)),
    (pa.decimal128(10, 2), pa.decimal128(10, 4), pa.decimal128(12, 4)),
    (pa.decimal128(38, 2), pa.decimal128(38, 10), pa.decimal256(46, 10)),
    (pa.int64(), pa.decimal128(5, 2), pa.decimal128(22, 2)),
    (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
    (pa.duration("s"), pa.duration("ns"), pa.duration("ns")),
    (pa.time32("s"), pa.time64("us"), pa.time64("us")),
    (pa.date32(), pa.date64(), pa.date64()),
    (pa.list_(pa.null()), pa.list_(S), pa.list_(S)),
    (pa.list_(pa.int8()), pa.large_list(pa.int16()), pa.large_list(pa.int16())),
    (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), pa.list_(pa.int8())),
    (pa.map_(S, pa.int8()), pa.map_(S, pa.int32()), pa.map_(S, pa.int32())),
    (pa.struct([("a", S)]), pa.struct([("b", S)]), pa.struct([("a", S), ("b", S)])),
]


@pytest.mark.parametrize(("a", "b", "united"), WIDENINGS, ids=str)
def test_widening(a: pa.DataType, b: pa.DataType, united: pa.DataType) -> None:
    assert unite_types(a, b) == united
    if not (pa.types.is_struct(a)):
        assert unite_types(b, a) == united
    for kind in (a, b, united):
        nothing = conform(pa.nulls(3, kind), united)
        assert nothing.type == united
        assert nothing.null_count == 3
        assert conform(pa.nulls(0, kind), united).type == united


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (S, pa.int64()),
        (S, pa.bool_()),
        (pa.int8(), pa.bool_()),
        (S, pa.binary()),
        (pa.timestamp("s", "UTC"), pa.timestamp("s")),
        (pa.timestamp("s"), pa.date32()),
        (pa.list_(S), S),
        (pa.struct([("a", S)]), pa.map_(S, S)),
        (pa.list_(S), pa.list_(pa.int8())),
    ],
    ids=str,
)
def test_clashes(a: pa.DataType, b: pa.DataType) -> None:
    with pytest.raises(TypeClash):
        unite_types(a, b)


def test_values_keep_their_places_when_conformed() -> None:
    kind = pa.list_(pa.struct([("a", pa.int8())]))
    array = pa.array([[{"a": 1}], None, [], [None, {"a": 2}], [{"a": 3}]], kind)
    target = pa.large_list(pa.struct([("a", pa.int64()), ("b", pa.string())]))
    for start in range(5):
        got = conform(array.slice(start), target)
        assert got.type == target
        expected = [
            None if row is None else [None if entry is None else {**entry, "b": None} for entry in row]
            for row in array.slice(start).to_pylist()
        ]
        assert got.to_pylist() == expected
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2))
    assert conform(fixed.slice(1), pa.list_(pa.int32())).to_pylist() == [None, [3, 4]]
    maps = pa.array([[("a", 1)], None, [("b", 2)]], pa.map_(S, pa.int8()))
    assert conform(maps.slice(1), pa.map_(S, pa.int32())).to_pylist() == [None, [("b", 2)]]


def _wrapped(rng: Random, kind: pa.DataType) -> pa.DataType:
    makers = (
        lambda: pa.list_(kind, rng.choice((0, 1, 3))),
        lambda: pa.map_(pa.string(), kind),
        lambda: pa.struct([("a", kind), ("b", pa.int8())]),
        lambda: pa.list_(kind),
        lambda: pa.list_view(kind),
    )
    return rng.choice(makers)()


def _with_nulls(rng: Random, array: pa.Array) -> pa.Array:
    """Fixed-size lists and maps with nulls that have values under them."""
    mask = pa.array([rng.random() < 0.3 for _ in range(len(array))], pa.bool_())
    if pa.types.is_fixed_size_list(array.type):
        return pa.FixedSizeListArray.from_arrays(array.values, type=array.type, mask=mask)
    if pa.types.is_map(array.type):
        offsets = pa.array(array.offsets.to_numpy().copy())
        return pa.MapArray.from_arrays(offsets, array.keys, array.items, type=array.type, mask=mask)
    return array


@pytest.mark.parametrize("inner", [*map(str, range(8)), "runs", "dictionary", "view", "extension in runs"])
def test_nested_values_of_any_types_keep_their_places(inner: str) -> None:
    """Whole and in slices, with nulls and without, empty and not: Arrow's own functions fail at some of these."""
    kinds = {
        "runs": pa.run_end_encoded(pa.int16(), pa.decimal256(76, 38)),
        "dictionary": pa.dictionary(pa.int8(), pa.string()),
        "view": pa.string_view(),
        "extension in runs": pa.list_(pa.run_end_encoded(pa.int32(), pa.json_())),
    }
    seen = 0
    for seed in range(150):
        rng = Random(f"{inner} {seed}")
        kind = kinds.get(inner) or any_type(rng)
        for _ in range(rng.randint(1, 3)):
            kind = _wrapped(rng, kind)
        if any(word in str(kind) for word in ("union", "marked", "uuid")):  # Python sees them otherwise
            continue
        size = rng.choice((0, 1, 5, 9))
        try:
            array = array_of(rng, kind, size)
            array = _with_nulls(rng, array) if rng.random() < 0.5 else array
            array.validate(full=True)
            expected = array.to_pylist()
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue  # pyarrow can't make it, or Python can't hold it
        start = rng.randint(0, size)
        stop = rng.randint(start, size)
        for first, last in ((0, size), (start, stop), *((i, i + 1) for i in range(size))):
            got = conform(array.slice(first, last - first), plain_type(kind))
            got.validate(full=True)
            assert got.type == plain_type(kind)
            assert repr(got.to_pylist()) == repr(expected[first:last]), (kind, first, last)  # NaN is NaN
        seen += 1
    assert seen > 40


LISTS = {
    "fixed": (lambda kind: pa.list_(kind, 2), lambda value: [value, value]),
    "view": (pa.list_view, lambda value: [value]),
    "large view": (pa.large_list_view, lambda value: [value]),
    "list": (pa.list_, lambda value: [value]),
    "large list": (pa.large_list, lambda value: [value]),
    "map": (lambda kind: pa.map_(pa.string(), kind), lambda value: [("k", value)]),
    "struct": (lambda kind: pa.struct([("a", kind)]), lambda value: {"a": value}),
}


@pytest.mark.parametrize("outer", LISTS)
@pytest.mark.parametrize("inner", LISTS)
def test_null_structs_in_lists_of_any_kind_are_no_errors(outer: str, inner: str) -> None:
    """Arrow itself puts indices into no dictionary under them."""
    kind = pa.struct([("f", pa.dictionary(pa.int16(), pa.string()))])
    (make_outer, put_outer), (make_inner, put_inner) = LISTS[outer], LISTS[inner]
    value = put_outer(put_inner(None))
    array = pa.array([value, None, value], make_outer(make_inner(kind)))
    with pytest.raises(pa.ArrowInvalid, match="Dictionary indices invalid"):
        array.validate(full=True)
    table, errors = check_text(0, pa.record_batch({"x": array}))
    assert not errors
    assert table["x"].to_pylist() == [value, None, value]
    table.validate(full=True)


def test_a_value_that_does_not_fit_is_an_error_of_its_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2**53 + 1, None, 3]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [0.5]}), tmp_path / "b.parquet")
    dataset = open_dataset(str(tmp_path))
    (batch,) = dataset.read(0)
    assert batch.table["x"].to_pylist() == [1.0, None, None, 3.0]
    assert list(batch.errors) == [1]
    assert batch.errors[1].error_class == ErrorClass.INVALID_ROW
    assert "9007199254740993" in batch.errors[1].message


def test_times_keep_their_instant(tmp_path: Path) -> None:
    early = datetime.datetime(1, 1, 1)
    pq.write_table(pa.table({"x": pa.array([early], pa.timestamp("us"))}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.array([1], pa.timestamp("ns"))}), tmp_path / "b.parquet")
    dataset = open_dataset(str(tmp_path))
    assert dataset.schema.field("x").type == pa.timestamp("ns")
    (batch,) = dataset.read(0)
    assert list(batch.errors) == [0]  # year 1 has no nanoseconds in 64 bits: said, not wrapped around


def test_metadata_of_other_programs_is_dropped(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("x", pa.int8(), False, {"unit": "m"})], {"huggingface": "{}", "pandas": "{}"})
    pq.write_table(pa.table({"x": [1]}, schema=schema), tmp_path / "a.parquet")
    united = open_dataset(str(tmp_path)).schema
    assert united.metadata is None
    assert united.field("x").nullable
    assert united.field("x").metadata == {b"unit": b"m"}


def test_several_formats_are_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"x": 2}\n')
    (tmp_path / "README.md").write_text("hello")
    with caplog.at_level(logging.WARNING, "batchinfer.data"):
        dataset = open_dataset(str(tmp_path))
    assert dataset.num_rows == 2
    assert "several formats" in caplog.text
    assert "README.md" in caplog.text


REQUIRED = {
    pa.int16(): 5,
    pa.time32("ms"): datetime.time(1),
    pa.string(): "s",
    pa.bool_(): True,
    pa.decimal128(15, 0): 7,
    pa.dictionary(pa.int32(), pa.string()): "d",
    pa.struct([pa.field("deep", pa.binary(), False)]): {"deep": b"b"},
}


@pytest.mark.parametrize("kind", REQUIRED, ids=str)
@pytest.mark.parametrize("around", ["struct", "list", "fixed", "map"])
def test_fields_that_can_not_be_null_have_values_where_what_holds_them_is_null(
    tmp_path: Path, kind: pa.DataType, around: str
) -> None:
    """Else Parquet does not take them, also not as they were read."""
    part = pa.struct([pa.field("must", kind, False), pa.field("may", pa.int8())])
    whole = {
        "struct": pa.struct([("x", part)]),
        "list": pa.list_(part),
        "fixed": pa.list_(part, 1),
        "map": pa.map_(pa.string(), part),
    }[around]
    must = pa.array([REQUIRED[kind], None, None, REQUIRED[kind]], kind)  # as readers leave it
    items = pa.StructArray.from_arrays(
        [must, pa.array([1, None, 3, None], pa.int8())], fields=list(part), mask=pa.array([False, True, True, False])
    )
    array = {
        "struct": lambda: pa.StructArray.from_arrays([items], ["x"], mask=pa.array([False, False, True, False])),
        "list": lambda: pa.ListArray.from_arrays(pa.array([0, 2, 2, 3, 4], pa.int32()), items, type=whole),
        "fixed": lambda: pa.FixedSizeListArray.from_arrays(
            items, type=whole, mask=pa.array([False, False, True, False])
        ),
        "map": lambda: pa.MapArray.from_arrays(pa.array([0, 2, 2, 3, 4], pa.int32()), pa.array(list("abcd")), items),
    }[around]()
    wanted = array.to_pylist()
    for start in range(4):
        got = conform(array.slice(start), whole)
        assert got.type == whole and got.to_pylist() == wanted[start:]
        pq.write_table(pa.table([got], names=["x"]), tmp_path / "x.parquet")
        back = conform(pq.read_table(tmp_path / "x.parquet")["x"].combine_chunks(), whole)
        assert back.to_pylist() == wanted[start:]
        pq.write_table(pa.table([back], names=["x"]), tmp_path / "y.parquet")


def test_fields_that_can_not_be_null_have_values_under_null_structs(tmp_path: Path) -> None:
    """Else Parquet does not take them."""
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array(["a", "b"]))
    fields = [pa.field("code", codes.type, False), pa.field("more", pa.int8())]
    array = pa.StructArray.from_arrays(
        [codes, pa.array([1, None, 3], pa.int8())], fields=fields, mask=pa.array([True, False, True])
    )
    target = pa.struct([pa.field("code", pa.dictionary(pa.int32(), pa.string()), False), pa.field("more", pa.int64())])
    for start in range(3):
        got = conform(array.slice(start), target)
        assert got.to_pylist() == [None, {"code": "b", "more": None}, None][start:]
        pq.write_table(pa.table([got], names=["x"]), tmp_path / "x.parquet")
        assert pq.read_table(tmp_path / "x.parquet")["x"].to_pylist() == got.to_pylist()


@pytest.mark.parametrize(
    "values", [pa.array([1, 2], pa.int8()), pa.nulls(2), pa.array(["1", "2"], pa.json_())], ids=str
)
def test_runs_in_null_structs_are_left_as_they_are(values: pa.Array) -> None:
    """Arrow's own way to a struct's fields gives them a null bitmap, which runs can't have."""
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int16()), values)
    fields = [pa.field("runs", runs.type), pa.field("n", pa.int8(), False)]
    array = pa.StructArray.from_arrays(
        [runs, pa.array([1, 2, 3], pa.int8())], fields=fields, mask=pa.array([False, True, False])
    )
    target = pa.struct([pa.field("runs", runs.type), pa.field("n", pa.int64())])
    got = conform(array, target)
    got.validate(full=True)
    assert got.is_null().to_pylist() == [False, True, False] and got.field(1).to_pylist()[::2] == [1, 3]
    assert got.field(0).values.equals(values)


def test_nested_names_that_are_no_text_are_found_however_long_the_type_is(tmp_path: Path) -> None:
    kind = pa.struct([("x" * 500, pa.int8()), ("evil", pa.list_(pa.struct([("name_is_bad", pa.int8())])))])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("prompt", pa.string()), ("s", kind)])):
        pass
    (tmp_path / "a.arrow").write_bytes(sink.getvalue().to_pybytes().replace(b"name_is_bad", b"name_is_\xff\xfe\xfd"))
    with pytest.raises(InputError, match="not UTF-8 text"):
        open_dataset(str(tmp_path))


def _broken_text(count: int) -> pa.Array:
    """Strings of one byte each, none of them UTF-8."""
    offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int32))
    return pa.Array.from_buffers(pa.string(), count, [None, offsets, pa.py_buffer(b"\xff" * count)])


def _laid(kind: pa.DataType, numbers: list[npt.NDArray[Any]], children: list[pa.Array]) -> pa.Array:
    return pa.Array.from_buffers(kind, 2, [None, *map(pa.py_buffer, numbers)], children=children)


def _runs(numbers: list[npt.NDArray[Any]]) -> pa.Array:
    return _laid(pa.run_end_encoded(pa.int32(), TEXT), [], [_laid(pa.int32(), numbers, []), TEXTS])


TEXT, TEXTS = pa.string(), _broken_text(2)
PAIRS = pa.StructArray.from_arrays([pa.array(["k", "l"]), TEXTS], names=["key", "value"])
# How an array is made of the numbers that say where its values are: right ones, then wrong ones.
BEYOND: dict[str, tuple[Callable[[list[npt.NDArray[Any]]], pa.Array], str, list[list[int]], list[list[int]]]] = {
    "list: beyond": (lambda at: _laid(pa.list_(TEXT), at, [TEXTS]), "int32", [[0, 1, 2]], [[0, 1, 9]]),
    "list: back": (lambda at: _laid(pa.list_(TEXT), at, [TEXTS]), "int32", [[0, 1, 2]], [[0, 2, 1]]),
    "list: before": (lambda at: _laid(pa.list_(TEXT), at, [TEXTS]), "int32", [[0, 1, 2]], [[-1, 1, 2]]),
    "large list": (lambda at: _laid(pa.large_list(TEXT), at, [TEXTS]), "int64", [[0, 1, 2]], [[0, 1 << 62, 2]]),
    "list view": (
        lambda at: _laid(pa.list_view(TEXT), at, [TEXTS]),
        "int32",
        [[0, 1], [1, 1]],
        [[0, 1], [1, 2**31 - 1]],
    ),
    "large list view": (
        lambda at: _laid(pa.large_list_view(TEXT), at, [TEXTS]),
        "int64",
        [[0, 1], [1, 1]],
        [[0, 1], [1, 2**63 - 1]],
    ),
    "map": (lambda at: _laid(pa.map_(TEXT, TEXT), at, [PAIRS]), "int32", [[0, 1, 2]], [[0, 1, 3]]),
    "runs: back": (_runs, "int32", [[1, 2]], [[2, 1]]),
    "runs: short": (_runs, "int32", [[1, 2]], [[0, 1]]),
    "union": (lambda at: pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [TEXTS]), "int32", [], []),
}


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a list"])
@pytest.mark.parametrize("name", BEYOND)
def test_a_broken_value_does_not_hide_values_that_are_not_there(name: str, nested: bool) -> None:
    """Arrow tells of the text alone. Touched, such an array ends the process."""
    make, dtype, right, wrong = BEYOND[name]
    numbers = [np.array(places, dtype) for places in right]
    array = make(numbers)
    if nested:
        places = pa.py_buffer(np.array([0, 2], np.int32))
        array = pa.Array.from_buffers(pa.list_(array.type), 1, [None, places], children=[array])
    for buffer, places in zip(numbers, wrong, strict=True):
        buffer[:] = places  # behind Arrow's back, as in a damaged file
    with pytest.raises(pa.ArrowInvalid):
        check_text(0, pa.RecordBatch.from_arrays([array], names=["x"]))


def test_broken_text_beside_what_can_not_be_taken_apart_is_said() -> None:
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16], pa.binary(16)))
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), uuids)
    array = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), _broken_text(2), runs)
    with pytest.raises(pa.ArrowInvalid, match=r"column 'x' holds text that is not UTF-8.*output\.columns"):
        check_text(0, pa.RecordBatch.from_arrays([array], names=["x"]))
