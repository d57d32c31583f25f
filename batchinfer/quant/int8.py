"""int8 weights and activations of CPUs, made while loading from any stored type; `batchinfer_kernels.int8` has the
numbers. GPUs have another int8: `w8a8`.

Rows are quantized as they are read, so that a layer is never there in full precision. Layers' sensitive features are
fine; where all are, as those of the head, they are kept in bfloat16. Activations between products are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from batchinfer_kernels.int8 import TURNED, Int8Ops, QuantizedRows
from batchinfer_kernels.native.int8 import PackedLayer
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.quant.shape import Basis, LinearShape

if TYPE_CHECKING:
    from batchinfer.quant.scheme import LinearWeights

# Rows of a shared weight that are converted at a time: about as many elements as are read at a time otherwise.
_SHARED_ROWS = 512


class Int8:
    name = "int8"
    stored_types: frozenset[str] = frozenset()

    def weights(self, shape: LinearShape, basis: Basis, shared: Tensor | None = None) -> Int8Weights:
        assert basis.dtype == torch.float32, "of what is between the products; see `arithmetic`"
        return Int8Weights(shape, basis.ops, basis.device, shared)


class Int8Weights:
    """Output features in bytes, then sensitive ones. Products take float32 tensors or QuantizedRows."""

    def __init__(self, shape: LinearShape, ops: Ops, device: torch.device, shared: Tensor | None) -> None:
        self.params: dict[str, Tensor] = {}
        self._shape, self._table, self._ops, self._device, self._shared = shape, ops, ops.int8, device, shared
        self._has_values = shape.num_sensitive < shape.out_features
        self._takes = {
            "values": self._has_values,
            "fine": self._has_values and shape.num_sensitive > 0,
            "plain": not self._has_values,
        }
        self._staged: _Rows | None = None

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (features, self._shape.in_features)}

    def target(self, kind: str, part: str, span: slice) -> _Part:
        if self._staged is None:
            self._staged = _Rows(self._shape, self._ops)
        return _Part(self._staged, span.start)

    def finish(self) -> None:
        rows, self._staged = self._staged, None
        if self._shared is not None:
            rows = _Rows(self._shape, self._ops)
            for start in range(0, self._shape.out_features, _SHARED_ROWS):
                some = self._shared.data[start : start + _SHARED_ROWS]
                rows.put(start, some.to("cpu", torch.float32, copy=self._has_values))  # put may overwrite those
        assert rows is not None
        kept = (rows.values, rows.scales, rows.plain, rows.fine)
        values, scales, plain, fine = (None if x is None else x.to(self._device) for x in kept)
        if self._shape.gated:
            assert values is not None and scales is not None and fine is None
            gate_values, up_values = values.chunk(2)
            gate_scales, up_scales = scales.chunk(2)
            self.params = self._ops.pack_gated(gate_values, gate_scales, up_values, up_scales)
        else:
            self.params = self._ops.pack(values, scales, plain, fine)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:
        return self._ops.rms_norm(x, weight, eps, **self._takes)

    def linear(self, x: Tensor | QuantizedRows, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._ops.linear(self._rows(x), self.params, bias, residual)

    def logits(self, x: Tensor | QuantizedRows) -> Tensor:
        return self.linear(x, None, None).float()

    def gated(self, x: Tensor | QuantizedRows, bias: Tensor | None, feeds: LinearWeights) -> QuantizedRows:
        return self._ops.gated(self._rows(x), self.params, bias)

    def activated(self, gate_up: Tensor) -> QuantizedRows:
        return self._rows(self._table.silu_and_mul(gate_up))

    def argmax(self, x: Tensor | QuantizedRows) -> tuple[Tensor, Tensor]:
        return self._ops.argmax(self._rows(x), self.params)

    def in_c(self) -> PackedLayer | None:
        return self.params if isinstance(self.params, PackedLayer) else None

    def _rows(self, x: Tensor | QuantizedRows) -> QuantizedRows:
        return self._ops.quantize(x, **self._takes) if isinstance(x, Tensor) else x


class _Rows:
    """A layer's rows as they come, quantized: values int8 [N, Kp], scales float32 [N] and, of the last features, fine
    int8 [Nf, Kp]; or plain bfloat16 [N, K]."""

    def __init__(self, shape: LinearShape, ops: Int8Ops) -> None:
        self._ops = ops
        self.values: Tensor | None = None
        self.scales: Tensor | None = None
        self.fine: Tensor | None = None
        self.plain: Tensor | None = None
        self._fine_from = shape.out_features - shape.num_sensitive
        if not self._fine_from:
            self.plain = torch.empty(shape.out_features, shape.in_features, dtype=torch.bfloat16)
            return
        padded = -(-shape.in_features // TURNED) * TURNED
        self.values = torch.empty(shape.out_features, padded, dtype=torch.int8)
        self.scales = torch.empty(shape.out_features)
        if shape.num_sensitive:
            self.fine = torch.empty(shape.num_sensitive, padded, dtype=torch.int8)

    def put(self, start: int, rows: Tensor) -> None:
        """Rows float32 [n, K] of the weight from `start` on; they may be overwritten."""
        if self.plain is not None:
            self.plain[start : start + len(rows)] = rows
            return
        assert self.values is not None and self.scales is not None
        split = max(0, min(len(rows), self._fine_from - start))
        for some, first in ((rows[:split], start), (rows[split:], start + split)):
            if not len(some):
                continue
            span, fine = slice(first, first + len(some)), None
            if first >= self._fine_from:
                assert self.fine is not None
                fine = self.fine[first - self._fine_from :][: len(some)]
            self._ops.quantize_weight(some, self.values[span], self.scales[span], fine)


class _Part:
    """Rows of a layer that are stored as one tensor: a `weights.RowSink`."""

    def __init__(self, rows: _Rows, start: int) -> None:
        self._rows, self._start = rows, start

    def put(self, start: int, rows: Tensor) -> None:
        self._rows.put(self._start + start, rows)
