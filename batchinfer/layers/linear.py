"""Linear layers, several stored projections of one input fused into one product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor, nn

from batchinfer.quant import LinearScheme
from batchinfer.weights import Part


class Linear(nn.Module):
    """y [T, sum of parts] = x [T, in] W^T + b.

    parts    output features by part name, in order; {"": n} for a layer of one part
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
    ) -> None:
        super().__init__()
        self.in_features, self.out_parts = in_features, dict(parts)
        self.scheme, self.ops = scheme, ops
        self._set(scheme.params(in_features, list(parts.values()), dtype, device))
        self.bias = _parameter(torch.empty(sum(parts.values()), dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.scheme.linear(self.ops, x, self.params, self.bias)

    def parts(self) -> dict[Part, tuple[int, ...]]:
        shapes: dict[Part, tuple[int, ...]] = {}
        for name, features in self.out_parts.items():
            shapes["weight", name] = (features, self.in_features)
            if self.bias is not None:
                shapes["bias", name] = (features,)
        return shapes

    def target(self, part: Part) -> Tensor:
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
        return self.scheme.target(self.params, start, stop)

    def loaded(self) -> None:
        self._set(self.scheme.finish(self.params))

    def _set(self, params: Mapping[str, Tensor]) -> None:
        for name, tensor in params.items():
            setattr(self, name, _parameter(tensor))
        # Kept beside the registered parameters: a plain dict is what the scheme takes, once per call.
        self.params = {name: getattr(self, name).data for name in params}


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
