"""What a process does before torch is loaded so that products give the same bytes for any batch and thread count.

Intel's MKL, which torch's x86 builds use for float32 products, picks kernels by the number of rows and threads
unless its strict conditional reproducibility is asked for, by an environment variable that it reads once, at its
first call. So `prepare` comes first in a process that will run a model; it imports no torch. Whether it worked on
this machine is measured later, by `probe`, which also finds a way round where MKL is not in use.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MKL_CBWR"
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """instruction_level: "avx512", "avx2", "sse", or the machine's name; part of what fixes a row's bytes.

    mkl_mode   what MKL_CBWR says now, and None where it means nothing
    in_time    False where torch was loaded before, so that MKL may have been set up without it
    """

    instruction_level: str
    mkl_mode: str | None
    in_time: bool


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What Linux says this machine's x86 processor has, by Linux' names; nothing where it doesn't say."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def instruction_level(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The widest vector instructions that this machine has, by the name that MKL gives them."""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64"):
        return machine
    flags = cpu_flags(cpuinfo)
    if flags >= _AVX512:
        return "avx512"
    if {"avx2", "fma"} <= flags:
        return "avx2"
    return "sse"


def product_level(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """`instruction_level`, told apart further by what products of int8 and bfloat16 are made with: on such machines
    they give other bytes, while those of float32 give the same."""
    level = instruction_level(cpuinfo)
    flags = cpu_flags(cpuinfo)
    if level != "avx512" or "avx512_vnni" not in flags:
        return level
    if "avx512_bf16" not in flags:
        return "avx512_vnni"
    return "amx" if "amx_bf16" in flags else "avx512_bf16"


def prepare() -> Preparation:
    """Asks MKL for strict reproducibility at this machine's level. A value that the user has set is kept.

    Threads that wait for work are told to sleep, too, after a few microseconds of spinning: the cores are shared
    with planning and commits, and two threads that spin for each other there were seen to slow an engine down fifty
    times. Without any spinning a decode step was seen to take a fifth longer.
    """
    in_time = "torch" not in sys.modules
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    level = instruction_level()
    mode = {"avx512": "AVX512,STRICT", "avx2": "AVX2,STRICT", "sse": "COMPATIBLE"}.get(level)
    if mode is not None:
        mode = os.environ.setdefault(VARIABLE, mode)
    return Preparation(instruction_level=level, mkl_mode=mode, in_time=in_time)
