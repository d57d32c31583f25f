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
    path.write_text(f"#!/bin/sh\n[ -z '{says}' ] || {{ echo '{says}'; exit 1; }}\n")
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
    says = "trial.c:1:10: fatal error: math.h: No such file or directory"
    gcc = compiler(tmp_path / "gcc", says)
    monkeypatch.setattr(library, "find_compilers", lambda: (gcc,))
    found = outlook.obstacle(tmp_path)
    assert found is not None and found.mend == outlook.MEND
    assert found.reason == f"{gcc}: {says}"
    other = compiler(tmp_path / "clang", "")
    monkeypatch.setattr(library, "find_compilers", lambda: (gcc, other))
    assert outlook.obstacle(tmp_path) is None


def test_nothing_is_tried_where_this_library_was_compiled(
    suited: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gcc = compiler(tmp_path / "gcc", "error")
    monkeypatch.setattr(library, "find_compilers", lambda: (gcc,))
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)

    def publish(name: str) -> None:
        (tmp_path / "made").write_bytes(b"a library")
        library._publish(tmp_path / "made", cache / name)

    publish("native-0123.so")  # another version's
    assert outlook.obstacle(cache) is not None
    publish(library.Recipe.of(library.SOURCES, frozenset(library.NEEDED)).file_name)
    assert outlook.obstacle(cache) is None
    cache.chmod(0o777)  # anybody's
    assert outlook.obstacle(cache) is not None


real_compiler = pytest.mark.skipif(outlook.obstacle() is not None, reason="no native kernels here")


@real_compiler
def test_the_trial_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that can do all but link threads is of no use."""
    [real, *_] = library.find_compilers()
    path = tmp_path / "gcc"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo "error: cannot find -lgomp"; exit 1;; esac\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    monkeypatch.setattr(library, "find_compilers", lambda: (path,))
    found = outlook.obstacle(tmp_path / "empty")
    assert found is not None and found.reason == f"{path}: error: cannot find -lgomp"


@real_compiler
def test_a_compiler_too_old_for_the_processors_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [real, *_] = library.find_compilers()
    path = tmp_path / "gcc"
    path.write_text(
        '#!/bin/sh\nfor word; do [ "$word" != -mavx512bf16 ] || '
        f'{{ echo "error: unrecognized option \'$word\'"; exit 1; }}; done\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    monkeypatch.setattr(library, "find_compilers", lambda: (path,))
    for bf16 in (False, True):
        features = frozenset(library.NEEDED) | ({library.BF16} if bf16 else set())
        monkeypatch.setattr(library, "cpu_flags", lambda features=features: features)
        found = outlook.obstacle(tmp_path / "empty")
        assert (found is not None) == bf16
        if found is not None:
            assert "unrecognized option '-mavx512bf16'" in found.reason


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
