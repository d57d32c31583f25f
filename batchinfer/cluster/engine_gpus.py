"""Which GPU each engine has: one of its own, by its worker's number on the machine.

An engine is started with CUDA_VISIBLE_DEVICES naming that GPU alone, so that nothing in it can reach another's, and
one that is started again has the same. Imports next to nothing, as workers do while they start. Not for which GPUs
there are (`batchinfer_kernels.gpus`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from batchinfer_kernels.gpus import VARIABLE, Gpu, NoGpu, find

from batchinfer.errors import ConfigError

if TYPE_CHECKING:
    from batchinfer.job.spec import JobSpec

# CPU threads of an engine on a GPU, at most: what is left to its CPU is the host's part of steps, and reading weights.
MOST_THREADS = 8
_LOCAL_NUMBER = "SLURM_LOCALID"  # of a task of srun's, on its node


def gpus_of(spec: JobSpec) -> tuple[Gpu, ...]:
    """Those that this machine has for the job's engines, one or more; none for a job on CPUs. Raises ConfigError."""
    return _found(None) if spec.engine.device == "cuda" else ()


def num_workers(spec: JobSpec, found: Sequence[Gpu]) -> int:
    """What the user says, else one for each GPU. Raises ConfigError where there are too few GPUs."""
    wanted = spec.cluster.workers if "workers" in spec.cluster.model_fields_set else len(found)
    if wanted > len(found):
        setting = os.environ.get(VARIABLE)
        shown = "has" if setting is None else f"shows ({VARIABLE} is {setting!r})"
        raise ConfigError(
            f"cluster.workers is {wanted}, and with engine.device cuda each of them needs a GPU of its own: this "
            f"machine {shown} {len(found)}; give at most that, or leave cluster.workers out"
        )
    return wanted


def with_gpu(handle: str | None) -> dict[str, str] | None:
    """The environment of a process that shall see this GPU alone; None: that of this process."""
    return None if handle is None else {**os.environ, VARIABLE: handle}


def gpu_of_worker(environment: Mapping[str, str]) -> str:
    """The GPU of a worker that others have started: the only one that it sees, else the one of its number on its node,
    which Slurm tells each task. Raises ConfigError where neither says which."""
    found = _found(environment)
    if len(found) == 1:
        return found[0].handle
    number = environment.get(_LOCAL_NUMBER, "")
    if number.isdecimal() and int(number) < len(found):
        return found[int(number)].handle
    why = f"it is number {number} of its node" if number else f"no {_LOCAL_NUMBER} says its number on its node"
    raise ConfigError(
        f"engine.device is cuda, this worker sees {len(found)} GPUs, and {why}: start each worker with {VARIABLE} "
        "naming a GPU of its own (srun --gpus-per-task=1 does)"
    )


def _found(environment: Mapping[str, str] | None) -> tuple[Gpu, ...]:
    try:
        return find(environment)
    except NoGpu as error:
        from batchinfer.arithmetic import no_gpu

        raise no_gpu(str(error)) from None
