"""Hashes of column values: equal for equal values, however they are cut into batches, chunked or encoded.

Each column is taken apart into streams that simply grow with the rows: one byte of validity a value, a 64-bit length
a string or list, and the bytes of the values that are not null. Each stream has its own SHA-256, so feeding rows in
other batches gives the same digests, and all work is on whole buffers. Dictionaries are decoded, `large_` types and
views hash like the plain ones. Order matters, types of other width (int32, int64) differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.data.schema import conform, plain_type


class _Node:
    """The streams of one column or nested field, with a node for each child."""

    __slots__ = ("children", "data", "lengths", "type", "validity")

    def __init__(self) -> None:
        self.type: pa.DataType | None = None
        self.validity = hashlib.sha256()
        self.lengths = hashlib.sha256()
        self.data = hashlib.sha256()
        self.children: dict[str, _Node] = {}

    def child(self, name: str) -> _Node:
        node = self.children.get(name)
        if node is None:
            node = self.children[name] = _Node()
        return node

    def digest(self) -> bytes:
        total = hashlib.sha256()
        for stream in (self.validity, self.lengths, self.data):
            total.update(stream.digest())
        for name, node in sorted(self.children.items()):
            total.update(name.encode("utf-8", "surrogatepass") + b"\0" + node.digest())
        return total.digest()

    def update(self, array: pa.Array) -> None:
        array = _plain(array)
        kind = array.type
        if len(array) == 0:
            return
        self.validity.update(_numpy(array.is_valid().cast(pa.uint8())).data)
        if pa.types.is_null(kind):
            return
        if array.null_count:
            array = array.drop_null()
        if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
            offsets = _offsets(array, np.int64)
            self.lengths.update(np.diff(offsets).data)
            data = array.buffers()[2]
            if data is not None:
                self.data.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])
        elif pa.types.is_string(kind) or pa.types.is_binary(kind):
            offsets = _offsets(array, np.int32)
            self.lengths.update(np.diff(offsets).astype(np.int64).data)
            data = array.buffers()[2]
            if data is not None:
                self.data.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])
        elif pa.types.is_struct(kind):
            names = [field.name for field in kind]
            for i, child in enumerate(array.flatten()):
                # Two fields may have one name; each has streams of its own.
                self.child(names[i] + "\0" * names[:i].count(names[i])).update(child)
        elif pa.types.is_fixed_size_list(kind):
            self.child("item").update(array.flatten())
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            self.lengths.update(_numpy(pc.list_value_length(array)).astype(np.int64).data)
            self.child("item").update(array.flatten())
        elif pa.types.is_map(kind):
            offsets = _offsets(array, np.int32)
            self.lengths.update(np.diff(offsets).astype(np.int64).data)
            start, count = int(offsets[0]), int(offsets[-1] - offsets[0])
            self.child("key").update(array.keys.slice(start, count))
            self.child("value").update(array.items.slice(start, count))
        elif pa.types.is_boolean(kind):
            self.data.update(_numpy(array.cast(pa.uint8())).data)
        elif kind.bit_width % 8 == 0 and array.buffers()[1] is not None:
            width = kind.bit_width // 8
            data = memoryview(array.buffers()[1])
            self.data.update(data[array.offset * width : (array.offset + len(array)) * width])
        else:
            raise TypeError(f"can't hash values of type {kind}")


def _plain(array: pa.Array) -> pa.Array:
    """The same values without dictionaries, run ends, views or extension types."""
    if pa.types.is_union(array.type):
        return pa.array([repr(value) for value in array.to_pylist()], pa.large_string())
    return conform(array, plain_type(array.type))


def _numpy(array: pa.Array) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array.to_numpy(zero_copy_only=False))


def _offsets(array: pa.Array, dtype: type) -> npt.NDArray[Any]:
    buffer = array.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(len(array) + 1, dtype)
    return np.frombuffer(buffer, dtype, len(array) + 1, array.offset * np.dtype(dtype).itemsize)


class ValueHasher:
    """Hashes the columns of consecutive batches. `only` limits it to some columns; a column's place is no matter."""

    def __init__(self, only: Iterable[str] | None = None) -> None:
        self._only = None if only is None else frozenset(only)
        self._columns: dict[str, _Node] = {}
        self.num_rows = 0

    def update(self, batch: pa.RecordBatch | pa.Table) -> None:
        self.num_rows += batch.num_rows
        for i, name in enumerate(batch.schema.names):
            if self._only is not None and name not in self._only:
                continue
            node = self._columns.get(name)
            if node is None:
                node = self._columns[name] = _Node()
            column = batch.column(i)
            for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else (column,):
                node.update(chunk)

    def digests(self) -> dict[str, bytes]:
        """A digest of each column's values."""
        return {name: node.digest() for name, node in self._columns.items()}

    def hexdigest(self) -> str:
        """A hex digest of all values."""
        return total_digest(self.num_rows, self.digests())


def total_digest(num_rows: int, digests: Mapping[str, bytes]) -> str:
    """One hex digest from the row count and the columns' names and digests."""
    total = hashlib.sha256(str(num_rows).encode())
    for name, digest in sorted(digests.items()):
        total.update(name.encode("utf-8", "surrogatepass") + b"\0" + digest)
    return total.hexdigest()[:32]


def hash_batch(hasher: ValueHasher, batch: pa.RecordBatch | pa.Table) -> None:
    """Feed the next rows into `hasher`."""
    hasher.update(batch)
