"""Runs a group of checks in a process of its own, for `check`: a kernel that breaks the device breaks nothing else, and
what takes too long can be ended.

    python -m batchinfer.testing.gpu.child JSON    # {"group", "sizes", "device", "limit_s", "given": {}, "names": []}

prints one JSON line as each check begins, {"begin": name}, and its `Line` as it ends. Whatever else is printed goes to
stderr. After a check that broke the device it ends without the others.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from batchinfer_kernels.determinism import prepare

prepare()  # before torch is loaded

import torch  # noqa: E402

from batchinfer.testing.gpu import laws  # noqa: E402
from batchinfer.testing.gpu.device import answers  # noqa: E402
from batchinfer.testing.gpu.engine_benches import EngineBenches, model_checks  # noqa: E402
from batchinfer.testing.gpu.kernel_benches import KernelBenches  # noqa: E402
from batchinfer.testing.gpu.outcome import Check, Clock, attempt  # noqa: E402
from batchinfer.testing.gpu.sizes import SIZES, Sizes  # noqa: E402

# In the order in which they run: the engine's laws; benches of kernels, of the engine, of one that need not be
# deterministic; another engine; models with experts, and with latent attention.
GROUPS = ("laws", "kernels", "engine", "loose", "peer", "models")


def checks_of(
    group: str, sizes: Sizes, device: torch.device, clock: Clock, given: Mapping[str, float] | None = None
) -> list[Check]:
    """Nothing touches the device before one of them runs. given: values of lines before, by name."""
    checks: Iterable[Check]
    if group == "laws":
        checks = laws.checks(sizes, device, clock)
    elif group == "kernels":
        checks = KernelBenches(sizes, device).checks()
    elif group == "models":
        checks = model_checks(sizes, device, clock)
    else:
        benches = EngineBenches(sizes, device, clock, given or {}, deterministic=group != "loose")
        checks = {"engine": benches.checks, "loose": benches.loose_checks, "peer": benches.peer_checks}[group]()
    return list(checks)


def main(arguments: Sequence[str]) -> None:
    asked = json.loads(arguments[0])
    # Libraries print what they like.
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        clock = Clock(asked["limit_s"])
        device = torch.device(asked["device"])
        checks = {c.name: c for c in checks_of(asked["group"], SIZES[asked["sizes"]], device, clock, asked["given"])}
        for name in asked["names"]:
            print(json.dumps({"begin": name}), file=out)
            line = attempt(asked["group"], checks[name], clock)
            print(line.to_json(), file=out)
            if line.status == "failed" and not answers(device):
                out.flush()
                os._exit(0)  # in no other order: what lies on the device can't be freed any more


if __name__ == "__main__":
    main(sys.argv[1:])
