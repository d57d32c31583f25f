"""What schemes share whose weights are not kept as one tensor of the activations' type: how such weights get from a
checkpoint into a layer, also into a layer of plain ones; layers whose parts can't be one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.quant.products import Products
from batchinfer.quant.shape import LinearShape
from batchinfer.quant.unquantized import PlainWeights
from batchinfer.weights import RowSink

if TYPE_CHECKING:
    from batchinfer.quant.scheme import LinearWeights


class Filling(Protocol):
    """Weights on their way from a checkpoint: as `LinearWeights` have these."""

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]: ...

    def target(self, kind: str, part: str, span: slice) -> Tensor | RowSink: ...


class Stored(Filling, Protocol):
    """Weights that a checkpoint has quantized."""

    def dequantized(self) -> Tensor:
        """W [N, K] of the model's dtype, once, when all of it is there; nothing else is held afterwards."""
        ...


class Dequantized(PlainWeights):
    """Weights that are stored quantized, as plain ones: for kernels that have no products with such."""

    def __init__(self, ops: Ops, filling: Stored) -> None:
        super().__init__(ops, torch.empty(0))
        self.params = {}
        self._filling = filling

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        return self._filling.stored(part, features)

    def target(self, kind: str, part: str, span: slice) -> Any:
        return self._filling.target(kind, part, span)

    def finish(self) -> None:
        self._weight = self._filling.dequantized()
        self.params = {"weight": self._weight}


class PackedWeights(Products):
    """What `LinearWeights` are beside `finish` and `linear`, which are the scheme's."""

    def __init__(self, ops: Ops, filling: Filling) -> None:
        super().__init__(ops)
        self._from = filling

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        return self._from.stored(part, features)

    def target(self, kind: str, part: str, span: slice) -> Tensor | RowSink:
        return self._from.target(kind, part, span)


class Apart(Products):
    """Parts that can't be one product: each has weights of its own, outputs stand side by side."""

    def __init__(self, ops: Ops, shape: LinearShape, make: Callable[[LinearShape], LinearWeights]) -> None:
        super().__init__(ops)
        self._sizes = shape.parts
        self._parts: dict[str, LinearWeights] = {}
        for (part, kinds), features in zip(shape.stored.items(), shape.parts, strict=True):
            alone = replace(shape, out_features=features, parts=(features,), stored={part: kinds}, gated=False)
            self._parts[part] = make(alone)

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        return self._parts[part].stored(part, features)

    def target(self, kind: str, part: str, span: slice) -> Tensor | RowSink:
        return self._parts[part].target(kind, part, slice(0, span.stop - span.start))

    def finish(self) -> None:
        for part, weights in self._parts.items():
            weights.finish()
            self.params |= {f"{part}_{name}": tensor for name, tensor in weights.params.items()}

    def linear(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        products = [partial(part.linear, x) for part in self._parts.values()]
        return side_by_side(products, self._sizes, bias, residual)


def side_by_side(
    products: Sequence[Callable[[Tensor | None, None], Tensor]],
    sizes: Sequence[int],
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """Several products (of their bias, and no residual) with so many output features as one."""
    biases = [None] * len(sizes) if bias is None else bias.split_with_sizes(list(sizes))
    y = torch.cat([product(part, None) for product, part in zip(products, biases, strict=True)], dim=1)
    return y if residual is None else residual.add_(y)
