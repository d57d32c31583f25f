"""The longest match among many runs is the one that a look at each of them finds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.scheduling.branches import Branches

RUNS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), max_size=30)


def num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


@given(runs=RUNS, gone=RUNS, asked=RUNS)
def test_the_longest_match_is_found(
    runs: list[tuple[int, ...]], gone: list[tuple[int, ...]], asked: list[tuple[int, ...]]
) -> None:
    branches: Branches[int] = Branches()
    there: dict[tuple[int, ...], int] = {}
    for value, run in enumerate(runs):
        assert branches.add(7, run, value) == (run not in there)
        there.setdefault(run, value)
        branches.add(8, (3, *run), value)  # another parent's runs are no match
        branches.check()
    for run in gone:
        assert not branches.remove(7, run, -1)
        value = there.pop(run, None)
        assert branches.remove(7, run, -1 if value is None else value) == (value is not None)
        branches.check()
    assert {run: value for parent, run, value in branches if parent == 7} == there
    for run in [run for run in asked if run]:
        count, value = branches.longest(7, run)
        assert count == max((num_common(run, other) for other in there), default=0)
        if count:
            assert any(value == there[other] and num_common(run, other) == count for other in there)
        else:
            assert value is None


def test_many_children_cost_a_bisection_each() -> None:
    """What is compared grows with the logarithm of the children: counted, not timed."""

    class Token(int):
        num_compared = 0

        def __eq__(self, other: object) -> bool:
            Token.num_compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    rng = random.Random(0)
    counts = []
    for num_children in (500, 50_000):
        branches: Branches[int] = Branches()
        for i in range(num_children):
            branches.add(1, tuple(rng.randrange(1000) for _ in range(16)), i)
        Token.num_compared = 0
        for _ in range(100):
            branches.longest(1, tuple(Token(rng.randrange(1000)) for _ in range(16)))
        counts.append(Token.num_compared / 100)
    assert counts[1] < 2.5 * counts[0] < 100
