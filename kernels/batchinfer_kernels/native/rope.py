"""`reference.rope` in C: one pass over q and k, in place."""

from __future__ import annotations

from ctypes import c_int, c_long, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels import cpu
from batchinfer_kernels.native import library


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.rope`; overwrites q and k, whose tokens may lie apart (parts of a wider product)."""
    if q.dtype != torch.float32 or not (_heads_are_dense(q) and _heads_are_dense(k)):
        return cpu.rope(q, k, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    _function()(
        q.data_ptr(),
        k.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        *q.shape[:2],
        k.shape[1],
        q.stride(0),
        k.stride(0),
        q.shape[2],
        cos.shape[1],
        torch.get_num_threads(),
    )
    return q, k


def _heads_are_dense(x: Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


@cache
def _function() -> Any:
    function = library.load().batchinfer_rope
    function.argtypes = [c_void_p] * 4 + [c_long] + [c_int] * 2 + [c_long] * 2 + [c_int] * 3
    function.restype = None
    return function
