"""What devices can do, as their makers say: dense matrix products, memory, and its bandwidth.

Rates are peaks that no program reaches. A user who has measured a device gives what was found (`parse_device`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from batchinfer.errors import ConfigError

RATES = ("float32", "bfloat16", "int8", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, or several that share a model evenly.

    memory_bytes   of all of them
    bandwidth      bytes a second, of all of them
    rates          operations (two for a multiplication and addition) a second, by what is multiplied: some of RATES,
                   bfloat16 among them (float16 has the same)
    """

    name: str
    memory_bytes: float
    bandwidth: float
    rates: Mapping[str, float]
    count: int = 1

    def rate(self, kind: str) -> float:
        """Where the device has no units for `kind`, what it is converted to counts: bfloat16."""
        return self.rates.get(kind, self.rates["bfloat16"])

    def times(self, count: int) -> Device:
        """That many of this one device, with nothing lost between them."""
        assert self.count == 1
        return replace(
            self,
            count=count,
            memory_bytes=self.memory_bytes * count,
            bandwidth=self.bandwidth * count,
            rates={kind: rate * count for kind, rate in self.rates.items()},
        )

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.count} x {self.name}"


def _device(
    name: str, mebibytes: int, gigabytes_s: float, bf16: float, int8: float, fp8: float | None, fp32: float
) -> Device:
    """Memory as nvidia-smi tells it; rates in 10^12 a second, without sparsity."""
    rates = {"float32": fp32, "bfloat16": bf16, "int8": int8} | ({} if fp8 is None else {"fp8": fp8})
    return Device(
        name=name,
        memory_bytes=mebibytes * 2**20,
        bandwidth=gigabytes_s * 1e9,
        rates={kind: rate * 1e12 for kind, rate in rates.items()},
    )


# Rates and bandwidth: NVIDIA's data sheets; bfloat16 of the RTX 4090 with sums in float32, B200 as one of eight in an
# HGX. Memory: the total that nvidia-smi shows ("0MiB / 81559MiB"), as users have posted it of each; it is not the data
# sheet's size in either unit (an H200 of "141 GB" has 140.4 GiB), and ECC and firmware have had their part already.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device("A100-40GB", 40_960, 1555, 312, 624, None, 19.5),
        _device("A100-80GB", 81_920, 2039, 312, 624, None, 19.5),
        _device("H100", 81_559, 3350, 989.4, 1978.9, 1978.9, 66.9),
        _device("H100-PCIe", 81_559, 2000, 756, 1513, 1513, 51.2),
        _device("H200", 143_771, 4800, 989.4, 1978.9, 1978.9, 66.9),
        _device("B200", 183_359, 7700, 2250, 4500, 4500, 75),
        _device("L4", 23_034, 300, 121, 242, 242, 30.3),
        _device("L40S", 46_068, 864, 362, 733, 733, 91.6),
        _device("RTX4090", 24_564, 1008, 165.2, 660.6, 330.3, 82.6),
    )
}


# What CUDA calls them, as far as it is not the name above.
_ALSO = {"H100 80GB HBM3": "H100", "A100-PCIE-40GB": "A100-40GB", "GeForce RTX 4090": "RTX4090"}


def find_device(name: str) -> Device | None:
    """Of the table, by its name there or by CUDA's ("NVIDIA H100 80GB HBM3")."""
    key = _key(name)
    return next((DEVICES[known] for also, known in _KEYS if also == key), None)


def parse_device(text: str) -> Device:
    """A device of the table, several of it, or one with numbers of one's own: "H100", "4xH100",
    "H100,bandwidth=3.0e12", "mine,bandwidth=1e12,memory=24e9,bfloat16=1e14".

    Keys are bandwidth (bytes a second), memory (bytes) and RATES (operations a second), of one device. Raises
    ConfigError for what is not understood, with the names that are known.
    """
    head, *settings = (part.strip() for part in text.split(","))
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?([\w .-]+)", head)
    if found is None or int(found[1] or 1) == 0:
        raise ConfigError(f"device {text!r} is not understood; for example: H100, 4xH100, H100,bandwidth=3.0e12")
    numbers = dict(_number(setting) for setting in settings)
    known = find_device(found[2])
    if known is None:
        missing = {"bandwidth", "memory", "bfloat16"} - set(numbers)
        if missing:
            raise ConfigError(
                f"device {found[2]!r} is not known; known are {', '.join(DEVICES)}; of another one give the numbers: "
                f"{found[2]},bandwidth=1e12,memory=24e9,bfloat16=1e14"
            )
        known = Device(name=found[2], memory_bytes=0, bandwidth=0, rates={})
    device = replace(
        known,
        memory_bytes=numbers.pop("memory", known.memory_bytes),
        bandwidth=numbers.pop("bandwidth", known.bandwidth),
        rates={**known.rates, **numbers},
    )
    return device.times(int(found[1])) if found[1] else device


def _key(name: str) -> str:
    return re.sub(r"[ _-]|nvidia|sxm\d?", "", name.lower())


_KEYS = tuple((_key(also), name) for also, name in (*zip(DEVICES, DEVICES, strict=True), *_ALSO.items()))


def _number(setting: str) -> tuple[str, float]:
    key, _, value = setting.partition("=")
    keys = ("bandwidth", "memory", *RATES)
    if key not in keys:
        raise ConfigError(f"device: {key!r} is not known; known are {', '.join(keys)}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"device: {key} must be a positive number, got {value!r}")
    return key, number
