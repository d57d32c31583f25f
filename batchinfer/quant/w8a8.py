"""int8 weights and activations as GPUs multiply them, made while loading or stored so: the format is
`batchinfer_kernels.w8`. The int8 of CPUs (`int8`) is another one."""

from __future__ import annotations

from batchinfer_kernels.formats import EightBitLinear, FormatOps

from batchinfer.quant.eight_bits import EightBits


class W8A8(EightBits):
    name, form = "w8a8", "int8"

    def product(self, formats: FormatOps) -> EightBitLinear:
        return formats.linear_int8

    def takes(self, formats: FormatOps, *, blocks: bool) -> str:
        return "int8"
