"""Whether this machine can use the native library, told without torch and without compiling it.

For whoever decides what a job runs with before an engine is there. `library` has the last word: it also knows whether
what was compiled loads.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from batchinfer_kernels.native import library
from batchinfer_kernels.native.library import NativeUnavailable

MEND = "install a C compiler and its headers (Debian, Ubuntu: apt-get install gcc libc6-dev)"
# What the C files need of a compiler: the headers that are packages of their own, to know the processor, an assembler
# that knows what the compiler writes for it, and to link threads.
_TRIAL = """\
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif
#ifdef __AMX_INT8__
#include <sys/syscall.h>
#endif
#ifndef __AVX512VNNI__
#error too old for this processor
#endif
__m512 trial(__m512 sum, __m512i a, __m512i b, double *roots, int count)
{
    sum = _mm512_add_ps(sum, _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), a, b)));
#ifdef __AVX512BF16__
    sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
#ifdef __AMX_INT8__
    _tile_dpbusd(0, 1, 2);
#endif
#pragma omp parallel for num_threads(omp_get_max_threads())
    for (int i = 0; i < count; i++)
        roots[i] = exp(roots[i]);
    return sum;
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why the library can't be used. `mend`: what would help, None where nothing does on this machine."""

    reason: str
    mend: str | None


def obstacle(cache: Path | None = None) -> Obstacle | None:
    """What keeps this machine from using the library, None where nothing is known to.

    Takes milliseconds where this very library was compiled before, else as long as compiling a small one.
    cache   `library.cache_folder()` unless given
    """
    try:
        features = library.check_machine()
    except NativeUnavailable as error:
        return Obstacle(reason=str(error), mend=None)
    recipe = library.Recipe.of(library.SOURCES, features)
    if not recipe.compilers:
        names = ", ".join(library.COMPILERS)
        return Obstacle(reason=f"no C compiler was found (tried {names})", mend=MEND)
    folder = library.cache_folder() if cache is None else cache
    if library.is_published(folder / recipe.file_name):
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="batchinfer-native-") as temporary:
            source = Path(temporary) / "trial.c"
            source.write_text(_TRIAL)
            replace(recipe, sources=(source,), headers=()).build(Path(temporary))
    except NativeUnavailable as error:
        return Obstacle(reason=str(error), mend=MEND)
    except OSError as error:
        return Obstacle(reason=f"can't write to {tempfile.gettempdir()} ({error})", mend="set TMPDIR to another folder")
    return None
