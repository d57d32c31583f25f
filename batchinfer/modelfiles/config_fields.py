"""Fields of a model's config, each of the type that it must have: another one is named, never guessed at."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from batchinfer.errors import ModelError

# Far above any model; a damaged number must not make lists or tables of its own size.
MOST = 1 << 31
MOST_LAYERS = 10_000


def whole(config: Mapping[str, Any], key: str, *, default: int | None = None, least: int = 1, most: int = MOST) -> int:
    """An integer of at least `least`. `default` stands for a key that is missing or null; without one it is needed."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ModelError(f"{key} in the model's config must be {kind}, got {value!r}")
    if value > most:
        raise ModelError(f"{key} in the model's config is {value}; no model has more than {most}")
    return value


def real(config: Mapping[str, Any], key: str, *, default: float, zero: bool = False) -> float:
    """A finite number above 0 (`zero`: or 0). `default` stands for a key that is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared as it is: an integer can be too large to be made a float.
    if not number or not 0 <= value <= sys.float_info.max or (value == 0 and not zero):
        kind = "a number of at least 0" if zero else "a positive number"
        raise ModelError(f"{key} in the model's config must be {kind}, got {value!r}")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """true or false; false where it is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{key} in the model's config must be true or false, got {value!r}")
    return bool(value)
