"""Linear layers, several stored projections of one input fused into one product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor, nn

from batchinfer.modelfiles import StoredTensor
from batchinfer.quant import Basis, LinearScheme, LinearShape, Stack
from batchinfer.weights import Part, RowSink


class Linear(nn.Module):
    """y [T, N] = x [T, K] W^T + b, N = sum of parts. x may also be what `normed` or `gated` of the scheme gave.

    parts      output features by part name, in order; {"": n} for a layer of one part
    sensitive  the last parts, by name, that a scheme keeps at a higher precision
    gated      the parts are gate and up, and `gated` is called instead of the layer
    shared     W is another layer's tensor: then nothing of this layer is stored
    place      the stack of which this is one of the layers, and its number there
    name, stored   see `LinearShape`
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        scheme: LinearScheme,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        sensitive: tuple[str, ...] = (),
        gated: bool = False,
        shared: Tensor | None = None,
        place: tuple[Stack, int] | None = None,
        name: str = "",
        stored: Mapping[str, Mapping[str, StoredTensor]] | None = None,
    ) -> None:
        super().__init__()
        assert list(parts)[len(parts) - len(sensitive) :] == list(sensitive)
        self.in_features, self.out_parts = in_features, dict(parts)
        self.is_shared = shared is not None
        features = sum(parts.values())
        shape = LinearShape(
            in_features=in_features,
            out_features=features,
            num_sensitive=sum(parts[name] for name in sensitive),
            gated=gated,
            parts=tuple(parts.values()),
            name=name,
            stored=stored or {},
        )
        self.weights = scheme.weights(shape, Basis(ops=ops, dtype=dtype, device=device), shared)
        self._place = place
        if place is not None:
            stack, index = place
            self.weights = stack.hold(index, self.weights)
        self._register()
        self.bias = _parameter(torch.empty(features, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Any, residual: Tensor | None = None) -> Tensor:
        """y, or residual + y, for which residual [T, N] may be overwritten."""
        return self.weights.linear(x, self.bias, residual)

    def gated(self, x: Any, feeds: Linear) -> Any:
        """silu(gate) * up, for the layer that takes it."""
        return self.weights.gated(x, self.bias, feeds.weights)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Any:
        """RMS norm of x [T, K], for this layer."""
        return self.weights.norm(x, weight, eps)

    def parts(self) -> dict[Part, tuple[int, ...]]:
        shapes: dict[Part, tuple[int, ...]] = {}
        if self.is_shared:
            return shapes
        for name, features in self.out_parts.items():
            shapes |= {(kind, name): shape for kind, shape in self.weights.stored(name, features).items()}
            if self.bias is not None:
                shapes["bias", name] = (features,)
        return shapes

    def target(self, part: Part) -> Tensor | RowSink:
        parameter, name = part
        start = 0
        for other, features in self.out_parts.items():
            if other == name:
                break
            start += features
        stop = start + self.out_parts[name]
        if parameter == "bias":
            assert self.bias is not None
            return self.bias.data[start:stop]
        return self.weights.target(parameter, name, slice(start, stop))

    def loaded(self) -> None:
        self.weights.finish()
        if self._place is not None:
            stack, index = self._place
            stack.put(index, self.weights)
        self._register()

    def _register(self) -> None:
        """The scheme's tensors as parameters of this module, by their names there."""
        for name, tensor in self.weights.params.items():
            self.register_parameter(name, _parameter(tensor))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
