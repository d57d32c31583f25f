"""The tensor type of a model's dtype; which one it is, is said in `arithmetic`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchinfer import arithmetic

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_CACHE_DTYPES = DTYPES | {"int8": torch.int8}


def resolve_dtype(dtype: str, config: Mapping[str, Any], device: torch.device) -> tuple[torch.dtype, str]:
    """(dtype, where it came from); raises ConfigError where the name is unknown."""
    name, source = arithmetic.resolve_dtype(dtype, config, on_cpu=device.type == "cpu")
    return DTYPES[name], source
