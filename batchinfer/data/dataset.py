"""The input dataset: its files, their united schema, and any slice of rows in bounded batches.

`open_dataset` reads footers (and scans JSON Lines once); everything after is by (file, start, stop). Row identity is
(file name relative to the root, row index). Which files: `sources`; how schemas unite: `schema`; one reader per
format: `parquet`, `arrow`, `jsonl`.
"""

from __future__ import annotations

import base64
import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa

from batchinfer.data import arrow, jsonl, parquet
from batchinfer.data.schema import conform, unite
from batchinfer.data.sources import Source, find_sources
from batchinfer.errors import InputError
from batchinfer.types.rows import ErrorClass, RowError

log = logging.getLogger("batchinfer.data")

MAX_BATCH_ROWS = 8_192
MAX_BATCH_BYTES = 64 << 20
MAX_CURSORS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of the input.

    name         path relative to the input's root: with a row index, the identity of a row
    num_rows     after `limit`
    num_bytes    uncompressed size, estimated
    fingerprint  of size and footer (or both ends), to notice a changed file cheaply
    seek_index   for JSON Lines: where the seek index lies (see `jsonl`), else empty
    mixed        for JSON Lines: columns whose values have several kinds
    """

    index: int
    name: str
    uri: str
    format: str
    compression: str
    num_rows: int
    num_bytes: int
    fingerprint: str
    seek_index: str = ""
    mixed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Consecutive rows of one file, in the united schema (or the columns asked for, in the order asked for).

    errors: by row index in the file. Values that such a row lost are null.
    """

    start: int
    table: pa.RecordBatch
    errors: Mapping[int, RowError] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + int(self.table.num_rows)

    def to_rows(self) -> list[dict[str, Any]]:
        """Native Python values, one dict a row: lists stay lists, null is None, nothing goes through pandas."""
        columns = [_to_python(self.table.column(i)) for i in range(self.table.num_columns)]
        names = self.table.schema.names
        if not columns:
            return [{} for _ in range(self.table.num_rows)]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _to_python(array: pa.Array) -> list[Any]:
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):  # times finer or farther than Python's: as ISO text
        return [_scalar_to_python(value) for value in array]


def _scalar_to_python(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDataset:
    """An opened input. Picklable; open files are cached per process, not here."""

    path: str
    files: tuple[InputFile, ...]
    schema: pa.Schema
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def check_columns(self, columns: Sequence[str]) -> None:
        """InputError that names missing columns and lists those that are there."""
        missing = [name for name in columns if name not in self.schema.names]
        if missing:
            there = ", ".join(self.schema.names[:30]) + (", …" if len(self.schema.names) > 30 else "")
            raise InputError(
                f"the input {self.path} has no column {', '.join(map(repr, missing))}; its columns are: {there}"
            )

    def read(
        self, file: int, start: int = 0, stop: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[RowBatch]:
        """Rows [start, stop) of a file, without a gap, in batches of at most 8,192 rows and about 64 MiB.

        columns: None for all; others are not read from the file. Raises InputError when the file has fewer rows than
        it had when it was opened, or can't be read.
        """
        source = self.files[file]
        stop = source.num_rows if stop is None else min(stop, source.num_rows)
        wanted = None if columns is None else tuple(columns)
        if wanted is not None:
            self.check_columns(wanted)
        schema = self.schema if wanted is None else pa.schema([self.schema.field(name) for name in wanted])
        row = start
        cursor = _take_cursor(self, source, wanted, start)
        try:
            while row < stop:
                batch = cursor.next(stop)
                if batch is None:
                    raise InputError(
                        f"input file {source.name} ends at row {row}, but had {source.num_rows} rows when the job was "
                        "planned: it changed; restore it, or start over with --fresh"
                    )
                row = batch.stop
                yield _finish(batch, schema)
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            raise InputError(f"input file {source.name} can't be read at row {row}: {error}") from error
        _keep_cursor(cursor)

    def describe(self) -> dict[str, Any]:
        """What the manifest keeps, as JSON values. `columns` is for people, `schema` for `from_description`."""
        return {
            "path": self.path,
            "num_rows": self.num_rows,
            "columns": {f.name: str(f.type) for f in self.schema},
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
            "files": [{**asdict(file), "mixed": list(file.mixed)} for file in self.files],
        }

    @classmethod
    def from_description(
        cls, description: Mapping[str, Any], *, storage_options: Mapping[str, Any] | None = None
    ) -> InputDataset:
        """The dataset as it was described; nothing is opened or checked (see `changes`)."""
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(description["schema"])))
        files = tuple(InputFile(**{**entry, "mixed": tuple(entry["mixed"])}) for entry in description["files"])
        return cls(path=description["path"], files=files, schema=schema, storage_options=dict(storage_options or {}))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two `describe()`s, one sentence each, so that a resume can be refused by reasons.

    Only names, contents and row counts count: a folder that moved is no change. New files are reported too (as
    `new input file ...`), since they may be what `--extend` is for.
    """
    before = {entry["name"]: entry for entry in old["files"]}
    after = {entry["name"]: entry for entry in new["files"]}
    found = [f"input file {name} is gone" for name in before if name not in after]
    for name, entry in after.items():
        was = before.get(name)
        if was is None:
            found.append(f"new input file {name} ({entry['num_rows']} rows)")
        elif was["fingerprint"] != entry["fingerprint"]:
            found.append(f"input file {name} changed ({was['num_rows']} rows before, {entry['num_rows']} now)")
        elif was["num_rows"] != entry["num_rows"]:
            found.append(f"input file {name} gave {was['num_rows']} rows before, {entry['num_rows']} now")
    for name, kind in old["columns"].items():
        now = new["columns"].get(name)
        if now is None:
            found.append(f"input column {name!r} is gone")
        elif now != kind:
            found.append(f"input column {name!r} was {kind}, now {now}")
    found += [f"new input column {name!r}" for name in new["columns"] if name not in old["columns"]]
    return found


def new_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names of files that only the new description has."""
    before = {entry["name"] for entry in old["files"]}
    return [entry["name"] for entry in new["files"] if entry["name"] not in before]


def open_dataset(
    path: str,
    *,
    format: str = "auto",
    limit: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
) -> InputDataset:
    """Find the input's files, read what is cheap, and unite their schemas.

    path       file, folder, glob, fsspec URL, folder of `save_to_disk` (`folder::split` for one of several splits),
               or hub id (`org/name::split`, `org/name:config::split`)
    limit      the first N rows of all files together
    cache_dir  where seek indexes of JSON Lines files are kept; without it they are scanned by each reader

    Raises InputError: nothing there, unreadable files, schemas that can't be united.
    """
    options = dict(storage_options or {})
    if limit is not None and limit < 0:
        raise InputError(f"input.limit is {limit}; it must be at least 0, or null for all rows")
    files: list[InputFile] = []
    schemas: list[tuple[str, pa.Schema]] = []
    left = limit
    for source in find_sources(path, format, options):
        if left == 0 and schemas:
            break
        file, schema = _inspect(len(files), source, options, left, cache_dir)
        if left is not None:
            file = replace(file, num_rows=min(file.num_rows, left))
            left -= file.num_rows
        files.append(file)
        schemas.append((source.name, schema))
    return InputDataset(path=path, files=tuple(files), schema=unite(schemas), storage_options=options)


def _inspect(
    index: int, source: Source, options: Mapping[str, Any], limit: int | None, cache_dir: str | None
) -> tuple[InputFile, pa.Schema]:
    name, uri = source.name, source.uri
    seek_index, mixed = "", ()
    if source.format == "parquet":
        schema, num_rows, num_bytes, fingerprint = parquet.inspect_parquet(name, uri, options)
    elif source.format == "arrow":
        schema, num_rows, num_bytes, fingerprint = arrow.inspect_arrow(name, uri, options)
    else:
        facts = jsonl.inspect_jsonl(name, uri, source.compression, options, limit, cache_dir)
        schema, num_rows, num_bytes, fingerprint = facts.schema, facts.num_rows, facts.num_bytes, facts.fingerprint
        seek_index, mixed = facts.index_path, facts.mixed
    file = InputFile(
        index=index,
        name=name,
        uri=uri,
        format=source.format,
        compression=source.compression,
        num_rows=num_rows,
        num_bytes=num_bytes,
        fingerprint=fingerprint,
        seek_index=seek_index,
        mixed=mixed,
    )
    return file, schema


class _Cursor:
    """An open reader of one file at some row. Kept after a read, so that the next slice goes on without a seek:
    a row group of a million rows is then decoded once, not once a slice, and a .gz is unpacked once."""

    def __init__(self, dataset: InputDataset, file: InputFile, columns: tuple[str, ...] | None, row: int) -> None:
        self.key = (file.uri, file.fingerprint, columns)
        self.row = row
        self._rest: RowBatch | None = None
        self._batches = _open_batches(dataset, file, columns, row)

    def next(self, stop: int) -> RowBatch | None:
        """The next rows before `stop`, or None at the end of the file."""
        batch = self._rest if self._rest is not None else next(self._batches, None)
        if batch is None:
            return None
        self._rest = None
        if batch.stop > stop:
            self._rest = _slice(batch, stop, batch.stop)
            batch = _slice(batch, batch.start, stop)
        self.row = batch.stop
        return batch

    def skip_to(self, row: int) -> bool:
        while self.row < row:
            if self.next(row) is None:
                return False
        return True


_cursors: OrderedDict[int, _Cursor] = OrderedDict()
_cursors_lock = threading.Lock()


def _take_cursor(dataset: InputDataset, file: InputFile, columns: tuple[str, ...] | None, row: int) -> _Cursor:
    key = (file.uri, file.fingerprint, columns)
    with _cursors_lock:
        fitting = [n for n, cursor in _cursors.items() if cursor.key == key and cursor.row == row]
        found = _cursors.pop(fitting[-1]) if fitting else None
    return found if found is not None else _Cursor(dataset, file, columns, row)


def _keep_cursor(cursor: _Cursor) -> None:
    with _cursors_lock:
        _cursors[id(cursor)] = cursor
        while len(_cursors) > MAX_CURSORS:
            _cursors.popitem(last=False)


def _slice(batch: RowBatch, start: int, stop: int) -> RowBatch:
    errors = {row: error for row, error in batch.errors.items() if start <= row < stop}
    return RowBatch(start=start, table=batch.table.slice(start - batch.start, stop - start), errors=errors)


def _open_batches(
    dataset: InputDataset, file: InputFile, columns: tuple[str, ...] | None, row: int
) -> Iterator[RowBatch]:
    """Batches as the file has them: own types, and for missing columns nothing."""
    options, limits = dataset.storage_options, (MAX_BATCH_ROWS, MAX_BATCH_BYTES)
    if file.format == "jsonl":
        for start, table, errors in jsonl.iter_jsonl(
            file.uri,
            file.compression,
            options,
            row,
            dataset.schema,
            columns,
            frozenset(file.mixed),
            file.seek_index,
            *limits,
        ):
            yield RowBatch(start=start, table=table, errors=errors)
        return
    if file.format == "arrow":
        batches = arrow.iter_arrow(file.uri, file.fingerprint, options, row, columns, *limits)
    else:
        batches = parquet.iter_parquet(file.uri, options, row, columns, *limits)
    for start, table in batches:
        table, errors = _check_text(start, table)
        yield RowBatch(start=start, table=table, errors=errors)


def _finish(batch: RowBatch, schema: pa.Schema) -> RowBatch:
    """The batch in the united schema."""
    errors = dict(batch.errors)
    names = batch.table.schema.names
    arrays = []
    for target in schema:
        if target.name in names:
            array = batch.table.column(names.index(target.name))
            arrays.append(_conform_column(array, target, batch.start, errors))
        else:
            arrays.append(pa.nulls(batch.table.num_rows, target.type))
    if not arrays:
        table = batch.table.select([])
    else:
        table = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return RowBatch(start=batch.start, table=table, errors=errors)


def _conform_column(array: pa.Array, target: pa.Field, start: int, errors: dict[int, RowError]) -> pa.Array:
    try:
        return conform(array, target.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    pieces = []
    for i in range(len(array)):
        try:
            pieces.append(conform(array.slice(i, 1), target.type))
        except pa.ArrowInvalid as error:
            pieces.append(pa.nulls(1, target.type))
            message = f"column {target.name!r} can't be kept as {target.type}: {error}"
            errors.setdefault(start + i, RowError(ErrorClass.INVALID_ROW, message))
    return pa.concat_arrays(pieces)


def _check_text(start: int, table: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, RowError]]:
    """Text columns may hold bytes that are no UTF-8 (written unchecked): such a value is repaired with U+FFFD, or
    null where it is nested, and its row gets an error. Otherwise it would fail much later, when the part is written
    or read."""
    try:
        table.validate(full=True)
        return table, {}
    except pa.ArrowInvalid:
        pass
    errors: dict[int, RowError] = {}
    arrays = []
    for field, array in zip(table.schema, table.columns, strict=True):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            array = _repair(field, array, start, errors)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema), errors


def _repair(field: pa.Field, array: pa.Array, start: int, errors: dict[int, RowError]) -> pa.Array:
    pieces = []
    for i in range(len(array)):
        piece = array.slice(i, 1)
        try:
            piece.validate(full=True)
            if pa.types.is_dictionary(field.type):
                piece = piece.dictionary_decode()
                piece.validate(full=True)
        except pa.ArrowInvalid:
            errors[start + i] = RowError(ErrorClass.INVALID_ROW, f"column {field.name!r} holds text that is not UTF-8")
            if pa.types.is_string(piece.type) or pa.types.is_large_string(piece.type):
                raw = piece.cast(pa.large_binary())[0].as_py()
                piece = pa.array([raw.decode("utf-8", "replace")], piece.type)
            else:
                piece = pa.nulls(1, piece.type)
        pieces.append(piece)
    repaired = pa.concat_arrays(pieces)
    return repaired.dictionary_encode().cast(field.type) if pa.types.is_dictionary(field.type) else repaired
