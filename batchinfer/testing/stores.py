"""Stores for tests: `MemoryStore` (no files) and `FaultyStore` (delays, lost replies and failures around a store).

Both are `batchinfer.data.fs.Store`s. What a store must do is in that protocol.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable

from batchinfer.data.fs import Store, is_foreign


class MemoryStore:
    """A store in memory, safe for threads."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self.blobs:
                return False
            self.blobs[key] = bytes(data)
            return True

    def replace(self, key: str, data: bytes) -> None:
        with self._lock:
            self.blobs[key] = bytes(data)

    def get(self, key: str, *, wait_s: float = 0.0) -> bytes | None:
        deadline = time.monotonic() + wait_s
        while True:
            with self._lock:
                found = self.blobs.get(key)
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(0.01)

    def list(self, prefix: str = "") -> list[str]:
        with self._lock:
            return sorted(
                key for key in self.blobs if key.startswith(prefix) and not any(map(is_foreign, key.split("/")))
            )

    def delete(self, key: str) -> None:
        with self._lock:
            self.blobs.pop(key, None)


class InjectedFault(OSError):
    """The error that a FaultyStore raises."""


class FaultyStore:
    """Wraps a store and misbehaves as shared file systems and object stores do. Seeded, so a failure repeats.

    fail_rate       how often an operation fails before it does anything
    lost_reply_rate how often a write happens and then fails all the same
    hidden_s        how long a new key stays invisible to `get` and `list` (never to put_if_absent, which is atomic)
    fail_when       called with (operation, key) before each operation; returning True fails it
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int = 0,
        fail_rate: float = 0.0,
        lost_reply_rate: float = 0.0,
        hidden_s: float = 0.0,
        fail_when: Callable[[str, str], bool] | None = None,
    ) -> None:
        self.store = store
        self.fail_rate = fail_rate
        self.lost_reply_rate = lost_reply_rate
        self.hidden_s = hidden_s
        self.fail_when = fail_when
        self.calls: list[tuple[str, str]] = []
        self._random = random.Random(seed)
        self._born: dict[str, float] = {}

    def _before(self, operation: str, key: str) -> None:
        self.calls.append((operation, key))
        told = self.fail_when is not None and self.fail_when(operation, key)
        if told or self._random.random() < self.fail_rate:
            raise InjectedFault(errno.EIO, f"injected fault before {operation}", key)

    def _after(self, operation: str, key: str) -> None:
        if self._random.random() < self.lost_reply_rate:
            raise InjectedFault(errno.EIO, f"injected fault: the reply to {operation} is lost", key)

    def _hidden(self, key: str) -> bool:
        return time.monotonic() - self._born.get(key, -1e9) < self.hidden_s

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._before("put_if_absent", key)
        won = self.store.put_if_absent(key, data)
        if won:
            self._born[key] = time.monotonic()
        self._after("put_if_absent", key)
        return won

    def replace(self, key: str, data: bytes) -> None:
        self._before("replace", key)
        self.store.replace(key, data)
        self._after("replace", key)

    def get(self, key: str, *, wait_s: float = 0.0) -> bytes | None:
        self._before("get", key)
        deadline = time.monotonic() + wait_s
        while self._hidden(key):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.01)
        return self.store.get(key, wait_s=max(0.0, deadline - time.monotonic()))

    def list(self, prefix: str = "") -> list[str]:
        self._before("list", prefix)
        return [key for key in self.store.list(prefix) if not self._hidden(key)]

    def delete(self, key: str) -> None:
        self._before("delete", key)
        self.store.delete(key)
        self._after("delete", key)
