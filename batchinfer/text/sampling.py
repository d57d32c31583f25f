"""Per-row sampling settings from columns: `SamplingColumns`.

`sampling_columns: {max_tokens: my_column}` says which column holds which setting; a null is the job's default, an
empty list is an empty list. Not for: what the settings do (`types.request`), nor prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from batchinfer.errors import ConfigError
from batchinfer.text.values import to_native, type_name
from batchinfer.types.request import SAMPLING_FIELDS, SamplingParams
from batchinfer.types.rows import ErrorClass, RowError

_INTEGERS = frozenset({"n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"})
_LISTS = frozenset({"stop", "stop_token_ids"})


class SamplingColumns:
    """`columns` maps a setting's name to a column; `base` is what the job says for every row."""

    def __init__(self, columns: Mapping[str, str], base: SamplingParams) -> None:
        for name in columns:
            if name not in SAMPLING_FIELDS:
                raise ConfigError(
                    f"input.sampling_columns: there is no sampling setting {name!r}; there are "
                    f"{', '.join(SAMPLING_FIELDS)}"
                )
        self._columns = dict(columns)
        self._base = base
        self._known: dict[str, dict[str, Any] | RowError | None] = {}

    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._columns.values()))

    def overrides(self, row: Mapping[str, Any]) -> dict[str, Any] | RowError | None:
        """The row's own settings as JSON-like values, None where it has none."""
        if not self._columns:
            return None
        values = {name: to_native(row.get(column)) for name, column in self._columns.items()}
        key = repr(values)  # columns of settings hold few different values; checking one costs 20 us
        if key in self._known:
            return self._known[key]
        outcome = self._checked(values)
        if len(self._known) < 4096:
            self._known[key] = outcome
        return outcome

    def _checked(self, values: Mapping[str, Any]) -> dict[str, Any] | RowError | None:
        overrides = {}
        for name, value in values.items():
            if value is None:
                continue
            try:
                overrides[name] = _converted(name, value)
            except ValueError as error:
                message = f"column {self._columns[name]!r} (sampling.{name}): {error}"
                return RowError(ErrorClass.INVALID_SAMPLING, message)
        if not overrides:
            return None
        try:
            apply_overrides(self._base, overrides)
        except ConfigError as error:
            columns = ", ".join(repr(self._columns[name]) for name in self._guilty(overrides))
            return RowError(ErrorClass.INVALID_SAMPLING, f"column {columns}: {error}")
        return overrides

    def _guilty(self, overrides: Mapping[str, Any]) -> list[str]:
        """The settings that are wrong alone; else they are only wrong together."""
        guilty = []
        for name, value in overrides.items():
            try:
                apply_overrides(self._base, {name: value})
            except ConfigError:
                guilty.append(name)
        return guilty or list(overrides)


def apply_overrides(base: SamplingParams, overrides: Mapping[str, Any] | None) -> SamplingParams:
    """`base` with a row's own settings. Takes them also as they come back from JSON (keys of maps are texts).

    Raises ConfigError where a value is out of range.
    """
    if not overrides:
        return base
    changes = dict(overrides)
    if isinstance(changes.get("logit_bias"), Mapping):
        changes["logit_bias"] = {int(token): bias for token, bias in changes["logit_bias"].items()}
    return replace(base, **changes)


def _converted(name: str, value: Any) -> Any:
    """Raises ValueError on a wrong type; ranges are SamplingParams' own concern."""
    value = _without_decimals(value)
    if name in _INTEGERS:
        # Readers turn integer columns with nulls into floats; 64.0 is 64, 64.5 is a mistake.
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be an integer, got {_shown(value)}")
        return value
    if name in _LISTS:
        if name == "stop" and isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise ValueError(f"must be a list, got {_shown(value)}")
        return value
    if name == "logit_bias":
        if isinstance(value, list) and all(isinstance(item, list) and len(item) == 2 for item in value):
            value = dict(value)  # Arrow maps arrive as lists of pairs
        if not isinstance(value, dict):
            raise ValueError(f"must be a map from token ids to numbers, got {_shown(value)}")
        bias = {}
        for token, number in value.items():
            # Structs from JSON have text keys; a null entry is a token that this row does not name.
            if number is None:
                continue
            try:
                bias[int(token)] = number
            except (TypeError, ValueError) as error:
                raise ValueError(f"{token!r} is not a token id") from error
        return bias
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("is NaN; leave it null for the job's default")
    return value


def _without_decimals(value: Any) -> Any:
    """As integers and floats, also within lists and maps. They come of a decimal column, and of one in which a single
    integer is beyond 64 bits."""
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, list):
        return [_without_decimals(item) for item in value]
    if isinstance(value, dict):
        return {_without_decimals(key): _without_decimals(item) for key, item in value.items()}
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:40]} ({type_name(value)})" if not isinstance(value, (dict, list)) else type_name(value)
