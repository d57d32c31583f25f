"""Cores and memory within control groups, over a made-up /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.runner.host import free_host_memory, num_cores


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable:    2000 kB\n", "proc/self/cgroup": ""})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_limits_it_is_the_machine(root: Path) -> None:
    assert free_host_memory(root) == 2000 * 1024
    assert num_cores(root) == len(os.sched_getaffinity(0))
    assert num_cores() >= 1
    assert free_host_memory() > 2**20


def test_limits_of_version_2_anywhere_above_hold(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    write(
        root,
        {
            "proc/self/cgroup": "0::/slurm/job7\n",
            "sys/fs/cgroup/slurm/job7/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job7/memory.current": "5\n",
            "sys/fs/cgroup/slurm/job7/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slurm/memory.max": "1000000\n",
            "sys/fs/cgroup/slurm/memory.current": "900000\n",
            "sys/fs/cgroup/slurm/memory.stat": "anon 3\ninactive_file 50000\n",
            "sys/fs/cgroup/slurm/cpu.max": "350000 100000\n",
        },
    )
    assert free_host_memory(root) == 150_000
    assert num_cores(root) == 3


def test_limits_of_version_1(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/b\n1:name=systemd:/c\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "2000",
            "sys/fs/cgroup/cpu/b/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/b/cpu.cfs_period_us": "100000",
        },
    )
    assert free_host_memory(root) == 0
    assert num_cores(root) == 1
