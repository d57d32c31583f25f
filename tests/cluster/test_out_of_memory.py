"""What is said of a process that was killed: whether memory ran out, how much it took, which settings need less."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cluster.engine_host import EngineHost
from batchinfer.cluster.out_of_memory import FOR_ENGINES, MemoryWatch


def host(root: Path, *, version: int, kills: int, limit: str) -> None:
    """/proc and /sys of a process in the group `job`."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    base = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / "job"
    base.mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("4:memory:/job\n" if version == 1 else "0::/job\n")
    (base / ("memory.oom_control" if version == 1 else "memory.events")).write_text(f"low 0\noom_kill {kills}\n")
    (base / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(f"{limit}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_that_the_kernel_has_counted_is_told(version: int, tmp_path: Path) -> None:
    host(tmp_path, version=version, kills=3, limit=str(4 << 30))
    watch = MemoryWatch(tmp_path)
    host(tmp_path, version=version, kills=4, limit=str(4 << 30))
    words = watch.words(-signal.SIGKILL, knobs=FOR_ENGINES)
    assert words.startswith("; most likely by the kernel: memory ran out while it ran (counted in ")
    assert "/job is 4.00 GiB" in words
    assert "engine.kv_cache_memory, engine.max_num_seqs" in words
    assert watch.words(-signal.SIGTERM, knobs=FOR_ENGINES) == watch.words(1, knobs=FOR_ENGINES) == ""


def test_a_kill_that_is_not_counted_was_somebody_elses(tmp_path: Path) -> None:
    host(tmp_path, version=2, kills=3, limit="max")
    words = MemoryWatch(tmp_path).words(-signal.SIGKILL, knobs=FOR_ENGINES)
    assert "not for want of memory" in words
    assert "engine." not in words


def test_where_nobody_counts_the_settings_are_named_all_the_same(tmp_path: Path) -> None:
    words = MemoryWatch(tmp_path).words(-signal.SIGKILL, knobs=FOR_ENGINES)
    assert words.startswith("; on ")
    assert "engine.kv_cache_memory" in words


def test_the_peak_is_that_of_the_child() -> None:
    program = (
        "from batchinfer.cluster.out_of_memory import MemoryWatch, Path; import subprocess, sys\n"
        "watch = MemoryWatch(Path('/nowhere'))\n"
        "code = 'x = bytearray(300 << 20); import os; os.kill(os.getpid(), 9)'\n"
        "child = subprocess.run([sys.executable, '-c', code])\n"
        "print(watch.words(child.returncode, knobs='none'))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    took = float(out.partition("it took ")[2].partition(" GiB")[0])
    assert 0.29 < took < 0.6


def test_a_killed_engine_tells_of_memory_beside_the_reason(tmp_path: Path) -> None:
    """Not in the reason: that goes into the output, where nothing of this machine belongs."""
    told: list[dict[str, Any]] = []
    died = threading.Event()

    def listen(message: dict[str, Any]) -> None:
        told.append(message)
        died.set()

    engine = EngineHost(name="w0", num_threads=1, preload=[], log=tmp_path / "engine.log")
    engine.listen(listen)
    engine.start()
    engine.kill()
    assert died.wait(60)
    assert told[0]["t"] == "died"
    assert told[0]["reason"] == "the engine process ended by signal 9 (SIGKILL, as when memory runs out)"
    assert "memory" in told[0]["memory"]
