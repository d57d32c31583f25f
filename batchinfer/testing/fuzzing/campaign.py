"""Many cases: which ones, side by side, counted; those that failed are kept as files that can be run again."""

from __future__ import annotations

import hashlib
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchinfer.testing.fuzzing.children import Child, make_case

LIMIT_S = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """inputs: of each kind; seconds_each: the most that a kind may take; limit_s: CPU seconds of one trial."""

    kinds: Sequence[str]
    inputs: int
    seed: int = 0
    first: int = 0
    seconds_each: float | None = None
    jobs: int = 1
    limit_s: float = LIMIT_S
    scratch: Path
    kept: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    kind: str
    number: int
    what: str
    detail: str
    file: Path
    seconds: float


@dataclass(slots=True)
class Sums:
    """outcomes: by kind; the slowest trial of each kind; faults that look alike are listed once, and counted."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    slowest: dict[str, tuple[float, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    alike: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return not self.alike


def run_campaign(plan: Plan, told: Callable[[Failure], None] = lambda failure: None) -> Sums:
    """Runs `plan.inputs` cases of each kind in `plan.jobs` processes."""
    sums = Sums()
    for kind in plan.kinds:
        begin = time.monotonic()
        sums.outcomes[kind] = Counter()
        sums.slowest[kind] = (0.0, -1)
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(plan.first, plan.first + plan.inputs):
            todo.put(number)
        mutex = threading.Lock()

        def work(index: int, kind: str = kind, begin: float = begin, todo: Any = todo, mutex: Any = mutex) -> None:
            child = Child(plan.scratch / f"{kind}-{index}", plan.limit_s)
            try:
                while plan.seconds_each is None or time.monotonic() - begin < plan.seconds_each:
                    try:
                        number = todo.get_nowait()
                    except queue.Empty:
                        return
                    answer = child.run({"kind": kind, "seed": plan.seed, "number": number})
                    with mutex:
                        _count(sums, plan, kind, number, answer, told)
            finally:
                child.close()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(plan.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sums.seconds[kind] = time.monotonic() - begin
    return sums


def _count(
    sums: Sums, plan: Plan, kind: str, number: int, answer: dict[str, Any], told: Callable[[Failure], None]
) -> None:
    sums.outcomes[kind][answer["outcome"]] += 1
    sums.slowest[kind] = max(sums.slowest[kind], (answer["seconds"], number))
    if answer["outcome"] != "fault":
        return
    likeness = f"{kind}: {_likeness(answer['detail'])}"
    sums.alike[likeness] += 1
    if sums.alike[likeness] > 1:
        return
    case = make_case(kind, plan.seed, number)
    text = case.to_json()
    plan.kept.mkdir(parents=True, exist_ok=True)
    file = plan.kept / f"{kind}-{plan.seed}-{number}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    file.write_text(text)
    failure = Failure(
        kind=kind, number=number, what=case.what, detail=answer["detail"], file=file, seconds=answer["seconds"]
    )
    sums.failures.append(failure)
    told(failure)


def _likeness(detail: str) -> str:
    """A fault's words without what differs from case to case."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[0-9]+", "#", detail.partition("\n")[0])[:120]
