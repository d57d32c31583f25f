"""One schema for many files: unite schemas, and bring a file's batches to the united schema.

Widening is allowed (null to anything, int32 to int64, int to float, string to large_string, dictionary to its value
type, structs by field name); anything else is an InputError that names file, column and both types. Not here: where
the schemas come from (`parquet`, `arrow`, `jsonl`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.errors import InputError

_UNITS = ("s", "ms", "us", "ns")
t = pa.types


class TypeClash(Exception):
    """Two types without a common one; `path` leads to the nested field."""

    def __init__(self, a: pa.DataType, b: pa.DataType, path: str = "") -> None:
        super().__init__(f"{path}: {a} and {b}")
        self.a, self.b, self.path = a, b, path


def unite(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """The schema that all files' batches can be brought to, columns in order of first appearance.

    schemas: (file name, schema). Columns are nullable; schema metadata is dropped, field metadata of the first file
    kept. Raises InputError on incompatible types.
    """
    fields: dict[str, pa.Field] = {}
    first_file: dict[str, str] = {}
    for file, schema in schemas:
        seen: set[str] = set()
        for field in schema:
            if field.name in seen:
                raise InputError(
                    f"input file {file} has two columns called {field.name!r}; rename one of them, rows can't be "
                    "addressed by name otherwise"
                )
            seen.add(field.name)
            old = fields.get(field.name)
            if old is None:
                fields[field.name] = pa.field(field.name, field.type, True, _clean_metadata(field))
                first_file[field.name] = file
                continue
            if old.type.equals(field.type):
                continue
            try:
                fields[field.name] = old.with_type(unite_types(old.type, field.type))
            except TypeClash as clash:
                where = f"column {field.name!r}" + (f" (field {clash.path})" if clash.path else "")
                raise InputError(
                    f"input files disagree about {where}: {clash.b} in {file}, but {clash.a} in "
                    f"{first_file[field.name]} (and files before it); convert one of them, or leave one out of "
                    "input.path"
                ) from None
            if t.is_null(old.type):
                first_file[field.name] = file
    return pa.schema(list(fields.values()))


def _clean_metadata(field: pa.Field) -> dict[bytes, bytes] | None:
    kept = {k: v for k, v in (field.metadata or {}).items() if k != b"PARQUET:field_id"}
    return kept or None


def unite_types(a: pa.DataType, b: pa.DataType, path: str = "") -> pa.DataType:
    """The narrowest type that holds values of both; TypeClash when there is none."""
    if a.equals(b):
        return a
    if t.is_null(a):
        return b
    if t.is_null(b):
        return a
    if t.is_dictionary(a) or t.is_dictionary(b):
        return _unite_dictionaries(a, b, path)
    if isinstance(a, pa.BaseExtensionType) or isinstance(b, pa.BaseExtensionType):
        return unite_types(_storage(a), _storage(b), path)
    if t.is_struct(a) and t.is_struct(b):
        return _unite_structs(a, b, path)
    if is_list(a) and is_list(b):
        item = unite_types(a.value_type, b.value_type, f"{path}[]")
        return pa.large_list(item) if t.is_large_list(a) or t.is_large_list(b) else pa.list_(item)
    if t.is_map(a) and t.is_map(b):
        key = unite_types(a.key_type, b.key_type, f"{path}.key")
        return pa.map_(key, unite_types(a.item_type, b.item_type, f"{path}.value"))
    for kind in (_unite_text, _unite_numbers, _unite_times):
        united = kind(a, b)
        if united is not None:
            return united
    raise TypeClash(a, b, path)


def _storage(a: pa.DataType) -> pa.DataType:
    return a.storage_type if isinstance(a, pa.BaseExtensionType) else a


def is_list(a: pa.DataType) -> bool:
    return bool(t.is_list(a) or t.is_large_list(a) or t.is_fixed_size_list(a))


def _is_list_view(a: pa.DataType) -> bool:
    return bool(t.is_list_view(a) or t.is_large_list_view(a))


def _unite_dictionaries(a: pa.DataType, b: pa.DataType, path: str) -> pa.DataType:
    value_a = a.value_type if t.is_dictionary(a) else a
    value_b = b.value_type if t.is_dictionary(b) else b
    if t.is_dictionary(a) and t.is_dictionary(b) and a.ordered == b.ordered and value_a.equals(value_b):
        wider = a.index_type if a.index_type.bit_width >= b.index_type.bit_width else b.index_type
        return pa.dictionary(wider, value_a, a.ordered)
    return unite_types(value_a, value_b, path)


def _unite_structs(a: pa.DataType, b: pa.DataType, path: str) -> pa.DataType:
    theirs = {field.name: field for field in b}
    if len(theirs) < len(b) or len({field.name for field in a}) < len(a):
        raise TypeClash(a, b, path)  # two fields of one name: which is which?
    fields = []
    for field in a:
        other = theirs.pop(field.name, None)
        if other is None:
            fields.append(field.with_nullable(True))
            continue
        inner = unite_types(field.type, other.type, f"{path}.{field.name}")
        fields.append(field.with_type(inner).with_nullable(field.nullable or other.nullable))
    return pa.struct(fields + [field.with_nullable(True) for field in theirs.values()])


def _unite_text(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    def is_text(x: pa.DataType) -> bool:
        return bool(t.is_string(x) or t.is_large_string(x) or t.is_string_view(x))

    def is_bytes(x: pa.DataType) -> bool:
        return bool(t.is_binary(x) or t.is_large_binary(x) or t.is_binary_view(x) or t.is_fixed_size_binary(x))

    if is_text(a) and is_text(b):
        return pa.large_string() if t.is_large_string(a) or t.is_large_string(b) else pa.string()
    if is_bytes(a) and is_bytes(b):
        return pa.large_binary() if t.is_large_binary(a) or t.is_large_binary(b) else pa.binary()
    return None


def _unite_numbers(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if t.is_integer(a) and t.is_integer(b):
        if t.is_signed_integer(a) == t.is_signed_integer(b):
            return a if a.bit_width >= b.bit_width else b
        unsigned, signed = (a, b) if t.is_unsigned_integer(a) else (b, a)
        bits = max(unsigned.bit_width * 2, signed.bit_width)
        return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits, pa.decimal128(20, 0))
    if t.is_floating(a) and t.is_floating(b):
        return a if a.bit_width >= b.bit_width else b
    if (t.is_integer(a) and t.is_floating(b)) or (t.is_floating(a) and t.is_integer(b)):
        return pa.float64()  # integers beyond 2**53 are refused row by row when they are read
    if t.is_decimal(a) or t.is_decimal(b):
        da, db = _as_decimal(a), _as_decimal(b)
        if da is not None and db is not None:
            scale = max(da.scale, db.scale)
            precision = max(da.precision - da.scale, db.precision - db.scale) + scale
            if precision <= 38 and not (t.is_decimal256(da) or t.is_decimal256(db)):
                return pa.decimal128(precision, scale)
            if precision <= 76:
                return pa.decimal256(precision, scale)
    return None


def _as_decimal(a: pa.DataType) -> pa.DataType | None:
    if t.is_decimal(a):
        return a
    digits = {8: 3, 16: 5, 32: 10, 64: 20}
    return pa.decimal128(digits[a.bit_width], 0) if t.is_integer(a) else None


def _unite_times(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    def finer() -> str:
        return _UNITS[max(_UNITS.index(a.unit), _UNITS.index(b.unit))]

    if t.is_timestamp(a) and t.is_timestamp(b) and a.tz == b.tz:
        return pa.timestamp(finer(), a.tz)
    if t.is_duration(a) and t.is_duration(b):
        return pa.duration(finer())
    if t.is_time(a) and t.is_time(b):
        return pa.time64(finer()) if finer() in ("us", "ns") else pa.time32(finer())
    if t.is_date(a) and t.is_date(b):
        return pa.date64()
    return None


def nulls(size: int, kind: pa.DataType) -> pa.Array:
    """`size` nulls. Unlike those of `pa.nulls`, they have values in fields that can't be null, which Parquet needs."""
    if t.is_struct(kind) and kind.num_fields:
        inner = [nulls(size, field.type) if field.nullable else _zeros(size, field.type) for field in kind]
        with contextlib.suppress(pa.ArrowInvalid):  # runs of nothing but nulls (26.0)
            return pa.StructArray.from_arrays(inner, fields=list(kind), mask=pa.array([True] * size, pa.bool_()))
    if t.is_nested(kind):
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError):  # types that Python values can't make
            return pa.array([None] * size, kind)
    return pa.nulls(size, kind)


def _zeros(size: int, kind: pa.DataType) -> pa.Array:
    """What Arrow puts into such a field of a null struct."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _zeros(size, kind.storage_type))
    if t.is_dictionary(kind):
        indices = pa.array([0] * size, kind.index_type)
        return pa.DictionaryArray.from_arrays(indices, _zeros(1, kind.value_type), ordered=kind.ordered)
    with contextlib.suppress(pa.ArrowException, TypeError, ValueError):
        return pa.array([None] * size, pa.struct([pa.field("", kind, False)])).field(0)
    return nulls(size, kind)


def conform(array: pa.Array, target: pa.DataType) -> pa.Array:
    """`array` as `target`, a type that `unite_types` made of its own. Raises ArrowInvalid when a value does not fit.

    What a nested field that can't be null holds under a null is filled, which Parquet needs: readers leave nulls there.
    """
    kind = array.type
    if kind.equals(target) and not _has_required(target):
        return array
    if isinstance(array, pa.ExtensionArray):
        return conform(array.storage, target)
    if t.is_null(kind):
        return nulls(len(array), target)
    if t.is_dictionary(kind) and not t.is_dictionary(target):
        return conform(array.dictionary_decode(), target)
    if t.is_run_end_encoded(kind) and not t.is_run_end_encoded(target):
        return conform(_without_run_ends(array), target)
    if t.is_struct(kind) and t.is_struct(target):
        mine = {field.name: i for i, field in enumerate(kind)}
        children = _children(array)
        if [field.name for field in kind] == [field.name for field in target]:  # also where two have one name
            inner = [conform(child, field.type) for child, field in zip(children, target, strict=True)]
        else:
            inner = [
                conform(children[mine[f.name]], f.type) if f.name in mine else nulls(len(array), f.type) for f in target
            ]
        mask = array.is_null() if array.null_count else None
        if not inner:
            return array.cast(target)
        inner = [child if field.nullable else _filled(child) for child, field in zip(inner, target, strict=True)]
        return pa.StructArray.from_arrays(inner, fields=list(target), mask=mask)
    if (is_list(kind) or _is_list_view(kind)) and is_list(target):
        return _conform_list(array, target)  # list views too: Arrow's own cast of them (25.0) makes broken lists
    if t.is_map(kind) and t.is_map(target):
        return _conform_map(array, target)
    if _is_list_view(kind) and _is_list_view(target):
        maker = pa.LargeListViewArray if t.is_large_list_view(target) else pa.ListViewArray
        places = [pa.array(numbers.to_numpy()) for numbers in (array.offsets, array.sizes)]
        mask = array.is_null() if array.null_count else None
        return maker.from_arrays(*places, conform(array.values, target.value_type), type=target, mask=mask)
    return pc.cast(array, target)


def _children(array: pa.StructArray) -> list[pa.Array]:
    """The fields' values, null where the struct is; but for runs, which can't be that: `flatten` breaks them (26.0)."""
    fields = range(array.type.num_fields)
    if any(t.is_run_end_encoded(field.type) for field in array.type):
        return [array.field(i) for i in fields]
    return list(array.flatten())


@functools.lru_cache(maxsize=1024)
def _has_required(kind: pa.DataType) -> bool:
    """Whether it has a nested field that can't be null, but for the keys of maps."""
    if t.is_struct(kind):
        return any(not field.nullable or _has_required(field.type) for field in kind)
    if t.is_map(kind):
        return not kind.item_field.nullable or _has_required(kind.key_type) or _has_required(kind.item_type)
    return is_list(kind) and (not kind.value_field.nullable or _has_required(kind.value_type))


def _filled(array: pa.Array) -> pa.Array:
    """With zeros for nulls, where Arrow can do that."""
    if not array.null_count:
        return array
    if isinstance(array, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(array.type, _filled(array.storage))
    with contextlib.suppress(pa.ArrowNotImplementedError):
        places = np.where(array.is_valid().to_numpy(zero_copy_only=False), np.arange(len(array)), len(array))
        return pa.concat_arrays([array, _zeros(1, array.type)]).take(pa.array(places))
    return array


def _without_run_ends(array: pa.Array) -> pa.Array:
    """Each value as often as its run is long; Arrow's own decoding knows few types (26.0)."""
    values = conform(array.values, plain_type(array.values.type))
    ends = array.run_ends.to_numpy().astype(np.int64)
    runs = np.searchsorted(ends, np.arange(array.offset, array.offset + len(array)), side="right")
    return values.take(pa.array(runs))


@functools.lru_cache(maxsize=1024)
def plain_type(kind: pa.DataType) -> pa.DataType:
    """A type for the same values that every function of Arrow knows: no views, dictionaries, run ends, extensions."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if t.is_string_view(kind):
        return pa.large_string()
    if t.is_binary_view(kind):
        return pa.large_binary()
    if t.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if t.is_map(kind):
        key = kind.key_field.with_type(plain_type(kind.key_type))
        return pa.map_(key, kind.item_field.with_type(plain_type(kind.item_type)), kind.keys_sorted)
    if is_list(kind) or _is_list_view(kind):
        item = kind.value_field.with_type(plain_type(kind.value_type))
        if t.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.list_(item) if t.is_list(kind) else pa.large_list(item)
    return kind


def with_nullable_fields(kind: pa.DataType) -> pa.DataType:
    """The type with nested fields that may be null: Arrow's own files say otherwise without being held to it."""
    if t.is_struct(kind):
        return pa.struct([f.with_type(with_nullable_fields(f.type)).with_nullable(True) for f in kind])
    if t.is_map(kind):
        item = kind.item_field.with_type(with_nullable_fields(kind.item_type)).with_nullable(True)
        return pa.map_(kind.key_field, item, kind.keys_sorted)
    if is_list(kind) or _is_list_view(kind):
        item = kind.value_field.with_type(with_nullable_fields(kind.value_type)).with_nullable(True)
        if t.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        makers = ((t.is_large_list, pa.large_list), (t.is_list_view, pa.list_view), (t.is_list, pa.list_))
        return next((maker(item) for test, maker in makers if test(kind)), pa.large_list_view(item))
    return kind


def _names(kind: pa.DataType) -> list[str]:
    """Of all nested fields; `str` of a type leaves out what is long. UnicodeDecodeError for one that is no text."""
    if isinstance(kind, pa.BaseExtensionType):
        return _names(kind.storage_type)
    if t.is_dictionary(kind):
        return _names(kind.value_type)
    fields = [kind.field(i) for i in range(kind.num_fields)]
    return [name for field in fields for name in (field.name, *_names(field.type))]


def check_names(file: str, schema: pa.Schema) -> None:
    """InputError where a name in the file, also of a nested field, is no text."""
    try:
        for name, field in zip(schema.names, schema, strict=True):
            _ = name, _names(field.type)
    except UnicodeDecodeError as error:
        raise InputError(f"input file {file}: a column's name is not UTF-8 text ({error}); write it again") from None


def _conform_list(array: pa.Array, target: pa.DataType) -> pa.Array:
    if t.is_fixed_size_list(target):
        # Null lists have slots too: values are taken unflattened.
        start, count = array.offset * target.list_size, len(array) * target.list_size
        values = conform(array.values.slice(start, count), target.value_type)
        if not target.value_field.nullable:
            values = _filled(values)
        mask = array.is_null() if array.null_count else None
        return pa.FixedSizeListArray.from_arrays(values, type=target, mask=mask)
    # flatten() skips what null lists may still point to, so offsets are built anew from the lengths.
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    values = _flattened(array, target.value_type)
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    mask = array.is_null() if array.null_count else None
    if t.is_large_list(target):
        return pa.LargeListArray.from_arrays(offsets, values, type=target, mask=mask)
    return pa.ListArray.from_arrays(offsets.cast(pa.int32()), values, type=target, mask=mask)


def _flattened(array: pa.Array, item: pa.DataType) -> pa.Array:
    """The values of all lists that are not null, one after the other, as `item`."""
    try:
        values = array.flatten()
    except pa.ArrowNotImplementedError:  # extensions in lists of which some are null, also within runs (26.0)
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
        starts = array.offsets.to_pylist()
        pieces = [array.values.slice(start, size) for start, size in zip(starts, lengths, strict=False) if size]
        return pa.concat_arrays([conform(piece, item) for piece in pieces or [array.values.slice(0, 0)]])
    return conform(values, item)


def _conform_map(array: pa.Array, target: pa.DataType) -> pa.Array:
    kind, mask = array.type, array.is_null() if array.null_count else None
    # Not by a cast to a list of structs: it casts the entries, too, and cuts runs in fixed-size lists short (26.0).
    places = pa.array(array.offsets.to_numpy().copy())
    entry = pa.struct([kind.key_field.with_type(target.key_type), kind.item_field.with_type(target.item_type)])
    keys, items = _flattened(pa.ListArray.from_arrays(places, array.values, mask=mask), entry).flatten()
    lengths = np.diff(places.to_numpy())
    if mask is not None:
        lengths[mask.to_numpy(zero_copy_only=False)] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.MapArray.from_arrays(pa.array(offsets), keys, items, type=target, mask=mask)
