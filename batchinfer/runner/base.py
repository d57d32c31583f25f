"""The seam between deciding and computing: a runner executes what the scheduler planned.

Implementations: `local.LocalRunner` (a model in this process), `fake.FakeRunner` (no model). `load` builds the
first from a model's files and the engine's options.
"""

from __future__ import annotations

from typing import Protocol

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
