"""The longest match among many runs is the one that a look at each of them finds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.scheduling.branches import TOKEN_BYTES, Branches, num_common, run_of

# Ids that differ in their lowest, highest and middle bytes.
TOKENS = st.sampled_from([0, 1, 256, 65536, 2**32 - 1, 2**32 - 2])
RUNS = st.lists(st.lists(TOKENS, min_size=1, max_size=5).map(run_of), max_size=30)


def count_common(first: bytes, second: bytes) -> int:
    """In tokens, one after the other."""
    a, b = (memoryview(run).cast("I").tolist() for run in (first, second))
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@given(runs=RUNS, gone=RUNS, asked=RUNS)
def test_the_longest_match_is_found(runs: list[bytes], gone: list[bytes], asked: list[bytes]) -> None:
    branches = Branches()
    there = [*runs, *runs[::3]]
    for run in there:
        branches.add(7, run)
        branches.add(8, run_of([3]) + run)  # another parent's runs are no match
        branches.check()
    for run in [*gone, *runs[::2]]:
        if run in there:
            there.remove(run)
            branches.remove(7, run)
            branches.check()
    assert sorted(run for parent, run in branches if parent == 7) == sorted(there)
    assert (7 in branches.after) == bool(there)
    for run in asked:
        count, found = branches.longest(7, run)
        assert count == max((count_common(run, other) for other in there), default=0)
        if count:
            assert found in there and count_common(run, found) == count
        else:
            assert found == b""


@given(
    head=st.lists(TOKENS, max_size=200),
    tails=st.tuples(st.lists(TOKENS, max_size=100), st.lists(TOKENS, max_size=100)),
)
def test_common_tokens_are_counted_in_long_runs_too(head: list[int], tails: tuple[list[int], list[int]]) -> None:
    first, second = (run_of(head + tail) for tail in tails)
    assert num_common(first, second) == count_common(first, second)


def test_many_children_cost_a_bisection_each() -> None:
    """What is compared grows with the logarithm of the children: counted, not timed."""

    class Run(bytes):
        num_compared = 0

        def __gt__(self, other: bytes) -> bool:  # what bisection asks of the run that it looks for
            Run.num_compared += 1
            return bytes(self) > other

    rng = random.Random(0)
    counts = []
    for num_children in (500, 50_000):
        branches = Branches()
        for _ in range(num_children):
            branches.add(1, rng.randbytes(16 * TOKEN_BYTES))
        Run.num_compared = 0
        for _ in range(100):
            branches.longest(1, Run(rng.randbytes(16 * TOKEN_BYTES)))
        counts.append(Run.num_compared / 100)
    assert counts[0] > 5 and counts[1] < 2.5 * counts[0] < 100
