"""The output's columns: clashes are refused with the list of them, types are those that come back."""

from __future__ import annotations

import io
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.layout import output_schema, storable
from batchinfer.errors import InputError


def schema(*names: str) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in names])


def test_input_columns_first_then_results() -> None:
    layout = output_schema(schema("b", "a"), token_ids=True, logprobs=True)
    counts = ["prompt_tokens", "completion_tokens"]
    results = ["source_file", "source_row", "completion", "finish_reason", *counts, "error", "token_ids", "logprobs"]
    assert layout.schema.names == ["b", "a", *results]
    assert layout.input_columns == ("b", "a")
    assert layout.schema.field("completion").type == pa.string()
    assert layout.schema.field("error").type == pa.struct([("class", pa.string()), ("message", pa.string())])
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout.describe()["columns"]["source_row"] == "int64"  # type: ignore[index]


def test_with_several_samples_their_columns_are_lists() -> None:
    layout = output_schema(schema(), lists=True, token_ids=True)
    kinds = {field.name: field.type for field in layout.schema}
    assert kinds["completion"] == kinds["finish_reason"] == pa.list_(pa.string())
    assert kinds["completion_tokens"] == pa.list_(pa.int32())
    assert kinds["token_ids"] == pa.list_(pa.list_(pa.int32()))
    assert kinds["prompt_tokens"] == pa.int32()


def test_columns_can_be_chosen() -> None:
    layout = output_schema(schema("a", "b", "completion"), ["b"])
    assert layout.schema.names[:2] == ["b", "source_file"]
    assert output_schema(schema("a"), []).input_columns == ()
    with pytest.raises(
        InputError, match=r"output\.columns names 'c', which the input does not have; its columns are: a, b"
    ):
        output_schema(schema("a", "b"), ["a", "c"])
    with pytest.raises(InputError, match="'a' twice"):
        output_schema(schema("a", "b"), ["a", "a"])


def test_all_clashes_are_listed() -> None:
    with pytest.raises(InputError) as caught:
        output_schema(
            schema(
                "prompt",
                "id",
                "text",
                "output",
                "finish_reason",
                "logprobs",
                "error",
                "__row_index__",
                "Completion",
                "",
                "a.b",
            ),
            logprobs=True,
        )
    message = str(caught.value)
    assert "'finish_reason', 'logprobs', 'error', 'Completion' (as 'completion')" in message
    assert "output.prefix (for instance 'out_'" in message
    assert "'prompt'" not in message and "'id'" not in message


def test_only_columns_that_are_written_clash() -> None:
    output_schema(schema("logprobs", "token_ids"))
    with pytest.raises(InputError, match="'token_ids'"):
        output_schema(schema("token_ids"), token_ids=True)
    with pytest.raises(InputError, match=r"'out_error'.*for instance 'batchinfer_'"):
        output_schema(schema("error", "out_error"), prefix="out_")


def test_own_output_as_input_takes_a_prefix() -> None:
    first = output_schema(schema("prompt")).schema
    with pytest.raises(InputError, match=r"source_file.*source_row.*completion"):
        output_schema(first)
    second = output_schema(first, prefix="second_")
    assert second.schema.names[-1] == "second_error"
    assert second.result_columns[0] == ("source_file", "second_source_file")
    third = output_schema(second.schema, prefix="third_")
    assert len(set(third.schema.names)) == len(third.schema.names) == 22


def test_odd_names_pass(caplog: pytest.LogCaptureFixture) -> None:
    layout = output_schema(schema("", "a.b", "A", "a", "é"))
    assert layout.input_columns == ("", "a.b", "A", "a", "é")
    assert "'A' and 'a' differ only in case" in caplog.text


S = pa.string()
STORED = [
    (pa.timestamp("s"), pa.timestamp("ms")),
    (pa.timestamp("s", "Europe/Berlin"), pa.timestamp("ms", "Europe/Berlin")),
    (pa.time32("s"), pa.time32("ms")),
    (pa.date64(), pa.date32()),
    (pa.dictionary(pa.int8(), pa.int64()), pa.int64()),
    (pa.dictionary(pa.int8(), pa.large_string()), pa.dictionary(pa.int8(), S)),
    (pa.list_(pa.dictionary(pa.int8(), S)), pa.list_(pa.dictionary(pa.int32(), S))),
    (pa.run_end_encoded(pa.int32(), S), S),
    (pa.struct([("t", pa.list_(pa.timestamp("s")))]), pa.struct([("t", pa.list_(pa.timestamp("ms")))])),
    (pa.map_(S, pa.time32("s")), pa.map_(S, pa.time32("ms"))),
]
KEPT = [
    *(pa.null(), pa.bool_(), pa.int8(), pa.uint8(), pa.uint32(), pa.uint64(), pa.float16(), pa.float32()),
    *(S, pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary(3), pa.binary_view()),
    *(pa.date32(), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.timestamp("ms"), pa.timestamp("us")),
    *(pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.duration("s"), pa.duration("ns"), pa.decimal128(38, 10)),
    *(pa.decimal256(60, 3), pa.decimal32(5, 2), pa.dictionary(pa.int8(), S), pa.dictionary(pa.uint16(), pa.binary())),
    *(
        pa.dictionary(pa.int32(), S, True),
        pa.list_(S),
        pa.large_list(S),
        pa.list_(pa.float32(), 3),
        pa.list_(pa.null()),
    ),
    *(pa.map_(S, pa.int8()), pa.struct([("a", pa.struct([("b", pa.null())]))]), pa.uuid(), pa.json_()),
]


@pytest.mark.parametrize(("kind", "stored"), [*STORED, *((kind, kind) for kind in KEPT)], ids=str)
def test_the_stored_type_is_what_comes_back(kind: pa.DataType, stored: pa.DataType) -> None:
    assert storable(kind) == stored
    sink = io.BytesIO()
    pq.write_table(pa.schema([("x", stored)]).empty_table(), sink)
    assert pq.read_schema(sink).field("x").type == stored
    assert storable(stored) == stored


@pytest.mark.parametrize(
    "kind",
    [pa.struct([]), pa.list_(pa.struct([])), pa.month_day_nano_interval(), pa.dense_union([pa.field("a", S)])],
    ids=str,
)
def test_what_parquet_cannot_hold_is_refused_by_column(kind: pa.DataType) -> None:
    with pytest.raises(InputError, match=r"input column 'odd' can't be carried along.*output\.columns"):
        output_schema(pa.schema([("odd", kind)]))
    output_schema(pa.schema([("odd", kind), ("a", S)]), ["a"])


def test_changed_types_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    output_schema(pa.schema([("when", pa.timestamp("s")), ("a", S)]))
    assert "column 'when' is timestamp[s] and becomes timestamp[ms] in Parquet" in caplog.text
    assert "'a'" not in caplog.text


@pytest.mark.parametrize("scale", [-2, 6])
def test_decimals_that_parquet_can_not_hold_are_refused(scale: int) -> None:
    schema = pa.schema({"x": pa.list_(pa.decimal128(5, scale))})
    with pytest.raises(InputError, match=r"'x' can't be carried along.*decimal128\(5, "):
        output_schema(schema)
    assert output_schema(schema, columns=()).input_columns == ()
