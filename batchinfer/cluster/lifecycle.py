"""Processes that end with their parent, however that ends. Standard library only.

A child calls `end_with_parent` first thing: the kernel then sends it a signal when the thread that started it
ends. The second net, for what the signal can't reach, is the end of its standard input (`watch_stdin`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """`parent`: the pid that started this process, as that one knows it. Ends at once if it is gone already."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the end of stdin has to do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def leave_interrupts_to_the_driver() -> None:
    """Ctrl-C and the end of a terminal reach every process of its group; only the driver decides what they mean."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def exit_after(seconds: float, code: int) -> None:
    """From another thread: this process ends in `seconds`, even if its main thread hangs."""

    def wait() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=wait, name="exit-after", daemon=True).start()


def in_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


_lowered = threading.local()


def behind_engines() -> None:
    """This thread, and those that it starts from now on, run where engines leave a core free, or at a quarter of one.

    An engine's threads wait for each other many times in a step: planning and commits that took a core away in
    between would hold up all of them. Where there are cores enough, nothing changes.
    """
    if not getattr(_lowered, "done", False):
        _lowered.done = True
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)


def how_it_ended(returncode: int) -> str:
    """ "exit code 3" or "signal 9 (SIGKILL)", with what usually sends that."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
    hint = ", as when memory runs out" if name == "SIGKILL" else ""
    return f"signal {-returncode} ({name}{hint})"


def log_to(path: Path) -> None:
    """From now on, what this process writes to its standard error goes to the end of this file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
