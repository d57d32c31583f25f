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
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchinfer_kernels.determinism import cpu_flags

SOURCES = Path(__file__).parent
# Without -ffast-math: rows keep their bytes in any batch, and NaN stays NaN.
FLAGS = ("-std=c11", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-Wall")
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
COMPILERS = ("cc", "gcc", "clang")
FILE_PATTERN = "native-*.so"
COMPILE_TIMEOUT_S = 120
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
    folder = cache_folder() if cache is None else cache
    path = folder / FILE_PATTERN.replace("*", recipe.key)
    if _is_whole(path):
        return _open(path)
    with tempfile.TemporaryDirectory(prefix="batchinfer-native-") as temporary:
        built = recipe.build(Path(temporary))
        try:
            _publish(built, path)
        except OSError as error:
            _log.warning("native kernels are compiled in every process: can't write %s (%s)", path, error)
            return _open(built)  # stays loaded when the file is gone
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
    openmp     the OpenMP runtime that this process has loaded; None leaves it to the compiler
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
            openmp=loaded_openmp(),
        )

    @property
    def key(self) -> str:
        digest = hashlib.sha256()
        parts: list[str] = [*FLAGS, *sorted(self.features), self.openmp.name if self.openmp else ""]
        for compiler in self.compilers:
            status = compiler.stat()
            parts += [str(compiler), str(status.st_size), str(status.st_mtime_ns)]
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
        begin = time.monotonic()
        for compiler in self.compilers:
            try:
                built = self._build_with(compiler, folder)
            except (OSError, subprocess.SubprocessError) as error:
                said.append(f"{compiler}: {complaint(error)}")
            else:
                _log.info("native kernels compiled by %s in %.1f s", compiler, time.monotonic() - begin)
                return built
        raise NativeUnavailable("; ".join(said))

    def _build_with(self, compiler: Path, folder: Path) -> Path:
        objects = [folder / f"{source.stem}.o" for source in self.sources]
        _run_all(
            [
                [str(compiler), *FLAGS, "-c", str(source), "-o", str(made)]
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
    """C compilers on PATH, each once."""
    found = (shutil.which(name) for name in COMPILERS)
    return tuple(dict.fromkeys(Path(name).resolve() for name in found if name))


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


def _run_all(commands: Sequence[list[str]]) -> None:
    """Runs commands side by side. Raises the first one's failure."""
    environment = os.environ | {"LC_ALL": "C"}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    try:
        for process in running:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, output)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def complaint(error: Exception) -> str:
    """What to say of a failed command, in one line."""
    output = error.output if isinstance(error, subprocess.CalledProcessError) else ""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line or "undefined reference" in line]
    return (telling or lines or [str(error)])[0]


def _publish(built: Path, path: Path) -> None:
    """Puts a library and its digest under its final name at once."""
    content = built.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
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
