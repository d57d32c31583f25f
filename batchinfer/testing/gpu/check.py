"""gpu_check: proves and measures the engine on one GPU. What is here, the tests, the engine's laws, benches; a table
and one JSON file.

Groups of checks run in processes of their own (`child`), one after the other, so that nothing measures beside anything.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from batchinfer.testing.gpu.child import GROUPS, checks_of
from batchinfer.testing.gpu.device import facts
from batchinfer.testing.gpu.outcome import Clock, Line, exit_code, table
from batchinfer.testing.gpu.sizes import Sizes
from batchinfer.testing.gpu.suite import GROUP as TESTS
from batchinfer.testing.gpu.suite import kernel_tests, run_tests

# Of all the time, at most so much for the tests: kernels are compiled in them.
SHARE_OF_TESTS = 0.5
# A process that is over its time ends itself between steps; a while after that it is ended.
GRACE_S = 10.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """groups: of TESTS and GROUPS; tests: files, None for those that run on a GPU."""

    root: Path
    sizes: Sizes
    device: torch.device
    limit_s: float
    groups: Collection[str] = (TESTS, *GROUPS)
    tests: Sequence[Path] | None = None
    jobs: int = 8


def run_all(options: Options, say: Say, save: Callable[[Mapping[str, Any]], None]) -> int:
    """The exit code. `say` is told lines for people, `save` the whole record whenever there is more of it."""
    clock, start = Clock(options.limit_s), time.monotonic()
    here = facts(options.device)
    packages = ", ".join(f"{name} {number}" for name, number in here["packages"].items())
    say(", ".join(f"{key} {value}" for key, value in here.items() if key != "packages") + f"\n{packages}")
    lines: list[Line] = []

    def saved(more: Sequence[Line]) -> None:
        for line in more:
            value = "" if line.value is None else f" {line.value:.4g} {line.unit}".rstrip()
            say(f"{line.status:8s} {line.group}: {line.name}{value} {line.target} ({line.seconds:.1f} s) {line.text}")
        lines.extend(more)
        save(
            {
                "facts": here,
                "sizes": options.sizes.name,
                "limit_s": options.limit_s,
                "seconds": time.monotonic() - start,
                "exit_code": exit_code(lines),
                "lines": [asdict(line) for line in lines],
            }
        )

    if TESTS in options.groups:
        files = kernel_tests(options.root) if options.tests is None else options.tests
        of_tests = Clock(SHARE_OF_TESTS * clock.left_s)
        saved(run_tests(files, options.root, device=options.device.type, clock=of_tests, jobs=options.jobs))
    for group in GROUPS:
        if group in options.groups:
            given = {line.name: line.value for line in lines if line.value is not None}
            run_group(group, options, clock, given, saved)
    say("\n" + table(lines))
    return exit_code(lines)


def run_group(
    group: str, options: Options, clock: Clock, given: Mapping[str, float], done: Callable[[Sequence[Line]], None]
) -> None:
    """All checks of a group; a process that dies, or breaks the device, takes one of them with it, and the rest go on
    in another."""
    left = [check.name for check in checks_of(group, options.sizes, options.device, clock)]
    while left:
        if clock.left_s <= 0:
            done([_line(group, name, "not run", "out of time: nothing of it was begun") for name in left])
            return
        asked = {
            "group": group,
            "sizes": options.sizes.name,
            "device": options.device.type,
            "limit_s": clock.left_s,
            "given": given,
            "names": left,
        }
        died = _run_child(asked, clock, options.root, done, left)
        if died is not None:
            name = left.pop(0)
            done([_line(group, name, *died)])


def _run_child(
    asked: Mapping[str, Any], clock: Clock, root: Path, done: Callable[[Sequence[Line]], None], left: list[str]
) -> tuple[str, str, Mapping[str, Any]] | None:
    """Takes names from `left` as they are done. What became of the first that is left, where there is one; None also
    where the process ended in order before that, since the device did not answer any more after the last one."""
    num_asked = len(left)
    command = [sys.executable, "-m", "batchinfer.testing.gpu.child", json.dumps(asked)]
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        said: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, said), daemon=True)
        reader.start()
        late = ended = False
        try:
            while True:
                try:
                    text = said.get(timeout=max(0.1, clock.left_s + GRACE_S))
                except queue.Empty:
                    late = True
                    break
                if text is None:
                    ended = True
                    break
                if "begin" not in json.loads(text):
                    done([Line.from_json(text)])
                    left.pop(0)
        finally:
            code = _end(process, wait_s=GRACE_S if ended else 0.0)
            reader.join()
            assert process.stdout is not None
            process.stdout.close()
        if not left or (code == 0 and len(left) < num_asked):
            return None
        errors.seek(0)
        tail = errors.read()[-4000:]
    if late:
        return "not run", "out of time: it was ended", {"stderr": tail}
    last = (tail.strip() or "no message").splitlines()[-1]
    return "failed", f"its process ended with exit code {code}: {last}", {"stderr": tail}


def _end(process: subprocess.Popen[str], *, wait_s: float) -> int:
    """Its exit code."""
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(process: subprocess.Popen[str], said: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        said.put(text)
    said.put(None)


def _line(group: str, name: str, status: Any, text: str, numbers: Mapping[str, Any] | None = None) -> Line:
    return Line(group=group, name=name, status=status, text=text, numbers=numbers or {})
