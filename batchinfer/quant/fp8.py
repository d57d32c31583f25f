"""FP8 (e4m3) weights, made while loading with a scale for each output feature or stored with theirs, and activations:
the format is `batchinfer_kernels.fp8`. Where there are no FP8 products activations keep their type."""

from __future__ import annotations

from batchinfer_kernels.formats import FormatOps, Fp8Linear

from batchinfer.quant.eight_bits import EightBits


class Fp8(EightBits):
    name, form = "fp8", "fp8"

    def product(self, formats: FormatOps) -> Fp8Linear:
        return formats.linear_fp8

    def takes(self, formats: FormatOps, *, blocks: bool) -> str | None:
        if not formats.fp8_activations:
            return None
        return "fp8_groups" if blocks else "fp8"
