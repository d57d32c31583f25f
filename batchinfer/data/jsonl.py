"""JSON Lines input files, plain, .gz or .zst: one scan for rows, types and a seek index, then slices in batches.

A row is a line that is not blank; blank lines are no rows. A line that is no JSON object or no UTF-8 is a row with an
error; lone surrogates in escapes become U+FFFD; a byte order mark is skipped; a file in another encoding is refused.
Types are decided over all rows (see `jsontypes`). Compressed files can't be sought: a slice unpacks from the start,
unless the reader stands there already (see `dataset._Cursor`).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.data.cursors import Target
from batchinfer.data.fs import publish_file, retrying, temp_for
from batchinfer.data.jsontypes import Kind, Shape, clean_surrogates, to_array
from batchinfer.data.sources import edge_fingerprint, open_bytes
from batchinfer.errors import InputError
from batchinfer.types.rows import ErrorClass, RowError

log = logging.getLogger("batchinfer.data")

BOM = b"\xef\xbb\xbf"
MARK_ROWS = 1_024
MARK_BYTES = 4 << 20
READ_BYTES = 1 << 20
MAX_DIGITS = 1_000
MAX_DEPTH = 48  # of lists and objects in each other: neither Arrow's nor Parquet's schemas nest without end
_LONG_NUMBER = re.compile("[0-9]{1001}")
SCAN_ROWS = 2_048
SCAN_BYTES = 8 << 20
WRONG_ENCODING_SHARE = 0.2
_OTHER_ENCODINGS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_OTHER_FORMATS = (
    (b"PAR1", "a Parquet file", "set input.format: parquet, or name it .parquet"),
    (b"ARROW1", "an Arrow file", "set input.format: arrow, or name it .arrow"),
    (b"\x1f\x8b", "packed by gzip", "name it .jsonl.gz"),
    (b"\x28\xb5\x2f\xfd", "packed by zstd", "name it .jsonl.zst"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"BZh", "packed by bzip2", "unpack it, or pack it by gzip or zstd"),
    (b"\xfd7zXZ", "packed by xz", "unpack it, or pack it by gzip or zstd"),
)
READ_FAULTS = (OSError, EOFError, zlib.error, pa.ArrowException)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JsonlFacts:
    """What one scan finds.

    num_bytes   of the lines, unpacked
    mixed       columns with values of several kinds
    marks       int64[k, 2]: row and byte offset (unpacked) of lines to seek to
    """

    schema: pa.Schema
    num_rows: int
    num_bytes: int
    mixed: tuple[str, ...]
    fingerprint: str
    marks: npt.NDArray[np.int64]
    index_path: str = ""


def inspect_jsonl(
    name: str,
    uri: str,
    compression: str,
    options: Mapping[str, Any],
    limit: int | None,
    cache_dir: str | None,
    used_as: Mapping[str, Kind],
) -> JsonlFacts:
    """Scan a file, or take what an earlier scan of the same bytes left in `cache_dir`. InputError when it can't be
    read or is in another encoding. `used_as`: see `jsontypes`."""
    try:
        fingerprint = edge_fingerprint(uri, options)
        path = None
        if cache_dir is not None:
            part = "" if limit is None else f"-{min(limit, 1 << 63)}"  # no file has more
            if used_as:
                part += f"-{zlib.crc32(json.dumps(sorted(used_as.items())).encode()):08x}"
            path = Path(cache_dir) / f"jsonl-{fingerprint}{part}.arrow"
            known = _load_index(path, fingerprint)
            if known is not None:
                return known
        facts = _scan(name, uri, compression, options, limit, fingerprint, used_as)
    except READ_FAULTS as error:
        packed = f"; it is no whole {compression} file: pack or copy it again, or rename it" if compression else ""
        raise InputError(f"input file {name} can't be read: {error}{packed}") from None
    if path is None:
        return facts
    _save_index(path, facts)
    return _load_index(path, fingerprint) or facts


def _save_index(path: Path, facts: JsonlFacts) -> None:
    about = {"num_rows": facts.num_rows, "num_bytes": facts.num_bytes, "mixed": facts.mixed}
    schema = pa.schema(
        [("row", pa.int64()), ("offset", pa.int64())],
        {"facts": json.dumps(about).encode(), "schema": facts.schema.serialize().to_pybytes()},
    )
    with temp_for(path) as tmp:
        with pa.OSFile(str(tmp), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            columns = [pa.array(np.ascontiguousarray(facts.marks[:, i])) for i in (0, 1)]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        publish_file(tmp, path)


def _load_index(path: Path, fingerprint: str) -> JsonlFacts | None:
    try:
        with retrying(lambda: pa.OSFile(str(path))) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
            about = json.loads(reader.schema.metadata[b"facts"])
            schema = pa.ipc.read_schema(pa.py_buffer(reader.schema.metadata[b"schema"]))
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        log.warning("the seek index %s is broken and ignored: %s", path, error)
        return None
    return JsonlFacts(
        schema=schema,
        num_rows=about["num_rows"],
        num_bytes=about["num_bytes"],
        mixed=tuple(about["mixed"]),
        fingerprint=fingerprint,
        marks=np.stack([table["row"].to_numpy(), table["offset"].to_numpy()], axis=1),
        index_path=str(path),
    )


@contextlib.contextmanager
def _open_lines(uri: str, compression: str, options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    with open_bytes(uri, options) as raw:
        unpacked: Any = raw
        if compression == "gzip":
            unpacked = gzip.GzipFile(fileobj=raw)
        elif compression == "zstd":
            unpacked = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
        with io.BufferedReader(unpacked, READ_BYTES) as lines:
            yield lines


def _scan(
    name: str,
    uri: str,
    compression: str,
    options: Mapping[str, Any],
    limit: int | None,
    fingerprint: str,
    used_as: Mapping[str, Kind],
) -> JsonlFacts:
    shape = Shape()
    records: list[dict[str, Any]] = []
    records_bytes = 0
    marks: list[tuple[int, int]] = []
    row = offset = good = broken_utf8 = foreign_utf8 = 0
    first_broken, last_mark, first_problem, array_opened = -1, 0, "", False
    with _open_lines(uri, compression, options) as lines:
        for number, line in enumerate(lines):
            start = offset
            offset += len(line)
            if number == 0:
                _refuse_encoding(name, line)
                line = line.removeprefix(BOM)
            if line.isspace() or not line:
                continue
            if row == limit:
                break
            if not marks or row - marks[-1][0] >= MARK_ROWS or start - last_mark >= MARK_BYTES:
                marks.append((row, start))
                last_mark = start
            row += 1
            record = parse_line(line)
            if isinstance(record, dict):
                good += 1
                foreign_utf8 += not line.isascii()
                records.append(record)
                records_bytes += len(line)
                if len(records) == SCAN_ROWS or records_bytes >= SCAN_BYTES:
                    shape.add_records(records)
                    records, records_bytes = [], 0
            else:
                first_problem = first_problem or record
                array_opened = array_opened or (row == 1 and line.lstrip().startswith(b"[") and "not JSON" in record)
                bad_at = _first_bad_byte(line)
                if bad_at >= 0:
                    broken_utf8 += 1
                    first_broken = start + bad_at if first_broken < 0 else first_broken
    shape.add_records(records)
    mostly_broken = broken_utf8 >= max(2, WRONG_ENCODING_SHARE * row) and not foreign_utf8
    if mostly_broken or 0 < broken_utf8 == row:
        raise InputError(
            f"input file {name} is not UTF-8: byte offset {first_broken} (and {broken_utf8} of {row} lines) does not "
            "decode, no other line has valid non-ASCII text; it looks like Latin-1 or Windows-1252. Convert it, for "
            "instance: iconv -f WINDOWS-1252 -t UTF-8"
        )
    if (row and not good) or array_opened:
        raise InputError(
            f"input file {name} is not JSON Lines, one JSON object a line (first line: {first_problem}). A JSON "
            "array can be converted with: jq -c '.[]'"
        )
    columns = {column: entry.column(used_as.get(column)) for column, entry in shape.fields.items()}
    mixed = tuple(column for column, (_, is_mixed) in columns.items() if is_mixed)
    for column in mixed:
        kind = columns[column][0]
        if not pa.types.is_null(kind):
            log.warning("%s: column %r has values of several kinds; it is read as %s", name, column, kind)
    return JsonlFacts(
        schema=pa.schema([(column, kind) for column, (kind, _) in columns.items()]),
        num_rows=row,
        num_bytes=offset,
        mixed=mixed,
        fingerprint=fingerprint,
        marks=np.array(marks, np.int64).reshape(-1, 2),
    )


def _refuse_encoding(name: str, line: bytes) -> None:
    for magic, what, instead in _OTHER_FORMATS:
        if line.startswith(magic):
            raise InputError(f"input file {name} is {what}, not JSON Lines; {instead}")
    encoding = next((known for mark, known in _OTHER_ENCODINGS if line.startswith(mark)), "")
    if not encoding:
        if b"\0" not in line[:4]:
            return
        encoding = "UTF-16 or UTF-32"
    raise InputError(
        f"input file {name} is in {encoding}, not UTF-8 (seen at byte offset 0); convert it, for instance: iconv -f "
        f"{encoding.split()[0]} -t UTF-8"
    )


def _parse_int(digits: str) -> int:
    # Python's own limit is a setting of the process; this one is the same everywhere.
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def parse_line(line: bytes) -> dict[str, Any] | str:
    """The line's object, or what is wrong with it."""
    try:
        text = line.decode("utf-8")
        record = json.loads(text, parse_int=_parse_int if _LONG_NUMBER.search(text) else None)
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte {line[error.start]:#04x} at position {error.start} of the line"
    except json.JSONDecodeError as error:
        at = min(error.pos, len(text.rstrip()))  # behind the end of the line it would be in a second one
        return f"not JSON: {error.msg} at character {at + 1} of the line"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(record, dict):
        return f"not a JSON object but {type(record).__name__}"
    if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(record):
        return f"nested deeper than {MAX_DEPTH} levels"
    if b"\\ud" in line or b"\\uD" in line:
        return clean_surrogates(record)  # type: ignore[no-any-return]
    return record


def _too_deep(record: dict[str, Any]) -> bool:
    level: list[Any] = [record]
    for _ in range(MAX_DEPTH):
        inner = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        if not level:
            return False
    return True


def _first_bad_byte(line: bytes) -> int:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return -1


def iter_jsonl(
    uri: str,
    compression: str,
    options: Mapping[str, Any],
    target: Target,
    schema: pa.Schema,
    columns: Sequence[str] | None,
    mixed: frozenset[str],
    index_path: str,
    max_rows: int,
    max_bytes: int,
) -> Iterator[tuple[int, pa.RecordBatch, dict[int, RowError]]]:
    """(first row, batch, errors by row) from row `target` to the file's end. Lines before it are not parsed.

    schema: the united schema of all columns. A value of the wrong kind in a mixed column is an error of its row when
    the column is asked for, or when its value is lost (see `jsontypes`).
    """
    row, offset = _seek_mark(index_path, target.row) if not compression else (0, 0)
    with _open_lines(uri, compression, options) as lines:
        if offset:
            lines.seek(offset - 1)
            if lines.read(1) != b"\n":  # the file changed between its ends, where the fingerprint does not look
                log.warning("the seek index %s does not fit its file and is ignored", index_path)
                row, offset = 0, 0
                lines.seek(0)
        records: list[dict[str, Any] | str] = []
        size, first = 0, offset == 0
        for line in lines:
            if first:
                line, first = line.removeprefix(BOM), False
            if line.isspace() or not line:
                continue
            row += 1
            if row <= target.row:
                continue
            records.append(parse_line(line))
            size += len(line)
            if len(records) >= max_rows or size >= max_bytes:
                yield _batch(row - len(records), records, schema, columns, mixed)
                records, size = [], 0
        if records:
            yield _batch(row - len(records), records, schema, columns, mixed)


def _seek_mark(index_path: str, row: int) -> tuple[int, int]:
    if not index_path or row == 0:
        return 0, 0
    index = _load_index(Path(index_path), "")
    if index is None or not len(index.marks):
        return 0, 0
    i = int(np.searchsorted(index.marks[:, 0], row, side="right")) - 1
    return (int(index.marks[i, 0]), int(index.marks[i, 1])) if i > 0 else (0, 0)


def _batch(
    first: int,
    records: Sequence[dict[str, Any] | str],
    schema: pa.Schema,
    columns: Sequence[str] | None,
    mixed: frozenset[str],
) -> tuple[int, pa.RecordBatch, dict[int, RowError]]:
    errors = {
        first + i: RowError(ErrorClass.INVALID_ROW, f"the line is {record}")
        for i, record in enumerate(records)
        if isinstance(record, str)
    }
    dicts = [record if isinstance(record, dict) else {} for record in records]
    names, arrays = [], []
    for field in schema:
        asked = columns is None or field.name in columns
        if not asked and (field.name not in mixed or pa.types.is_string(field.type)):
            continue
        name = field.name
        array, problems = to_array([record.get(name) for record in dicts], field.type, name in mixed)
        for i, problem in problems.items():
            errors.setdefault(first + i, RowError(ErrorClass.INVALID_ROW, f"column {name!r} holds {problem}"))
        if asked:
            names.append(name)
            arrays.append(array)
    if not arrays:
        return first, pa.RecordBatch.from_pylist([{} for _ in records], pa.schema([])), errors
    return first, pa.RecordBatch.from_arrays(arrays, names=names), errors
