"""All int8 decoder layers of a llama in one call of C: the same operations, and bytes, as `NativeInt8`, `rope` and
`attention` part by part, without what each of those calls costs.

A layer is x += o(attention(rope(qkv(norm(x))))), then x += down(silu(gate(norm(x))) * up(norm(x))).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.native import library
from batchinfer_kernels.native.attention import TileLayer, TileStep
from batchinfer_kernels.native.int8 import PackedStruct, address, gated_bias, packed_struct

_ALIGNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """One layer: norms float32 [H]; products as `NativeInt8.pack` and, for gate and up, `pack_gated` made them; biases
    float32, or None."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Mapping[str, Tensor]
    o: Mapping[str, Tensor]
    gate_up: Mapping[str, Tensor]
    down: Mapping[str, Tensor]
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class _Layer(ctypes.Structure):
    """`struct decoder_layer`."""

    _fields_ = [
        *((name, PackedStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "o_bias", "gate_up_bias", "down_bias")),
    ]


class _Decoder(ctypes.Structure):
    """`struct decoder`."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_long) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    """`struct decoder_step`."""

    _fields_ = [
        ("num_tokens", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("hidden", "cos", "sin")),
        ("half", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("plans", "caches", "part", "part_top_sum", "wanted")),
        ("num_wanted", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("out", "scratch")),
    ]


class NativeDecoder:
    """The layers of one model. Not thread-safe."""

    def __init__(
        self, layers: Sequence[DecoderWeights], *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float
    ) -> None:
        self._kept: list[Any] = [layers]  # what the C code has addresses of
        self._hidden_size = layers[0].input_norm.numel()
        self._layers = (_Layer * len(layers))(*map(self._describe, layers))
        self._decoder = _Decoder(self._layers, len(layers), self._hidden_size, num_heads, num_kv_heads, head_dim, eps)
        # Kept between steps: fresh memory would be paged in by the kernel in every step.
        self._scratch, self._partial = torch.empty(0, dtype=torch.uint8), torch.empty(0)

    def _describe(self, layer: DecoderWeights) -> _Layer:
        gate_up_bias = None if layer.gate_up_bias is None else gated_bias(layer.gate_up_bias)
        self._kept.append(gate_up_bias)
        vectors = (layer.input_norm, layer.post_norm, layer.qkv_bias, layer.o_bias, gate_up_bias, layer.down_bias)
        assert all(x is None or (x.dtype == torch.float32 and x.is_contiguous()) for x in vectors)
        products = (layer.qkv, layer.o, layer.gate_up, layer.down)
        assert not any("plain" in product for product in products)
        return _Layer(*map(packed_struct, products), *map(address, vectors))

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: Sequence[tuple[TileLayer, TileStep]],
        wanted: Tensor | None,
    ) -> Tensor:
        """The layers' result for float32 hidden [T, H], which is overwritten: rows `wanted` of it, int64 [W], or all.

        cos, sin   float32 [T, R / 2], of the tokens' positions
        attention  by layer; all plans are of these T tokens
        """
        num_tokens = hidden.shape[0]
        cos, sin = cos.contiguous(), sin.contiguous()
        assert hidden.dtype == cos.dtype == sin.dtype == torch.float32 and hidden.is_contiguous()
        assert len(attention) == len(self._layers) and all(
            plan.struct.num_tokens == num_tokens for _, plan in attention
        )
        out = hidden
        if wanted is not None:
            assert wanted.dtype == torch.int64 and wanted.is_contiguous()
            out = hidden.new_empty(len(wanted), self._hidden_size)
        functions = _functions()
        size = functions.batchinfer_decoder_scratch_bytes(self._decoder, num_tokens) + _ALIGNED
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size + size // 4, dtype=torch.uint8)
        heads = self._decoder.num_heads
        entries = max(plan.num_entries for _, plan in attention)
        size = entries * heads * (self._decoder.head_dim + 2)
        if self._partial.numel() < size:
            self._partial = torch.empty(size + size // 4)
        plans = (ctypes.c_void_p * len(attention))(*(ctypes.addressof(plan.struct) for _, plan in attention))
        caches = (ctypes.c_void_p * len(attention))(*(ctypes.addressof(layer.struct) for layer, _ in attention))
        step = _Step(
            num_tokens=num_tokens,
            hidden=hidden.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            half=cos.shape[1],
            plans=ctypes.addressof(plans),
            caches=ctypes.addressof(caches),
            part=self._partial.data_ptr(),
            part_top_sum=self._partial[entries * heads * self._decoder.head_dim :].data_ptr(),
            wanted=address(wanted),
            num_wanted=-1 if wanted is None else len(wanted),  # no row wanted has no address either
            out=out.data_ptr(),
            scratch=-(-self._scratch.data_ptr() // _ALIGNED) * _ALIGNED,
        )
        functions.batchinfer_decoder(self._decoder, step, torch.get_num_threads())
        return out


@cache
def _functions() -> Any:
    """The library, its functions' types declared."""
    found = library.load()
    decoder, step = ctypes.POINTER(_Decoder), ctypes.POINTER(_Step)
    found.batchinfer_decoder.argtypes = [decoder, step, ctypes.c_int]
    found.batchinfer_decoder.restype = None
    found.batchinfer_decoder_scratch_bytes.argtypes = [decoder, ctypes.c_long]
    found.batchinfer_decoder_scratch_bytes.restype = ctypes.c_long
    return found
