"""Kernels with faults, for the compile check to find; prints what it says, as JSON by kernel. Run in a process of its
own, without the interpreter."""

from __future__ import annotations

import json
from typing import Any

import triton
import triton.language as tl
from batchinfer_kernels.triton.compile_check import check
from batchinfer_kernels.triton.variants import Variant


@triton.jit
def _sound(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1.0)


@triton.jit
def _emptied(x_ptr, BLOCK: tl.constexpr):
    tl.load(x_ptr + tl.arange(0, BLOCK))


@triton.jit
def _recompiled(x_ptr, num_rows, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1.0, mask=at < num_rows)


def faults(name: str, kernel: Any, **more: Any) -> list[str]:
    variant = Variant(
        name=name,
        kernel=kernel,
        signature={"x_ptr": "*fp32", **({"num_rows": "i32"} if kernel is _recompiled else {})},
        constants={"BLOCK": 128},
        configs={80: {"num_warps": 4, "num_stages": 1}},
        **more,
    )
    return list(check(variant, 80).faults)


if __name__ == "__main__":
    found = {
        "sound": faults("sound", _sound),
        "emptied": faults("emptied", _emptied),
        "no product": faults("no product", _sound, is_product=True),
        "recompiled": faults("recompiled", _recompiled),
    }
    print(json.dumps(found))
