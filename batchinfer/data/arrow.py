"""Arrow IPC input files, both the file and the stream kind (which `datasets` writes), in bounded batches.

Not here: uniting schemas and row errors (see `dataset`), and our own Arrow files (`prepared`, `segments`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.data.arrowrows import first_nodes, num_rows
from batchinfer.data.schema import check_names, with_nullable_fields
from batchinfer.data.sources import edge_fingerprint, is_local, open_arrow, open_bytes
from batchinfer.errors import InputError

FILE_MAGIC = b"ARROW1"
FILE_HEADER_BYTES = 8
COPIED_BATCH_BYTES = 64 << 20  # larger record batches are mapped, not read


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where a file's record batches lie: first row of each (and the total at the end), byte offset of each."""

    starts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    has_dictionaries: bool
    is_file: bool
    max_body_bytes: int


def inspect_arrow(name: str, uri: str, options: Mapping[str, Any]) -> tuple[pa.Schema, int, int, str]:
    """Schema, number of rows, uncompressed bytes, and fingerprint. InputError when it is broken or cut short."""
    try:
        fingerprint = edge_fingerprint(uri, options)
        with open_bytes(uri, options) as head:
            is_file = head.read(len(FILE_MAGIC)) == FILE_MAGIC
        with open_arrow(uri, options, memory_map=True) as source:
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            schema = reader.schema
            check_names(name, schema)
            schema = pa.schema([field.with_type(with_nullable_fields(field.type)) for field in schema])
            layout = _read_layout(uri, options)
            if is_file and reader.num_record_batches != len(layout.offsets):
                raise pa.ArrowInvalid(
                    f"its footer knows {reader.num_record_batches} record batches, but it has {len(layout.offsets)}"
                )
            size = source.size()
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:  # of types that can't be, ValueError
        raise InputError(
            f"input file {name} can't be read as Arrow IPC: {error}; it is broken, was cut off, or is another format "
            "(input.format): write it again or remove it"
        ) from None
    return schema, int(layout.starts[-1]), size, fingerprint


def _read_layout(uri: str, options: Mapping[str, Any]) -> _Layout:
    """Walk over the messages' headers; of a memory map the bodies are not even read. Raises ArrowInvalid also where a
    batch claims rows that it does not have."""
    with open_arrow(uri, options, memory_map=True) as source:
        is_file = source.read(len(FILE_MAGIC)) == FILE_MAGIC
        source.seek(FILE_HEADER_BYTES if is_file else 0)
        schema = pa.ipc.open_stream(source).schema
        nodes = first_nodes(schema)
        source.seek(FILE_HEADER_BYTES if is_file else 0)
        starts, offsets, dictionaries, biggest = [0], [], False, 0
        reader = pa.ipc.MessageReader.open_stream(source)
        while True:
            offset = source.tell()
            try:
                message = reader.read_next_message()
            except StopIteration:
                break
            if message.type == "dictionary":
                dictionaries = True
            elif message.type == "record batch":
                offsets.append(offset)
                starts.append(starts[-1] + num_rows(message, schema, nodes))
                biggest = max(biggest, message.body.size if message.body is not None else 0)
    return _Layout(np.array(starts, np.int64), np.array(offsets, np.int64), dictionaries, is_file, biggest)


@functools.lru_cache(maxsize=64)
def _cached_layout(uri: str, fingerprint: str, options: tuple[tuple[str, Any], ...]) -> _Layout:
    return _read_layout(uri, dict(options))


def _layout_of(uri: str, fingerprint: str, options: Mapping[str, Any]) -> _Layout:
    try:
        return _cached_layout(uri, fingerprint, tuple(sorted(options.items())))
    except TypeError:  # options that can't be hashed
        return _read_layout(uri, options)


def iter_arrow(
    uri: str,
    fingerprint: str,
    options: Mapping[str, Any],
    start: int,
    columns: Sequence[str] | None,
    max_rows: int,
    max_bytes: int,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(first row, batch) from row `start` to the file's end."""
    layout = _layout_of(uri, fingerprint, options)
    if start >= layout.starts[-1]:
        return
    first = int(np.searchsorted(layout.starts, start, side="right")) - 1
    mapped = is_local(uri) and layout.max_body_bytes > COPIED_BATCH_BYTES
    with open_arrow(uri, options, memory_map=mapped) as source:
        for i, batch in _record_batches(source, layout, first, columns):
            row = int(layout.starts[i])
            step = max(1, min(max_rows, int(max_bytes * batch.num_rows / max(1, batch.get_total_buffer_size()))))
            for at in range(max(0, start - row), batch.num_rows, step):
                yield row + at, batch.slice(at, step)


def _record_batches(
    source: pa.NativeFile, layout: _Layout, first: int, columns: Sequence[str] | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    opener = pa.ipc.open_file if layout.is_file else pa.ipc.open_stream
    source.seek(0)
    schema = opener(source).schema
    options = None
    if columns is not None:
        wanted = frozenset(columns)
        fields = [i for i, name in enumerate(schema.names) if name in wanted]
        if fields:  # an empty list would mean all
            options = pa.ipc.IpcReadOptions(included_fields=fields)
    source.seek(0)
    if layout.is_file:
        reader = pa.ipc.open_file(source, options=options)
        for i in range(first, len(layout.offsets)):
            yield i, reader.get_batch(i)
        return
    if layout.has_dictionaries:  # they have to be collected from the start
        for i, batch in enumerate(pa.ipc.open_stream(source, options=options)):
            if i >= first:
                yield i, batch
        return
    source.seek(int(layout.offsets[first]))
    for i in range(first, len(layout.offsets)):
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
        yield i, batch if columns is None else batch.select([n for n in schema.names if n in columns])
