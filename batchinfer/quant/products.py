"""What follows from a layer's product, where that takes tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from batchinfer_kernels.table import Ops
from torch import Tensor

if TYPE_CHECKING:
    from batchinfer.quant.scheme import LinearWeights


class Products(ABC):
    """What of `LinearWeights` follows from the product, for one that takes tensors."""

    def __init__(self, ops: Ops) -> None:
        self.params: dict[str, Tensor] = {}
        self._ops = ops

    @abstractmethod
    def linear(self, x: Any, bias: Tensor | None, residual: Tensor | None) -> Tensor: ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Any:
        return self._ops.rms_norm(x, weight, eps)

    def gated(self, x: Any, bias: Tensor | None, feeds: LinearWeights) -> Any:
        return feeds.activated(self.linear(x, bias, None))

    def activated(self, gate_up: Tensor) -> Any:
        return self._ops.silu_and_mul(gate_up)

    def logits(self, x: Any) -> Tensor:
        return self.linear(x, None, None).float()

    def argmax(self, x: Any) -> tuple[Tensor, Tensor]:
        y = self.linear(x, None, None)
        return y.argmax(-1), y.isfinite().all(-1)

    def in_c(self) -> None:
        return None
