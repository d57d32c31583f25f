"""The fuzzer: the default run's share of it, that it sees planted faults, and plain tests of what it has found."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data import jsonl as jsonl_reader
from batchinfer.data.arrow import inspect_arrow
from batchinfer.data.rows import check_text
from batchinfer.errors import InputError
from batchinfer.testing.fuzzing.campaign import Plan, run_campaign
from batchinfer.testing.fuzzing.case import Case, job_text
from batchinfer.testing.fuzzing.children import Child, make_case
from batchinfer.testing.fuzzing.kinds import KINDS
from batchinfer.testing.fuzzing.trial import text_of, try_case

PROMPTS = [f"good row {i}" for i in range(12)]


def test_a_few_hundred_hostile_inputs(tmp_path: Path) -> None:
    for kind in KINDS:
        # A template may run for seconds before it is stopped.
        inputs, seconds = (15, 3.0) if kind == "template" else (75, 6.0)
        plan = Plan(
            kinds=[kind], inputs=inputs, seed=20, seconds_each=seconds, scratch=tmp_path, kept=tmp_path / "kept"
        )
        sums = run_campaign(plan)
        assert sums.ok, [(failure.kind, failure.number, failure.what, failure.detail) for failure in sums.failures]
        assert sums.outcomes[kind].total()


def test_moments_beside_nanoseconds_of_another_file_may_be_lost_if_they_are_beyond(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for number, kind in enumerate((pa.timestamp("us"), pa.timestamp("ns"))):
        out = io.BytesIO()
        values = pa.array([1 << 62 if number == 0 else 7, 1], pa.int64()).cast(kind)
        pq.write_table(pa.table({"prompt": PROMPTS[:2], "x": values}), out)
        files[f"in/rows-{number}.parquet"] = out.getvalue()

    def verdict(name: str, carried: dict[int, dict[str, str]]) -> Any:
        case = Case(
            kind="parquet",
            what="a test",
            job=job_text(input={"prompt": "{prompt}"}),
            files=files,
            rows={"rows-0.parquet": 2, "rows-1.parquet": 2},
            completions={},
            carried={"rows-0.parquet": carried},
        )
        return try_case(case, tmp_path / name)

    assert verdict("lost", {0: {"x": "beyond Python"}, 1: {"x": "1970-01-01T00:00:00.000001"}}).ok
    assert "and is None" in verdict("not so far", {0: {"x": "2261-01-01T00:00:00"}}).detail
    assert "column 'x' was None" in verdict("another", {1: {"x": "None"}}).detail


def test_ids_beside_bytes_of_another_file_keep_their_bytes() -> None:
    raw = bytes(range(16))
    own = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([raw], pa.binary(16)))
    assert text_of(own[0]) == text_of(pa.scalar(raw, pa.large_binary())) != text_of(pa.scalar(raw[::-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_case_and_a_file_keeps_it(kind: str) -> None:
    for number in range(5):
        case = make_case(kind, 3, number)
        assert case == make_case(kind, 3, number)
        assert case == Case.from_json(case.to_json())


# --- planted faults


def jsonl_case(*lines: bytes, **more: Any) -> Case:
    good = [b'{"text": "%s"}' % prompt.encode() for prompt in PROMPTS]
    content = b"\n".join([*good[:6], *lines, *good[6:]])
    rows = {i + (len(lines) if i >= 6 else 0): prompt for i, prompt in enumerate(PROMPTS)}
    return Case(
        kind="jsonl",
        what="a test",
        job=job_text(input={"prompt_column": "text"}),
        files={"in/rows-0.jsonl": content},
        rows={"rows-0.jsonl": len(PROMPTS) + len(lines)},
        completions={"rows-0.jsonl": rows},
        **more,
    )


def test_integers_beside_decimals_of_another_file_keep_their_values(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for number, column in enumerate((pa.array([0, 7], pa.uint64()), pa.array([1, 2], pa.decimal128(9, 2)))):
        out = io.BytesIO()
        pq.write_table(pa.table({"prompt": PROMPTS[:2], "x": column}), out)
        files[f"in/rows-{number}.parquet"] = out.getvalue()

    def verdict(name: str, carried: str) -> Any:
        case = Case(
            kind="parquet",
            what="a test",
            job=job_text(input={"prompt": "{prompt}"}),
            files=files,
            rows={"rows-0.parquet": 2, "rows-1.parquet": 2},
            completions={},
            carried={"rows-0.parquet": {1: {"x": carried}}},
        )
        return try_case(case, tmp_path / name)

    assert verdict("as it was", "7").ok
    assert "column 'x' was 8, and is 7.00" in verdict("another", "8").detail


def test_other_exceptions_lost_neighbours_and_wrong_bytes_are_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, parse = jsonl_case(b"{hostile"), jsonl_reader.parse_line

    def verdict(name: str, parser: Any) -> Any:
        monkeypatch.setattr(jsonl_reader, "parse_line", parser)
        return try_case(case, tmp_path / name)

    assert verdict("sound", parse).outcome == "error rows"

    def raises(line: bytes) -> Any:
        if b"hostile" in line:
            raise KeyError("planted")
        return parse(line)

    assert "KeyError: 'planted' (" in verdict("raises", raises).detail

    def neighbour(line: bytes) -> Any:
        return "not JSON: planted" if b"good row 7" in line else parse(line)

    assert "a good row should have 'good row 7'" in verdict("neighbour", neighbour).detail
    assert "a good row" in verdict("bytes", lambda line: parse(line.replace(b"row 3", b"row 4"))).detail

    def refuses(line: bytes) -> Any:
        raise InputError("no" if b"hostile" in line else "rows-0.jsonl")

    assert "good rows are lost" in verdict("refuses", refuses).detail
    case = jsonl_case(b"{hostile", refusable=True)
    monkeypatch.setattr(jsonl_reader, "parse_line", lambda line: refuses(b"hostile"))
    assert "names neither file nor key: no" in try_case(case, tmp_path / "unnamed").detail


def test_a_crash_and_a_hang_are_faults_and_the_next_trial_runs(tmp_path: Path) -> None:
    child = Child(tmp_path, 30.0)
    command = {"kind": "jsonl", "seed": 0, "number": 0}
    assert child.run(command)["outcome"] != "fault"
    process = child._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)

    def crash() -> None:
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGSEGV)
        os.kill(process.pid, signal.SIGCONT)

    thread = threading.Thread(target=crash)
    thread.start()
    answer = child.run(command)
    thread.join()
    assert answer["outcome"] == "fault"
    assert "signal 11 (SIGSEGV)" in answer["detail"]
    assert child.run(command)["outcome"] != "fault"
    child._limit_s = 0.0
    answer = child.run({"kind": "template", "seed": 0, "number": 16})  # calls that take seconds
    assert "no end after 0 CPU seconds" in answer["detail"]
    child.close()


# --- what it has found


def completed(
    table: pa.Table, tmp_path: Path, *, kind: str = "parquet", prompt: str = "{prompt}", failed: int = 0
) -> pa.Table:
    """The output of a job over the table; as many rows as told have errors, texts are completed as they should be."""
    if kind == "parquet":
        out = io.BytesIO()
        pq.write_table(table, out)
        content = out.getvalue()
    else:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        content = sink.getvalue().to_pybytes()
    name = f"rows-0.{kind}"
    case = Case(
        kind=kind,
        what="a test",
        job=job_text(input={"prompt": prompt}),
        files={f"in/{name}": content},
        rows={name: table.num_rows},
        completions={name: dict(enumerate(PROMPTS))} if table["prompt"].type == pa.string() else {},
    )
    verdict = try_case(case, tmp_path)
    assert verdict.ok, verdict
    assert f" {failed} of them" in verdict.detail
    return pq.read_table(tmp_path / "out" / "part-00000-00000.parquet")


def beside(column: pa.Array) -> pa.Table:
    return pa.table({"x": column, "prompt": PROMPTS})


def test_extension_types_stay(tmp_path: Path) -> None:
    ids = [bytes([i] * 16) for i in range(12)]
    column = pa.ExtensionArray.from_storage(pa.uuid(), pa.array(ids, pa.binary(16)))
    out = completed(beside(column), tmp_path)
    assert out["x"].type == pa.uuid()
    assert [value.bytes for value in out["x"].to_pylist()] == ids


@pytest.mark.parametrize("nested", [False, True])
def test_a_time_that_parquet_cannot_hold_is_null_and_the_job_goes_on(nested: bool, tmp_path: Path) -> None:
    seconds = pa.array([0, 2**62, *range(10)], pa.int64()).view(pa.timestamp("s"))
    column = pa.StructArray.from_arrays([seconds], ["t"]) if nested else seconds
    values = completed(beside(column), tmp_path, kind="arrow")["x"].to_pylist()
    assert [value is None for value in values] == [False, True, *[False] * 10]


def test_times_that_python_cannot_hold_are_numbers_in_prompts(tmp_path: Path) -> None:
    days = pa.array([2**31 - 1] * 3, pa.int32()).view(pa.date32())
    table = pa.table({"prompt": days})
    assert completed(table, tmp_path / "a", prompt="on {prompt}")["completion"].to_pylist() == ["on 2147483647"] * 3
    table = pa.table({"prompt": pa.array([2**62], pa.int64()).view(pa.duration("s"))})
    assert completed(table, tmp_path / "b", prompt="for {prompt}")["completion"].to_pylist() == [f"for {2**62}"]


@pytest.mark.parametrize(
    "column",
    [
        pa.StructArray.from_arrays(
            [pa.array(["a", None] * 6, pa.string_view())], ["s"], mask=pa.array([False, True] * 6)
        ),
        pa.StructArray.from_arrays([pa.array(range(12)), pa.array(["a"] * 12)], ["", ""]),
        pa.RunEndEncodedArray.from_arrays(pa.array([5, 12]), pa.array(["a", "b"], pa.string_view())),
        pa.ListArray.from_arrays(
            pa.array(range(13), pa.int32()), pa.RunEndEncodedArray.from_arrays([12], pa.array([1.5]))
        ),
        pa.ListViewArray.from_arrays([0] * 12, [1] * 12, pa.array([[b"a"]], pa.list_(pa.binary_view()))),
        pa.ListViewArray.from_arrays(
            [0] * 12,
            [1] * 12,
            pa.RunEndEncodedArray.from_arrays(
                [1], pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"], pa.string()))
            ),
            mask=pa.array([False, True] * 6),
        ),
        pa.MapArray.from_arrays(
            pa.array([None, *range(12)], pa.int32()),
            pa.array(range(11), pa.int32()),
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16] * 11, pa.binary(16))),
        ),
    ],
    ids=[
        "view in null struct",
        "fields of one name",
        "runs of views",
        "runs in lists",
        "views in lists",
        "runs in null lists",
        "uuids in maps",
    ],
)
def test_types_that_arrow_itself_half_knows_are_carried(column: pa.Array, tmp_path: Path) -> None:
    out = completed(beside(column), tmp_path, kind="arrow")["x"].combine_chunks()
    if pa.types.is_struct(column.type) and column.type.num_fields == 2:  # Python has no dict for it
        assert [out.field(i).to_pylist() for i in (0, 1)] == [column.field(i).to_pylist() for i in (0, 1)]
    else:
        assert out.to_pylist() == column.to_pylist()


def test_fields_that_must_not_be_null_are_null_all_the_same(tmp_path: Path) -> None:
    kind = pa.struct([pa.field("a", pa.int64(), False)])
    wrong = pa.StructArray.from_arrays([pa.array([None, *range(11)], pa.int64())], fields=list(kind))
    assert completed(beside(wrong), tmp_path / "a", kind="arrow")["x"].to_pylist()[:2] == [{"a": None}, {"a": 0}]
    files: dict[str, bytes] = {}
    for number, columns in enumerate(({"prompt": PROMPTS}, {"x": pa.array([{"a": 1}] * 12, kind), "prompt": PROMPTS})):
        out = io.BytesIO()
        pq.write_table(pa.table(columns), out)
        files[f"in/rows-{number}.parquet"] = out.getvalue()
    case = Case(kind="parquet", what="a test", job=job_text(input={"prompt_column": "prompt"}), files=files)
    assert try_case(case, tmp_path / "b").outcome == "completed"


def test_values_that_are_none_are_errors_of_their_rows_alone(tmp_path: Path) -> None:
    times = pa.array([0, 10**9, *range(10)], pa.int32()).view(pa.time32("s"))
    out = completed(pa.table({"prompt": times}), tmp_path, kind="arrow", prompt="at {prompt}", failed=1)
    assert "within the acceptable range" in out["error"][1].as_py()["message"]


def test_what_lies_under_a_null_struct_is_nobodys_fault() -> None:
    """Arrow itself puts indices there that lead nowhere."""
    kind = pa.large_list(pa.map_(pa.string(), pa.struct([("f", pa.dictionary(pa.int16(), pa.string()))])))
    values = [[[("", None)]], None, [[("a", {"f": "x"})], None]]
    table, errors = check_text(0, pa.RecordBatch.from_arrays([pa.array(values, kind)], ["x"]))
    assert not errors
    assert table["x"].to_pylist() == values


def arrow_file(path: Path, *, spoil: tuple[bytes, bytes]) -> Path:
    sink = pa.BufferOutputStream()
    table = pa.table({"prompt": PROMPTS, "column-name": range(12)})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    assert spoil[0] in content
    path.write_bytes(content.replace(*spoil))
    return path


def test_names_that_are_no_text_are_refused_by_file(tmp_path: Path) -> None:
    path = arrow_file(tmp_path / "rows-0.arrow", spoil=(b"column-name", b"column\xff\xfename"[:11]))
    with pytest.raises(InputError, match=r"rows-0\.arrow.*name is not UTF-8"):
        inspect_arrow("rows-0.arrow", str(path), {})
    out = io.BytesIO()
    pq.write_table(pa.table({"prompt": PROMPTS, "column-name": range(12)}), out)
    content = out.getvalue().replace(b"column-name", b"column\xff\xffname")
    case = Case(
        kind="parquet",
        what="a test",
        job=job_text(input={"prompt_column": "prompt"}),
        files={"in/rows-0.parquet": content},
        refusable=True,
    )
    verdict = try_case(case, tmp_path / "run")
    assert verdict.outcome == "refused"
    assert "rows-0.parquet" in verdict.detail


def test_offsets_that_lead_nowhere_refuse_the_file_and_crash_nothing(tmp_path: Path) -> None:
    offsets = b"".join((10 * i).to_bytes(4, "little") for i in range(1, 4))
    path = arrow_file(tmp_path / "rows-0.arrow", spoil=(offsets, b"\xff\xff\xff\x7f" * 3))
    case = Case(
        kind="arrow",
        what="a test",
        job=job_text(input={"prompt_column": "prompt"}),
        files={"in/rows-0.arrow": path.read_bytes()},
        refusable=True,
    )
    child = Child(tmp_path / "child", 30.0)
    kept = tmp_path / "case.json"
    kept.write_text(case.to_json())
    answer = child.run({"file": str(kept)})
    child.close()
    assert answer["outcome"] == "refused"
    assert "rows-0.arrow can't be read at row 0" in answer["detail"]
