"""Whether the native library can be used, told without torch and without compiling it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from batchinfer_kernels.native import library, outlook


@pytest.fixture
def suited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose processor the C files are for."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(library.NEEDED))


def compiler(path: Path, says: str) -> Path:
    """A compiler that fails with these words, or is content where there are none."""
    path.write_text(f"#!/bin/sh\ncat >/dev/null\n[ -z '{says}' ] || {{ echo '{says}'; exit 1; }}\n")
    path.chmod(0o755)
    return path


def test_it_agrees_with_the_library_here() -> None:
    code = "import sys; from batchinfer_kernels.native.outlook import obstacle; print(obstacle() is None); "
    code += "assert 'torch' not in sys.modules; import torch; "
    code += "from batchinfer_kernels.native import library; print(library.available() is None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, true = done.stdout.split()
    assert told == true


def test_an_older_processor_can_not_be_mended(suited: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(library.NEEDED) - {"avx512_vnni"})
    found = outlook.obstacle()
    assert found is not None and found.mend is None
    assert found.reason == "this processor lacks avx512_vnni"


def test_no_compiler(suited: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "native-0123.so").touch()  # its name holds the compiler that made it: of no use without one
    found = outlook.obstacle(tmp_path)
    assert found is not None
    assert found.reason == "no C compiler was found (tried cc, gcc, clang)"
    assert found.mend is not None and "apt-get install gcc" in found.mend


def test_a_compiler_without_headers(suited: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    says = "<stdin>:1:10: fatal error: math.h: No such file or directory"
    gcc = compiler(tmp_path / "gcc", says)
    monkeypatch.setattr(library, "find_compilers", lambda: (gcc,))
    found = outlook.obstacle(tmp_path)
    assert found is not None and found.mend == outlook.MEND
    assert found.reason == f"{gcc}: {says}"
    other = compiler(tmp_path / "clang", "")
    monkeypatch.setattr(library, "find_compilers", lambda: (gcc, other))
    assert outlook.obstacle(tmp_path) is None


def test_nothing_is_tried_where_a_library_was_compiled(
    suited: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "find_compilers", lambda: (compiler(tmp_path / "gcc", "error"),))
    (tmp_path / "native-0123.so").touch()
    assert outlook.obstacle(tmp_path) is None
    assert outlook.obstacle(tmp_path / "empty") is not None


def test_the_trial_asks_for_what_the_sources_include() -> None:
    asked = {line for line in outlook._TRIAL.splitlines() if line.startswith("#include")}
    needed = {
        line.strip()
        for source in library.SOURCES.glob("*.[ch]")
        for line in source.read_text().splitlines()
        if line.startswith("#include <")
    }
    of_the_compiler = {"immintrin.h", "stddef.h", "stdint.h", "stdbool.h", "float.h", "limits.h"}
    assert {line for line in needed if line.split("<")[1].rstrip(">") not in of_the_compiler} <= asked
