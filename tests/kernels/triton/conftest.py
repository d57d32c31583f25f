"""Kernels run in Triton's interpreter here unless a GPU is asked for, which must be known before one is imported."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.triton.device import DEVICE, ON_GPU


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    """Where tests and references put what they make."""
    if not ON_GPU:
        yield
        return
    with DEVICE:
        yield


@pytest.fixture(autouse=True)
def float8_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs round: Triton 3.9's interpreter cuts off."""
    if ON_GPU:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.float8e4nv:
            return torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(values, source, target, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", converted)
