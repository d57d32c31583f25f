"""The scripts as a user runs them: without a GPU, as toys in the interpreter, and with processes that die or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchinfer.testing.gpu import check
from batchinfer.testing.gpu.check import Options, run_all
from batchinfer.testing.gpu.device import answers
from batchinfer.testing.gpu.outcome import FAILED, MISSED, NO_GPU, OK
from batchinfer.testing.gpu.sizes import TOY

ROOT = Path(__file__).parent.parent.parent.parent
# What a machine for gpu_check need not have.
ABSENT = ("pyarrow", "dask", "distributed", "pydantic", "datasets", "click", "yaml", "rich", "fsspec", "transformers")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["gpu_check", "bench_kernels"])
def test_without_a_gpu_it_says_so(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / script)], capture_output=True, text=True)
    assert done.returncode == NO_GPU and not done.stdout
    assert done.stderr.startswith(f"{script}: torch {torch.__version__} sees no NVIDIA GPU here")
    assert len(done.stderr.splitlines()) == 1


def test_as_toys_it_runs_with_few_packages(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    tests = tmp_path / "test_one.py"
    tests.write_text("import sys\ndef test_it(): assert sys.modules['pyarrow'] is None\n")
    command = [sys.executable, str(ROOT / "scripts/gpu_check"), "--interpreter", "--json", str(tmp_path / "out.json")]
    command += ["--tests", str(tests), "--only", "tests", "--only", "kernels", "--only", "peer"]
    environment = {**os.environ, "PYTHONPATH": str(blocked)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (OK, MISSED), done.stdout + done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["exit_code"] == done.returncode and record["facts"]["packages"]["torch"] == torch.__version__
    found = {line["name"]: line for line in record["lines"]}
    assert {line["group"] for line in found.values()} == {"tests", "kernels", "peer"} and len(found) == 12
    assert found["test_one.py"]["text"] == "1 passed"
    assert found["offline throughput against transformers"]["text"].startswith("no peer installed")
    assert "| kernels | copy bandwidth | number |" in done.stdout


def run_with(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float) -> tuple[int, list[dict]]:  # type: ignore[type-arg]
    """Exit code and lines where a child's Python is this shell script."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(check.sys, "executable", str(python))
    monkeypatch.setattr(check, "GRACE_S", 0.2)
    options = Options(root=ROOT, sizes=TOY, device=torch.device("cpu"), limit_s=limit_s, groups=["kernels"])
    records: list[dict] = []  # type: ignore[type-arg]
    code = run_all(options, lambda text: None, records.append)
    return code, records[-1]["lines"]


def test_a_process_that_dies_takes_one_check_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check has its own here: the others are tried in another process."""
    code, lines = run_with("echo 'CUDA error: illegal access' >&2; exit 9", tmp_path, monkeypatch, 60)
    assert code == FAILED and len(lines) == 10
    assert {line["text"] for line in lines} == {"its process ended with exit code 9: CUDA error: illegal access"}
    assert {line["status"] for line in lines} == {"failed"}


def test_a_process_that_ends_in_order_before_its_time_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each check here."""
    line = json.dumps({"group": "kernels", "name": "it", "status": "failed", "text": "CUDA error: illegal access"})
    code, lines = run_with(f"echo '{line}'", tmp_path, monkeypatch, 60)
    assert code == FAILED and len(lines) == 10
    assert {line["text"] for line in lines} == {"CUDA error: illegal access"}


def test_a_process_that_says_nothing_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = run_with("exit 0", tmp_path, monkeypatch, 60)
    assert code == FAILED and len(lines) == 10
    assert {line["text"] for line in lines} == {"its process ended with exit code 0: no message"}


def test_a_device_that_is_broken_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert answers(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert not answers(torch.device("cuda"))


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = run_with("exec sleep 60", tmp_path, monkeypatch, 0.5)
    assert code == FAILED and len(lines) == 10
    assert lines[0]["text"] == "out of time: it was ended"
    assert {line["status"] for line in lines} == {"not run"}
