"""Parquet and Arrow files: good prompts beside columns of any type, files that disagree, files that are broken."""

from __future__ import annotations

import io
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.testing.fuzzing.arrow_values import any_type, array_of
from batchinfer.testing.fuzzing.case import INPUT_FOLDER, NASTY_TEXTS, Case, job_text, mutated
from batchinfer.testing.fuzzing.trial import text_of

_NAMES = ("a", "b", "a.b", "", "A", "id", "Prompt", "prompt ", "\u00e9", "x\ny", "x" * 500, "`", '"', "error", "0")


def make_parquet(rng: Random) -> Case:
    """One to three Parquet files."""
    return _make(rng, "parquet", _write_parquet)


def make_arrow(rng: Random) -> Case:
    """One to three Arrow IPC files, streams among them."""
    return _make(rng, "arrow", _write_arrow)


def _make(rng: Random, kind: str, write: Callable[[Random, pa.Table], bytes]) -> Case:
    notes: list[str] = []
    files: dict[str, bytes] = {}
    rows: dict[str, int] = {}
    completions: dict[str, dict[int, str]] = {}
    carried: dict[str, dict[int, dict[str, str]]] = {}
    refusable = False
    count = rng.choice((1, 1, 1, 2, 3))
    shared = [(rng.choice(_NAMES), any_type(rng)) for _ in range(rng.choice((1, 1, 2, 4)))]
    for number in range(count):
        columns = shared if rng.random() < 0.8 else [(rng.choice(_NAMES), any_type(rng)) for _ in range(2)]
        size = rng.choice((0, 1, 12, 12, 12, 40))
        table, prompts, doubtful = _table(rng, columns, size, number, notes)
        try:
            content = write(rng, table)
        except Exception as error:  # pyarrow can't write such a file, so nobody will have one
            notes.append(f"plain prompts instead ({type(error).__name__})")
            prompts = [f"good row {i} of file {number} é🙂" for i in range(size)]
            table, doubtful = pa.table({"prompt": pa.array(prompts, pa.string())}), False
            content = write(rng, table)
        name = f"rows-{number}.{kind}"
        sure = True
        if rng.random() < 0.25:
            content, sure, doubtful = _broken(rng, content, notes), False, True
        files[f"{INPUT_FOLDER}/{name}"] = content
        # Arrow can't take apart extension types within runs, of which one value may be none (26.0).
        kinds = [str(kind) for kind in table.schema.types]
        refusable = refusable or doubtful or any("run_end" in kind and "extension" in kind for kind in kinds)
        if sure:
            rows[name] = table.num_rows
            completions[name] = {row: text for row, text in enumerate(prompts) if text is not None}
            if kind == "parquet":
                try:
                    carried[name] = _texts(content, completions[name])
                except pa.ArrowException as error:  # what pyarrow itself can't read back may be refused
                    notes.append(f"unreadable ({error})"[:200])
                    refusable = True
    prompt = rng.choice(({"prompt": "{prompt}"}, {"prompt_column": "prompt"}))
    chosen = {"columns": ["prompt"]} if rng.random() < 0.15 else {}
    if chosen:
        carried = {}
    job = job_text(input=prompt, output=chosen)
    if any(b"rror" in content for content in files.values()):
        refusable = True
    return Case(
        kind=kind,
        what="; ".join(notes),
        job=job,
        files=files,
        rows=rows,
        completions=completions,
        carried=carried,
        refusable=refusable or count > 1,
    )


def _table(
    rng: Random, columns: list[tuple[str, pa.DataType]], size: int, number: int, notes: list[str]
) -> tuple[pa.Table, list[str | None], bool]:
    """(table with the prompts last, completion of each row where one is certain, whether it may be refused)."""
    names, arrays, doubtful = [], [], False
    for name, kind in columns:
        made = _array(rng, kind, size)
        if made is None:
            continue
        arrays.append(made)
        names.append(name)
        notes.append(f"{name[:20]!r}: {kind}"[:200])
        doubtful = doubtful or _unstorable(kind)
    prompts: list[Any] = [f"good row {i} of file {number} é🙂" for i in range(size)]
    sure: list[str | None] = list(prompts)
    for _ in range(rng.choice((0, 1, 2)) if size else 0):
        at = rng.randrange(size)
        prompts[at], sure[at] = rng.choice((None, *NASTY_TEXTS)), None
    array: pa.Array = pa.array(prompts, rng.choice((pa.string(), pa.string(), pa.large_string(), pa.string_view())))
    match rng.randrange(12):
        case 0:
            array = pa.array(prompts, pa.string()).dictionary_encode()
        case 1 if size:
            raw = [None if prompt is None else prompt.encode() for prompt in prompts]
            at = rng.randrange(size)
            raw[at], sure[at] = b"ab\xff\xfe", None
            array = pa.array(raw, pa.binary()).view(pa.string())
            notes.append("a prompt that is no UTF-8")
        case 2 if (made := _array(rng, any_type(rng), size)) is not None:
            array = made
            sure, doubtful = [None] * size, True
            notes.append(f"prompts of type {array.type}")
        case 3:
            names.append("prompt")
            arrays.append(array)
            doubtful = True
            notes.append("two columns of one name")
    return (
        pa.Table.from_arrays([*arrays, array], names=[*names, "prompt"]),
        sure,
        doubtful or len({*names}) < len(names),
    )


def _array(rng: Random, kind: pa.DataType, size: int) -> pa.Array | None:
    """None where pyarrow can't make such an array."""
    try:
        return array_of(rng, kind, size)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return None


def _unstorable(kind: pa.DataType) -> bool:
    """Types that Parquet can't hold are refused by name."""
    text = str(kind)
    return any(word in text for word in ("union", "interval", "struct<>"))


def _texts(content: bytes, rows: dict[int, str]) -> dict[int, dict[str, str]]:
    """What other readers find in the file beside the good rows: what must stand in the output, too."""
    table = pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)
    names = [name for name in table.schema.names if table.schema.names.count(name) == 1 and _kept(table, name)]
    return {row: {name: text_of(table[name][row]) for name in names} for row in rows}


def _kept(table: pa.Table, name: str) -> bool:
    """Columns whose values stay as they are: type and values are written as they were read, and nothing is broken."""
    try:
        table[name].validate(full=True)
    except pa.ArrowInvalid:
        return False
    kind = str(table.schema.field(name).type)
    return not any(word in kind for word in ("[s", "date64", "run_end", "time32", "dictionary"))


def _write_parquet(rng: Random, table: pa.Table) -> bytes:
    out = io.BytesIO()
    options: dict[str, Any] = {
        "version": rng.choice(("1.0", "2.4", "2.6")),
        "compression": rng.choice(("none", "snappy", "zstd", "gzip", "lz4", "brotli")),
        "use_dictionary": rng.random() < 0.5,
        "data_page_version": rng.choice(("1.0", "2.0")),
        "row_group_size": rng.choice((1, 5, 1000)),
        "store_schema": rng.random() < 0.7,
        "use_deprecated_int96_timestamps": rng.random() < 0.1,
        "use_compliant_nested_type": rng.random() < 0.8,
        "write_statistics": rng.random() < 0.5,
    }
    pq.write_table(table, out, **options)
    return out.getvalue()


def _write_arrow(rng: Random, table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, "lz4", "zstd")))
    opener = rng.choice((pa.ipc.new_file, pa.ipc.new_stream))
    with opener(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice((1, 5, 1000)))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _broken(rng: Random, content: bytes, notes: list[str]) -> bytes:
    """Cut, or with a few bytes changed: anywhere, or in the last few hundred, where footers lie."""
    match rng.randrange(4):
        case 0:
            notes.append("cut")
            return content[: rng.randrange(len(content) + 1)]
        case 1:
            notes.append("bytes changed")
            return mutated(rng, content)
        case 2:
            notes.append("other bytes, same length")
            out = bytearray(content)
            for _ in range(rng.randint(1, 6)):
                out[rng.randrange(len(out))] = rng.randrange(256)
            return bytes(out)
        case _:
            notes.append("other bytes near the end")
            out = bytearray(content)
            for _ in range(rng.randint(1, 4)):
                out[rng.randrange(max(0, len(out) - 600), len(out))] = rng.randrange(256)
            return bytes(out)
