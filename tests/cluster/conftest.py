"""Small jobs over fake models, run by the command line in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from batchinfer.job.layout import JobLayout

SLOW = "fake://hash?vocab=512&max_model_len=512&step_delay_ms=25"
FAST = "fake://hash?vocab=512&max_model_len=512"


def alive(pid: int) -> bool:
    """Zombies count as dead: nobody may reap them here for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def family(pid: int) -> dict[int, str]:
    """Descendants of a process: pid to command line."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                lines[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    found: dict[int, str] = {}
    grown = True
    while grown:
        grown = False
        for child, parent in parents.items():
            if child not in found and (parent == pid or parent in found):
                found[child] = lines[child]
                grown = True
    return found


class JobFolder:
    """An input, a job file and an output in a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "out"
        self.trace = root / "trace.jsonl"
        self.started: list[subprocess.Popen[str]] = []

    @property
    def state(self) -> Path:
        return JobLayout(self.out).state

    def input(self, columns: dict[str, list[Any]] | int, name: str = "rows.parquet") -> None:
        if isinstance(columns, int):
            columns = {"text": [f"row {i} of the input {'x' * (i % 23)}" for i in range(columns)]}
        (self.root / "in").mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), self.root / "in" / name)

    def job(self, model: str = FAST, **sections: Any) -> Path:
        data: dict[str, Any] = {
            "model": {"path": model},
            "input": {"path": "in", "prompt": "{text}"},
            "output": {"path": "out", "token_ids": True},
            "sampling": {"max_tokens": 8, "seed": 3},
        }
        for key, section in sections.items():
            data[key] = {**data.get(key, {}), **section}
        path = self.root / "job.yaml"
        path.write_text(json.dumps(data))
        return path

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "batchinfer", *(arguments or ("submit", "job.yaml"))]
        options = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "env": os.environ | {"BATCHINFER_TRACE": str(self.trace)},
            **options,
        }
        process = subprocess.Popen(command, cwd=self.root, text=True, **options)
        self.started.append(process)
        return process

    def run(self, *arguments: str, code: int = 0, timeout: float = 120, **options: Any) -> str:
        """Runs a command to its end and checks its exit code; returns what it said on both outputs."""
        process = self.start(*arguments, **options)
        out, error = process.communicate(timeout=timeout)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{error}\n{self.logs()}"
        assert "Traceback" not in (out or "") + (error or "")
        return (out or "") + (error or "")

    def table(self) -> pa.Table:
        table = ds.dataset(self.out, format="parquet").to_table()
        return table.sort_by([("source_file", "ascending"), ("source_row", "ascending")])

    def rows(self) -> list[dict[str, Any]]:
        return self.table().to_pylist()

    def segments(self) -> list[Path]:
        return sorted(self.state.glob("segments/*/u*-e*.arrow"))

    def logs(self) -> str:
        paths = [self.state / "log.txt", *sorted(self.state.glob("logs/engine*"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in paths if path.exists())

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def ran_again(self) -> set[tuple[int, int]]:
        """(chunk, row) of rows that were durable before their unit's new lease, and were run all the same."""
        durable: dict[tuple[int, int], float] = {}
        again: set[tuple[int, int]] = set()
        for event in sorted(self.events("published"), key=lambda event: event["time"]):
            for row in event["rows"]:
                durable.setdefault(tuple(row), event["time"])
        for event in self.events("lease"):
            again |= {tuple(row) for row in event["rows"] if durable.get(tuple(row), 1e18) < event["leased_at"]}
        return again

    def wait_for(self, condition: Callable[[], object], timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"waited too long\n{self.logs()}"
            time.sleep(0.02)

    def of_kind(self, driver: subprocess.Popen[str], kind: str) -> list[int]:
        return [pid for pid, line in family(driver.pid).items() if kind in line and alive(pid)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[JobFolder]:
    made = JobFolder(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
