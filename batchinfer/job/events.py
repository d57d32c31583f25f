"""What the job's state is told (events) and what it asks for (instructions). Frozen, nothing but data.

The state machine itself is `job.state`; `cluster.coordinator` turns the world into events and carries out
instructions. Every instruction but `RevokeLease`, `RestartEngine`, `Quarantine` and `StopEngine` is answered by
exactly one event, or by the loss of its worker. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["done", "interrupted", "failure_limit", "failed", "refused"]


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Rows `start .. stop` of a unit, by position in the unit's prepared file. Leases are of pieces."""

    window: int
    unit: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """A unit as the planner cut it.

    chunks      those that own at least one of its rows
    complete    an earlier run finished it: it is only to be checked
    shared_before   tokens that its first row shares with the last row of the unit before it in the window
    """

    unit: int
    num_rows: int
    num_tokens: int
    chunks: frozenset[int]
    complete: bool = False
    shared_before: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """Outcomes of rows. Tokens count completed rows only; `cached_tokens` are prompt tokens not computed again."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rows + other.rows,
            self.failed + other.failed,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def __sub__(self, other: Tally) -> Tally:
        return Tally(
            self.rows - other.rows,
            self.failed - other.failed,
            self.prompt_tokens - other.prompt_tokens,
            self.completion_tokens - other.completion_tokens,
            self.cached_tokens - other.cached_tokens,
        )


# Instructions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanChunk:
    window: int
    chunk: int


@dataclass(frozen=True, slots=True)
class CutWindow:
    """Cut the window's prepared rows into units."""

    window: int


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Give a piece to a worker. `alone`: its engine must run nothing else meanwhile (the piece is under suspicion)."""

    worker: str
    lease: int
    piece: Piece
    alone: bool = False


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """Ask for rows that the engine has not begun: all of them, or their second half. Answered by `LeaseReturned`."""

    worker: str
    lease: int
    half: bool


@dataclass(frozen=True, slots=True)
class FinishUnit:
    """Every piece of the unit is done: check that each row has a result, and compact."""

    window: int
    unit: int


@dataclass(frozen=True, slots=True)
class GiveUpRow:
    """Write the error result of the one row that kills its engine."""

    piece: Piece
    message: str


@dataclass(frozen=True, slots=True)
class CommitChunk:
    window: int
    chunk: int


@dataclass(frozen=True, slots=True)
class CleanWindow:
    """All parts of the window are out: its prepared rows and segments may go."""

    window: int


@dataclass(frozen=True, slots=True)
class RestartEngine:
    worker: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """This worker's engine is not to be started again in this run."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Make durable what is finished, then leave. Answered by `EngineStopped`."""

    worker: str


@dataclass(frozen=True, slots=True)
class EndJob:
    outcome: Outcome
    message: str = ""


Task = PlanChunk | CutWindow | FinishUnit | GiveUpRow | CommitChunk | CleanWindow
Instruction = Task | GrantLease | RevokeLease | RestartEngine | Quarantine | StopEngine | EndJob

# Events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker process is there and starts its engine."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker process is gone, and its engine with it."""

    worker: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineReady:
    """`num_seqs`: how many rows the engine runs at once; more than that must be leased for it to stay full."""

    worker: str
    num_seqs: int = 0


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine process ended by itself.

    reason      goes into the output where a row is given up: it says nothing of this machine or this moment
    last_words  what its log ends with, for whoever looks for the cause
    in_flight   (lease, start, stop): rows that the engine had begun and not made durable
    fatal       starting it again can't help (the model can't be used here); `reason` says why
    """

    worker: str
    reason: str
    in_flight: tuple[tuple[int, int, int], ...] = ()
    fatal: bool = False
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class EngineStopped:
    worker: str


@dataclass(frozen=True, slots=True)
class ChunkPlanned:
    """`failed` rows got their error while planning. `fresh`: planned now, not found from an earlier run."""

    window: int
    chunk: int
    num_rows: int
    failed: int
    fresh: bool = True


@dataclass(frozen=True, slots=True)
class WindowCut:
    window: int
    units: tuple[UnitInfo, ...]


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """Rows that became durable since the lease's last report."""

    worker: str
    lease: int
    tally: Tally


@dataclass(frozen=True, slots=True)
class LeaseBegun:
    """Every row of the lease is in the engine, or has an outcome: it is no reserve any more."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class LeaseDone:
    """Every row of the piece has a durable result."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    """The lease now ends at position `stop`; the rows from there on were not begun."""

    worker: str
    lease: int
    stop: int


@dataclass(frozen=True, slots=True)
class LeaseRefused:
    """The grant did not arrive."""

    worker: str
    lease: int


@dataclass(frozen=True, slots=True)
class UnitFinished:
    """`missing` rows have no result: none, unless files were lost. `tally` counts the whole unit."""

    window: int
    unit: int
    missing: int
    tally: Tally
    fresh: bool = True


@dataclass(frozen=True, slots=True)
class RowGivenUp:
    piece: Piece


@dataclass(frozen=True, slots=True)
class ChunkCommitted:
    window: int
    chunk: int


@dataclass(frozen=True, slots=True)
class WindowCleaned:
    window: int


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A planning or commit task raised. `fatal`: trying again can't help; `refused`: the user's input is wrong."""

    task: Task
    message: str
    fatal: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class StopRequested:
    message: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time goes on; `now` is in seconds of a clock that never goes back."""

    now: float


Event = (
    WorkerJoined
    | WorkerLost
    | EngineReady
    | EngineDied
    | EngineStopped
    | ChunkPlanned
    | WindowCut
    | LeaseProgress
    | LeaseBegun
    | LeaseDone
    | LeaseReturned
    | LeaseRefused
    | UnitFinished
    | RowGivenUp
    | ChunkCommitted
    | WindowCleaned
    | TaskFailed
    | StopRequested
    | Tick
)
