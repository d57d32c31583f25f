"""Parquet input files: what the footer says, and rows from any place on in bounded batches.

Not here: uniting schemas and row errors (see `dataset`).
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.schema import check_names
from batchinfer.data.sources import open_arrow, open_bytes
from batchinfer.errors import InputError

# With pre_buffer off, column chunks are streamed through a buffer of this size; else a row group is read whole.
BUFFER_BYTES = 1 << 20


def inspect_parquet(name: str, uri: str, options: Mapping[str, Any]) -> tuple[pa.Schema, int, int, str]:
    """Schema, number of rows, uncompressed bytes, and fingerprint (of the footer). InputError when it is broken."""
    try:
        with open_bytes(uri, options) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8))
            tail = file.read(8)
            if size < 12 or tail[4:] != b"PAR1":
                raise InputError(
                    f"input file {name} is not a complete Parquet file ({size} bytes, no footer at its end); "
                    "it was cut off or is still being written: write it again or remove it"
                )
            footer_bytes = int.from_bytes(tail[:4], "little")
            file.seek(max(0, size - 8 - footer_bytes))
            fingerprint = hashlib.sha256(f"{size}\0".encode() + file.read(footer_bytes)).hexdigest()[:32]
            file.seek(0)
            # As it will be read: the metadata's own Arrow schema knows no extension types.
            with pq.ParquetFile(file) as opened:
                metadata, schema = opened.metadata, opened.schema_arrow
            check_names(name, schema)
            for i in range(metadata.num_columns):
                _ = metadata.schema.column(i).path  # names that are no text are found here
            _check_rows(metadata, size)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"input file {name} can't be read as Parquet: {error}") from None
    num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return schema, metadata.num_rows, num_bytes, fingerprint


def _check_rows(metadata: pq.FileMetaData, file_bytes: int) -> None:
    """ArrowInvalid where the footer claims rows that its row groups, or these groups' columns, do not have."""
    groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if min(groups, default=0) < 0 or sum(groups) != metadata.num_rows:
        raise pa.ArrowInvalid(
            f"its footer claims {metadata.num_rows} rows, its row groups have {sum(groups)}; it is broken: write it "
            "again or remove it"
        )
    for group, rows in enumerate(groups):
        if rows <= file_bytes:  # a byte to each row: columns need not be asked
            continue
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        _check_entries(metadata, group, paths)
        entry = metadata.row_group(group)
        for i, path in enumerate(paths):
            held = entry.column(i).num_values
            if held < rows:  # lists have at least one value to a row, a null if need be
                raise pa.ArrowInvalid(
                    f"row group {group} claims {rows} rows, but has {held} values of column {path!r}; it is broken: "
                    "write it again or remove it"
                )


def column_bytes(name: str, uri: str, options: Mapping[str, Any], columns: Sequence[str]) -> int:
    """Uncompressed bytes of the columns, by the footer. InputError when it is broken."""
    try:
        with open_bytes(uri, options) as file:
            metadata = pq.read_metadata(file)
        return sum(_group_bytes(metadata, group, columns) for group in range(metadata.num_row_groups))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"input file {name} can't be read as Parquet: {error}") from None


def iter_parquet(
    uri: str,
    options: Mapping[str, Any],
    start: int,
    columns: Sequence[str] | None,
    max_rows: int,
    max_bytes: int,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(first row, batch) from row `start` to the file's end. Big row groups are streamed, never read whole."""
    with open_arrow(uri, options) as source, pq.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        metadata = file.metadata
        first = 0
        for group in range(metadata.num_row_groups):
            num_rows = metadata.row_group(group).num_rows
            if first + num_rows > start and num_rows:
                skip = max(0, start - first)
                batch_rows = _batch_rows(metadata, group, columns, max_rows, max_bytes)
                row = first
                for batch in _stream_group(file, group, columns, batch_rows):
                    if skip < batch.num_rows:
                        yield row + skip, batch.slice(skip)
                    row += batch.num_rows
                    skip = max(0, skip - batch.num_rows)
            first += num_rows


def _batch_rows(
    metadata: pq.FileMetaData, group: int, columns: Sequence[str] | None, max_rows: int, max_bytes: int
) -> int:
    row_bytes = _group_bytes(metadata, group, columns) / metadata.row_group(group).num_rows
    return max(1, min(max_rows, int(max_bytes / max(1, row_bytes))))


def _group_bytes(metadata: pq.FileMetaData, group: int, columns: Sequence[str] | None) -> int:
    """Uncompressed bytes of some columns (None: of all) of a row group. ArrowException or OSError for a bad footer."""
    entry = metadata.row_group(group)
    if columns is None:
        return int(entry.total_byte_size)
    wanted = set(columns)
    paths = {i: metadata.schema.column(i).path for i in range(entry.num_columns)}
    paths = {i: path for i, path in paths.items() if path in wanted or path.split(".", 1)[0] in wanted}
    _check_entries(metadata, group, list(paths.values()))
    return sum(entry.column(i).total_uncompressed_size for i in paths)


class _NoBytes(io.RawIOBase):
    """A file of which nothing can be read."""

    SIZE = 1 << 62  # beyond the place of every column

    def __init__(self) -> None:
        self.asked = False
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.SIZE}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        self.asked = True
        raise OSError("nothing to read")


def _check_entries(metadata: pq.FileMetaData, group: int, paths: list[str]) -> None:
    """Raises what pyarrow finds wrong in the footer's entries of some columns of one row group.

    `RowGroupMetaData.column` ends the whole process where an entry contradicts itself (seen up to pyarrow 26.0), a
    reader raises. The reader looks at all the entries before it asks for the bytes of a column, so it is given none.
    """
    none = _NoBytes()
    with pq.ParquetFile(none, metadata=metadata, buffer_size=1, pre_buffer=False) as file:
        try:
            next(file.iter_batches(batch_size=1, row_groups=[group], columns=paths, use_threads=False), None)
        except (pa.ArrowException, OSError):
            if not none.asked:
                raise


def _stream_group(
    file: pq.ParquetFile, group: int, columns: Sequence[str] | None, batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """The batches of one row group; smaller ones when a batch of nested columns passes 2 GB."""
    done = 0
    while True:
        try:
            skip = done
            batches = file.iter_batches(
                batch_size=batch_rows,
                row_groups=[group],
                columns=None if columns is None else list(columns),
                use_threads=False,
            )
            for batch in batches:
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                batch = batch.slice(skip)
                skip = 0
                yield batch
                done += batch.num_rows
            return
        except (pa.ArrowNotImplementedError, pa.ArrowCapacityError):
            if batch_rows == 1:
                raise
            batch_rows = max(1, batch_rows // 8)
