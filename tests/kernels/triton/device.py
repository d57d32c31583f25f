"""Where kernels are tested: in Triton's interpreter on the CPU, or, with BATCHINFER_TEST_DEVICE=cuda, on a GPU.

The interpreter multiplies bfloat16 wrongly, and a GPU's shared memory can't hold tiles of float32: products are tested
in dtypes that the device has. What only reads and writes rows is tested in all of them.
"""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE = torch.device(os.environ.get("BATCHINFER_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"
if ON_GPU:
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"

HOST = torch.device("cpu")
# Of products: the type with the most exponents, and both. Of what has no products: all.
WIDE = torch.bfloat16 if ON_GPU else torch.float32
PRODUCTS = (WIDE, torch.float16)
ROWS = (torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else []))


def on_gpu(*cases: Any) -> list[Any]:
    """Cases that the interpreter can't have."""
    return list(cases) if ON_GPU else []


def least_ulps(dtype: torch.dtype) -> float:
    """For `check_close` of a product: two float32 sums in different orders differ by more than a unit by chance."""
    return 2.0 if dtype == torch.float32 else 1.0
