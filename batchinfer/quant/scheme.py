"""What a quantization scheme is, and the one of a name.

To add a scheme: a file beside this one, an entry in `resolve_scheme` and in `arithmetic`; its detection from
`quantization_config` is in `modelfiles.stored_quantization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from batchinfer_kernels.native.int8 import PackedLayer
from torch import Tensor

from batchinfer.errors import ConfigError, ModelError
from batchinfer.modelfiles.stored_quantization import stored_quantization
from batchinfer.quant.fp8 import Fp8
from batchinfer.quant.int8 import Int8
from batchinfer.quant.shape import Basis, LinearShape
from batchinfer.quant.unquantized import Unquantized
from batchinfer.quant.w4 import W4
from batchinfer.quant.w8a8 import W8A8
from batchinfer.weights import RowSink


class LinearWeights(Protocol):
    """The weights of one linear layer, W [N, K], as a scheme keeps and multiplies them.

    What goes into a product is the scheme's own: a tensor [T, K], or what `norm` and `gated` of the same scheme give.
    `params` are the tensors that are kept; before `finish` they need not be there.
    """

    params: dict[str, Tensor]

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that are stored of a part with so many output features, by their kinds: the last parts
        of their names."""
        ...

    def target(self, kind: str, part: str, span: slice) -> Tensor | RowSink:
        """Where the stored tensor of a kind and part goes, about to be read; `span`: the part's output features."""
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

    def gated(self, x: Any, bias: Tensor | None, feeds: LinearWeights) -> Any:
        """silu(gate) * up for [gate | up] = x W^T + bias, as products of `feeds` take it."""
        ...

    def activated(self, gate_up: Tensor) -> Any:
        """silu(gate) * up of gate_up [T, 2 K] = [gate | up], as this layer's products take it."""
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
    """name          as `arithmetic` has it
    stored_types  types of tensors that are read as they are, beside floating-point ones
    """

    name: str
    stored_types: frozenset[str]

    def weights(self, shape: LinearShape, basis: Basis, shared: Tensor | None = None) -> LinearWeights:
        """One layer's weights, not yet filled. `shared`: W is another layer's tensor [N, K], which is filled before
        `finish` is called; `target` is not called then."""
        ...


def resolve_scheme(quantization: str, config: Mapping[str, Any]) -> LinearScheme:
    """The scheme of a name that `arithmetic` has resolved. Raises ConfigError for another, and ModelError where the
    checkpoint's weights are stored quantized in another way, or in one that can't be read."""
    stored = stored_quantization(config)
    if stored is not None and stored.scheme != quantization:
        raise ModelError(
            f"the checkpoint is quantized ({stored.scheme}, as its quantization_config says); model.quantization "
            f"{quantization} is not supported for it: leave that out"
        )
    if quantization == "none":
        return Unquantized()
    if quantization == "int8":
        return Int8()
    if quantization == "w8a8":
        return W8A8(stored)
    if quantization == "fp8":
        return Fp8(stored)
    if stored is not None:
        return W4(stored)
    raise ConfigError(f"there is no quantization {quantization!r} for weights, only none, int8, w8a8 and fp8")
