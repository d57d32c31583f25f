"""Compiling, caching and loading the C kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch  # loads the OpenMP runtime that the library is linked with
from batchinfer_kernels.native import library
from batchinfer_kernels.native.library import NativeUnavailable, Recipe, open_library

ROOT = Path(__file__).parent.parent.parent
SMALL = "#include <omp.h>\nint answer(void) { return VALUE; }\nint threads(void) { return omp_get_max_threads(); }\n"

try:
    FEATURES = library.check_machine()
except NativeUnavailable as error:
    pytest.skip(f"no native kernels here: {error}", allow_module_level=True)
if not library.find_compilers():
    pytest.skip("no C compiler", allow_module_level=True)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a small library of our own, so that a test compiles in an instant."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.c").write_text('#include "value.h"\n' + SMALL)
    (folder / "value.h").write_text("#define VALUE 42\n")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "deep"


def cached(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers can be found, but each one fails."""
    monkeypatch.setattr(library, "_run_all", lambda commands: pytest.fail("compiled again"))


def test_the_real_library_loads() -> None:
    assert library.available() is None
    assert library.load() is library.load()


def test_compiled_once_and_then_found(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_library(sources, cache).answer() == 42
    [path] = cached(cache)
    no_compiler(monkeypatch)
    assert open_library(sources, cache).answer() == 42
    assert cached(cache) == [path]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_file_is_compiled_again(sources: Path, cache: Path, damage: str) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from batchinfer_kernels.native.library import open_library;"
        "print(open_library(Path(sys.argv[1]), Path(sys.argv[2])).answer())"
    )

    def answer_of_another_process() -> str:
        command = [sys.executable, "-c", code, str(sources), str(cache)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert answer_of_another_process() == "42"
    [path] = cached(cache)
    content = path.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "changed": content[:999] + b"\xff" + content[1000:], "empty": b""}
    path.write_bytes(damaged[damage])
    assert answer_of_another_process() == "42"
    assert cached(cache) == [path]
    assert library._is_whole(path)


def test_processes_that_compile_at_once_do_not_disturb_each_other(sources: Path, cache: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from batchinfer_kernels.native.library import open_library;"
        "sys.stdin.read(); print(open_library(Path(sys.argv[1]), Path(sys.argv[2])).answer())"
    )
    command = [sys.executable, "-c", code, str(sources), str(cache)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in running:
        assert process.stdin
        process.stdin.close()
        process.stdin = None
    done = [process.communicate(timeout=60) for process in running]
    assert [out.strip() for out, _ in done] == ["42"] * 3, done
    assert len(cached(cache)) == 1


def test_a_folder_that_cannot_be_written_costs_a_compilation_each_time(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")  # fails for root as well, unlike a read-only folder
    assert open_library(sources, blocked / "cache").answer() == 42
    assert "compiled in every process" in caplog.text
    assert not list(tmp_path.glob("batchinfer-native-*"))


@pytest.mark.parametrize("whose", ["the group's", "anybody's", "another user's"])
def test_what_others_could_have_written_is_not_loaded(
    sources: Path, cache: Path, whose: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_library(sources, cache)
    [path] = cached(cache)
    assert library.is_published(path)
    if whose == "another user's":
        monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    else:
        cache.chmod(0o720 if whose == "the group's" else 0o702)
    assert not library.is_published(path)
    before = path.stat()
    opened: list[Path] = []
    monkeypatch.setattr(library, "_open", opened.append)
    open_library(sources, cache)
    assert opened and opened[0].parent != cache
    assert "compiled in every process" in caplog.text
    assert cached(cache) == [path] and path.stat() == before


def test_a_file_that_others_may_write_is_compiled_again(sources: Path, cache: Path) -> None:
    open_library(sources, cache)
    [path] = cached(cache)
    path.chmod(0o722)
    assert open_library(sources, cache).answer() == 42
    assert cached(cache) == [path] and library.is_published(path)


def test_what_is_old_is_dropped_from_the_cache_and_what_is_used_is_not_old(sources: Path, cache: Path) -> None:
    open_library(sources, cache)
    [first] = cached(cache)
    stale, torn, foreign = (cache / name for name in ("native-01.so", f".{first.name}-ab", "notes.txt"))
    recent = cache / "native-02.so"
    for path in (stale, torn, foreign, recent):
        path.touch()
    long_ago = time.time() - library.KEPT_S - 9
    for path in (first, stale, torn, foreign):
        os.utime(path, (long_ago, long_ago))
    open_library(sources, cache)
    (sources / "value.h").write_text("#define VALUE 43\n")
    open_library(sources, cache)
    kept = set(cached(cache))
    assert {first, recent, foreign} < kept and len(kept) == 4


def test_no_compiler_is_left_running(tmp_path: Path) -> None:
    marker = tmp_path / "done"
    with pytest.raises(FileNotFoundError):
        library._run_all([["sh", "-c", f"sleep 1; touch {marker}"], [str(tmp_path / "missing")]])
    time.sleep(1.5)
    assert not marker.exists()


def test_compilers_go_by_the_names_they_were_found_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper finds out from its name what to run."""
    wrapper = tmp_path / "elsewhere" / "ccache"
    wrapper.parent.mkdir()
    wrapper.write_text("#!/bin/sh\n")
    wrapper.chmod(0o755)
    for name in ("gcc", "clang"):
        (tmp_path / name).symlink_to(wrapper)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert library.find_compilers() == (tmp_path / "gcc",)


def test_the_key_follows_what_decides_the_library(sources: Path, tmp_path: Path) -> None:
    plain = Recipe.of(sources, FEATURES)
    assert plain.key == Recipe.of(sources, FEATURES).key
    keys = {plain.key, Recipe.of(sources, FEATURES | {"another"}).key}
    (sources / "value.h").write_text("#define VALUE 43\n")
    keys.add(Recipe.of(sources, FEATURES).key)
    (sources / "more.c").write_text("int more(void) { return 1; }\n")
    keys.add(Recipe.of(sources, FEATURES).key)
    compiler = tmp_path / "cc"
    shutil.copy(plain.compilers[0], compiler)
    for compilers, openmp in (((compiler,), plain.openmp), (plain.compilers, Path("/lib/libgomp-other.so.1"))):
        keys.add(
            Recipe(
                sources=plain.sources,
                headers=plain.headers,
                compilers=compilers,
                features=FEATURES,
                openmp=openmp,
            ).key
        )
    assert len(keys) == 6


def test_a_changed_source_gives_another_library(sources: Path, cache: Path) -> None:
    assert open_library(sources, cache).answer() == 42
    (sources / "value.h").write_text("#define VALUE 43\n")
    assert open_library(sources, cache).answer() == 43
    assert len(cached(cache)) == 2


def test_no_compiler_is_said(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(sources))
    with pytest.raises(NativeUnavailable, match=r"no C compiler was found .*install gcc"):
        open_library(sources, cache)
    assert not cache.exists()


def test_what_the_compiler_says_is_said(sources: Path, cache: Path) -> None:
    (sources / "small.c").write_text("int answer(void) { return 42 }\n")
    with pytest.raises(NativeUnavailable, match="expected ';'"):
        open_library(sources, cache)


@pytest.mark.skipif(library.TILES not in FEATURES, reason="a processor without AMX")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc: others assemble by themselves")
def test_an_assembler_too_old_for_tiles_costs_only_them(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a system that is older than its compiler."""
    (sources / "tiles.c").write_text(
        "#include <immintrin.h>\n#ifdef __AMX_INT8__\nvoid multiply(void) { _tile_dpbusd(0, 1, 2); }\n"
        "int tiles(void) { return 1; }\n#else\nint tiles(void) { return 0; }\n#endif\n"
    )
    if not open_library(sources, cache / "of_today").tiles():
        pytest.skip("a compiler that is too old as well")
    compiler, assembler = tmp_path / "gcc", tmp_path / "as"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} -B {tmp_path} "$@"\n')
    assembler.write_text(
        '#!/bin/sh\nfor word; do case "$word" in *.s) '
        'if grep -q tdpbusd "$word"; then echo "Error: no such instruction"; exit 1; fi;; esac; done\n'
        f'exec {shutil.which("as")} "$@"\n'
    )
    for path in (compiler, assembler):
        path.chmod(0o755)
    monkeypatch.setattr(library, "find_compilers", lambda: (compiler,))
    found = open_library(sources, cache)
    assert found.answer() == 42 and not found.tiles()


def test_a_missing_function_fails_when_linking(sources: Path, cache: Path) -> None:
    (sources / "small.c").write_text("int other(void);\nint answer(void) { return other(); }\n")
    with pytest.raises(NativeUnavailable, match="other"):
        open_library(sources, cache)


def test_an_older_processor_and_another_system_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: FEATURES - {"avx512_vnni"})
    with pytest.raises(NativeUnavailable, match="this processor lacks avx512_vnni"):
        open_library()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(NativeUnavailable, match="linux on aarch64"):
        open_library()


def test_a_failure_is_logged_once_and_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> ctypes.CDLL:
        raise NativeUnavailable("for a reason")

    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "open_library", fail)
    caplog.set_level("INFO")
    assert library.available() == library.available() == "for a reason"
    assert [r.getMessage() for r in caplog.records] == ["native kernels are not used: for a reason"]
    with pytest.raises(NativeUnavailable, match="for a reason"):
        library.load()


def test_threads_come_from_the_runtime_that_torch_uses(sources: Path, cache: Path) -> None:
    small = open_library(sources, cache)
    before = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        assert small.threads() == count
    torch.set_num_threads(before)
    assert library.loaded_openmp() is not None


@pytest.mark.parametrize("folder", [None, "", "relative"])
def test_the_cache_folder(folder: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if folder is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
    assert library.cache_folder() == tmp_path / ".cache" / "batchinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert library.cache_folder() == tmp_path / "elsewhere" / "batchinfer"


def test_a_wheel_has_the_sources(tmp_path: Path) -> None:
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "kernels", tree / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "batchinfer").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tree, capture_output=True, text=True, check=True
    )
    names = zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).namelist()
    for source in library.SOURCES.iterdir():
        if source.suffix in (".c", ".h", ".py"):
            assert f"batchinfer_kernels/native/{source.name}" in names
