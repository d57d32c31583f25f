"""What is known of a kernel before it runs: the ways in which it is compiled, for machines without a GPU to check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchinfer_kernels.tuning import CAPABILITIES, Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way in which a kernel is compiled.

    name          of the kernel and what is special, as "rms_norm" or "linear.bias"
    kernel        the `triton.jit` function
    signature     by argument: "*bf16", "i32", "fp32", ...; arguments that are constants are left out
    constants     by argument: constants that the configuration does not have
    configs       by compute capability: block sizes and so on, num_warps, num_stages
    unaligned     arguments that are no multiples of 16 (addresses, strides); the others are compiled as such
    is_default    part of every run of the checks; the rest is checked when all are asked for
    is_product    a product, which must use the instructions for those, on sm_90 those of warpgroups
    has_few_rows  a product of too few rows for the instructions of warpgroups
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    configs: Mapping[int, Config]
    unaligned: frozenset[str] = frozenset()
    is_default: bool = True
    is_product: bool = False
    has_few_rows: bool = False

    def __post_init__(self) -> None:
        assert set(self.configs) <= set(CAPABILITIES)

    def in_float16(self) -> Variant | None:
        """The same of models in float16, no default one; None where nothing is in bfloat16."""
        if "*bf16" not in self.signature.values():
            return None
        signature = {name: "*fp16" if kind == "*bf16" else kind for name, kind in self.signature.items()}
        return replace(self, name=f"{self.name}.fp16", signature=signature, is_default=False)
