"""The batch scripts, run by bash with stand-ins for batchinfer and scontrol: what is stopped, requeued, passed on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
STAND_INS = {
    # Exits with $CODE, or runs until it is told to stop, as `batchinfer submit` does.
    "batchinfer": 'echo "$@" > told; [ -n "${CODE:-}" ] && exit "$CODE"\n'
    "trap 'exit 75' TERM\ntouch runs\nwhile :; do read -r -t 0.05 < pipe; done\n",
    "scontrol": 'echo "$@" > requeued\n',
    "sleep": "exit 0\n",  # until Slurm ends the script
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


class Batch:
    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.folder = script, folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **variables: str) -> subprocess.Popen[bytes]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment: Mapping[str, str] = {**os.environ, "PATH": path, "SLURM_JOB_ID": "17", **variables}
        command = ["bash", str(self.script), "job.yaml", "--set", "a.b=c d"]
        self.process = subprocess.Popen(command, cwd=self.folder, env=environment)
        return self.process

    def end(self, **variables: str) -> int:
        return self.start(**variables).wait(20)

    @property
    def requeued(self) -> str | None:
        told = self.folder / "requeued"
        return told.read_text().strip() if told.exists() else None


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.stem)
def batch(request: pytest.FixtureRequest, folder: Path) -> Iterator[Batch]:
    # A descriptor of the pipe is kept open for both ends, so that reading from it waits.
    pipe = os.open(folder / "pipe", os.O_RDWR)
    made = Batch(request.param, folder)
    yield made
    os.close(pipe)
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4])
def test_the_exit_code_is_passed_on(batch: Batch, code: int) -> None:
    assert batch.end(CODE=str(code)) == code
    assert (batch.folder / "told").read_text() == "submit job.yaml --set a.b=c d\n"
    assert batch.requeued is None


def test_an_interrupted_job_is_requeued_but_not_without_end(batch: Batch) -> None:
    assert batch.end(CODE="75", SLURM_RESTART_COUNT="100") == 75 and batch.requeued is None
    assert batch.end(CODE="75", SLURM_RESTART_COUNT="99") == 75 and batch.requeued == "requeue 17"


@pytest.mark.parametrize(
    ("signum", "requeued"), [(signal.SIGUSR1, "requeue 17"), (signal.SIGTERM, None)], ids=["time_is_up", "cancelled"]
)
def test_the_driver_is_stopped_in_order(batch: Batch, signum: int, requeued: str | None) -> None:
    process = batch.start()
    end = time.monotonic() + 20
    while not (batch.folder / "runs").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signum)
    assert process.wait(20) == 75
    assert batch.requeued == requeued


def test_the_scripts_differ_in_what_they_ask_for_alone() -> None:
    assert [path.stem for path in SCRIPTS] == ["cpu_node", "gpu_node"]
    heads, bodies = zip(*(path.read_text().split("\n\n", 1) for path in SCRIPTS), strict=True)
    assert bodies[0] == bodies[1]
    assert "--gpus-per-node" in heads[1] and "gpus" not in heads[0]
    for head in heads:
        options = [line for line in head.splitlines() if line.startswith("#SBATCH")]
        assert "#SBATCH --signal=B:USR1@120" in options and "--requeue" in head
