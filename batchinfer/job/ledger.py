"""What planning found out, as it stands in windows/*.json: chunks, units, statistics.

`load_window` answers None where a window is not planned yet. Written once, create-if-absent, by `job.units`.
Not for who runs what (`job.state`) or what is done: that is decided by result segments and parts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchinfer.data.fs import LocalStore, read_bytes
from batchinfer.errors import BatchinferError
from batchinfer.job.layout import JobLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSummary:
    """A chunk as planned.

    num_rows        rows looked at: all of the chunk, or those that a retry names
    failed          how many rows got their error while planning, by error class
    prompt_tokens   sum over the rows that were prepared
    shareable_tokens   those of them that stand in a prefix of the row before in the window's token order; known once
                    the window is cut
    content_hash    of the values of the columns that prompts are made of; checked again at commit
    epoch           of the driver whose prepared files hold it
    """

    window: int
    chunk: int
    num_rows: int
    failed: Mapping[str, int]
    prompt_tokens: int
    max_prompt_tokens: int
    content_hash: str
    epoch: int
    shareable_tokens: int = 0

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    @property
    def num_prepared(self) -> int:
        return self.num_rows - self.num_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Rows that stand together by their token ids, leased and run together.

    computed_tokens   prompt tokens with each prefix shared inside the unit counted once
    shared_before     tokens that its first row shares with the last row of the unit before it
    work              computed_tokens plus the output tokens assumed: what units are made comparable by
    chunks            (chunk, rows) for each chunk that owns rows of it
    """

    unit: int
    num_rows: int
    prompt_tokens: int
    computed_tokens: int
    work: int
    chunks: tuple[tuple[int, int], ...]
    shared_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """A planned window. `epoch` names the folder of its prepared files; units are in the order to lease them.

    prompt_tokens     of all prepared rows
    shared_tokens     those of them that stand in a prefix of the row before in token order: computed once
    duplicate_rows    rows whose whole prompt equals the row before in token order
    """

    window: int
    epoch: int
    chunks: tuple[ChunkSummary, ...]
    units: tuple[Unit, ...]
    prompt_tokens: int
    shared_tokens: int
    duplicate_rows: int = 0

    def summary_of(self, chunk: int) -> ChunkSummary:
        for summary in self.chunks:
            if summary.chunk == chunk:
                return summary
        raise KeyError(f"chunk {chunk} is not in window {self.window}")

    def by_chunk(self) -> dict[int, WindowPlan]:
        """What each chunk's commit needs of the plan, and no more: a window may hold thousands of small chunks."""
        units: dict[int, list[Unit]] = {chunk.chunk: [] for chunk in self.chunks}
        for unit in self.units:
            for owner, count in unit.chunks:
                units[owner].append(replace(unit, chunks=((owner, count),)))
        return {chunk.chunk: replace(self, chunks=(chunk,), units=tuple(units[chunk.chunk])) for chunk in self.chunks}

    def units_of(self, chunk: int) -> tuple[Unit, ...]:
        """The units that own rows of a chunk."""
        return tuple(unit for unit in self.units if any(owner == chunk for owner, _ in unit.chunks))


def window_to_json(plan: WindowPlan) -> bytes:
    return json.dumps({"format": 1, **asdict(plan)}, separators=(",", ":")).encode()


def window_from_json(data: bytes) -> WindowPlan:
    raw: dict[str, Any] = json.loads(data)
    raw.pop("format")
    chunks = tuple(ChunkSummary(**chunk) for chunk in raw.pop("chunks"))
    units = tuple(
        Unit(**{**unit, "chunks": tuple((int(c), int(n)) for c, n in unit["chunks"])}) for unit in raw.pop("units")
    )
    return WindowPlan(chunks=chunks, units=units, **raw)


def load_window(layout: JobLayout, window: int) -> WindowPlan | None:
    """The plan of a window, or None where it is not planned yet."""
    data = LocalStore(layout.output).get(layout.key(layout.window(window)))
    return None if data is None else window_from_json(data)


def publish_window(layout: JobLayout, plan: WindowPlan) -> WindowPlan:
    """Writes the plan if none is there; returns the one that holds (another driver's may have been first)."""
    store = LocalStore(layout.output)
    key = layout.key(layout.window(plan.window))
    if store.put_if_absent(key, window_to_json(plan)):
        return plan
    data = store.get(key, wait_s=10.0)
    if data is None:
        raise OSError(f"{layout.window(plan.window)}: exists and can't be read")
    return window_from_json(data)


def planned_windows(layout: JobLayout) -> Sequence[int]:
    """Numbers of the windows that are planned, in order. For status only: decisions go by `load_window`."""
    folder = layout.work / "windows"
    if not folder.is_dir():
        return ()
    return sorted(int(path.stem[1:]) for path in folder.glob("w*.json"))


def retry_rows(layout: JobLayout) -> dict[int, list[int]]:
    """Of a retry: rows to run again, by chunk, ascending (written by `job.retry`)."""
    store, key = LocalStore(layout.output), layout.key(layout.retry_plan)
    try:
        stat = layout.retry_plan.stat()
    except FileNotFoundError:  # not visible yet
        if store.get(key, wait_s=10.0) is None:
            raise BatchinferError(f"{layout.retry_plan}: no such file; start the retry again") from None
        stat = layout.retry_plan.stat()
    return _read_retry_rows(store.path(key), (stat.st_ino, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=2)
def _read_retry_rows(path: Path, version: tuple[int, int, int]) -> dict[int, list[int]]:
    """Asked for by every chunk, and may name millions of rows. `version` tells the file from one of the same name."""
    return {int(chunk): rows for chunk, rows in json.loads(read_bytes(path))["rows"].items()}
