"""The table of operations: their names and signatures, and the choice of an implementation.

Resolved once when a model is built (`resolve`), never per call. What each operation computes is said, with shapes,
in `reference`; how products are made independent of the batch in `probe`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from batchinfer_kernels import reference
from batchinfer_kernels.probe import RowRule

BACKENDS = ("auto", "reference", "cpu")


class Linear(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of each operation. `backend` is its name in reports."""

    backend: str
    linear: Linear
    embedding: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


def resolve(backend: str = "auto", device: str | torch.device = "cpu", *, rows: RowRule | None = None) -> Ops:
    """The table for a backend on a device. `rows` says how products keep independent of their number of rows.

    "auto" is the fastest backend that the device has. Raises ValueError for a backend that does not exist.
    """
    kind = torch.device(device).type
    if backend == "auto":
        backend = "reference"
    if backend == "reference":
        return Ops(
            backend="reference",
            linear=partial(reference.linear),
            embedding=reference.embedding,
            rms_norm=reference.rms_norm,
            add_rms_norm=reference.add_rms_norm,
            rope=reference.rope,
            silu_and_mul=reference.silu_and_mul,
            kv_write=reference.kv_write,
        )
    raise ValueError(f"kernel backend {backend!r} does not exist on {kind}; there are {', '.join(BACKENDS)}")
