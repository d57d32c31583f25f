"""What a quantization scheme is, and the one of a name.

To add a scheme: a file beside this one, an entry in `resolve_scheme` and in `arithmetic`, its detection from
`quantization_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from batchinfer_kernels.native.int8 import PackedLayer
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.errors import ConfigError
from batchinfer.modelfiles.supported import refuse_stored_quantization
from batchinfer.quant.int8 import Int8
from batchinfer.quant.shape import LinearShape
from batchinfer.quant.unquantized import Unquantized
from batchinfer.weights import RowSink


class LinearWeights(Protocol):
    """The weights of one linear layer, W [N, K], as a scheme keeps and multiplies them.

    What goes into a product is the scheme's own: a tensor [T, K], or what `norm` and `gated` of the same scheme give.
    `params` are the tensors that are kept; before `finish` they need not be there.
    """

    params: dict[str, Tensor]

    def target(self, start: int, stop: int) -> Tensor | RowSink:
        """Where output features start .. stop of the stored weight go, about to be read."""
        ...

    def finish(self) -> None:
        """Called once, when all of W is there: the time to set `params`."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Any:
        """RMS norm of x [T, K], as this layer's products take it."""
        ...

    def linear(self, x: Any, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """y [T, N] = x W^T + bias, or residual + y, for which residual [T, N] may be overwritten."""
        ...

    def gated(self, x: Any, bias: Tensor | None) -> Any:
        """silu(gate) * up for [gate | up] = x W^T + bias, as this scheme's products take it."""
        ...

    def logits(self, x: Any) -> Tensor:
        """x W^T as float32 [T, N]."""
        ...

    def argmax(self, x: Any) -> tuple[Tensor, Tensor]:
        """Of y = logits(x): (int64 [T], the index of each row's largest value, of equal ones the lowest; bool [T],
        whether all of the row are finite). Does not hold [T, N] where it can be avoided."""
        ...

    def in_c(self) -> PackedLayer | None:
        """What C code that runs whole layers takes, after `finish`; None where the weights are not packed for it."""
        ...


class LinearScheme(Protocol):
    name: str

    def weights(
        self,
        shape: LinearShape,
        *,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        shared: Tensor | None = None,
    ) -> LinearWeights:
        """One layer's weights, not yet filled. `shared`: W is another layer's tensor [N, K], which is filled before
        `finish` is called; `target` is not called then."""
        ...


def resolve_scheme(quantization: str, config: Mapping[str, Any]) -> LinearScheme:
    """The scheme of a name that `arithmetic` has resolved. Raises ConfigError for another, and ModelError where the
    checkpoint's weights are stored quantized in a way that can't be read."""
    refuse_stored_quantization(config)
    if quantization == "none":
        return Unquantized()
    if quantization == "int8":
        return Int8()
    raise ConfigError(f"there is no quantization {quantization!r} for weights, only none and int8")
