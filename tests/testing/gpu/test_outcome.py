"""What becomes of a check: every way in which it can end has a line, an exit code and a place in the table."""

from __future__ import annotations

import math

import pytest

from batchinfer.testing.gpu.outcome import (
    FAILED,
    MISSED,
    OK,
    Check,
    Clock,
    Found,
    Line,
    NothingToCompare,
    OutOfTime,
    attempt,
    exit_code,
    table,
)


def line_of(found: Found | Exception, *, left_s: float = 60.0, **more: object) -> Line:
    def run() -> Found:
        if isinstance(found, Exception):
            raise found
        return found

    return attempt("benches", Check(name="it", run=run, **more), Clock(left_s))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value, more, status",
    [
        (1.4, {"target": 1.4}, "passed"),
        (1.39, {"target": 1.4}, "missed"),
        (math.nan, {"target": 1.4}, "missed"),
        (0.2, {"target": 0.2, "at_most": True}, "passed"),
        (0.21, {"target": 0.2, "at_most": True}, "missed"),
        (math.nan, {"target": 0.2, "at_most": True}, "missed"),
        (7.0, {}, "number"),
        (None, {}, "passed"),
        (None, {"target": 1.4}, "failed"),
    ],
)
def test_a_value_is_held_against_its_target(value: float | None, more: dict[str, object], status: str) -> None:
    assert line_of(Found(value=value), **more).status == status


def test_what_did_not_pass_has_failed_whatever_its_value() -> None:
    assert line_of(Found(value=9.0, passed=False), target=1.0).status == "failed"


def test_an_exception_is_a_line_and_harms_nothing_else() -> None:
    broken = line_of(ValueError("no such block\nand more"))
    assert (broken.status, broken.text) == ("failed", "ValueError: no such block")
    assert "raise found" in broken.numbers["traceback"]
    assert line_of(Found()).status == "passed"


def test_out_of_time_and_nothing_to_compare_are_said() -> None:
    assert line_of(Found(), left_s=-1.0).status == "not run"
    late = line_of(OutOfTime("3 of 9 rows"))
    assert (late.status, late.text) == ("not run", "out of time: 3 of 9 rows")
    assert line_of(NothingToCompare("no peer installed")).status == "number"


def test_exit_codes() -> None:
    passed, number = line_of(Found()), line_of(Found(value=1.0))
    missed, failed = line_of(Found(value=1.0), target=2.0), line_of(ValueError())
    late = line_of(Found(), left_s=-1.0)
    assert exit_code([passed, number]) == OK
    assert exit_code([passed, missed]) == MISSED
    assert exit_code([missed, failed]) == exit_code([passed, late]) == exit_code([]) == FAILED


def test_the_table_says_twice_what_is_not_as_it_should_be() -> None:
    lines = [line_of(Found(text="fine")), line_of(Found(value=1.0, unit="x"), target=2.0), line_of(ValueError("a|b"))]
    text = table(lines)
    assert "| benches | it | MISSED | 1 x | >= 2 |" in text
    assert "MISSED: benches, it: 1 x, target >= 2; " in text and "FAILED: benches, it: ValueError: a|b" in text
    assert "1 passed, 0 numbers without a target." in text
    assert all(row.count("|") == 8 for row in text.splitlines() if row.startswith("|"))


def test_a_line_survives_its_way_between_processes() -> None:
    line = line_of(Found(value=1.5, unit="x", text="said", numbers={"a": [1, 2]}), target=1.0)
    assert Line.from_json(line.to_json()) == line
