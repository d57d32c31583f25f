"""The table of operations: their names and signatures, and the choice of an implementation.

Resolved once when a model is built (`resolve`), never per call. What each operation computes is said, with shapes,
in `reference`, `int8`, `formats` and `experts`; how products are made independent of the batch in `probe`. A new
backend is one module beside `cpu` and one branch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchinfer_kernels import cpu, experts, formats, mla, reference, triton_outlook
from batchinfer_kernels.experts import ExpertOps
from batchinfer_kernels.formats import FormatOps
from batchinfer_kernels.int8 import Int8Ops, ReferenceInt8
from batchinfer_kernels.mla import LatentOps
from batchinfer_kernels.native import library, rope
from batchinfer_kernels.native.decoder import NativeDecoder
from batchinfer_kernels.native.int8 import NativeInt8
from batchinfer_kernels.probe import STRICT, RowRule
from batchinfer_kernels.sampling import SamplingOps

BACKENDS = ("reference", "cpu", "native", "triton")


class Linear(Protocol):
    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor: ...


class KVWrite(Protocol):
    def __call__(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, fresh_blocks: Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of each operation.

    backend   its name in reports
    row_rule  how `linear`, and attention's own products, keep independent of the number of rows
    decoder   all of a model's int8 layers in one call, with the bytes that the operations one by one would give; None
              where there is no such thing
    experts   routers and sums of layers of experts
    formats   of weights in GPUs' formats; None where there are no products with such
    turns     whether attention of this backend norms heads and rotates them itself, told by a `turning.Turning`
    latent    what stands around latent attention
    sampling  how tokens are chosen where the logits lie; None where the host chooses them
    """

    backend: str
    row_rule: RowRule
    linear: Linear
    logits: Callable[[Tensor, Tensor], Tensor]
    linear_argmax: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    embedding: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    kv_write: KVWrite
    latent: LatentOps
    int8: Int8Ops
    decoder: type[NativeDecoder] | None
    experts: ExpertOps
    formats: FormatOps | None = None
    turns: bool = False
    sampling: SamplingOps | None = None


def resolve(
    backend: str = "auto", device: str | torch.device = "cpu", *, rows: RowRule = STRICT, deterministic: bool = True
) -> Ops:
    """The table for a backend on a device. `rows` says how torch's products keep independent of their number of rows,
    `deterministic` whether Triton's do.

    "auto" is the fastest backend that the device has. Raises ValueError for a backend that does not exist or can't be
    used on the device, and NativeUnavailable for "native" where it can't be used.
    """
    kind = torch.device(device).type
    if backend == "auto":  # "cpu" is plain torch: right on every device
        backend = "cpu"
        if kind == "cpu" and library.available() is None:
            backend = "native"
        elif kind == "cuda" and triton_outlook.obstacle(on_cpu=False) is None:
            backend = "triton"
    if backend not in BACKENDS:
        raise ValueError(f"kernel backend {backend!r} does not exist for {kind}; there are: {', '.join(BACKENDS)}")
    if backend == "reference":
        return Ops(
            backend=backend,
            row_rule=rows,
            linear=reference.linear,
            logits=reference.logits,
            linear_argmax=reference.linear_argmax,
            embedding=reference.embedding,
            rms_norm=reference.rms_norm,
            rope=reference.rope,
            silu_and_mul=reference.silu_and_mul,
            kv_write=reference.kv_write,
            latent=mla.make_latent_ops(rows),
            int8=ReferenceInt8(rows),
            decoder=None,
            experts=experts.REFERENCE,
            formats=formats.REFERENCE,
        )
    if backend == "triton":
        if (obstacle := triton_outlook.obstacle(on_cpu=kind == "cpu")) is not None:
            raise ValueError(f"kernel backend 'triton' can't be used on {kind}: {obstacle}")
        from batchinfer_kernels.triton.ops import make_ops  # imports triton, which need not be there

        return make_ops(torch.device(device), deterministic=deterministic)
    if backend == "native":
        library.load()
    return Ops(
        backend=backend,
        row_rule=rows,
        linear=cpu.make_linear(rows),
        logits=cpu.make_logits(rows),
        linear_argmax=cpu.make_linear_argmax(rows),
        embedding=reference.embedding,
        rms_norm=reference.rms_norm,
        rope=rope.rope if backend == "native" else cpu.rope,
        silu_and_mul=cpu.silu_and_mul,
        kv_write=cpu.kv_write,
        latent=mla.make_latent_ops(rows),
        int8=NativeInt8() if backend == "native" else ReferenceInt8(rows),
        decoder=NativeDecoder if backend == "native" else None,
        experts=cpu.make_expert_ops(rows),
    )
