"""Which floating-point type a model runs in, and who said so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchinfer.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str, config: Mapping[str, Any], device: torch.device) -> tuple[torch.dtype, str]:
    """(dtype, where it came from). "auto" is float32 on the CPU and the checkpoint's own type elsewhere."""
    if dtype in DTYPES:
        return DTYPES[dtype], "model.dtype"
    if dtype != "auto":
        raise ConfigError(f"model.dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    if device.type == "cpu":
        return torch.float32, "auto: float32 on the CPU"
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    if stored in ("float16", "bfloat16"):
        return DTYPES[stored], f"auto: the checkpoint's {stored}"
    # Not float16: a model that was not trained in it may overflow.
    return torch.bfloat16, f"auto: bfloat16 on {device.type}"
