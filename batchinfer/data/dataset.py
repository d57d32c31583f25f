"""The input dataset: its files, their united schema, and any slice of rows in bounded batches.

`open_dataset` reads footers (and scans JSON Lines once); everything after is by (file, start, stop). Row identity is
(file name relative to the root, row index). Which files: `sources`; how schemas unite: `schema`; one reader per
format: `parquet`, `arrow`, `jsonl`.
"""

from __future__ import annotations

import base64
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa

from batchinfer.data import arrow, jsonl, parquet
from batchinfer.data.cursors import Cursor, Target, keep_cursor, take_cursor
from batchinfer.data.jsontypes import Kind
from batchinfer.data.rows import RowBatch, check_text, in_schema
from batchinfer.data.schema import is_list, unite
from batchinfer.data.sources import Source, find_sources
from batchinfer.errors import InputError

__all__ = ["InputDataset", "InputFile", "Kind", "RowBatch", "changes", "new_files", "open_dataset"]

log = logging.getLogger("batchinfer.data")

MAX_BATCH_ROWS = 8_192
MAX_BATCH_BYTES = 32 << 20


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

    def column_bytes(self, columns: Sequence[str]) -> tuple[int, ...]:
        """Uncompressed bytes of some columns in each file, estimated: from a Parquet footer, else in proportion."""
        sizes = []
        for file in self.files:
            if file.format == "parquet":
                sizes.append(parquet.column_bytes(file.name, file.uri, self.storage_options, columns))
            else:
                share = len(set(columns)) / max(1, len(self.schema))
                sizes.append(file.num_bytes if share >= 1 else int(file.num_bytes * max(0.5, share)))
        return tuple(sizes)

    def check_columns(self, columns: Sequence[str]) -> None:
        """InputError that names missing columns and lists those that are there."""
        names = self.schema.names
        missing = sorted(set(columns) - set(names))
        if missing and not names:
            raise InputError(f"the input {self.path} is empty: it holds no rows and no columns")
        if missing:
            there = ", ".join(names[:30]) + (", …" if len(names) > 30 else "")
            raise InputError(
                f"the input {self.path} has no column {', '.join(map(repr, missing))}; its columns are: {there}"
            )

    def check_field(self, name: str) -> None:
        """InputError where a prompt template's name leads to nothing: neither a column nor field b of column a."""
        if name in self.schema.names:
            return
        head, *path = name.split(".")
        self.check_columns([head])
        kind = self.schema.field(head).type
        if any(head in file.mixed for file in self.files):
            return  # some rows may hold a struct
        for depth, key in enumerate(path):
            if pa.types.is_null(kind):
                return
            there = [entry.name for entry in kind] if pa.types.is_struct(kind) else []
            if key not in there:
                what = f"has the fields {', '.join(there)}" if there else f"is {kind}, not a struct"
                raise InputError(
                    f"the input {self.path} has no {name!r}: {'.'.join([head, *path[:depth]])!r} {what}; braces of "
                    "the text itself are written {{ and }}"
                )
            kind = kind.field(key).type

    def kind_of(self, column: str) -> str:
        """What a column's values are: text, list of structs, list, null, mixed, or else the type's own name."""
        kind = self.schema.field(column).type
        if any(column in file.mixed for file in self.files):
            return "mixed"
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            return "text"
        if is_list(kind):
            return "list of structs" if pa.types.is_struct(kind.value_type) else "list"
        return "null" if pa.types.is_null(kind) else str(kind)

    def read(
        self, file: int, start: int = 0, stop: int | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[RowBatch]:
        """Rows [start, stop) of a file, without a gap, in batches of at most 8,192 rows and about 32 MiB.

        columns: None for all; others are not read from the file. Raises InputError when the file has fewer rows than
        it had when it was opened, or can't be read.
        """
        source = self.files[file]
        stop = source.num_rows if stop is None else min(stop, source.num_rows)
        wanted = None if columns is None else tuple(columns)
        if wanted is not None:
            self.check_columns(wanted)
        schema = self.schema
        if wanted is not None:
            fields = {entry.name: entry for entry in self.schema}  # schema.field(name) looks at every field
            schema = pa.schema([fields[name] for name in wanted])
        row = start
        key = (source.uri, source.fingerprint, wanted, self.schema)
        # Where there is nothing to seek by, reading on from any earlier place beats starting over.
        blind = source.format == "jsonl" and (source.compression or not source.seek_index)
        cursor = take_cursor(key, start, farthest_back=start if blind else 0)
        if cursor is None:
            target = Target(start)
            cursor = Cursor(key, target, _open_batches(self, source, wanted, target))
        try:
            while row < stop:
                batch = cursor.next(stop)
                if batch is None:
                    raise InputError(
                        f"input file {source.name} ends at row {row}, but had {source.num_rows} rows when the job was "
                        "planned: it changed; restore it, or start over with --fresh"
                    )
                row = batch.stop
                yield in_schema(batch, schema)
        except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
            raise InputError(f"input file {source.name} can't be read at row {row}: {error}") from error
        keep_cursor(cursor)

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
    used_as: Mapping[str, Kind] | None = None,
) -> InputDataset:
    """Find the input's files, read what is cheap, and unite their schemas.

    path       file, folder, glob, fsspec URL, folder of `save_to_disk` (`folder::split` for one of several splits),
               or hub id (`org/name::split`, `org/name:config::split`)
    limit      the first N rows of all files together
    cache_dir  where seek indexes of JSON Lines files are kept; without it they are scanned by each reader
    used_as    what columns must hold to be of use: where JSON Lines mix kinds of values, that kind is the column's

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
        file, schema = _inspect(len(files), source, options, left, cache_dir, used_as or {})
        if left is not None:
            file = replace(file, num_rows=min(file.num_rows, left))
            left -= file.num_rows
        files.append(file)
        schemas.append((source.name, schema))
    return InputDataset(path=path, files=tuple(files), schema=unite(schemas), storage_options=options)


def _inspect(
    index: int,
    source: Source,
    options: Mapping[str, Any],
    limit: int | None,
    cache_dir: str | None,
    used_as: Mapping[str, Kind],
) -> tuple[InputFile, pa.Schema]:
    name, uri = source.name, source.uri
    seek_index = ""
    mixed: tuple[str, ...] = ()
    if source.format == "parquet":
        schema, num_rows, num_bytes, fingerprint = parquet.inspect_parquet(name, uri, options)
    elif source.format == "arrow":
        schema, num_rows, num_bytes, fingerprint = arrow.inspect_arrow(name, uri, options)
    else:
        facts = jsonl.inspect_jsonl(name, uri, source.compression, options, limit, cache_dir, used_as)
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


def _open_batches(
    dataset: InputDataset, file: InputFile, columns: tuple[str, ...] | None, target: Target
) -> Iterator[RowBatch]:
    """Batches as the file has them: own types, and for missing columns nothing."""
    options, limits = dataset.storage_options, (MAX_BATCH_ROWS, MAX_BATCH_BYTES)
    if file.format == "jsonl":
        for start, table, errors in jsonl.iter_jsonl(
            file.uri,
            file.compression,
            options,
            target,
            dataset.schema,
            columns,
            frozenset(file.mixed),
            file.seek_index,
            MAX_BATCH_ROWS,
            MAX_BATCH_BYTES // 2,  # as Python objects they take several times as much
        ):
            yield RowBatch(start=start, table=table, errors=errors)
        return
    if file.format == "arrow":
        batches = arrow.iter_arrow(file.uri, file.fingerprint, options, target.row, columns, *limits)
    else:
        batches = parquet.iter_parquet(file.uri, options, target.row, columns, *limits)
    for start, table in batches:
        table, errors = check_text(start, table)
        yield RowBatch(start=start, table=table, errors=errors)
