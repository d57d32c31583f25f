"""What came of checks and measurements: lines, their table, and how the whole ended.

`attempt` runs one and lets nothing of it touch the next: what it raises becomes its line.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "missed", "number", "not run"]
# How gpu_check ends: all passed; something failed or did not run; no GPU; all passed but for targets.
OK, FAILED, NO_GPU, MISSED = 0, 1, 2, 3


class OutOfTime(Exception):
    """A check gives up: the time for all of them is over."""


class NothingToCompare(Exception):
    """A measurement has no other side here; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a check has found, where it has not raised. value: what a target is held against, in `unit`."""

    text: str = ""
    value: float | None = None
    unit: str = ""
    passed: bool = True
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line to be. target: the least that the value is to be, or with `at_most` the most; None: a number alone, or
    for a check without a value, that it passes."""

    name: str
    run: Callable[[], Found]
    target: float | None = None
    at_most: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """seconds: that it took."""

    group: str
    name: str
    status: Status
    text: str
    value: float | None = None
    unit: str = ""
    target: str = ""
    seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Line:
        return Line(**json.loads(text))


class Clock:
    """Time for all checks together, seconds from now."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def check(self, what: str) -> None:
        """Raises OutOfTime, with what was reached."""
        if self.left_s <= 0:
            raise OutOfTime(what)


def attempt(group: str, check: Check, clock: Clock) -> Line:
    start = time.perf_counter()
    text_of_target = "" if check.target is None else f"{'<=' if check.at_most else '>='} {check.target:g}"

    def line(status: Status, text: str, **more: Any) -> Line:
        taken = time.perf_counter() - start
        return Line(
            group=group, name=check.name, status=status, text=text, target=text_of_target, seconds=taken, **more
        )

    try:
        clock.check("nothing of it was begun")
        found = check.run()
    except OutOfTime as error:
        return line("not run", f"out of time: {error}")
    except NothingToCompare as error:
        return line("number", str(error))
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        return line("failed", f"{type(error).__name__}: {first}", numbers={"traceback": traceback.format_exc()})
    return line(_status(check, found), found.text, value=found.value, unit=found.unit, numbers=found.numbers)


def _status(check: Check, found: Found) -> Status:
    if not found.passed:
        return "failed"
    if check.target is None:
        return "passed" if found.value is None else "number"
    if found.value is None:
        return "failed"
    # Written so that NaN misses.
    reached = found.value <= check.target if check.at_most else found.value >= check.target
    return "passed" if reached else "missed"


def exit_code(lines: Sequence[Line]) -> int:
    statuses = {line.status for line in lines}
    if not lines or statuses & {"failed", "not run"}:
        return FAILED
    return MISSED if "missed" in statuses else OK


def table(lines: Sequence[Line]) -> str:
    """For people, in Markdown; what is not as it should be stands below once more."""
    rows = [("group", "what", "", "value", "target", "s", ""), ("---",) * 7]
    for line in lines:
        value = "" if line.value is None else f"{line.value:.4g} {line.unit}".strip()
        mark = line.status if line.status in ("passed", "number") else line.status.upper()
        rows.append((line.group, line.name, mark, value, line.target, f"{line.seconds:.1f}", line.text))
    text = "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
    bad = [line for line in lines if line.status in ("failed", "missed", "not run")]
    counts = {status: sum(line.status == status for line in lines) for status in ("passed", "number")}
    said = [f"{line.status.upper()}: {line.group}, {line.name}: {_short(line)}" for line in bad]
    return "\n".join([text, "", f"{counts['passed']} passed, {counts['number']} numbers without a target.", *said])


def _short(line: Line) -> str:
    value = "" if line.value is None else f"{line.value:.4g} {line.unit}".strip() + f", target {line.target}; "
    return value + line.text
