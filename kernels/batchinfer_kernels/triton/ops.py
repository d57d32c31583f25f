"""The kernel table of NVIDIA GPUs, for weights in the activations' own type.

Nothing here waits for the GPU. Sums have one order for any number of rows by the kernels' construction: `probe` has
nothing to find out. Norms of heads and rotation are done by attention, as it stores keys (`kv_store`).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from batchinfer_kernels import reference
from batchinfer_kernels.int8 import ReferenceInt8
from batchinfer_kernels.probe import STRICT
from batchinfer_kernels.table import Ops
from batchinfer_kernels.triton import lm_head
from batchinfer_kernels.triton.activations import activation
from batchinfer_kernels.triton.linear import linear
from batchinfer_kernels.triton.norms import rms_norm


def make_ops(*, deterministic: bool) -> Ops:
    """`deterministic`: see `linear`. What `turns` leaves to attention, and int8 weights, are plain torch."""
    return Ops(
        backend="triton",
        row_rule=STRICT,
        linear=partial(linear, deterministic=deterministic),
        logits=lm_head.logits,
        linear_argmax=lm_head.argmax,
        embedding=reference.embedding,
        rms_norm=rms_norm,
        rope=reference.rope,
        silu_and_mul=_silu_and_mul,
        kv_write=reference.kv_write,
        int8=ReferenceInt8(STRICT),
        decoder=None,
        turns=True,
    )


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    return activation(gate_up, "silu")
