"""How close is close enough: within twice the reference's own error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AsType = Callable[[Tensor], Tensor]


def check_close(found: Tensor, compute: Callable[[AsType], Tensor], *, ulps: float = 1.0) -> None:
    """`compute` is the reference of operands that went through what it is given: once as they are, once in float64.

    Both errors are the largest, against the float64 result rounded to nothing; the reference's counts as at least
    `ulps` units in the last place of the largest value, since it may be exact by luck.
    """
    exact = compute(lambda x: x.double() if x.is_floating_point() else x).double()
    ours = compute(lambda x: x).double()
    assert found.shape == exact.shape and found.isfinite().all()
    if not found.numel():
        return
    least = ulps * torch.finfo(found.dtype).eps * exact.abs().max()
    allowed = 2 * torch.maximum((ours - exact).abs().max(), least)
    worst = (found.double() - exact).abs().max()
    assert worst <= allowed, f"off by {worst:.3g}, and the reference by {(ours - exact).abs().max():.3g}"
