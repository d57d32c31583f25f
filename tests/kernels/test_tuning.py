"""Whose launch configurations a device takes."""

from __future__ import annotations

import pytest
from batchinfer_kernels.tuning import nearest


@pytest.mark.parametrize("capability, takes", [(80, 80), (89, 80), (90, 90), (100, 100), (103, 100), (120, 80)])
def test_nearest(capability: int, takes: int) -> None:
    assert nearest(capability) == takes


def test_too_old() -> None:
    with pytest.raises(ValueError, match="sm_75 is older than sm_80"):
        nearest(75)
