"""How a checkpoint stores the experts of its layers, told from names and types of its tensors: none is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from batchinfer.modelfiles.experts_config import MIXTRAL_PROJECTIONS, PROJECTIONS
from batchinfer.modelfiles.files import StoredTensor
from batchinfer.modelfiles.stored_quantization import StoredQuantization

_TENSOR = re.compile(
    r"(?P<at>.+\.layers\.(?P<layer>\d+)\..+\.experts)\.(?P<expert>\d+\.(?P<projection>[^.]+))\.(?P<kind>[^.]+)"
)
_DOWN = {names["down"] for names in (PROJECTIONS, MIXTRAL_PROJECTIONS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """gate_up, down   whether gates and ups, and whether downs, are quantized in some layer
    difference       where weights of one layer that are to be one product (its gates and ups, or its downs) are stored
                     in different ways, with an example of each; None where they are not
    """

    gate_up: bool = True
    down: bool = True
    difference: str | None = None


def stored_experts(tensors: Mapping[str, StoredTensor], stored: StoredQuantization, num_layers: int) -> StoredExperts:
    """Of the first num_layers layers: a checkpoint may have more, which are not run. Without tensors of experts, of a
    config alone, all of them are taken to be quantized."""
    weights: dict[tuple[str, str, str], dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if (part := _TENSOR.fullmatch(name)) is not None and int(part["layer"]) < num_layers:
            at = part["at"], part["expert"], part["projection"]
            weights.setdefault(at, {})[part["kind"]] = tensor
    if not weights:
        return StoredExperts()
    # By (layer, whether it is its downs), then by whether they are quantized: a weight that is stored so.
    found: dict[tuple[str, bool], dict[bool, str]] = {}
    for (at_layer, expert, projection), kinds in weights.items():
        examples = found.setdefault((at_layer, projection in _DOWN), {})
        examples.setdefault(stored.quantizes(kinds), expert)
    return StoredExperts(
        gate_up=any(True in examples for (_, is_down), examples in found.items() if not is_down),
        down=any(True in examples for (_, is_down), examples in found.items() if is_down),
        difference=next(
            (
                f"of {at_layer}, {examples[True]} is stored as {stored.scheme} and {examples[False]} is not quantized"
                for (at_layer, _), examples in found.items()
                if len(examples) > 1
            ),
            None,
        ),
    )
