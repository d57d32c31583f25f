"""Every kernel compiles for GPUs that are not there, keeps to their limits and spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: here the kernels are the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def compiled(*arguments: str) -> list[dict[str, object]]:
    done = run("-m", "batchinfer_kernels.triton.compile_check", *arguments)
    assert done.returncode in (0, 1), done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found, "nothing was compiled"
    assert (done.returncode == 1) == any(entry["faults"] for entry in found)
    return found


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_one_configuration_of_each(capability: int) -> None:
    found = compiled("--capability", str(capability))
    assert not [entry for entry in found if entry["faults"]]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all(capability: int) -> None:
    found = compiled("--all", "--capability", str(capability))
    assert not [entry for entry in found if entry["faults"]]


def test_faults_are_found() -> None:
    done = run("-m", "tests.kernels.triton.faulty")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "sound": [],
        "emptied": ["it stores nothing"],
        "no product": ["it has no instructions for products"],
        "recompiled": ["it is compiled again for other values of num_rows"],
    }
