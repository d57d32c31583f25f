"""Kernels run in Triton's interpreter here, which must be known before one of them is imported."""

import os
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def float8_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs round: Triton 3.9's interpreter cuts off."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.float8e4nv:
            return torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(values, source, target, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
