"""The NVIDIA GPUs that a process may use, told without torch and without waking them: nvidia-smi's list, as far as
CUDA_VISIBLE_DEVICES lets it be seen.

Responsible for: which there are, how one of them is named to a process that shall see no other, and what of a GPU
decides bytes (`level`). Where a driver is there without nvidia-smi (a container with compute rights alone), torch is
asked in a process of its own. Not for who gets which one, nor for memory.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER, BY_PLACE = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"  # what CUDA counts GPUs by, and what nvidia-smi does
OLDEST = 80  # architecture that the Triton kernels are made for: `tuning.CAPABILITIES`
_QUERY = ("nvidia-smi", "--query-gpu=uuid,name,compute_cap,mig.mode.current", "--format=csv,noheader")
_TIMEOUT_S = 120.0  # a driver that is not kept loaded takes seconds for each GPU
_DRIVER = Path("/proc/driver/nvidia/version")
_ASK_TORCH = """
import torch
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    mig = " MIG " in p.name
    print(f"{'MIG' if mig else 'GPU'}-{p.uuid}, {p.name.partition(' MIG ')[0]}, {p.major}.{p.minor}, [N/A]")
"""


class NoGpu(Exception):
    """There is none that can be used: the reason, as half a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one instance of a GPU that is divided (MIG).

    handle       what CUDA_VISIBLE_DEVICES must be for a process that shall see this one alone
    name         as CUDA names it: "NVIDIA H200"
    capability   90 for sm_90
    """

    handle: str
    name: str
    capability: int

    @property
    def level(self) -> str:
        return level(self.capability, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A GPU as the driver lists it. instances: UUIDs of its MIG devices; None where it is not divided."""

    uuid: str
    name: str
    capability: int
    instances: tuple[str, ...] | None = None


def find(environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """At least one, in the order of CUDA_VISIBLE_DEVICES, or of the driver. Raises NoGpu."""
    there = installed()
    environment = os.environ if environment is None else environment
    _refuse_numbers_of_others(environment, there)
    found = visible(environment.get(VARIABLE), there)
    if found:
        return found
    if VARIABLE in environment:
        raise NoGpu(f"{VARIABLE} is {environment[VARIABLE]!r}, which shows none of this machine's {len(there)} GPUs")
    raise NoGpu("its GPUs are divided (MIG), and have no instances")


def _refuse_numbers_of_others(environment: Mapping[str, str], there: Sequence[Installed]) -> None:
    """GPUs of different kinds CUDA counts by speed, unless it is told otherwise: its 0 may be another one
    than nvidia-smi's, of another architecture."""
    setting, kinds = environment.get(VARIABLE, ""), sorted({gpu.name for gpu in there})
    if len(kinds) == 1 or environment.get(ORDER) == BY_PLACE:
        return
    if any(entry.strip().isdecimal() for entry in setting.split(",")):
        raise NoGpu(
            f"{VARIABLE} is {setting!r}, but this machine has different GPUs ({', '.join(kinds)}), which CUDA numbers "
            f"by their speed; name them by UUID (nvidia-smi -L lists those), or set {ORDER}={BY_PLACE} as well, and "
            "count them as nvidia-smi does"
        )


def visible(setting: str | None, there: Sequence[Installed]) -> tuple[Gpu, ...]:
    """Those that a value of CUDA_VISIBLE_DEVICES names (None: it is not set), as CUDA reads it: indices, UUIDs or
    their beginnings, MIG devices; what comes behind a name that is none does not count, and naming one twice shows
    none. Of divided GPUs, all instances, though one process of CUDA's can use but one of them."""
    if setting is None:
        return tuple(
            Gpu(handle=handle, name=gpu.name, capability=gpu.capability)
            for gpu in there
            for handle in ((gpu.uuid,) if gpu.instances is None else gpu.instances)
        )
    found: dict[str, Gpu] = {}
    for entry in map(str.strip, setting.split(",")):
        named = _named(entry, there)
        if named is None:
            break
        which, gpu = named
        if which in found:
            return ()
        found[which] = Gpu(handle=entry, name=gpu.name, capability=gpu.capability)
    return tuple(found.values())


def level(capability: int, name: str) -> str:
    """What of a GPU decides bytes: its architecture, and the launch table of its kind where there is one."""
    table = table_path(name)
    if not table.exists():
        return f"sm_{capability}"
    return f"sm_{capability}, table {hashlib.sha256(table.read_bytes()).hexdigest()[:8]}"


def table_path(name: str) -> Path:
    """Where the launch configurations (`tuning`) of a device of this name are, if there are any."""
    whole = name.partition(" MIG ")[0]
    return Path(__file__).parent / "tuning" / f"{whole.replace(' ', '_')}.json"


def torch_obstacle() -> str | None:
    """Why the installed torch can use no GPU, and what would help; None where nothing is known. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "the package torch is not installed (pip install torch)"
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    values = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*=\s*(.+?)\s*$", text, re.MULTILINE))
    if values.get("cuda") != "None":
        return None
    version = values.get("__version__", "").strip("'\"")
    return f"torch {version} is a build without CUDA (pip install torch from PyPI, not from the index of CPU builds)"


@functools.cache
def installed() -> tuple[Installed, ...]:
    """All that the driver shows this process, at least one. Raises NoGpu; an answer is kept, a failure is not."""
    try:
        done = _nvidia_smi(_QUERY)
    except FileNotFoundError:
        if not _DRIVER.exists():
            raise NoGpu("this machine has no NVIDIA driver (there is no nvidia-smi)") from None
        return _from_torch()
    if done.returncode:
        if "not a valid field" in done.stdout + done.stderr:  # a driver that is too old to be asked
            return _from_torch()
        raise NoGpu(f"nvidia-smi fails: {_last_line(done.stdout + done.stderr)}")
    there = _parse(done.stdout)
    if any(gpu.instances is not None for gpu in there):
        there = with_instances(there, _nvidia_smi(("nvidia-smi", "-L")).stdout)
    return there


def _nvidia_smi(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Raises FileNotFoundError where it is not installed, NoGpu where it can't be run or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpu(f"nvidia-smi can't be asked for GPUs: {error}") from None


def _parse(text: str) -> tuple[Installed, ...]:
    """Lines of `uuid, name, 9.0, Enabled`. Raises NoGpu where there is none, or one that does not say what it is."""
    there = []
    for line in filter(None, map(str.strip, text.splitlines())):
        found = re.fullmatch(r"((?:GPU|MIG)-[\w-]+),\s*(.+?),\s*(\d+)\.(\d+),\s*(\S+)", line)
        if found is None:
            raise NoGpu(f"nvidia-smi says what is not understood: {line[:200]!r}")
        there.append(
            Installed(
                uuid=found[1],
                name=found[2],
                capability=10 * int(found[3]) + int(found[4]),
                instances=() if found[5] == "Enabled" else None,
            )
        )
    if not there:
        raise NoGpu("nvidia-smi lists no GPU")
    return tuple(there)


def with_instances(there: Sequence[Installed], listed: str) -> tuple[Installed, ...]:
    """Divided GPUs with their MIG devices, from the text of `nvidia-smi -L`."""
    of: dict[str, list[str]] = {}
    gpu = ""
    for line in listed.splitlines():
        found = re.search(r"\(UUID: ((GPU|MIG)-[\w/-]+)\)", line)
        if found is None:
            continue
        if found[2] == "GPU":
            gpu = found[1]
        else:
            of.setdefault(gpu, []).append(found[1])
    return tuple(
        item if item.instances is None else replace(item, instances=tuple(of.get(item.uuid, ()))) for item in there
    )


def _from_torch() -> tuple[Installed, ...]:
    """Asked in a process of its own, which sees all: seconds."""
    hidden = {key: value for key, value in os.environ.items() if key != VARIABLE}
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=hidden)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpu(f"there is no nvidia-smi to ask for GPUs, and torch can't be asked: {error}") from None
    if done.returncode:
        raise NoGpu(f"there is no nvidia-smi to ask for GPUs, and torch fails: {_last_line(done.stderr)}")
    return _parse(done.stdout)


def _named(entry: str, there: Sequence[Installed]) -> tuple[str, Installed] | None:
    """(which device, the GPU that it is or lies in) of one name in CUDA_VISIBLE_DEVICES; None where it names none."""
    if entry.isdecimal():
        index = int(entry)
        return (there[index].uuid, there[index]) if index < len(there) else None
    if not re.match(r"(GPU|MIG)-\w", entry):
        return None
    if entry.startswith("MIG-GPU-"):  # older drivers': the GPU, and two numbers
        whole = entry.removeprefix("MIG-").partition("/")[0]
        return next(((entry, gpu) for gpu in there if gpu.uuid == whole), None)
    if entry.startswith("MIG-"):
        matches = [(uuid, gpu) for gpu in there for uuid in gpu.instances or () if uuid.startswith(entry)]
    else:
        matches = [(gpu.uuid, gpu) for gpu in there if gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "it says nothing"
