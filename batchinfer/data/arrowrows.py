"""How many rows a record batch has, by the header of its Arrow IPC message, and whether its bytes can hold them.

A broken header may claim any number, and a job would be cut into millions of chunks. Only headers are looked at, and
the first bytes of compressed buffers where the claim is a strange one. Not here: whether values are right (reading
checks them).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

# What a batch may have without a byte for each row (nulls, runs): the format's own advice for one batch.
MAX_ROWS_WITHOUT_BYTES = (1 << 31) - 1
MAX_UNPACKED = 1 << 16  # neither LZ4 nor Zstandard makes more bytes of one
VERSION_5 = 4  # the format before it gave unions a validity buffer
t = pa.types


@dataclass(frozen=True, slots=True)
class _Header:
    """Fields of Arrow's `RecordBatch` (Message.fbs).

    nodes     (rows, nulls) of each array, parents before children
    buffers   (offset in the body, bytes) of each buffer
    variadic  how many data buffers each array of views has
    """

    version: int
    num_rows: int
    nodes: Sequence[tuple[int, int]]
    buffers: Sequence[tuple[int, int]]
    is_compressed: bool
    variadic: Sequence[int]


def num_rows(message: pa.Message, schema: pa.Schema, first_nodes: Sequence[int]) -> int:
    """The rows of a record batch message. `first_nodes`: see there. Raises ArrowInvalid for a claim that can't be."""
    try:
        header = _read_header(memoryview(message.metadata))
        _check_rows(header, message.body, schema, first_nodes)
    except (StopIteration, IndexError, struct.error):
        raise pa.ArrowInvalid("a record batch's header lacks arrays or buffers of its columns") from None
    return header.num_rows


def _check_rows(header: _Header, body: pa.Buffer | None, schema: pa.Schema, first_nodes: Sequence[int]) -> None:
    rows = header.num_rows
    if rows < 0 or (not first_nodes and rows > MAX_ROWS_WITHOUT_BYTES):
        raise pa.ArrowInvalid(f"a record batch claims {rows} rows")
    for field, node in zip(schema, first_nodes, strict=True):
        held = header.nodes[node][0]
        if held != rows:
            raise pa.ArrowInvalid(f"a record batch claims {rows} rows, its column {field.name!r} {held}")
    if rows <= (0 if body is None else body.size):  # a byte to each row: enough, whatever the types
        return
    arrays = _Arrays(header, memoryview(b"" if body is None else body))
    for field in schema:
        most = arrays.most_rows(field.type)
        if rows > most:
            raise pa.ArrowInvalid(
                f"a record batch claims {rows} rows, the bytes of its column {field.name!r} hold {most} at most"
            )


def first_nodes(schema: pa.Schema) -> list[int]:
    """For each column the place of its own node: those of nested arrays come in between."""
    places, place = [], 0
    for field in schema:
        places.append(place)
        place += _num_nodes(field.type)
    return places


def _storage(kind: pa.DataType) -> pa.DataType:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return kind.index_type if t.is_dictionary(kind) else kind


def _children(kind: pa.DataType) -> list[pa.DataType]:
    """Types of a storage type's child arrays."""
    if t.is_run_end_encoded(kind):
        return [kind.run_end_type, kind.value_type]
    if t.is_map(kind):
        return [pa.struct([kind.key_field, kind.item_field])]
    return [kind.field(i).type for i in range(kind.num_fields)]


def _num_nodes(kind: pa.DataType) -> int:
    return 1 + sum(_num_nodes(child) for child in _children(_storage(kind)))


class _Arrays:
    """Goes over a batch's buffers in their order, one column after the other."""

    def __init__(self, header: _Header, body: memoryview) -> None:
        self._header, self._body = header, body
        self._buffers: Iterator[tuple[int, int]] = iter(header.buffers)
        self._variadic: Iterator[int] = iter(header.variadic)

    def most_rows(self, kind: pa.DataType) -> int:
        """How many rows the next array's buffers have room for. StopIteration or struct.error where they are none."""
        kind = _storage(kind)
        children = _children(kind)
        if t.is_null(kind):
            return MAX_ROWS_WITHOUT_BYTES
        if t.is_run_end_encoded(kind):
            for child in children:
                self.most_rows(child)
            return int(min((1 << (kind.run_end_type.bit_width - 1)) - 1, MAX_ROWS_WITHOUT_BYTES))
        if not t.is_union(kind) or self._header.version < VERSION_5:
            next(self._buffers)  # validity; without nulls it may be empty
        if t.is_struct(kind):
            return min((self.most_rows(child) for child in children), default=MAX_ROWS_WITHOUT_BYTES)
        if t.is_fixed_size_list(kind):
            held = self.most_rows(children[0])
            return held // kind.list_size if kind.list_size else MAX_ROWS_WITHOUT_BYTES
        size = self._next_bytes()
        if t.is_union(kind):
            held = size
            if kind.mode == "dense":
                next(self._buffers)
        elif t.is_list_view(kind) or t.is_large_list_view(kind):
            next(self._buffers)
            held = size // (8 if t.is_large_list_view(kind) else 4)
        elif t.is_list(kind) or t.is_map(kind) or t.is_large_list(kind):
            held = max(0, size // (8 if t.is_large_list(kind) else 4) - 1)
        elif t.is_string_view(kind) or t.is_binary_view(kind):
            for _ in range(next(self._variadic)):
                next(self._buffers)
            held = size // 16
        elif t.is_string(kind) or t.is_binary(kind) or t.is_large_string(kind) or t.is_large_binary(kind):
            next(self._buffers)
            held = max(0, size // (8 if t.is_large_string(kind) or t.is_large_binary(kind) else 4) - 1)
        else:
            held = size * 8 // kind.bit_width if kind.bit_width else MAX_ROWS_WITHOUT_BYTES
        for child in children:
            self.most_rows(child)
        return int(held)

    def _next_bytes(self) -> int:
        offset, size = next(self._buffers)
        if not self._header.is_compressed or size == 0:
            return size
        (unpacked,) = struct.unpack_from("<q", self._body, offset)
        packed = max(0, size - 8)
        return packed if unpacked < 0 else min(int(unpacked), packed * MAX_UNPACKED)


def _read_header(data: memoryview) -> _Header:
    """By hand from flatbuffers, since reading the batch would unpack it. pyarrow has verified the message."""

    def place(table: int, number: int) -> int:
        """Where a table's field is, or 0 where it has its default."""
        vtable = table - struct.unpack_from("<i", data, table)[0]
        entry = 4 + 2 * number
        if entry >= struct.unpack_from("<H", data, vtable)[0]:
            return 0
        offset = struct.unpack_from("<H", data, vtable + entry)[0]
        return table + int(offset) if offset else 0

    def target(at: int) -> int:
        return at + int(struct.unpack_from("<I", data, at)[0])

    def vector(at: int, per_entry: int) -> tuple[int, ...]:
        if not at:
            return ()
        start = target(at)
        count = struct.unpack_from("<I", data, start)[0]
        return struct.unpack_from(f"<{count * per_entry}q", data, start + 4)

    root = target(0)
    version = place(root, 0)
    batch = target(place(root, 2))
    length = place(batch, 0)
    nodes, buffers = vector(place(batch, 1), 2), vector(place(batch, 2), 2)
    return _Header(
        version=struct.unpack_from("<h", data, version)[0] if version else 0,
        num_rows=struct.unpack_from("<q", data, length)[0] if length else 0,
        nodes=list(zip(nodes[::2], nodes[1::2], strict=True)),
        buffers=list(zip(buffers[::2], buffers[1::2], strict=True)),
        is_compressed=bool(place(batch, 3)),
        variadic=vector(place(batch, 4), 1),
    )
