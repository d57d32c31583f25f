"""What is here to be checked: the GPU, its driver, the packages."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from batchinfer.testing.gpu.timing import synchronize

PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "numpy", "jinja2", "pytest", "transformers")


def no_gpu() -> str | None:
    """Why there is nothing to check here; None where there is a GPU."""
    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} sees no NVIDIA GPU here, so nothing was checked"


def answers(device: torch.device) -> bool:
    """Whether this process can still use it: not after an illegal access, whatever is run then."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def facts(device: torch.device) -> dict[str, Any]:
    """What this is."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(), "packages": versions}
    if device.type != "cuda":
        return found | {"device": "CPU, in Triton's interpreter"}
    at = torch.cuda.get_device_properties(device)
    return found | {
        "device": at.name,
        "capability": f"sm_{at.major}{at.minor}",
        "memory_gib": round(at.total_memory / 2**30, 1),
        "multiprocessors": at.multi_processor_count,
        "l2_mib": round(at.L2_cache_size / 2**20),
        "driver": _driver(),
        "cuda_of_torch": torch.version.cuda,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: nvidia-smi does not run"
