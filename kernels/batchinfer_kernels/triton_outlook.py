"""Whether this process can use the Triton kernels, told without torch and without importing triton."""

from __future__ import annotations

import importlib.util
import os

NOT_INSTALLED = "the package triton is not installed (pip install triton)"
NO_GPU = (
    "its kernels are for NVIDIA GPUs (device cuda); on a CPU only Triton's interpreter runs them, for tests and very "
    "slowly, where TRITON_INTERPRET=1 is set before Python starts"
)


def obstacle(*, on_cpu: bool) -> str | None:
    """What keeps kernels from running on that kind of device, None where nothing is known to."""
    if importlib.util.find_spec("triton") is None:
        return NOT_INSTALLED
    if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        return NO_GPU
    return None
