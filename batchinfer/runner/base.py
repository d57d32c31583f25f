"""The seam between deciding and computing: a runner executes what the scheduler planned.

Implementations: `local.LocalRunner` (a model in this process), `fake.FakeRunner` (no model). `load` builds the
first from a model's files and the engine's options.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from batchinfer.types.step import KVGroup, StepPlan, StepResult


class ModelRunner(Protocol):
    """One engine's model.

    `kv_groups` says which block tables a chunk carries. `execute` raises errors.OutOfMemory when a step does not
    fit; the step may then be planned smaller and executed again. Not thread-safe.
    """

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]: ...

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class LaunchedStep(Protocol):
    """A step that a device is at work on, or will be after those that were launched before it."""

    def result(self) -> StepResult:
        """Waits for the step's tokens; in the order in which steps were launched. What it raises is the end of the
        runner: a step that does not fit is refused by `launch`."""
        ...


@runtime_checkable
class OverlappingRunner(ModelRunner, Protocol):
    """A runner that can be given a step while the one before it is under way.

    `overlaps` says whether that gains anything here. `launch` begins a step and returns before it is done; it raises
    what `execute` raises, and then the step did not happen. At most one step is under way when another is launched; its
    chunks may hold UNKNOWN_TOKEN for sequences that the one under way samples for. Steps are carried out one after the
    other, so a block that one step writes may be read by the next. `execute` is for when none is under way.
    """

    @property
    def overlaps(self) -> bool: ...

    def launch(self, plan: StepPlan) -> LaunchedStep: ...
