"""Seconds that work takes on a device: by its own events, so that the host does not count, or on a CPU by the clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from batchinfer.testing.gpu.sizes import Sizes

# More than any L2 cache has: what a run reads comes from memory.
FLUSH_BYTES = 256 << 20
# The GPU is kept busy for so many cycles, about 2 ms, while the host launches what is timed.
BUSY_CYCLES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """The median of `runs`, after `warm` runs that are not timed (kernels are compiled in them)."""

    device: torch.device
    runs: int
    warm: int

    def __call__(self, work: Callable[[], Any]) -> float:
        for _ in range(self.warm):
            work()
        if self.device.type != "cuda":
            return median(self._by_the_clock(work) for _ in range(self.runs))
        flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        pairs = []
        for _ in range(self.runs):
            flushed.zero_()
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return float(median(start.elapsed_time(end) for start, end in pairs)) / 1e3

    def _by_the_clock(self, work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Gives memory of what is gone back to the device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the device does at best: bytes a second, read and written, of a copy; operations a second of a large product
    in `dtype`."""

    copy_bytes_s: float
    product_ops_s: float

    def __str__(self) -> str:
        product = f"{self.product_ops_s / 1e12:.1f} TFLOP/s"
        return f"copies {self.copy_bytes_s / 1e9:.0f} GB/s, read and written; products {product}"

    def floor_s(self, num_bytes: float, operations: float = 0.0, speed: float = 1.0) -> float:
        """What so many bytes and operations take at the rate of a copy, and at `speed` times that of a product. Bytes
        that are only read may take a little less: memory turns round less often."""
        return max(num_bytes / self.copy_bytes_s, operations / (speed * self.product_ops_s))


def measure_copy(timer: Timer, num_bytes: int) -> float:
    """Bytes a second, read and written, of a copy of so many bytes."""
    source = torch.empty(num_bytes // 4, dtype=torch.int32, device=timer.device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer(lambda: target.copy_(source))


def measure_product(timer: Timer, size: int, dtype: torch.dtype) -> float:
    """Operations a second of a square product of random numbers by torch."""
    a, b = (torch.empty(size, size, dtype=dtype, device=timer.device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / timer(lambda: torch.matmul(a, b, out=out))


def measure_rates(timer: Timer, sizes: Sizes) -> Rates:
    return Rates(
        copy_bytes_s=measure_copy(timer, sizes.copy_bytes),
        product_ops_s=measure_product(timer, sizes.product_size, sizes.dtype),
    )
