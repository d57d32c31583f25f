"""The kernel table of NVIDIA GPUs.

Nothing here waits for the GPU. Sums have one order for any number of rows by the kernels' construction: `probe` has
nothing to find out. Norms of heads and rotation are done by attention, as it stores keys (`kv_store`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from batchinfer_kernels import reference
from batchinfer_kernels.experts import ExpertOps, GroupedOps
from batchinfer_kernels.formats import FormatOps, Quantized
from batchinfer_kernels.int8 import ReferenceInt8
from batchinfer_kernels.mla import LatentOps
from batchinfer_kernels.probe import STRICT
from batchinfer_kernels.sampling import SamplingOps
from batchinfer_kernels.table import Ops
from batchinfer_kernels.triton import experts, lm_head, mla_heads, routing, sampling
from batchinfer_kernels.triton.activations import activation, activation_quantized
from batchinfer_kernels.triton.linear import linear
from batchinfer_kernels.triton.linear_fp8 import linear_fp8
from batchinfer_kernels.triton.linear_int8 import linear_int8
from batchinfer_kernels.triton.linear_w4 import linear_w4
from batchinfer_kernels.triton.norms import rms_norm, rms_norm_quantized
from batchinfer_kernels.triton.quantize import quantize
from batchinfer_kernels.tuning import device_capability

_FP8_CAPABILITY = 89  # from there on GPUs multiply e4m3, and Triton has the type


def make_ops(device: torch.device, *, deterministic: bool) -> Ops:
    """`deterministic`: see `linear`; products in other formats have one order anyway. What `turns` leaves to attention,
    and the int8 of CPUs, are plain torch."""
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
        latent=LatentOps(absorb=mla_heads.absorb, expand=mla_heads.expand),
        int8=ReferenceInt8(STRICT),
        decoder=None,
        experts=ExpertOps(
            logits=lm_head.logits,
            wide_weights=False,
            softmax_top_k=routing.softmax_top_k,
            sigmoid_top_k=routing.sigmoid_top_k,
            grouped=GroupedOps(
                block_size=partial(experts.block_size, device=device),
                align=routing.align,
                combine=experts.combine,
                linear=experts.experts_linear,
                linear_int8=experts.experts_linear_int8,
                linear_fp8=experts.experts_linear_fp8,
                linear_w4=experts.experts_linear_w4,
            ),
        ),
        formats=FormatOps(
            quantize=quantize,
            rms_norm=rms_norm_quantized,
            silu_and_mul=_silu_and_mul_quantized,
            linear_int8=linear_int8,
            linear_fp8=linear_fp8,
            linear_w4=linear_w4,
            fp8_activations=device.type != "cuda" or device_capability(device) >= _FP8_CAPABILITY,
        ),
        turns=True,
        sampling=SamplingOps(greedy=sampling.greedy, sample=sampling.sample),
    )


def _silu_and_mul(gate_up: Tensor) -> Tensor:
    return activation(gate_up, "silu")


def _silu_and_mul_quantized(gate_up: Tensor, name: str) -> Quantized:
    return activation_quantized(gate_up, "silu", name)
