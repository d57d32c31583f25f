"""The shared library of this folder's C files: compiled on first use, kept in the user's cache, loaded once.

Compiled where it runs, for this processor (`-march=native`): a wheel carries sources only, so that one built elsewhere
can't crash on an older machine. A cached file's name says what it was made from (sources, compiler, flags, processor,
OpenMP runtime), and it ends with its own digest: a file cut short by a full disk would crash the process that loads it.

Torch must be loaded first. The library is linked with the OpenMP runtime that torch brought along, so that the process
has one pool of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import itertools
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchinfer_kernels.determinism import cpu_flags

SOURCES = Path(__file__).parent
# Without -ffast-math: rows keep their bytes in any batch, and NaN stays NaN.
FLAGS = ("-std=c11", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-Wall")
# Asked for by name where the processor has it: `determinism.product_level` says that bfloat16 is multiplied with it, so
# that a compiler too old to know it must fail rather than give other bytes.
BF16, BF16_FLAG = "avx512_bf16", "-mavx512bf16"
# Where the assembler is too old for what the compiler knows, tiles are left out: bytes are the same without them.
TILES, NO_TILES_FLAG = "amx_int8", "-mno-amx-int8"
AMX_VARIABLE = "BATCHINFER_AMX"
"""Of the environment: with 0 tiles are not used where there are some, for whoever compares."""
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
COMPILERS = ("cc", "gcc", "clang")
FILE_PATTERN = "native-*.so"
COMPILE_TIMEOUT_S = 120
KEPT_S = 30 * 24 * 3600
_DIGEST_BYTES = 32

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_loaded: ctypes.CDLL | str | None = None


class NativeUnavailable(RuntimeError):
    """The library can't be compiled or loaded here; the message says why."""


def load() -> ctypes.CDLL:
    """The library, compiled first if it isn't in the cache. Raises NativeUnavailable; a failure is remembered.

    What that means for a model is for the caller to say.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                _loaded = open_library()
                _loaded.batchinfer_use_tiles(int(os.environ.get(AMX_VARIABLE) != "0"))
            except NativeUnavailable as error:
                _loaded = str(error)
                _log.info("native kernels are not used: %s", error)
    if isinstance(_loaded, str):
        raise NativeUnavailable(_loaded)
    return _loaded


def available() -> str | None:
    """None where the library can be used (and is loaded now), or why not."""
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None


def open_library(sources: Path = SOURCES, cache: Path | None = None) -> ctypes.CDLL:
    """Compiles or finds the library of a folder's C files. `cache` is `cache_folder()` unless given."""
    features = check_machine()
    recipe = Recipe.of(sources, features)
    path = (cache_folder() if cache is None else cache) / recipe.file_name
    if is_published(path):
        with suppress(OSError):
            os.utime(path)  # in use: not for `_drop_old`
        return _open(path)
    with tempfile.TemporaryDirectory(prefix="batchinfer-native-") as temporary:
        begin = time.monotonic()
        built = recipe.build(Path(temporary))
        _log.info("native kernels compiled in %.1f s", time.monotonic() - begin)
        try:
            _publish(built, path)
        except OSError as error:
            _log.warning("native kernels are compiled in every process: can't use %s (%s)", path, error)
            return _open(built)  # stays loaded when the file is gone
    _drop_old(path.parent)
    return _open(path)


def check_machine() -> frozenset[str]:
    """The processor's features. Raises NativeUnavailable on one that the C files are not for."""
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        raise NativeUnavailable(f"they are for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    features = cpu_flags()
    missing = [name for name in NEEDED if name not in features]
    if missing:
        raise NativeUnavailable(f"this processor lacks {', '.join(missing)}")
    return features


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/batchinfer, ~/.cache/batchinfer by default."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(root) if Path(root).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # no home directory; nothing will be found or written there
        base = Path("/nonexistent")
    return base / "batchinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides what comes out of the compiler.

    compilers  in the order in which they are tried
    openmp     the OpenMP runtime that torch brings; None leaves it to the compiler
    """

    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    compilers: tuple[Path, ...]
    features: frozenset[str]
    openmp: Path | None

    @classmethod
    def of(cls, folder: Path, features: frozenset[str]) -> Recipe:
        return cls(
            sources=tuple(sorted(folder.glob("*.c"))),
            headers=tuple(sorted(folder.glob("*.h"))),
            compilers=find_compilers(),
            features=features,
            openmp=loaded_openmp() or openmp_of_torch(),
        )

    @property
    def flags(self) -> tuple[str, ...]:
        return (BF16_FLAG, *FLAGS) if BF16 in self.features else FLAGS

    @property
    def file_name(self) -> str:
        return FILE_PATTERN.replace("*", self.key)

    @property
    def key(self) -> str:
        digest = hashlib.sha256()
        parts: list[str] = [*self.flags, *sorted(self.features), self.openmp.name if self.openmp else ""]
        for compiler in self.compilers:
            status = compiler.stat()
            parts += [str(compiler), str(compiler.resolve()), str(status.st_size), str(status.st_mtime_ns)]
        for source in (*self.sources, *self.headers):
            parts += [source.name, hashlib.sha256(source.read_bytes()).hexdigest()]
        for part in parts:
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()[:24]

    def build(self, folder: Path) -> Path:
        """The library, made in a folder by the first compiler that can. Raises NativeUnavailable."""
        if not self.compilers:
            raise NativeUnavailable(f"no C compiler was found (tried {', '.join(COMPILERS)}); install gcc")
        said = []
        flags = [self.flags]
        if TILES in self.features:
            flags.append((*self.flags, NO_TILES_FLAG))
        for some, compiler in itertools.product(flags, self.compilers):
            try:
                return self._build_with(compiler, some, folder)
            except (OSError, subprocess.SubprocessError) as error:
                said.append(f"{compiler}: {_complaint(error)}")
        raise NativeUnavailable("; ".join(dict.fromkeys(said)))

    def _build_with(self, compiler: Path, flags: tuple[str, ...], folder: Path) -> Path:
        objects = [folder / f"{source.stem}.o" for source in self.sources]
        _run_all(
            [
                [str(compiler), *flags, "-c", str(source), "-o", str(made)]
                for source, made in zip(self.sources, objects, strict=True)
            ]
        )
        built = folder / "native.so"
        # The runtime by its file: its name differs between builds of torch. Undefined symbols are an error here, such
        # as those of a compiler that works with another runtime, rather than when the library is loaded.
        openmp = [str(self.openmp)] if self.openmp else ["-fopenmp"]
        _run_all([[str(compiler), "-shared", "-Wl,-z,defs", "-o", str(built), *map(str, objects), *openmp, "-lm"]])
        return built


def find_compilers() -> tuple[Path, ...]:
    """C compilers on PATH, each once, by the names they were found by: a wrapper such as ccache tells by its name."""
    found: dict[Path, Path] = {}
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            found.setdefault(Path(path).resolve(), Path(path).absolute())
    return tuple(found.values())


def loaded_openmp(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """The file of the OpenMP runtime that torch has loaded: GNU's, or Intel's, which has GNU's functions as well."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return None
    files = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    runtimes = [Path(name) for name in files if Path(name).name.startswith(("libgomp", "libiomp5"))]
    # Others bring copies of their own along; torch's lies beside torch, or is the system's.
    runtimes.sort(key=lambda path: "torch" not in path.parts and "torch.libs" not in path.parts)
    return runtimes[0] if runtimes else None


def openmp_of_torch() -> Path | None:
    """The OpenMP runtime that torch would load, told without loading torch; None where it brings none along."""
    found = importlib.util.find_spec("torch")
    for package in (found.submodule_search_locations or ()) if found else ():
        for folder in (Path(package) / "lib", Path(package).parent / "torch.libs"):
            for runtime in sorted(folder.glob("libgomp*.so*")):
                return runtime.resolve()
    return None


def _run_all(commands: Sequence[list[str]]) -> None:
    """Runs commands side by side. Raises the first one's failure."""
    environment = os.environ | {"LC_ALL": "C"}
    running: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        for command in commands:
            running.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        for process in running:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, output)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _complaint(error: Exception) -> str:
    """What to say of a failed command, in one line."""
    output = error.output if isinstance(error, subprocess.CalledProcessError) else ""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line or "undefined reference" in line]
    return (telling or lines or [str(error)])[0]


def _publish(built: Path, path: Path) -> None:
    """Puts a library and its digest under its final name at once. Raises OSError, also where others could change it."""
    content = built.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_ours(path.parent):
        raise PermissionError(f"{path.parent} is another user's, or others may write to it")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        temporary.chmod(0o700)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _drop_old(folder: Path) -> None:
    """Removes what was left in a cache folder by other versions, and by processes that were killed."""
    for pattern in (FILE_PATTERN, f".{FILE_PATTERN}-*"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > KEPT_S:
                    path.unlink()


def is_published(path: Path) -> bool:
    """Whether a library is there as this user wrote it. What others could have written is never loaded."""
    return _is_ours(path.parent) and _is_ours(path) and _is_whole(path)


def _is_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(path: Path) -> bool:
    """Whether a published library is there as it was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the compiled library does not load: {error}") from error
