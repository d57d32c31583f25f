"""Values of a row as plain Python: `to_native`. What readers and pandas hand over must not reach templates.

Responsible for: numpy and Arrow values, tuples and map entries, nulls that only a shared struct type brought in.
Not for: what a value means (`fields`, `messages`, `sampling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def to_native(value: Any) -> Any:
    """Lists, dicts, str, int, float, bool, None, bytes; other scalars (dates, decimals) as they are."""
    if value is None or type(value) in (str, int, float, bool, bytes):
        return value
    if isinstance(value, Mapping):
        return {key if type(key) is str else to_native(key): to_native(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_native(item) for item in value]
    if isinstance(value, str):  # numpy.str_ and other subclasses
        return str.__str__(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # numpy arrays and scalars
        return to_native(value.tolist())
    if hasattr(value, "as_py"):  # Arrow scalars
        return to_native(value.as_py())
    return value


def without_nulls(value: Any) -> Any:
    """Dicts without their null entries, at any depth.

    Arrow gives every struct of a column all fields that any of them has; a null field is one that this row's value
    never had, and a template that asks `is defined` must not see it.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def type_name(value: Any) -> str:
    """A value's kind in the words of data, for messages."""
    if value is None:
        return "null"
    if isinstance(value, float) and value != value:
        return "NaN"
    names = {bool: "a boolean", int: "a number", float: "a number", bytes: "bytes", list: "a list", dict: "a struct"}
    return names.get(type(value), f"of type {type(value).__name__}")
