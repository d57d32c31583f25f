"""Compiles kernels for GPUs that are not there, and says what came of it.

    python -m batchinfer_kernels.triton.compile_check [--capability 90] [--all] [--kernel TEXT]

prints one JSON line for each variant and capability (`Compiled`), and ends with exit code 1 where one has a fault.
Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES

# Shared memory that one block may have, bytes (CUDA C++ Programming Guide, compute capabilities).
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
MODULES = (
    "norms",
    "quantize",
    "activations",
    "lm_head",
    "sampling",
    "linear",
    "linear_int8",
    "linear_w4",
    "linear_fp8",
    "linear_mxfp4",
    "attention",
    "merge",
    "kv_store",
    "mla",
    "routing",
    "experts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """faults: what is wrong with it, in words. stack_bytes: of a thread, which is where registers spill to."""

    name: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    warpgroup: bool
    faults: tuple[str, ...]


def all_variants() -> Iterator[Variant]:
    for name in MODULES:
        yield from importlib.import_module(f"batchinfer_kernels.triton.{name}").variants()


def check(variant: Variant, capability: int) -> Compiled:
    """Compiles one variant. Triton's own exceptions pass."""
    config = dict(variant.configs[capability])
    options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
    constants = {**variant.constants, **config}
    names = variant.kernel.arg_names
    unknown = {*variant.signature, *constants} ^ set(names)
    if unknown:
        raise ValueError(f"{variant.name}: arguments {sorted(unknown)} are missing, or unknown to the kernel")
    source = ASTSource(
        variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in variant.unaligned and variant.signature.get(name, "").startswith(("*", "i"))
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack_bytes = _resources(compiled.asm["cubin"])
    shared_bytes = int(compiled.metadata.shared)
    warpgroup = "wgmma.mma_async" in compiled.asm["ptx"]
    faults = []
    if stack_bytes:
        faults.append(f"{stack_bytes} bytes of a thread's registers are spilled")
    if shared_bytes > SHARED_BYTES[capability]:
        faults.append(f"{shared_bytes} bytes of shared memory, and a block may have {SHARED_BYTES[capability]}")
    if variant.is_product and capability == 90 and not warpgroup:
        faults.append("it does not use the warpgroup instructions")
    return Compiled(
        name=variant.name,
        capability=capability,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=shared_bytes,
        warpgroup=warpgroup,
        faults=tuple(faults),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="compile_check", description="Compiles kernels without a GPU.")
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES, help="default: all")
    parser.add_argument("--all", action="store_true", help="every variant, not only the default ones")
    parser.add_argument("--kernel", default="", help="only variants with this in their name")
    args = parser.parse_args(arguments)
    faulty = False
    for variant in all_variants():
        if args.kernel not in variant.name or not (args.all or variant.is_default):
            continue
        for capability in args.capability or CAPABILITIES:
            if capability in variant.configs:
                compiled = check(variant, capability)
                faulty |= bool(compiled.faults)
                print(json.dumps(asdict(compiled)), flush=True)
    return int(faulty)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
