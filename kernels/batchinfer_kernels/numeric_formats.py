"""The numeric formats that models compute in, and a number for each: under equal ones two versions give equal bytes.

Jobs freeze the numbers of the formats that they use, but for FIRST, and go on only under the same ones. So raise a
format's number by one in the change that lets it give other bytes for the same input on the same machine: other groups,
scales, rounding, polynomials or orders of sums. What gives the same bytes in less time leaves it as it is. Where only
one backend's bytes change, raise it all the same, or name what is the backend's own, as `int8_attention` is.

A new format begins with FIRST. Never lower a number, nor use one again. No torch: planning a job asks as well.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST = 1  # also of jobs that were begun before there were numbers
_PLAIN = ("float32", "bfloat16", "float16")

NUMBERS: Mapping[str, int] = {
    # What is not quantized, in products and KV caches.
    "float32": 1,
    "bfloat16": 1,
    "float16": 1,
    # Weights, with their activations.
    "int8": 2,  # of `int8`; 2: groups of up to 320 inputs instead of 128, v in fine bytes, silu from a table
    "w8a8": 1,
    "fp8": 1,
    "gptq": 1,
    "awq": 1,
    # KV caches.
    "int8_kv_cache": 1,  # how keys and values are rounded (`kv8`)
    "int8_attention": 2,  # to such caches with native kernels; 2: values' scales in exponents
}


def used(*, dtype: str, quantization: str, kv_cache_dtype: str, kernels: str) -> frozenset[str]:
    """Names of the formats of what `batchinfer.arithmetic` has resolved; none where nothing is computed."""
    if kernels == "fake":
        return frozenset()
    names = {dtype}
    if quantization != "none":
        names.add(quantization)
    names.add(kv_cache_dtype if kv_cache_dtype in _PLAIN else f"{kv_cache_dtype}_kv_cache")
    if kv_cache_dtype == "int8" and kernels == "native":  # or in torch, where heads do not fit: then it says too much
        names.add("int8_attention")
    return frozenset(names)
