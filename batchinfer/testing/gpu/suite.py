"""Runs test files by pytest, each in a process of its own and several at a time, and counts what came of them.

The checkout's pytest settings need plugins that gpu_check does not ask for, and make errors of warnings, which versions
of torch and triton differ in: these runs have settings of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchinfer.testing.gpu.outcome import Clock, Line

GROUP = "tests"
SETTINGS = "[pytest]\naddopts = --strict-markers -m 'not slow'\nmarkers =\n    slow\n    gpu\n    slurm\n    timeout\n"
DEVICE_VARIABLE = "BATCHINFER_TEST_DEVICE"
# Compiles for other GPUs, which no GPU is needed for.
LEFT_OUT = ("test_compiles.py",)


def kernel_tests(root: Path) -> list[Path]:
    """Those of a checkout that run on a GPU."""
    folders = (root / "tests/kernels/triton", root / "tests/runner/triton")
    return [path for folder in folders for path in sorted(folder.glob("test_*.py")) if path.name not in LEFT_OUT]


def run_tests(files: Sequence[Path], root: Path, *, device: str, clock: Clock, jobs: int) -> list[Line]:
    """A line for each file, in their order."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        settings = Path(folder) / "pytest.ini"
        settings.write_text(SETTINGS)
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        paths = [str(root), str(root / "kernels"), environment.get("PYTHONPATH", "")]
        environment |= {DEVICE_VARIABLE: device, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}

        def run(numbered: tuple[int, Path]) -> Line:
            number, file = numbered
            return _run_file(file, root, settings, Path(folder) / f"{number}.xml", environment, clock)

        return list(pool.map(run, enumerate(files)))


def _run_file(
    file: Path, root: Path, settings: Path, report: Path, environment: Mapping[str, str], clock: Clock
) -> Line:
    start = time.perf_counter()
    name = str(file.relative_to(root)) if file.is_relative_to(root) else file.name

    def line(status: str, text: str, **numbers: object) -> Line:
        taken = time.perf_counter() - start
        return Line(group=GROUP, name=name, status=status, text=text, seconds=taken, numbers=numbers)  # type: ignore[arg-type]

    if clock.left_s <= 0:
        return line("not run", "out of time: it was not begun")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-c", str(settings)]
    command += [f"--rootdir={root}", f"--confcutdir={root}", f"--junitxml={report}", str(file)]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=clock.left_s, check=False
        )
    except subprocess.TimeoutExpired:
        return line("not run", "out of time: it was ended")
    said = (done.stdout + done.stderr)[-4000:]
    if not report.exists():
        return line("failed", f"pytest ended with exit code {done.returncode} and no report", output=said)
    counts, failures = read_report(report)
    numbers = {**counts, "failures": failures, "exit_code": done.returncode}
    bad = counts["failed"] + counts["errors"]
    if bad or done.returncode != 0:
        first = failures[0] if failures else f"pytest ended with exit code {done.returncode}"
        return line("failed", f"{bad} of {counts['run']} failed: {first}", **numbers, output=said)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    if not counts["passed"]:
        return line("not run", f"nothing ran{skipped}", **numbers)
    return line("passed", f"{counts['passed']} passed{skipped}", **numbers)


def read_report(report: Path) -> tuple[dict[str, int], list[str]]:
    """(counts, what failed with the first line of why) of a JUnit file."""
    counts = dict.fromkeys(("run", "passed", "failed", "errors", "skipped"), 0)
    failures = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        counts["run"] += 1
        kind = "passed"
        for tag, named in (("failure", "failed"), ("error", "errors"), ("skipped", "skipped")):
            found = case.find(tag)
            if found is not None:
                kind = named
                if tag != "skipped":
                    why = (found.get("message") or "").strip().splitlines()
                    failures.append(f"{case.get('name')}: {why[0] if why else 'no message'}")
        counts[kind] += 1
    return counts, failures
