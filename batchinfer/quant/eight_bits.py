"""Weights and activations of 8 bits as GPUs multiply them: what `w8a8` (int8) and `fp8` share.

Weights are made while loading, from any stored type, with one scale for each output feature (the head stays plain), or
are read as they are stored. Activations are quantized by token as they come, by the norm or gated activation before a
product where there is one; between products they are of the model's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from batchinfer_kernels import fp8
from batchinfer_kernels.activation_formats import FORMATS, quantize
from batchinfer_kernels.formats import EightBitLinear, FormatOps, Fp8Linear
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.errors import ConfigError, ModelError
from batchinfer.modelfiles.stored_quantization import WEIGHTS, StoredQuantization
from batchinfer.quant.packed import Apart, Dequantized, PackedWeights
from batchinfer.quant.shape import Basis, LinearShape
from batchinfer.quant.unquantized import Unquantized
from batchinfer.weights import RowSink

if TYPE_CHECKING:
    from batchinfer.quant.scheme import LinearWeights

_SCALES = ("weight_scale", "weight_scale_inv")


class EightBits(ABC):
    """A scheme. `form`: of weights, a name in `activation_formats`."""

    name: str
    form: str

    def __init__(self, stored: StoredQuantization | None) -> None:
        self._stored = stored
        self.stored_types: frozenset[str] = frozenset() if stored is None else frozenset({WEIGHTS[self.name][1]})

    @abstractmethod
    def product(self, formats: FormatOps) -> EightBitLinear | Fp8Linear: ...

    @abstractmethod
    def takes(self, formats: FormatOps, *, blocks: bool) -> str | None:
        """The format of activations, None where they are not quantized."""

    def weights(self, shape: LinearShape, basis: Basis, shared: Tensor | None = None) -> LinearWeights:
        quantized = [shape.num_sensitive < shape.out_features]
        if self._stored is not None:
            quantized = [self._stored.quantizes(kinds) for kinds in shape.stored.values()]
        if shared is not None or not any(quantized):
            return Unquantized().weights(shape, basis, shared)
        blocks = self._stored is not None and self._stored.blocks
        if not all(quantized) or (self._stored is not None and self._stored.splits(shape.parts)):
            return Apart(basis.ops, shape, partial(self.weights, basis=basis))
        ops, dtype, device = basis.ops, basis.dtype, basis.device
        filling: AsStored | ByRow
        if self._stored is not None:
            filling = AsStored(shape, self.form, dtype, device, blocks=blocks)
            if ops.formats is None:
                return Dequantized(ops, filling)
        elif ops.formats is None:
            raise ConfigError(f"model.quantization {self.name}: {ops.backend} kernels have no such products")
        else:
            filling = ByRow(shape, self.form, device)
        takes = self.takes(ops.formats, blocks=blocks)
        return EightBitWeights(ops, ops.formats, filling, self.product(ops.formats), takes, dtype)


@dataclass(frozen=True, slots=True)
class Codes:
    """Activations as a layer takes them: `activation_formats`."""

    values: Tensor
    scales: Tensor


class EightBitWeights(PackedWeights):
    """weight int8 or e4m3 [N, K] with float32 scales; products take tensors or `Codes`."""

    def __init__(
        self,
        ops: Ops,
        formats: FormatOps,
        filling: AsStored | ByRow,
        product: EightBitLinear | Fp8Linear,
        takes: str | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(ops, filling)
        self._formats, self._filling = formats, filling
        self._product: Any = product  # takes no scales only where activations are not quantized
        self._takes, self.dtype = takes, dtype

    def finish(self) -> None:
        values, scales = self._filling.quantized()
        self.params = {"weight": values, "scales": scales}

    def move(self, params: dict[str, Tensor]) -> None:
        """To tensors of the same values."""
        self.params = params

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Any:
        if self._takes is None:
            return super().norm(x, weight, eps)
        return Codes(*self._formats.rms_norm(x, weight, eps, self._takes))

    def codes(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """x [T, K], or `Codes` of it, as products take it: with its scales, None where it is not quantized."""
        if self._takes is None:
            return x, None
        codes = x if isinstance(x, Codes) else Codes(*self._formats.quantize(x, self._takes))
        return codes.values, codes.scales

    def linear(self, x: Any, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        values, scales = self.codes(x)
        weight, its_scales = self.params["weight"], self.params["scales"]
        y: Tensor = self._product(values, scales, weight, its_scales, bias, residual, dtype=self.dtype)
        return y

    def activated(self, gate_up: Tensor) -> Any:
        if self._takes is None:
            return super().activated(gate_up)
        return Codes(*self._formats.silu_and_mul(gate_up, self._takes))


class ByRow:
    """Rows of any stored type, quantized as they are read: a layer is never there in full precision."""

    def __init__(self, shape: LinearShape, form: str, device: torch.device) -> None:
        self._shape, self._form, self._device = shape, form, device
        self._kept: tuple[Tensor, Tensor] | None = None

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (features, self._shape.in_features)}

    def target(self, kind: str, part: str, span: slice) -> RowSink:
        if self._kept is None:
            self._kept = _empty(self._shape, self._form, self._device)
        values, scales = self._kept
        return _Part(values[span], scales[span], self._form)

    def quantized(self) -> tuple[Tensor, Tensor]:
        kept, self._kept = self._kept, None
        assert kept is not None
        return kept


class AsStored:
    """Codes as a checkpoint has them, with its scales: one for each part, each output feature, or BLOCK x BLOCK
    weights, of which no block has weights of two parts."""

    def __init__(
        self, shape: LinearShape, form: str, dtype: torch.dtype, device: torch.device, *, blocks: bool
    ) -> None:
        self._shape, self._form, self._dtype, self._device, self._blocks = shape, form, dtype, device, blocks
        self._values: Tensor | None = None
        self._scales: dict[int, tuple[Tensor, int]] = {}  # by first output feature; and the number of those

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        kinds, depth = self._shape.stored[part], self._shape.in_features
        name = next((name for name in _SCALES if name in kinds), _SCALES[0])
        shape: tuple[int, ...] = (features, 1)
        if self._blocks:
            shape = (-(-features // fp8.BLOCK), -(-depth // fp8.BLOCK))
        elif name in kinds and kinds[name].shape in ((), (1,), (features,)):
            shape = kinds[name].shape
        return {"weight": (features, depth), name: shape}

    def target(self, kind: str, part: str, span: slice) -> Tensor:
        if kind == "weight":
            if self._values is None:
                self._values, _ = _empty(self._shape, self._form, self._device)
            return self._values[span]
        features = span.stop - span.start
        scales = torch.empty(self.stored(part, features)[kind] or (1,))
        self._scales[span.start] = (scales, features)
        return scales

    def quantized(self) -> tuple[Tensor, Tensor]:
        values, parts = self._values, [self._scales.pop(start) for start in sorted(self._scales)]
        self._values = None
        assert values is not None
        if self._form == "fp8":
            try:
                fp8.check_weight(values)
            except ValueError as error:
                raise ModelError(f"{self._shape.name}: {error}") from error
        scales = [part if self._blocks else part.flatten().expand(features) for part, features in parts]
        return values, torch.cat(scales).to(self._device)

    def dequantized(self) -> Tensor:
        return fp8.dequantize(*self.quantized()).to(self._dtype)


class _Part:
    """Rows of a layer that are stored as one tensor: a `weights.RowSink`."""

    def __init__(self, values: Tensor, scales: Tensor, form: str) -> None:
        self._values, self._scales, self._form = values, scales, form

    def put(self, start: int, rows: Tensor) -> None:
        span = slice(start, start + len(rows))
        self._values[span], self._scales[span] = quantize(rows.to(self._values.device), self._form)


def _empty(shape: LinearShape, form: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for codes [N, K] and scales [N]."""
    values = torch.empty(shape.out_features, shape.in_features, dtype=FORMATS[form].dtype, device=device)
    return values, torch.empty(shape.out_features, device=device)
