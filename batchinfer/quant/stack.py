"""One linear layer of many experts, all of whose weights are multiplied in one launch (`experts.GroupedOps`).

Each expert's layer is made and filled as any other by its scheme. As soon as one is filled its tensors move into those
of all, and become views of them: a layer is there once.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from batchinfer_kernels import w4
from batchinfer_kernels.experts import Aligned, GroupedOps
from batchinfer_kernels.table import Ops
from batchinfer_kernels.w4 import Packed
from torch import Tensor

from batchinfer.errors import ModelError
from batchinfer.quant.eight_bits import EightBitWeights
from batchinfer.quant.scheme import LinearWeights
from batchinfer.quant.unquantized import PlainWeights
from batchinfer.quant.w4 import W4Weights

_MEND = "use engine.kernels cpu, which multiplies them one by one"


class Stack:
    """Weights [E, N, K] of `size` layers. `name`: theirs in the model, for messages."""

    def __init__(self, size: int, ops: Ops, grouped: GroupedOps, *, name: str) -> None:
        self._size, self._ops, self._grouped, self._name = size, ops, grouped, name
        self._lock = threading.Lock()  # layers are filled by several threads
        self._tensors: dict[str, Tensor] = {}
        self._packed: Packed | None = None  # of 4 bits
        self._kind: type[LinearWeights] | None = None  # of all of them
        self._filled: dict[int, LinearWeights] = {}

    def hold(self, index: int, made: LinearWeights) -> LinearWeights:
        """What is filled in the place of `made`, which is not yet: where nothing is repacked, that is in the stack.
        Raises ModelError where layers of their kinds can't be multiplied together."""
        if not isinstance(made, (PlainWeights, EightBitWeights, W4Weights)):
            raise ModelError(f"{self._name}: gate and up of an expert can't be one product; {_MEND}")
        if self._kind is None:
            self._kind = type(made)
        if type(made) is not self._kind:
            raise ModelError(
                f"{self._name}: experts are stored in different ways, and can't be multiplied together; {_MEND}"
            )
        if not isinstance(made, PlainWeights):
            return made
        weight = made.params["weight"]
        if not self._tensors:
            self._tensors["weight"] = weight.new_empty(self._size, *weight.shape)
        return PlainWeights(self._ops, self._tensors["weight"][index])

    def put(self, index: int, filled: LinearWeights) -> None:
        """Layer `index`, which is filled now. Raises ModelError where what was read can't be multiplied together."""
        with self._lock:
            self._filled[index] = filled
            if isinstance(filled, EightBitWeights):
                filled.move(self._moved(index, filled.params))
            if isinstance(filled, W4Weights):
                filled.move(self._moved_packed(index, filled.one(self._name)))

    def _moved(self, index: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        views = {}
        for name, tensor in tensors.items():
            of_all = self._tensors.get(name)
            if of_all is None:
                of_all = self._tensors[name] = tensor.new_empty(self._size, *tensor.shape)
            if of_all.shape[1:] != tensor.shape:
                raise ModelError(f"{self._name}: experts differ in how many scales they have; {_MEND}")
            views[name] = of_all[index].copy_(tensor)
        return views

    def _moved_packed(self, index: int, one: Packed) -> Packed:
        if one.order is not None:
            raise ModelError(f"{self._name}: experts with activation order can't be multiplied together; {_MEND}")
        of_all = self._packed
        if of_all is None:
            codes, scales = (x.new_empty(self._size, *x.shape) for x in (one.codes, one.scales))
            of_all = replace(one, codes=codes, scales=scales, zeros=None)
        if (of_all.group, of_all.codes.shape[1:]) != (one.group, one.codes.shape):
            raise ModelError(f"{self._name}: experts differ in their groups; {_MEND}")
        if one.zeros is not None and of_all.zeros is None:  # those before had none, which stands for this
            zeros = torch.full_like(of_all.scales, w4.MIDDLE, dtype=torch.uint8)
            of_all = replace(of_all, zeros=zeros)
        self._packed = of_all
        its_zeros = None
        if of_all.zeros is not None:
            its_zeros = of_all.zeros[index]
            if one.zeros is None:
                its_zeros.fill_(w4.MIDDLE)
            else:
                its_zeros.copy_(one.zeros)
        codes, scales = of_all.codes[index].copy_(one.codes), of_all.scales[index].copy_(one.scales)
        return replace(one, codes=codes, scales=scales, zeros=its_zeros)

    @property
    def form(self) -> str:
        """The format's name in `GroupedOps.block_size`."""
        one = self._filled[0]
        if isinstance(one, EightBitWeights):
            return "int8" if self._tensors["weight"].dtype == torch.int8 else "fp8"
        return "w4" if isinstance(one, W4Weights) else "plain"

    def linear(self, x: Any, aligned: Aligned) -> Tensor:
        """y [A, N] of each assignment. x [T, K] or [A, K], or what `activated` gave."""
        one = self._filled[0]
        if isinstance(one, EightBitWeights):
            values, scales = one.codes(x)
            product: Any = self._grouped.linear_int8 if self.form == "int8" else self._grouped.linear_fp8
            weight, its_scales = self._tensors["weight"], self._tensors["scales"]
            y: Tensor = product(values, scales, weight, its_scales, aligned, dtype=one.dtype)
            return y
        if isinstance(one, W4Weights):
            assert self._packed is not None
            return self._grouped.linear_w4(x, self._packed, aligned)
        return self._grouped.linear(x, self._tensors["weight"], aligned)

    def activated(self, gate_up: Tensor) -> Any:
        """silu(gate) * up of gate_up [A, 2 K] = [gate | up], as `linear` takes it."""
        return self._filled[0].activated(gate_up)
