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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES

# Shared memory that one block may have, bytes (CUDA C++ Programming Guide, compute capabilities). Under 80 that of the
# least of those which take its configurations (8.6, 8.9 and 12.x: see `tuning.nearest`); 8.0 itself has 163 KB.
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# The instructions of products, in PTX, by what `Compiled` calls them.
PRODUCTS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
TENSOR_COLUMNS = 512  # of tensor memory, where it is
# Whole numbers that differ from step to step, for which nothing may be compiled again.
PER_STEP = frozenset({"num_rows", "num_slots", "num_blocks", "num_chunks", "num_tokens", "rows", "table_width"})
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
    "mla_heads",
    "routing",
    "experts",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """faults: what is wrong with it, in words. stack_bytes: of a thread, which is where registers spill to.
    product: its instructions for products, as in PRODUCTS, or "". tensor_columns: of tensor memory, 32 bits by 128."""

    name: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_columns: int
    product: str
    faults: tuple[str, ...]


def all_variants() -> Iterator[Variant]:
    for name in MODULES:
        for variant in importlib.import_module(f"batchinfer_kernels.triton.{name}").variants():
            yield variant
            in_float16 = variant.in_float16()
            if in_float16 is not None:
                yield in_float16


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
    ptx = compiled.asm["ptx"]
    found = Compiled(
        name=variant.name,
        capability=capability,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=int(compiled.metadata.shared),
        tensor_columns=int(compiled.metadata.tmem_size or 0),
        product=next((name for name, instruction in PRODUCTS.items() if instruction in ptx), ""),
        faults=(),
    )
    return replace(found, faults=tuple(_faults(variant, found, is_storing="st.global" in ptx)))


def _faults(variant: Variant, found: Compiled, *, is_storing: bool) -> Iterator[str]:
    if found.stack_bytes:
        yield f"{found.stack_bytes} bytes of a thread's registers are spilled"
    most = SHARED_BYTES[found.capability]
    if found.shared_bytes > most:
        yield f"{found.shared_bytes} bytes of shared memory, and a block may have {most}"
    if found.tensor_columns > TENSOR_COLUMNS:
        yield f"{found.tensor_columns} columns of tensor memory, and there are {TENSOR_COLUMNS}"
    if not is_storing:
        yield "it stores nothing"
    if variant.is_product and not found.product:
        yield "it has no instructions for products"
    elif variant.is_product and not variant.has_few_rows and found.capability == 90 and found.product != "wgmma":
        yield "it does not use the warpgroup instructions"
    again = PER_STEP.intersection(variant.kernel.arg_names) - set(variant.kernel.do_not_specialize)
    if again:
        yield f"it is compiled again for other values of {', '.join(sorted(again))}"


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
