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


class Branches(Generic[Value]):
    """Token runs of at least one token by the hash of the block before them, each with a value."""

    __slots__ = ("_after",)

    def __init__(self) -> None:
        self._after: dict[int, list[tuple[Tokens, Value]]] = {}  # sorted by tokens, which are all different

    def __bool__(self) -> bool:
        return bool(self._after)

    def __iter__(self) -> Iterator[tuple[int, Tokens, Value]]:
        for parent, runs in self._after.items():
            for tokens, value in runs:
                yield parent, tokens, value

    def add(self, parent: int, tokens: Tokens, value: Value) -> bool:
        """False, and nothing done, where the same run is there already."""
        runs = self._after.get(parent)
        if runs is None:
            self._after[parent] = [(tokens, value)]
            return True
        place = bisect_left(runs, (tokens,))
        if place < len(runs) and runs[place][0] == tokens:
            return False
        runs.insert(place, (tokens, value))
        return True

    def remove(self, parent: int, tokens: Tokens, value: Value) -> bool:
        """False where this run is not there, or with another value."""
        runs = self._after.get(parent)
        if runs is None:
            return False
        place = bisect_left(runs, (tokens,)) if len(runs) > 1 else 0
        if place == len(runs) or runs[place] != (tokens, value):
            return False
        if len(runs) == 1:
            del self._after[parent]
        else:
            del runs[place]
        return True

    def longest(self, parent: int, tokens: Tokens) -> tuple[int, Value | None]:
        """(leading tokens, at least one, that some run behind this parent has in common, its value), or (0, None)."""
        runs = self._after.get(parent)
        if runs is None:
            return 0, None
        place = bisect_left(runs, (tokens,))
        best, value = 0, None
        if place < len(runs):
            best = _num_common(runs[place][0], tokens)
            value = runs[place][1] if best else None
        if place and best < len(tokens):
            before = _num_common(runs[place - 1][0], tokens)
            if before > best:
                best, value = before, runs[place - 1][1]
        return best, value

    def check(self) -> None:
        for runs in self._after.values():
            assert runs, "an empty list of runs was kept"
            assert all(tokens for tokens, _ in runs), "a run without tokens"
            assert all(a[0] < b[0] for a, b in pairwise(runs)), "runs are not in order"


def _num_common(first: Tokens, second: Tokens) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
