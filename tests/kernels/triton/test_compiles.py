"""Every kernel compiles for GPUs that are not there, keeps to their limits and spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def compiled(*arguments: str) -> list[dict[str, object]]:
    """In a process of its own: here the kernels are the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "batchinfer_kernels.triton.compile_check", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert found, "nothing was compiled"
    assert (run.returncode == 1) == any(entry["faults"] for entry in found)
    return found


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_one_configuration_of_each(capability: int) -> None:
    found = compiled("--capability", str(capability))
    assert not [entry for entry in found if entry["faults"]]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all(capability: int) -> None:
    found = compiled("--all", "--capability", str(capability))
    assert not [entry for entry in found if entry["faults"]]
