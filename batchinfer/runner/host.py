"""What this process may use of its host: cores and memory, within its affinity and its control groups' limits.

Containers and Slurm jobs see the whole machine in /proc; what they may use of it stands in their control groups.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def num_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on, and has time on: a quota of 1.5 cores counts as 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for group, version in _control_groups(root, "cpu"):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").partition(" ")
        else:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, max(1, math.floor(int(quota) / int(period))))
    return cores


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process could still allocate without swapping or being killed."""
    free = 0
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    if not free:  # no Linux
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group, version in _control_groups(root, "memory"):
        limit_file, used_file, cache = (
            ("memory.max", "memory.current", "inactive_file ")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        )
        limit, used = _read(group / limit_file), _read(group / used_file)
        if limit.isdigit() and used.isdigit():
            # File cache counts as used, but makes room.
            lines = _read(group / "memory.stat").splitlines()
            reclaimable = sum(int(line.split()[1]) for line in lines if line.startswith(cache))
            free = min(free, max(0, int(limit) - int(used) + reclaimable))
    return free


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Folders of this process's control groups that limit a resource, up to the root, with their version."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder, version


def _read(path: Path) -> str:
    """A file's text without the newline at its end; "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
