"""Which columns the output has and of which type; clashes are found here, before anything runs.

Carried input columns keep name, place and Arrow type. Parquet can't hold a few types, so these change, always in the
same way: timestamp[s] and time32[s] to milliseconds, date64 to date32, dictionaries of other than string or bytes to
their values, run-end encoding and nested views to plain. A time that the new type can't hold becomes
null, which the log tells (`joining`). Not here: writing (see `parts`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from batchinfer.data.segments import LOGPROB_TYPE
from batchinfer.errors import InputError

log = logging.getLogger("batchinfer.data")
t = pa.types

ERROR_TYPE = pa.struct([("class", pa.string()), ("message", pa.string())])
PER_SAMPLE = ("completion", "finish_reason", "completion_tokens", "token_ids", "logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayout:
    """The output's columns. Picklable.

    schema          of every part: carried input columns, then the result columns (names with prefix)
    input_columns   the carried ones
    result_columns  plain name and name in the output
    lists           per-sample columns are lists (n above 1)
    """

    schema: pa.Schema
    input_columns: tuple[str, ...]
    result_columns: tuple[tuple[str, str], ...]
    lists: bool
    prefix: str = ""

    @property
    def result_names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self.result_columns)

    def describe(self) -> dict[str, object]:
        """JSON form for the manifest."""
        return {
            "columns": {field.name: str(field.type) for field in self.schema},
            "input_columns": list(self.input_columns),
            "prefix": self.prefix,
            "lists": self.lists,
        }


def output_schema(
    input_schema: pa.Schema,
    columns: Literal["all"] | Sequence[str] = "all",
    prefix: str = "",
    *,
    lists: bool = False,
    token_ids: bool = False,
    logprobs: bool = False,
) -> OutputLayout:
    """The output's layout. InputError on unknown columns, on clashing names (all of them listed), on types that
    Parquet can't hold."""
    known = {field.name: field for field in input_schema}
    if columns == "all":
        carried = list(known)
    else:
        carried = list(columns)
        missing = [name for name in carried if name not in known]
        if missing:
            raise InputError(
                f"output.columns names {', '.join(map(repr, missing))}, which the input does not have; its columns "
                f"are: {', '.join(known)}"
            )
        twice = sorted(name for name, count in Counter(carried).items() if count > 1)
        if twice:
            raise InputError(f"output.columns names {', '.join(map(repr, twice))} twice")
    results = _result_fields(lists, token_ids, logprobs)
    _refuse_clashes(carried, [prefix + field.name for field in results], prefix)
    fields = []
    for name in carried:
        field = known[name]
        try:
            fields.append(field.with_type(storable(field.type)).with_nullable(True))
        except _Unstorable as error:
            raise InputError(
                f"input column {name!r} can't be carried along: Parquet has no way to hold {error}; leave it out "
                "with output.columns, or convert it"
            ) from None
        if not fields[-1].type.equals(field.type):
            log.warning("column %r is %s and becomes %s in Parquet", name, field.type, fields[-1].type)
    fields += [field.with_name(prefix + field.name) for field in results]
    return OutputLayout(
        schema=pa.schema(fields),
        input_columns=tuple(carried),
        result_columns=tuple((field.name, prefix + field.name) for field in results),
        lists=lists,
        prefix=prefix,
    )


def _result_fields(lists: bool, token_ids: bool, logprobs: bool) -> list[pa.Field]:
    def each(kind: pa.DataType) -> pa.DataType:
        return pa.list_(kind) if lists else kind

    fields = [
        pa.field("source_file", pa.string()),
        pa.field("source_row", pa.int64()),
        pa.field("completion", each(pa.string())),
        pa.field("finish_reason", each(pa.string())),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("completion_tokens", each(pa.int32())),
        pa.field("error", ERROR_TYPE),
    ]
    if token_ids:
        fields.append(pa.field("token_ids", each(pa.list_(pa.int32()))))
    if logprobs:
        fields.append(pa.field("logprobs", each(pa.list_(LOGPROB_TYPE))))
    return fields


def _refuse_clashes(carried: Sequence[str], results: Sequence[str], prefix: str) -> None:
    # Compared without case: DuckDB, Spark and others could not tell `Error` from `error`.
    lower = {name.lower(): name for name in results}
    clashes = [name for name in carried if name.lower() in lower]
    if clashes:
        listed = ", ".join(
            f"{name!r}" if name == lower[name.lower()] else f"{name!r} (as {lower[name.lower()]!r})" for name in clashes
        )
        free = next(
            p
            for p in ("out_", "batchinfer_", *(f"out{i}_" for i in range(2, 1000)))
            if not {(p + r.removeprefix(prefix)).lower() for r in results} & {c.lower() for c in carried}
        )
        raise InputError(
            f"output columns clash with input columns: {listed}. Set output.prefix (for instance {free!r}: the output "
            f"columns become {free}completion and so on), or leave the input's out with output.columns"
        )
    seen: dict[str, str] = {}
    for name in carried:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            log.warning("input columns %r and %r differ only in case: DuckDB and Spark rename one", other, name)


class _Unstorable(Exception):
    pass


def storable(kind: pa.DataType, nested: bool = False) -> pa.DataType:
    """The type that comes back when values of `kind` go through Parquet."""
    if isinstance(kind, pa.BaseExtensionType):
        storable(kind.storage_type, nested)
        return kind
    if t.is_timestamp(kind) and kind.unit == "s":
        return pa.timestamp("ms", kind.tz)
    if t.is_time32(kind):
        return pa.time32("ms")
    if t.is_date64(kind):
        return pa.date32()
    if t.is_dictionary(kind):
        return _storable_dictionary(kind, nested)
    if t.is_run_end_encoded(kind):
        return storable(kind.value_type, nested)
    if t.is_struct(kind):
        if kind.num_fields == 0:
            raise _Unstorable("a struct without fields")
        return pa.struct([field.with_type(storable(field.type, True)) for field in kind])
    if t.is_map(kind):
        key = kind.key_field.with_type(storable(kind.key_type, True))
        return pa.map_(key, kind.item_field.with_type(storable(kind.item_type, True)), kind.keys_sorted)
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        item = kind.value_field.with_type(storable(kind.value_type, True))
        if t.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if t.is_large_list(kind) else pa.list_(item)
    if t.is_list_view(kind) or t.is_large_list_view(kind):
        item = kind.value_field.with_type(storable(kind.value_type, True))
        return pa.large_list(item) if t.is_large_list_view(kind) else pa.list_(item)
    if nested and t.is_string_view(kind):  # pyarrow can't write these inside of others (26.0)
        return pa.string()
    if nested and t.is_binary_view(kind):
        return pa.binary()
    if t.is_union(kind) or t.is_interval(kind) or (t.is_decimal(kind) and not 0 <= kind.scale <= kind.precision):
        raise _Unstorable(str(kind))
    return kind


def _storable_dictionary(kind: pa.DataType, nested: bool) -> pa.DataType:
    value = kind.value_type
    if t.is_large_string(value) or t.is_string_view(value):
        value = pa.string()
    elif t.is_large_binary(value) or t.is_binary_view(value):
        value = pa.binary()
    elif not (t.is_string(value) or t.is_binary(value)):
        return storable(value, nested)
    # A row group must hold no more values than the index can count: nested ones are not watched (see `parts`).
    return pa.dictionary(pa.int32() if nested else kind.index_type, value, kind.ordered)
