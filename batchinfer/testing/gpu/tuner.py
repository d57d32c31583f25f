"""Times kernels, and finds better configurations for one: for `scripts/bench_kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer_kernels.tuning import Config, trial
from torch import Tensor

from batchinfer.testing.gpu.kernels import Case, Work
from batchinfer.testing.gpu.timing import Rates, Timer, free

# A configuration must be better by so much: less is noise.
LEAST_GAIN = 0.01
_MOST = {"num_warps": 16, "num_stages": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """share: of the time that the device needs at best. configs: what it was launched with, by kernel."""

    name: str
    seconds: float
    bytes_s: float
    operations_s: float
    share: float
    configs: dict[str, dict[str, int]]


def time_case(case: Case, timer: Timer, rates: Rates) -> Timed:
    with trial() as asked:
        work = case.made()
        seconds = timer(work.run)
    floor = rates.floor_s(work.num_bytes, work.operations, work.speed)
    return Timed(
        name=case.name,
        seconds=seconds,
        bytes_s=work.num_bytes / seconds,
        operations_s=work.operations / seconds,
        share=floor / seconds,
        configs={kernel: dict(config) for kernel, config in asked.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """best: the entry of the device's table; gain: how many times faster than what stood, over the cases."""

    kernel: str
    before: dict[str, int]
    best: dict[str, int]
    gain: float
    cases: tuple[str, ...]
    num_tried: int
    num_refused: int


def tune(kernel: str, cases: Sequence[Case], timer: Timer, say: Callable[[str], None]) -> Tuned:
    """Goes from the configuration that stands to better neighbours of it, one number at a time, until none is better.

    Over the cases that launch the kernel; ValueError where none does. A neighbour counts where it compiles, fits and
    gives the same results, up to rounding. (Other blocks may add in another order: bytes may change.)
    """
    mine, before = _cases_with(kernel, cases)
    if before is None:
        raise ValueError(f"no case launches a kernel of the name {kernel!r}")
    results = [_result(case, kernel, before) for case in mine]
    base = [_seconds(case, kernel, before, timer) for case in mine]
    best, best_score, seen, refused = before, 1.0, [before], 0
    better = True
    while better:
        better = False
        for config in neighbours(best):
            if config in seen:
                continue
            seen.append(config)
            try:
                for case, expected in zip(mine, results, strict=True):
                    check_same(_result(case, kernel, config), expected)
                times = [_seconds(case, kernel, config, timer) for case in mine]
            except Exception as error:  # of the compiler, the launch, or a result: whatever it is, this one is not it
                refused += 1
                say(f"{_text(config)}: {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}")
                continue
            score = math.exp(sum(math.log(t / b) for t, b in zip(times, base, strict=True)) / len(mine))
            say(f"{_text(config)}: {score:.3f} of the time")
            if score < best_score * (1 - LEAST_GAIN):
                best, best_score, better = config, score, True
    return Tuned(
        kernel=kernel,
        before=dict(before),
        best=dict(best),
        gain=1 / best_score,
        cases=tuple(case.name for case in mine),
        num_tried=len(seen) - 1,
        num_refused=refused,
    )


def neighbours(config: Config) -> Iterator[dict[str, int]]:
    """With one number halved or doubled, or one stage more or less."""
    for key, value in config.items():
        others = (value - 1, value + 1) if key == "num_stages" else (value // 2, value * 2)
        for other in others:
            if 1 <= other <= _MOST.get(key, 1 << 20):
                yield {**config, key: other}


def check_same(found: Any, expected: Any) -> None:
    """Raises ValueError for results that differ by more than roundings do: on the mean, since a code of 8 bits that
    rounds the other way is far off."""
    for ours, right in zip(_tensors(found), _tensors(expected), strict=True):
        wide, meant = ours.double(), right.double()
        if not (wide - meant).abs().mean() <= 0.01 * meant.abs().mean():  # NaN is not the same
            raise ValueError("the result is another one")


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _cases_with(kernel: str, cases: Sequence[Case]) -> tuple[list[Case], Config | None]:
    mine, before = [], None
    for case in cases:
        with trial() as asked:
            case.made().run()
        if kernel in asked:
            mine.append(case)
            before = asked[kernel]
    return mine, before


def _with(case: Case, kernel: str, config: Config) -> Work:
    """Made within the trial: what is planned follows from block sizes."""
    with trial({kernel: config}):
        work = case.made()

    def run() -> Any:
        with trial({kernel: config}):
            return work.run()

    return Work(run=run, num_bytes=work.num_bytes, operations=work.operations, speed=work.speed)


def _result(case: Case, kernel: str, config: Config) -> Any:
    result = _with(case, kernel, config).run()
    return tuple(x.clone() for x in _tensors(result))


def _seconds(case: Case, kernel: str, config: Config, timer: Timer) -> float:
    seconds = timer(_with(case, kernel, config).run)
    free(timer.device)
    return seconds


def _text(config: Config) -> str:
    return ", ".join(f"{key} {value}" for key, value in config.items())
