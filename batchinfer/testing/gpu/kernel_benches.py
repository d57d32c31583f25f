"""Benches of single kernels and layers: the device's own rates first, then what is held against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from batchinfer.testing.gpu.kernels import Maker, Work
from batchinfer.testing.gpu.outcome import Check, Found
from batchinfer.testing.gpu.sizes import Sizes
from batchinfer.testing.gpu.timing import Rates, Timer, free, measure_rates

Make = Callable[..., Work]  # a method of Maker: of the maker, and of sizes


@dataclass
class KernelBenches:
    sizes: Sizes
    device: torch.device

    def checks(self) -> Iterator[Check]:
        at = self.sizes
        few, many = at.few_rows, at.many_rows
        yield Check(name="copy bandwidth", run=lambda: Found(value=self.rates.copy_bytes_s / 1e9, unit="GB/s"))
        yield Check(
            name=f"matrix rate, {at.product_size} cubed",
            run=lambda: Found(value=self.rates.product_ops_s / 1e12, unit="TFLOP/s"),
        )
        yield Check(
            name=f"attention, {at.shared_seqs} sequences behind a shared prefix of {at.shared_prefix}",
            run=self._shared_prefix,
            target=10.0,
        )
        yield Check(name=f"W4A16 products of {few} rows", run=partial(self._against_plain, Maker.w4, few), target=2.0)
        fp8, in_blocks = (partial(Maker.fp8, blocks=blocks) for blocks in (False, True))
        yield Check(name=f"FP8 products of {many} rows", run=partial(self._against_plain, fp8, many), target=1.4)
        yield Check(name=f"FP8 products of {many} rows, in blocks", run=partial(self._against_plain, in_blocks, many))
        for rows in (few, at.decode_seqs, many):
            name = f"a layer of {at.experts.num_experts} experts, {rows} rows"
            yield Check(name=name, run=partial(self._of_floor, Maker.experts, rows))
        name = f"latent attention, {at.decode_seqs} sequences at {at.latent_context}"
        yield Check(name=name, run=partial(self._of_floor, Maker.latent, at.decode_seqs, at.latent_context))

    @cached_property
    def rates(self) -> Rates:
        return measure_rates(self._timer, self.sizes)

    @property
    def _timer(self) -> Timer:
        return Timer(device=self.device, runs=self.sizes.runs, warm=self.sizes.warm)

    def _work(self, make: Make, *arguments: Any, **options: Any) -> Work:
        free(self.device)
        torch.manual_seed(0)
        return make(Maker(sizes=self.sizes, device=self.device), *arguments, **options)

    def _seconds(self, make: Make, *arguments: Any, **options: Any) -> float:
        return self._timer(self._work(make, *arguments, **options).run)

    def _products(self, make: Make, rows: int) -> float:
        """Seconds of all products of a layer."""
        return sum(self._seconds(make, rows, n, k) for n, k in self.sizes.products.values())

    def _shared_prefix(self) -> Found:
        at = self.sizes
        starts, lengths = [at.shared_prefix + at.shared_own - 1] * at.shared_seqs, [1] * at.shared_seqs
        shared = self._seconds(Maker.attention, starts, lengths, shared=at.shared_prefix)
        apart = self._seconds(Maker.attention, starts, lengths)
        return Found(
            value=apart / shared,
            unit="x",
            text=f"{1e3 * shared:.3f} ms, apart {1e3 * apart:.3f} ms, of one layer",
            numbers={"shared_s": shared, "apart_s": apart},
        )

    def _against_plain(self, make: Make, rows: int) -> Found:
        """Against the fastest products of plain weights: ours, deterministic or not, or torch's."""
        taken = self._products(make, rows)
        plain = {
            "deterministic_s": self._products(Maker.plain, rows),
            "not_deterministic_s": self._products(partial(Maker.plain, deterministic=False), rows),
            "torch_s": self._products(Maker.torch_product, rows),
        }
        best = min(plain.values())
        dtype = str(self.sizes.dtype).removeprefix("torch.")
        return Found(
            value=best / taken,
            unit="x",
            text=f"{1e6 * taken:.1f} us of a layer; {dtype}, the fastest of ours and torch's: {1e6 * best:.1f} us",
            numbers={"taken_s": taken, **plain},
        )

    def _of_floor(self, make: Make, *arguments: Any) -> Found:
        work = self._work(make, *arguments)
        taken = self._timer(work.run)
        floor = self.rates.floor_s(work.num_bytes, work.operations, work.speed)
        return Found(
            value=floor / taken,
            unit="of the floor",
            text=f"{1e6 * taken:.1f} us, at best {1e6 * floor:.1f} us",
            numbers={"taken_s": taken, "bytes": work.num_bytes, "operations": work.operations},
        )
