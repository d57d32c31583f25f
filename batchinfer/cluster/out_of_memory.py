"""Whether a child process that was killed ran out of memory, and what to change: for messages. Standard library only.

The kernel counts its kills in the control group (`memory.events` of version 2, `memory.oom_control` of version 1); a
child's peak is known once it has been waited for. How a process ended is said in `lifecycle.how_it_ended`.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

FOR_ENGINES = "engine.kv_cache_memory, engine.max_num_seqs, engine.max_num_batched_tokens, fewer cluster.workers"
FOR_WORKERS = "input.window_rows, fewer cluster.workers, engine.kv_cache_memory"


class MemoryWatch:
    """Made before a child starts; asked after it was waited for."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._group = _control_group(root)
        self._kills = self._counted()
        self._peak = _peak_of_children()

    def words(self, returncode: int, *, knobs: str) -> str:
        """After SIGKILL, what is known of memory, and the settings that need less; else nothing. Begins with "; "."""
        if returncode != -signal.SIGKILL:
            return ""
        before, after = self._kills, self._counted()
        known = before is not None and after is not None
        if known and after == before:
            # Somebody sent it: a batch system, a person.
            return f"; not for want of memory, it seems: {self._group} counts no kill of the kernel's"
        facts = []
        if known:
            # Its neighbours are counted in the same group.
            facts.append(f"most likely by the kernel: memory ran out while it ran (counted in {self._group})")
        peak = _peak_of_children()
        if peak > self._peak:  # else an earlier child's was higher
            facts.append(f"it took {_gib(peak)} at most")
        if (limit := self._limit()) is not None:
            facts.append(f"the limit of {self._group} is {_gib(limit)}")
        facts.append(f"on {os.uname().nodename}")
        return f"; {', '.join(facts)}. What decides how much it takes: {knobs}"

    def _counted(self) -> int | None:
        """Kills so far in the control group, None where nobody counts."""
        if self._group is None:
            return None
        for name in ("memory.events", "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)$", _read(self._group / name), re.MULTILINE)
            if found:
                return int(found[1])
        return None

    def _limit(self) -> int | None:
        """Of the group, or of the nearest one around it."""
        group = self._group
        while group is not None and len(group.parts) > 1:
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _read(group / name).strip()
                if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a huge number for none
                    return int(text)
            group = group.parent
        return None


def _control_group(root: Path) -> Path | None:
    """The folder of this process's control group for memory."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        if controllers in ("", "memory"):
            # Inside a container the path may be the host's, and the folder the container's own root.
            for group in (base / path.lstrip("/"), base):
                if (group / "memory.events").exists() or (group / "memory.oom_control").exists():
                    return group
    return None


def _peak_of_children() -> int:
    """Bytes: the most that one child took, of those that have been waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
