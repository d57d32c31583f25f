"""Machines with NVIDIA GPUs, as far as they are told by nvidia-smi: a script of that name on the PATH."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from batchinfer_kernels.gpus import Installed

UUIDS = ("GPU-aaaa1111-0000-0000-0000-000000000000", "GPU-aaaa2222-0000-0000-0000-000000000000")
H200S = tuple(Installed(uuid=uuid, name="NVIDIA H200", capability=90) for uuid in UUIDS)


def nvidia_smi(folder: Path, lines: Sequence[str], *, listed: str = "", code: int = 0) -> Path:
    """Makes `folder`/nvidia-smi, which answers a query with these lines, and -L with `listed`."""
    folder.mkdir(exist_ok=True)
    (folder / "query.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "list.txt").write_text(listed)
    script = folder / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -L ]; then cat "{folder}/list.txt"; else cat "{folder}/query.txt"; fi\nexit {code}\n'
    )
    script.chmod(0o755)
    return script


def machine_of(folder: Path, gpus: Sequence[Installed], **variables: str) -> dict[str, str]:
    """The environment of processes on a machine with these GPUs, and no others."""
    lines = [f"{gpu.uuid}, {gpu.name}, {gpu.capability // 10}.{gpu.capability % 10}, [N/A]" for gpu in gpus]
    nvidia_smi(folder, lines or ["No devices were found"], code=0 if gpus else 6)
    there = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return there | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
