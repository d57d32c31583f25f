"""Launch configurations: each kernel has defaults by compute capability, a table of a device may replace them.

Tables are JSON files beside this one, named after the device as CUDA names it (spaces become underscores):
{"kernel": {"BLOCK_N": 128, ..., "num_warps": 8, "num_stages": 3}}. None is ever required. A configuration may change
the order of sums, and so the bytes: tables belong to the semantics of a job as the device does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch

from batchinfer_kernels.gpus import table_path

# Compute capabilities that kernels state defaults for; `nearest` says which ones a device takes.
CAPABILITIES = (80, 90, 100)

Config = Mapping[str, int]
# (what is tried, what was asked for) while a `trial` lasts.
_trials: list[tuple[Mapping[str, Config], dict[str, Config]]] = []


def config(kernel: str, defaults: Mapping[int, Config], device: torch.device) -> Config:
    """What to launch `kernel` with on a device: block sizes by name, num_warps, num_stages. `defaults`: by capability.

    Raises ValueError for a table that lacks a key of the defaults, or has another one.
    """
    found = _resolved(kernel, defaults, device)
    for tried, asked in _trials:
        found = asked[kernel] = tried.get(kernel, found)
    return found


@contextmanager
def trial(tried: Mapping[str, Config] | None = None) -> Iterator[dict[str, Config]]:
    """While it lasts, kernels of these names are launched with these configurations, whatever the device. What it gives
    becomes what was asked for, by name: so the names are found that an operation has, and what they stand at."""
    asked: dict[str, Config] = {}
    _trials.append((tried or {}, asked))
    try:
        yield asked
    finally:
        _trials.pop()


def _resolved(kernel: str, defaults: Mapping[int, Config], device: torch.device) -> Config:
    if device.type != "cuda":  # the interpreter
        return defaults[CAPABILITIES[0]]
    capability, table = _known(torch.cuda.current_device() if device.index is None else device.index)
    found = defaults[capability]
    tuned = table.get(kernel)
    if tuned is None:
        return found
    if set(tuned) != set(found):
        raise ValueError(f"tuning of {kernel}: the keys are {sorted(tuned)}, they must be {sorted(found)}")
    return tuned


def device_capability(device: torch.device) -> int:
    """90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def nearest(capability: int) -> int:
    """Of CAPABILITIES, the one whose defaults a device takes: the highest that is not above its own, but for 12.0 and
    later, which have neither the instructions of 9.0 or 10.0 nor their shared memory. ValueError below the lowest."""
    if capability >= 120:
        return CAPABILITIES[0]
    fitting = [known for known in CAPABILITIES if known <= capability]
    if not fitting:
        raise ValueError(f"sm_{capability} is older than sm_{CAPABILITIES[0]}: kernels here need at least that")
    return fitting[-1]


@cache  # asked at every launch
def _known(index: int) -> tuple[int, dict[str, Config]]:
    """Of a device: whose defaults it takes, and its table."""
    device = torch.device("cuda", index)
    path = table_path(torch.cuda.get_device_name(device))
    table: dict[str, Config] = json.loads(path.read_text()) if path.exists() else {}
    return nearest(device_capability(device)), table
