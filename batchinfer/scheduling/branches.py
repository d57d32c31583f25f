"""What follows a prefix: the token runs behind each parent block, and the one that agrees longest with a given run.

Responsible for: a token-exact longest match among many runs, by bisection: in sorted order, what shares most with a
run stands beside its place. Not for: what the runs are (blocks that are computed in `prefix_index`, prompts that are
being computed in `holdback`).

A run is its tokens as bytes, TOKEN_BYTES for each: to hash, to compare and to cut out takes a call instead of a loop.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import pairwise

_TOKEN_TYPE = "I"
TOKEN_BYTES = array(_TOKEN_TYPE).itemsize
_SHORT = 32 * TOKEN_BYTES


def run_of(tokens: Sequence[int]) -> bytes:
    """Token ids, of 32 bits each, as a run."""
    return array(_TOKEN_TYPE, tokens).tobytes()


def num_common(first: bytes, second: bytes) -> int:
    """Leading tokens that two runs have in common."""
    start, stop = 0, min(len(first), len(second))
    if first[:stop] == second[:stop]:
        return stop // TOKEN_BYTES
    while stop - start > _SHORT:
        middle = (start + stop) // 2
        if first[start:middle] == second[start:middle]:
            start = middle
        else:
            stop = middle
    differ = int.from_bytes(first[start:stop], "little") ^ int.from_bytes(second[start:stop], "little")
    return (start + ((differ & -differ).bit_length() - 1) // 8) // TOKEN_BYTES


def longest_among(runs: list[bytes], run: bytes) -> tuple[int, int]:
    """(leading tokens, at least one, that one of these runs, which are in order, has in common with that one, its
    place), or (0, 0)."""
    place = bisect_left(runs, run)
    best = num_common(runs[place - 1], run) if place else 0
    if place < len(runs):
        behind = runs[place]
        more = (best + 1) * TOKEN_BYTES
        if len(run) >= more and behind.startswith(run[:more]):
            return num_common(behind, run), place
    return (best, place - 1) if best else (0, 0)


class Branches:
    """Runs of at least one token by the hash of the block before them. The same run may be there more than once.

    Nearly every parent has one run only, which then stands for itself; several are a sorted list.
    """

    __slots__ = ("after",)

    def __init__(self) -> None:
        self.after: dict[int, bytes | list[bytes]] = {}

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for parent, runs in self.after.items():
            for run in [runs] if isinstance(runs, bytes) else runs:
                yield parent, run

    def add(self, parent: int, run: bytes) -> None:
        runs = self.after.get(parent)
        if runs is None:
            self.after[parent] = run
        elif isinstance(runs, bytes):
            self.after[parent] = [runs, run] if runs < run else [run, runs]
        else:
            insort(runs, run)

    def remove(self, parent: int, run: bytes) -> None:
        """Takes out a run that is there."""
        runs = self.after[parent]
        if isinstance(runs, bytes):
            assert runs == run, "another run is there"
            del self.after[parent]
            return
        place = bisect_left(runs, run)
        assert runs[place] == run, "the run is not there"
        del runs[place]
        if len(runs) == 1:
            self.after[parent] = runs[0]

    def longest(self, parent: int, run: bytes) -> tuple[int, bytes]:
        """(leading tokens, at least one, that a run behind this parent has in common, that run), or (0, b"")."""
        runs = self.after.get(parent)
        if runs is None:
            return 0, b""
        if isinstance(runs, bytes):
            best = num_common(runs, run)
            return (best, runs) if best else (0, b"")
        best, place = longest_among(runs, run)
        return (best, runs[place]) if best else (0, b"")

    def any_begins_with(self, parent: int, head: bytes) -> bool:
        """Whether a run behind this parent begins with that one."""
        runs = self.after.get(parent, b"")
        if isinstance(runs, bytes):
            return runs.startswith(head)
        place = bisect_left(runs, head)
        return place < len(runs) and runs[place].startswith(head)

    def check(self) -> None:
        for runs in self.after.values():
            if isinstance(runs, bytes):
                assert runs, "a run without tokens"
                continue
            assert len(runs) > 1, "a list for less than two runs was kept"
            assert all(runs), "a run without tokens"
            assert all(a <= b for a, b in pairwise(runs)), "runs are not in order"
