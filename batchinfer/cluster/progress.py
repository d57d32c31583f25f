"""How far the job is: totals, rates over the last half minute, time left. Computes; shows and writes nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batchinfer.job.events import Tally

WINDOW_S = 30.0
MIN_ROWS = 10  # to guess the time left from: a first batch begins long before its first row ends
BEFORE_WORK = ("planning", "waiting for workers", "loading the model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A moment of a running job. Rates are per second; `eta_s` is None while nothing can be said.

    shareable_tokens   the most prompt tokens that rows planned so far can share
    first_token_s      from the start to the first token, once there is one
    """

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
    shareable_tokens: int = 0
    first_token_s: float | None = None


class ProgressMeter:
    def __init__(self, name: str, num_rows: int, base: Tally, now: float) -> None:
        """`base`: outcomes in parts that were out before this run."""
        self._name, self._num_rows, self._base, self._start = name, num_rows, base, now
        self._history: deque[tuple[float, int, int, int]] = deque()
        self._work_began: tuple[float, int] | None = None  # when, and how many rows had an outcome by then

    def told_again(self, tally: Tally) -> None:
        """These outcomes of parts that were out before will come once more."""
        self._base -= tally

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
        shareable_tokens: int = 0,
        first_token_s: float | None = None,
    ) -> Progress:
        """`prompt_tokens`, `completion_tokens`: that engines went through so far, also of rows not yet finished."""
        total = self._base + tally
        history = self._history
        if self._work_began is None:
            history.clear()  # rows that counted up to here were there already, or are bad ones: no rate comes of them
            if phase not in BEFORE_WORK:
                self._work_began = now, total.rows
        history.append((now, total.rows, prompt_tokens, completion_tokens))
        while len(history) > 2 and history[1][0] <= now - WINDOW_S:
            history.popleft()
        then = history[0]
        span = max(now - then[0], 1e-9)
        first = then[0] <= now - 0.5
        rates = [max(0, b - a) / span if first else 0.0 for a, b in zip(then[1:], history[-1][1:], strict=True)]
        return Progress(
            name=self._name,
            phase=phase,
            num_rows=self._num_rows,
            tally=total,
            rows_per_s=rates[0],
            prompt_tokens_per_s=rates[1],
            completion_tokens_per_s=rates[2],
            eta_s=self._eta_s(now, total.rows),
            elapsed_s=now - self._start,
            parts_done=parts_done,
            workers_ready=workers_ready,
            workers=workers,
            notes=notes,
            shareable_tokens=shareable_tokens,
            first_token_s=first_token_s,
        )

    def _eta_s(self, now: float, rows: int) -> float | None:
        """From the last half minute, or from the whole run where that holds too few rows."""
        left = self._num_rows - rows
        if left <= 0:
            return 0.0
        if self._work_began is None:
            return None
        for then, rows_then in (self._history[0][:2], self._work_began):
            if rows - rows_then >= MIN_ROWS and now > then:
                return left * (now - then) / (rows - rows_then)
        return None
