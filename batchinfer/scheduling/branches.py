"""What follows a prefix: the token runs behind each parent block, and the one that agrees longest with a given run.

Responsible for: a token-exact longest match among many runs, by bisection: in sorted order, what shares most with a
run stands beside its place. Not for: what the runs are (blocks that are computed in `prefix_index`, blocks that are
being computed in `holdback`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Generic, TypeVar

Value = TypeVar("Value")
Tokens = tuple[int, ...]


class _Runs(Generic[Value]):
    """Two runs or more behind one parent: `values[i]` belongs to `tokens[i]`; tokens are sorted and all different."""

    __slots__ = ("tokens", "values")

    def __init__(self, tokens: list[Tokens], values: list[Value]) -> None:
        self.tokens = tokens
        self.values = values


class Branches(Generic[Value]):
    """Token runs of at least one token by the hash of the block before them, each with a value.

    Nearly every parent has one run only, which then stands for itself as `(tokens, value)`.
    """

    __slots__ = ("_after",)

    def __init__(self) -> None:
        self._after: dict[int, tuple[Tokens, Value] | _Runs[Value]] = {}

    def __bool__(self) -> bool:
        return bool(self._after)

    def __iter__(self) -> Iterator[tuple[int, Tokens, Value]]:
        for parent, runs in self._after.items():
            if isinstance(runs, tuple):
                yield parent, *runs
            else:
                for tokens, value in zip(runs.tokens, runs.values, strict=True):
                    yield parent, tokens, value

    def add(self, parent: int, tokens: Tokens, value: Value) -> bool:
        """False, and nothing done, where the same run is there already."""
        runs = self._after.get(parent)
        if runs is None:
            self._after[parent] = (tokens, value)
            return True
        if isinstance(runs, tuple):
            only, its_value = runs
            if only == tokens:
                return False
            runs = self._after[parent] = _Runs([only], [its_value])
        place = bisect_left(runs.tokens, tokens)
        if place < len(runs.tokens) and runs.tokens[place] == tokens:
            return False
        runs.tokens.insert(place, tokens)
        runs.values.insert(place, value)
        return True

    def remove(self, parent: int, tokens: Tokens, value: Value) -> bool:
        """False where this run is not there, or with another value."""
        runs = self._after.get(parent)
        if runs is None:
            return False
        if isinstance(runs, tuple):
            if runs[1] != value or runs[0] != tokens:
                return False
            del self._after[parent]
            return True
        place = bisect_left(runs.tokens, tokens)
        if place == len(runs.tokens) or runs.values[place] != value or runs.tokens[place] != tokens:
            return False
        del runs.tokens[place], runs.values[place]
        if len(runs.tokens) == 1:
            self._after[parent] = (runs.tokens[0], runs.values[0])
        return True

    def longest(self, parent: int, tokens: Tokens) -> tuple[int, Value | None]:
        """(leading tokens, at least one, that some run behind this parent has in common, its value), or (0, None)."""
        runs = self._after.get(parent)
        if runs is None:
            return 0, None
        if isinstance(runs, tuple):
            best = _num_common(runs[0], tokens)
            return best, runs[1] if best else None
        known = runs.tokens
        place = bisect_left(known, tokens)
        best = before = 0
        if place < len(known):
            best = _num_common(known[place], tokens)
        if place and best < len(tokens):
            before = _num_common(known[place - 1], tokens)
        if before > best:
            return before, runs.values[place - 1]
        return best, runs.values[place] if best else None

    def check(self) -> None:
        for runs in self._after.values():
            if isinstance(runs, tuple):
                assert runs[0], "a run without tokens"
                continue
            assert len(runs.tokens) == len(runs.values) > 1, "a list for less than two runs was kept"
            assert all(runs.tokens), "a run without tokens"
            assert all(a < b for a, b in pairwise(runs.tokens)), "runs are not in order"


def _num_common(first: Tokens, second: Tokens) -> int:
    if first == second:
        return len(first)
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
