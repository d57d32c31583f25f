"""How far the job is: totals, rates over the last half minute, time left. Computes; shows and writes nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batchinfer.job.events import Tally

WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A moment of a running job. Rates are per second; `eta_s` is None while nothing can be said."""

    name: str
    phase: str
    num_rows: int
    tally: Tally
    rows_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    eta_s: float | None
    elapsed_s: float
    parts_done: int
    workers_ready: int
    workers: int
    notes: tuple[str, ...] = ()


class ProgressMeter:
    def __init__(self, name: str, num_rows: int, base: Tally, now: float) -> None:
        """`base`: outcomes in parts that were out before this run."""
        self._name, self._num_rows, self._base, self._start = name, num_rows, base, now
        self._history: deque[tuple[float, int, int, int]] = deque()

    def measure(
        self,
        now: float,
        tally: Tally,
        *,
        phase: str,
        parts_done: int,
        prompt_tokens: int,
        completion_tokens: int,
        workers_ready: int,
        workers: int,
        notes: tuple[str, ...] = (),
    ) -> Progress:
        """`prompt_tokens`, `completion_tokens`: that engines went through so far, also of rows not yet finished."""
        total = self._base + tally
        history = self._history
        history.append((now, total.rows, prompt_tokens, completion_tokens))
        while len(history) > 2 and history[1][0] <= now - WINDOW_S:
            history.popleft()
        then = history[0]
        span = max(now - then[0], 1e-9)
        first = then[0] <= now - 0.5
        rates = [max(0, b - a) / span if first else 0.0 for a, b in zip(then[1:], history[-1][1:], strict=True)]
        left = self._num_rows - total.rows
        return Progress(
            name=self._name,
            phase=phase,
            num_rows=self._num_rows,
            tally=total,
            rows_per_s=rates[0],
            prompt_tokens_per_s=rates[1],
            completion_tokens_per_s=rates[2],
            eta_s=0.0 if left <= 0 else left / rates[0] if rates[0] > 0 else None,
            elapsed_s=now - self._start,
            parts_done=parts_done,
            workers_ready=workers_ready,
            workers=workers,
            notes=notes,
        )
