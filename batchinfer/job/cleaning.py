"""Deleting what is no longer needed: windows whose parts are out, and what dead processes left behind.

Every step may be killed and run again. A window's plan goes first, by a rename, so that never a plan without its
results is found; whatever that leaves is taken up at the driver's next start.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from batchinfer.data.fs import LocalStore, is_foreign
from batchinfer.data.writers import is_left_over
from batchinfer.job.driver_lock import refuse_if_succeeded
from batchinfer.job.layout import JobLayout

_WINDOW = re.compile(r"w(\d+)(?:\.json|-e\d+)?$")
_DONE = re.compile(r"w(\d+)\.done")
_RUN = re.compile(r"e(\d+)\.json")
_REPLACEMENT = re.compile(r".+~e(\d+)-part-.+")


def clean_window(layout: JobLayout, window: int) -> None:
    """Deletes plan, prepared files and segments of a window whose parts are all out. What can't be deleted stays, with
    the mark that says that it may go."""
    plan = layout.window(window)
    done = plan.with_suffix(".done")
    with contextlib.suppress(FileNotFoundError):
        plan.rename(done)
    folders = [*(layout.work / "prepared").glob(f"w{window:04d}-e*"), layout.segments(window)]
    for folder in folders * 2:  # once more where an error was of the moment
        shutil.rmtree(folder, ignore_errors=True)
    if not any(folder.exists() for folder in folders):
        with contextlib.suppress(FileNotFoundError):
            done.unlink()


def clean_leftovers(layout: JobLayout, finished: Collection[int] = (), *, epoch: int) -> int:
    """What dead processes left: half-cleaned windows and temporary files. To be called by the driver of `epoch` as it
    starts.

    `finished` are windows whose parts are all out: a kill may have come before their cleaning, or an engine of an
    earlier driver may have written after it.

    Temporary files go where it can be seen from here that their writer is dead, others when they are a day old.
    Returns how many files and windows. Raises TakenOver where a later driver's files may lie among them.
    """
    refuse_if_succeeded(layout.output, epoch)
    removed = 0
    done = {int(match[1]) for name in _names(layout.work / "windows") if (match := _DONE.fullmatch(name))}
    for kind in ("windows", "prepared", "segments"):
        numbers = {int(match[1]) for name in _names(layout.work / kind) if (match := _WINDOW.match(name))}
        done |= numbers.intersection(finished)
    for window in sorted(done):
        clean_window(layout, window)
        removed += 1
    for name in _names(layout.work / "runs"):  # of earlier epochs alone: a later driver's engines need theirs
        found = _RUN.fullmatch(name)
        if found is not None and int(found[1]) < epoch:
            with contextlib.suppress(OSError):
                (layout.work / "runs" / name).unlink()  # it may hold the keys of a job's storage
    # Files that were never given their names, wherever they lie.
    removed += LocalStore(layout.state).remove_temps()
    folder = layout.state / "tmp"
    if folder.is_dir():
        for path in folder.iterdir():
            if is_foreign(path.name):  # NFS keeps deleted files that are still open as `.nfs...`
                continue
            with contextlib.suppress(FileNotFoundError):
                if is_left_over(path.name, time.time() - path.stat().st_mtime):
                    path.unlink()
                    removed += 1
    return removed


def fence_replacements(layout: JobLayout, epoch: int) -> None:
    """Takes away what earlier drivers are about to replace parts with: they may be slow rather than dead. To be called
    by a driver as soon as it has its epoch, before it looks at parts."""
    for name in _names(layout.state / "tmp"):
        found = _REPLACEMENT.fullmatch(name)
        if found is not None and int(found[1]) < epoch:
            (layout.state / "tmp" / name).unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
