"""One driver at a time: epochs, the counter that shows life, takeover.

A driver claims `driver/<epoch>` by create-if-absent and bumps a counter every 5 s. A successor claims the next epoch
at once where that process is dead on this host or has said goodbye, else after 30 s without a change of the
counter; a live one is left alone (ResumeRefused). Clocks of different hosts are never compared.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from batchinfer.data.fs import Store

BUMP_EVERY_S = 5.0
TAKEOVER_AFTER_S = 30.0


class Clock(Protocol):
    """Time for the lock: seconds that never go back, and sleeping."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class DriverLock:
    """Held from `claim` to `release`.  Thread-safe."""

    epoch: int

    @classmethod
    def claim(cls, store: Store, *, clock: Clock | None = None) -> DriverLock:
        """Becomes the driver. `store` has the output folder as root. Raises ResumeRefused naming host and pid."""
        raise NotImplementedError

    def bump(self) -> None:
        """Shows life; call every BUMP_EVERY_S. Raises ResumeRefused if another driver has taken over."""
        raise NotImplementedError

    def start_heartbeat(self) -> None:
        """Bumps from a daemon thread until `release`; `lost` turns true if another driver has taken over."""
        raise NotImplementedError

    @property
    def lost(self) -> bool:
        raise NotImplementedError

    def release(self) -> None:
        """Says goodbye, so that the next driver need not wait."""
        raise NotImplementedError

    def __enter__(self) -> DriverLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
