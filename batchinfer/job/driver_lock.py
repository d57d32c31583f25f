"""One driver at a time: epochs, the counter that shows life, takeover.

A driver claims `driver/<epoch>` by create-if-absent and bumps a counter every 5 s. A successor claims the next epoch
at once where that process is dead on this host or has said goodbye, else after 30 s without a change of the
counter; a live one is left alone (ResumeRefused). Where a driver promises life at other times
(`cluster.takeover_timeout_s`), its claim says so. Clocks of different hosts are never compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from batchinfer.data.fs import LocalStore, Store
from batchinfer.data.writers import is_dead, process_scope, start_ticks
from batchinfer.errors import BatchinferError, Interrupted, ResumeRefused
from batchinfer.job.layout import STATE_FOLDER

TAKEOVER_AFTER_S = 30.0
BUMPS = 6  # in that time
BUMP_EVERY_S = TAKEOVER_AFTER_S / BUMPS
POLL_EVERY_S = 0.5
_PREFIX = f"{STATE_FOLDER}/driver/"
_CLAIM = re.compile(re.escape(_PREFIX) + r"(\d{6,})\.json")


class TakenOver(Interrupted):
    """Another driver has this job by now."""


class Clock(Protocol):
    """Time for the lock: seconds that never go back, and sleeping."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class DriverProcess:
    """Who drives. `scope` names the set of process ids that `pid` belongs to: machine, boot and pid namespace."""

    host: str
    pid: int
    scope: str
    started: str

    @classmethod
    def current(cls) -> DriverProcess:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, process_scope(), start_ticks(pid) or "")

    def dead_here(self) -> bool:
        """Whether it can be seen from this process that it is dead. False for processes of other machines, and
        for those that this one may not look at."""
        return self.scope == process_scope() and is_dead(self.pid, self.started) is True


def _read_claim(claim: bytes) -> tuple[DriverProcess, float]:
    """Whose it is, and how long its silence is to be waited out (earlier versions did not say: as by default). Of a
    claim that is damaged, a process of which nothing can be known but its silence."""
    try:
        data = json.loads(claim)
        return DriverProcess(**data["process"]), float(data.get("takeover_after_s", TAKEOVER_AFTER_S))
    except (ValueError, KeyError, TypeError):
        return DriverProcess("unknown", 0, "unknown", ""), TAKEOVER_AFTER_S


@dataclass(frozen=True, slots=True)
class DriverRecord:
    """The last claim, as found: for `status`."""

    epoch: int
    process: DriverProcess
    counter: int
    released: bool
    takeover_after_s: float = TAKEOVER_AFTER_S

    @property
    def gone(self) -> bool:
        """Said goodbye, or dead on this host. False where it can't be known from here."""
        return self.released or self.process.dead_here()


def last_driver(store: Store) -> DriverRecord | None:
    """The latest driver of an output folder, or None where there was none."""
    epochs = [int(match[1]) for key in store.list(_PREFIX) if (match := _CLAIM.fullmatch(key))]
    if not epochs:
        return None
    epoch = max(epochs)
    claim = store.get(_key(epoch, "json"), wait_s=10.0)
    if claim is None:
        raise BatchinferError(f"{_key(epoch, 'json')} is listed and can't be read; run the command again")
    process, takeover_after_s = _read_claim(claim)
    return DriverRecord(
        epoch=epoch,
        process=process,
        takeover_after_s=takeover_after_s,
        counter=_counter(store, epoch),
        released=store.get(_key(epoch, "released")) is not None,
    )


class DriverLock:
    """Held from `claim` to `release`. Thread-safe."""

    def __init__(self, store: Store, epoch: int, takeover_after_s: float = TAKEOVER_AFTER_S) -> None:
        self.epoch = epoch
        self.takeover_after_s = takeover_after_s
        self._store = store
        self._counter = 0
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def claim(
        cls,
        store: Store,
        *,
        clock: Clock = time,
        process: DriverProcess | None = None,
        on_wait: Callable[[str], None] | None = None,
        takeover_after_s: float = TAKEOVER_AFTER_S,
    ) -> DriverLock:
        """Becomes the driver. `store` has the output folder as root. Raises ResumeRefused naming host and pid.

        `on_wait` is told once, in a sentence, that and why claiming takes up to as long as the driver found may be
        silent. `takeover_after_s`: how long this one may be silent before another one takes over.
        """
        process = process or DriverProcess.current()
        while True:
            found = last_driver(store)
            if found is not None and not found.gone:
                _wait_for_silence(store, found, clock, on_wait)
            epoch = found.epoch + 1 if found else 1
            claim = json.dumps({"process": asdict(process), "takeover_after_s": takeover_after_s}).encode()
            if store.put_if_absent(_key(epoch, "json"), claim):
                return cls(store, epoch, takeover_after_s)
            # Another driver was faster. Shared file systems may take a while to show its claim.
            clock.sleep(POLL_EVERY_S)

    def bump(self) -> None:
        """Shows life; call BUMPS times in `takeover_after_s`. Raises ResumeRefused if another driver has taken over."""
        with self._mutex:
            successor = self._store.get(_key(self.epoch + 1, "json"))
            if successor is not None:
                self._lost.set()
                process, _ = _read_claim(successor)
                raise ResumeRefused(
                    f"another driver took over this job (host {process.host}, process {process.pid}) because this one "
                    f"showed no life for {self.takeover_after_s:.0f} s; this one stops, nothing is lost"
                )
            self._counter += 1
            self._store.replace(_key(self.epoch, "beat"), str(self._counter).encode())

    def start_heartbeat(self) -> None:
        """Bumps from a daemon thread until `release`; `lost` turns true if another driver has taken over."""
        self.bump()
        self._thread = threading.Thread(target=self._beat, name="driver-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(self.takeover_after_s / BUMPS):
            try:
                self.bump()
            except ResumeRefused:
                return
            except OSError:
                continue  # the file system is away for a moment; silence for long has its own consequence

    @property
    def lost(self) -> bool:
        """Another driver has taken over: start nothing new. What is under way can't harm (it carries our epoch)."""
        return self._lost.is_set()

    def release(self) -> None:
        """Says goodbye, so that the next driver need not wait."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=BUMP_EVERY_S)
            self._thread = None
        if not self.lost:
            with contextlib.suppress(OSError):  # a full disk: the next driver sees that this process is gone
                self._store.put_if_absent(_key(self.epoch, "released"), b"{}")

    def __enter__(self) -> DriverLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _wait_for_silence(store: Store, found: DriverRecord, clock: Clock, on_wait: Callable[[str], None] | None) -> None:
    """Returns when the driver may be succeeded. Raises ResumeRefused as soon as it shows life."""
    process = found.process
    if on_wait is not None:
        on_wait(
            f"process {process.pid} on host {process.host} was driving this job; waiting up to "
            f"{found.takeover_after_s:.0f} s to see whether it still does"
        )
    begin = clock.monotonic()
    while clock.monotonic() - begin < found.takeover_after_s:
        now = last_driver(store)
        if now is None or now.epoch != found.epoch or now.gone:
            return
        if now.counter != found.counter:
            raise ResumeRefused(
                f"this job is being run by process {process.pid} on host {process.host}: one driver at a time. "
                "Wait for it, watch it with `batchinfer status`, or stop it and run the same command again"
            )
        clock.sleep(POLL_EVERY_S)


def _counter(store: Store, epoch: int) -> int:
    data = store.get(_key(epoch, "beat"))
    try:
        return int(data) if data else 0
    except ValueError:  # damaged: a living driver writes a number soon
        return -1


def _key(epoch: int, kind: str) -> str:
    return f"{_PREFIX}{epoch:06d}.{kind}"


def succeeded(output: Path, epoch: int) -> bool:
    """Whether a later driver than that of `epoch` has claimed the output. From any process."""
    return lock_store(output).get(_key(epoch + 1, "json")) is not None


def refuse_if_succeeded(output: Path, epoch: int) -> None:
    """Before what would harm a later driver: raises TakenOver if there is one."""
    if succeeded(output, epoch):
        raise TakenOver("another driver has taken over this job; this one changes nothing any more")


def lock_store(output: Path) -> Store:
    """The store that an output folder's lock lives in."""
    return LocalStore(output)
