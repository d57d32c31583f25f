"""Steps on a runner that works while the host goes on: the next one is planned and launched before one is waited for.

Responsible for: the order of planning, launching, waiting and committing; what happens where a step can't be launched.
Not for: what a step planned ahead holds (`scheduling.lookahead`), steps that are cut (`recovery`), nor what is done
with a step's outcome (`engine`).

Between two calls one step is under way at most. Where nothing can be planned behind it, it is waited for first. A step
that the runner does not take did not happen: the one under way is waited for, and what is planned then is executed
as on any runner, which finds the row that is to blame, or the size that fits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from batchinfer.engine.recovery import StepExecutor
from batchinfer.errors import OutOfMemory
from batchinfer.runner.base import LaunchedStep
from batchinfer.scheduling import LookaheadScheduler, Sequence
from batchinfer.types.step import StepPlan, StepResult

MAX_LOGGED_REFUSALS = 3

_log = logging.getLogger(__name__)


class OverlappedSteps:
    """Runs steps for one engine. `take_in` commits a step's outcome and returns the sequences that ended.

    num_overlapped   steps launched while another one was under way
    num_refused      that the runner did not take
    launching_s      seconds of launching, and of steps that were executed as on any runner
    waiting_s        of waiting for tokens that were not there yet: device time that the host's work did not cover
    """

    def __init__(
        self,
        scheduler: LookaheadScheduler,
        executor: StepExecutor,
        take_in: Callable[[StepPlan, StepResult], list[Sequence]],
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._take_in = take_in
        self._under_way: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self.num_overlapped = self.num_refused = 0
        self.launching_s = self.waiting_s = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether a step has been launched and not waited for."""
        return bool(self._under_way)

    def step(self) -> list[Sequence]:
        """Launches a step if one can be planned, and takes in the one that was under way. Returns who has ended."""
        if not self._under_way:
            return self._begin()
        if len(self._under_way) > 1:  # the last call was interrupted as it waited
            return self._end()
        plan = self._scheduler.schedule_ahead()
        is_refused = plan is not None and not self._launch(plan)
        done = self._end()
        if not self._under_way:
            self._scheduler.hand_out(done)  # not lost where the call is interrupted in the next step
            done = self._begin(is_refused=is_refused)
        return done

    def finish(self) -> None:
        """Takes in what is under way and launches nothing. Who has ended comes with those of the next commit."""
        while self._under_way:
            self._scheduler.hand_out(self._end())

    def _begin(self, is_refused: bool = False) -> list[Sequence]:
        """With nothing under way: launches a step, or executes it where the last was refused or this one is."""
        plan = self._scheduler.schedule()
        if plan is None or (not is_refused and self._launch(plan)):
            return self._scheduler.take_done()  # those that planning gave up
        start = time.perf_counter()
        result = self._executor.execute(plan)
        self.launching_s += time.perf_counter() - start
        return self._take_in(plan, result)

    def _launch(self, plan: StepPlan) -> bool:
        start = time.perf_counter()
        try:
            launched = self._executor.launch(plan)
        except Exception as error:  # the executor meets it again, and knows whose fault it is
            if not isinstance(error, (OutOfMemory, MemoryError)) and self.num_refused < MAX_LOGGED_REFUSALS:
                _log.warning(
                    "a step could not be launched, and is planned again with nothing under way", exc_info=error
                )
            self.num_refused += 1
            return False
        finally:
            self.launching_s += time.perf_counter() - start
        self.num_overlapped += bool(self._under_way)
        self._under_way.append((plan, launched))
        self._scheduler.launched(plan)
        return True

    def _end(self) -> list[Sequence]:
        """Of the step that was launched first."""
        plan, launched = self._under_way[0]
        start = time.perf_counter()
        result = self._executor.wait_for(launched)
        self.waiting_s += time.perf_counter() - start
        self._under_way.popleft()
        return self._take_in(plan, result)
