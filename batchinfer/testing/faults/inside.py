"""Faults inside a process: calls that change files fail, are slow, or leave half of what was written.

`arm` is called as a Python process starts (`rounds` puts a `sitecustomize` on its path) and reads what to do from the
file that BATCHINFER_FILE_FAULTS names:

    {"record": FOLDER}                          notes every call site that changes files
    {"site": SITE, "mode": MODE, "hit": N, "done": FILE}    at the site's Nth call in a process does harm, once in all
    {"full": FILE}                              no space is left while FILE is there

A site is a call and the function of batchinfer that asked for it, the file layer (`data.fs`) left out: "link
job.commit.commit_chunk". Modes: `error` (before anything is done), `full` (the same as ENOSPC), `stale` (as a network
file system has it for a moment), `lost` (done, and reported as failed), `slow`, `torn` (what was written is cut in
half, and reported as failed), `torn_kill` (the same, and the process is killed), `kill` (before anything is done).
Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "BATCHINFER_FILE_FAULTS"
CALLS = ("link", "rename", "replace", "unlink", "mkdir", "fsync")
MODES = ("error", "full", "stale", "lost", "slow", "kill", "torn", "torn_kill")
SLOW_S = 2.5
_ERRORS = {"error": errno.EIO, "full": errno.ENOSPC, "stale": errno.ESTALE, "lost": errno.EIO, "torn": errno.EIO}
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_NOBODY = "nobody"  # of batchinfer: a library of its own accord
_SKIPPED = ("data/fs.py", "testing/faults/inside.py")


def environment(place: Path, plan: dict[str, Any]) -> dict[str, str]:
    """Variables under which Python processes do what `plan` says. Files for that go into `place`."""
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(f"from {__name__} import arm\n\narm()\n")
    (place / "plan.json").write_text(json.dumps(plan))
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"PYTHONPATH": path, VARIABLE: str(place / "plan.json")}


def modes_of(site: str) -> tuple[str, ...]:
    """What can be done at a site: only what was written (and is about to be synced) can be torn."""
    return MODES if site.startswith("fsync ") else MODES[:6]


def arm() -> None:
    """Wraps the calls, if this process is told to do harm."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    faults = _Faults(json.loads(Path(path).read_text()))
    for name in CALLS:
        setattr(os, name, faults.wrap(name, getattr(os, name)))


class _Faults:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._hits: Counter[str] = Counter()
        self._known: set[str] = set()

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            mode = self._mode_for(name, args)
            if mode == "slow":
                time.sleep(SLOW_S)
            elif mode == "lost":
                call(*args, **named)
            elif mode in ("torn", "torn_kill"):
                _cut_in_half(args[0])
            if mode in ("kill", "torn_kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if mode not in (None, "slow"):
                raise OSError(_ERRORS[mode], f"{os.strerror(_ERRORS[mode])} (injected)", str(args[-1]))
            return call(*args, **named)

        return wrapped

    def _mode_for(self, name: str, args: tuple[Any, ...]) -> str | None:
        plan = self._plan
        if "full" in plan:
            return "full" if name in ("link", "mkdir", "fsync") and os.path.exists(plan["full"]) else None  # noqa: PTH110
        if name == "fsync" and not stat.S_ISREG(os.fstat(args[0]).st_mode):
            return None
        site = f"{name} {_caller()}"
        if "record" in plan:
            if site not in self._known and not site.endswith(_NOBODY):
                self._known.add(site)
                self._note(Path(plan["record"]) / f"{os.getpid()}.txt", site)
            return None
        if site != plan["site"]:
            return None
        self._hits[site] += 1
        if self._hits[site] != plan["hit"]:
            return None
        try:
            os.close(os.open(plan["done"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return None
        return str(plan["mode"])

    def _note(self, path: Path, line: str) -> None:
        with contextlib.suppress(OSError), path.open("a") as file:
            file.write(line + "\n")


def _caller() -> str:
    """The innermost function of batchinfer above the file layer, as "job.commit.commit_chunk"."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not path.endswith(_SKIPPED):
            return f"{path[len(_PACKAGE) : -len('.py')].replace(os.sep, '.')}.{frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return _NOBODY


def _cut_in_half(descriptor: int) -> None:
    """Of the file behind a descriptor, which may be open for reading only."""
    path = f"/proc/self/fd/{descriptor}"
    os.truncate(path, os.stat(path).st_size // 2)  # noqa: PTH116
