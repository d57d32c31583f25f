"""4-bit weights of GPTQ and AWQ checkpoints, repacked once when they are loaded; `batchinfer_kernels.w4` has the
layout.

Activations keep their type. Layers that are stored plain stay plain.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from batchinfer_kernels import w4
from batchinfer_kernels.formats import FormatOps
from batchinfer_kernels.table import Ops
from batchinfer_kernels.w4 import Packed
from torch import Tensor

from batchinfer.errors import ModelError
from batchinfer.modelfiles.stored_quantization import WEIGHTS, StoredQuantization
from batchinfer.quant.packed import Apart, Dequantized, PackedWeights, side_by_side
from batchinfer.quant.shape import Basis, LinearShape
from batchinfer.quant.unquantized import Unquantized

if TYPE_CHECKING:
    from batchinfer.quant.scheme import LinearWeights

_CODES_IN_WORD = 8


class W4:
    """`name` is gptq or awq."""

    def __init__(self, stored: StoredQuantization) -> None:
        self.name = stored.scheme
        self.stored_types = frozenset({WEIGHTS[stored.scheme][1]})
        self._stored = stored

    def weights(self, shape: LinearShape, basis: Basis, shared: Tensor | None = None) -> LinearWeights:
        quantized = [self._stored.quantizes(kinds) for kinds in shape.stored.values()]
        if shared is not None or not any(quantized):
            return Unquantized().weights(shape, basis, shared)
        if not all(quantized):
            return Apart(basis.ops, shape, partial(self.weights, basis=basis))
        ops, words = basis.ops, _Words(shape, self._stored, basis.dtype, basis.device)
        return Dequantized(ops, words) if ops.formats is None else W4Weights(ops, ops.formats, words)


class W4Weights(PackedWeights):
    """Codes, scales, zero points and the order of inputs as `w4.Packed` has them; products take tensors."""

    def __init__(self, ops: Ops, formats: FormatOps, words: _Words) -> None:
        super().__init__(ops, words)
        self._product, self._words = formats.linear_w4, words
        self._packed: list[Packed] = []

    def finish(self) -> None:
        self._keep(self._words.packed())

    def one(self, name: str) -> Packed:
        """All of it. Raises ModelError, with the layer's name, where parts have other orders of their inputs."""
        if len(self._packed) > 1:
            raise ModelError(f"{name}: gate and up of an expert can't be one product; use engine.kernels cpu")
        return self._packed[0]

    def move(self, packed: Packed) -> None:
        """To tensors of the same values."""
        self._keep([packed])

    def _keep(self, packed: list[Packed]) -> None:
        self._packed, self.params = packed, {}
        for i, part in enumerate(packed):
            kept = {"codes": part.codes, "scales": part.scales, "zeros": part.zeros, "order": part.order}
            at = "" if len(packed) == 1 else f"{i}_"
            self.params |= {at + name: tensor for name, tensor in kept.items() if tensor is not None}

    def linear(self, x: Any, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if len(self._packed) == 1:
            return self._product(x, self._packed[0], bias, residual)
        products = [partial(self._product, x, packed) for packed in self._packed]
        return side_by_side(products, [packed.codes.shape[1] for packed in self._packed], bias, residual)


class _Words:
    """A layer's tensors as they are stored, on the CPU, until all of them are there."""

    def __init__(
        self, shape: LinearShape, stored: StoredQuantization, dtype: torch.dtype, device: torch.device
    ) -> None:
        if shape.in_features % _CODES_IN_WORD:
            raise ModelError(f"{shape.name}: {shape.in_features} inputs in 4 bits, which is no multiple of 8")
        self._shape, self._how, self._dtype, self._device = shape, stored, dtype, device
        self._parts: dict[int, dict[str, Tensor]] = {}  # by their first output feature

    def stored(self, part: str, features: int) -> dict[str, tuple[int, ...]]:
        depth, words = self._shape.in_features, features // _CODES_IN_WORD
        groups = 1 if self._how.group == -1 else -(-depth // self._how.group)
        shapes: dict[str, tuple[int, ...]] = {"qzeros": (groups, words), "scales": (groups, features)}
        if self._how.scheme == "awq":
            return {"qweight": (depth, words), **shapes}
        if self._how.act_order or "g_idx" in self._shape.stored[part]:
            shapes["g_idx"] = (depth,)
        return {"qweight": (depth // _CODES_IN_WORD, features), **shapes}

    def target(self, kind: str, part: str, span: slice) -> Tensor:
        shape = self.stored(part, span.stop - span.start)[kind]
        tensor = torch.empty(shape, dtype=torch.float32 if kind == "scales" else torch.int32)
        self._parts.setdefault(span.start, {})[kind] = tensor
        return tensor

    def packed(self) -> list[Packed]:
        """All parts as one; each by itself where their inputs stand in different orders."""
        stored = [self._parts.pop(start) for start in sorted(self._parts)]
        try:
            parts = [self._pack({kind: tensor.to(self._device) for kind, tensor in part.items()}) for part in stored]
        except ValueError as error:
            raise ModelError(f"{self._shape.name}: {error}") from error
        with contextlib.suppress(ValueError):
            return [w4.concatenate(parts)]
        return parts

    def dequantized(self) -> Tensor:
        return torch.cat([w4.dequantize(packed, self._dtype) for packed in self.packed()])

    def _pack(self, tensors: dict[str, Tensor]) -> Packed:
        how, g_idx = self._how, tensors.get("g_idx")
        words = tensors["qweight"], tensors["qzeros"], tensors["scales"]
        if how.scheme == "awq":
            return w4.from_awq(*words, group=how.group, dtype=self._dtype)
        # What g_idx says counts more than the config; zeros stand there for no order of its own.
        act_order = how.act_order or (g_idx is not None and bool(g_idx.any()))
        return w4.from_gptq(
            *words, g_idx, group=how.group, dtype=self._dtype, act_order=act_order, zero_offset=how.zero_offset
        )
