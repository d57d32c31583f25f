"""How a checkpoint stores the experts of its layers, told from names and types of its tensors: none is read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from batchinfer.modelfiles.experts_config import MIXTRAL_PROJECTIONS, PROJECTIONS
from batchinfer.modelfiles.files import StoredTensor
from batchinfer.modelfiles.stored_quantization import StoredQuantization

_TENSOR = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+\.(?P<projection>[^.]+))\.(?P<kind>[^.]+)")
_DOWN = {names["down"] for names in (PROJECTIONS, MIXTRAL_PROJECTIONS)}


def differing_experts(tensors: Mapping[str, StoredTensor], stored: StoredQuantization) -> str | None:
    """Where weights of one layer's experts that are to be one product (their gates and ups, or their downs) are stored
    in different ways, with an example of each; None where they are not."""
    for (layer, _), examples in _examples(tensors, stored).items():
        if len(examples) > 1:
            return f"of {layer}, {examples[True]} is stored as {stored.scheme} and {examples[False]} is not quantized"
    return None


def are_plain(tensors: Mapping[str, StoredTensor], stored: StoredQuantization) -> bool:
    """Whether there are experts, and none of them is quantized."""
    found = _examples(tensors, stored)
    return bool(found) and not any(True in examples for examples in found.values())


def _examples(
    tensors: Mapping[str, StoredTensor], stored: StoredQuantization
) -> dict[tuple[str, bool], dict[bool, str]]:
    """By (layer, whether it is its downs), then by whether they are quantized: a weight that is stored so."""
    weights: dict[tuple[str, str, str], dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if (part := _TENSOR.fullmatch(name)) is not None:
            at = part["layer"], part["expert"], part["projection"]
            weights.setdefault(at, {})[part["kind"]] = tensor
    found: dict[tuple[str, bool], dict[bool, str]] = {}
    for (layer, expert, projection), kinds in weights.items():
        examples = found.setdefault((layer, projection in _DOWN), {})
        examples.setdefault(stored.quantizes(kinds), expert)
    return found
