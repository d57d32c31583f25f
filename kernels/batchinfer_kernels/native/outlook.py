"""Whether this machine can use the native library, told without torch and without compiling it.

For whoever decides what a job runs with before an engine is there. `library` has the last word: it also knows whether
what was compiled loads.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from batchinfer_kernels.native import library
from batchinfer_kernels.native.library import NativeUnavailable

MEND = "install a C compiler and its headers (Debian, Ubuntu: apt-get install gcc libc6-dev)"
TRIAL_TIMEOUT_S = 20
# What the C files need of a compiler: the headers that are packages of their own, and to know the processor.
_TRIAL = (
    "#include <math.h>\n#include <omp.h>\n#include <string.h>\n#ifndef __AVX512VNNI__\n#error too old for it\n#endif\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why the library can't be used. `mend`: what would help, None where nothing does on this machine."""

    reason: str
    mend: str | None


def obstacle(cache: Path | None = None) -> Obstacle | None:
    """What keeps this machine from using the library, None where nothing is known to.

    Takes a millisecond where a library was compiled before, else as long as it takes to try the compiler's headers.
    cache   `library.cache_folder()` unless given
    """
    try:
        library.check_machine()
    except NativeUnavailable as error:
        return Obstacle(reason=str(error), mend=None)
    compilers = library.find_compilers()
    if not compilers:
        names = ", ".join(library.COMPILERS)
        return Obstacle(reason=f"no C compiler was found (tried {names})", mend=MEND)
    folder = library.cache_folder() if cache is None else cache
    if any(folder.glob(library.FILE_PATTERN)):
        return None
    said = {str(compiler): _complaint_of(compiler) for compiler in compilers}
    if None in said.values():
        return None
    return Obstacle(reason="; ".join(f"{name}: {text}" for name, text in said.items()), mend=MEND)


def _complaint_of(compiler: Path) -> str | None:
    """Why a compiler can't do it, from headers alone."""
    command = [str(compiler), *library.FLAGS, "-fsyntax-only", "-x", "c", "-"]
    try:
        subprocess.run(
            command,
            input=_TRIAL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LC_ALL": "C"},
            text=True,
            timeout=TRIAL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return library.complaint(error)
    return None
