"""The exception tree, with the exit code that each kind gives the command line.

    BatchinferError            1   anything that is not named below
    ├── ConfigError            2   the user's job file, arguments or settings are wrong (also a ValueError)
    │   ├── InputError         2   the input dataset is wrong: missing column, clashing schemas, unreadable file
    │   ├── ModelError         2   the model is wrong: no such path, unknown architecture, bad weight file
    │   └── ResumeRefused      2   the job changed since it was first submitted, or another driver owns it
    ├── EngineError            1   the engine failed as a whole (never because of one row)
    │   └── OutOfMemory        1   the engine ran out of memory
    ├── FailureLimitReached    4   too many rows failed; the same command goes on once the cause is mended
    └── Interrupted           75   stopped by a signal; the same command goes on

Trouble with one row is never an exception across rooms: it is data, `types.rows.RowError`.
"""

from __future__ import annotations


class BatchinferError(Exception):
    """Base of all errors raised on purpose. `str(error)` says what, where, and what to do."""

    exit_code = 1


class ConfigError(BatchinferError, ValueError):
    """The user's settings are wrong."""

    exit_code = 2


class InputError(ConfigError):
    """The input dataset can't be used as it is."""


class ModelError(ConfigError):
    """The model can't be used as it is."""


class ResumeRefused(ConfigError):
    """Going on with this output folder would mix results or drivers."""


class EngineError(BatchinferError):
    """The engine as a whole failed."""


class OutOfMemory(EngineError):
    """The engine's device or host memory is exhausted."""


class FailureLimitReached(BatchinferError):
    """More rows failed than the job allows."""

    exit_code = 4


class Interrupted(BatchinferError):
    """The job was told to stop; everything finished is durable."""

    exit_code = 75
