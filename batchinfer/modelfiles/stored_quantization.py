"""How a checkpoint's weights are stored quantized, as its config says. No torch.

Known are GPTQ and AWQ in 4 bits; FP8 (e4m3) with a scale for a tensor, an output feature or 128 x 128 weights; int8
with one for an output feature. The last two as `compressed-tensors` or (FP8) transformers' own "fp8" say it, with
activations that are scaled as they come. Which layers are stored plain is told by their tensors, not by lists of names
(`quant`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.modelfiles.files import StoredTensor

GROUPS = (32, 64, 128, -1)
BLOCK = 128
# Last parts of the names under which each scheme keeps what makes its weights quantized.
MARKS: Mapping[str, frozenset[str]] = {
    "gptq": frozenset({"qweight", "qzeros", "g_idx"}),
    "awq": frozenset({"qweight", "qzeros"}),
    "fp8": frozenset({"weight_scale", "weight_scale_inv"}),
    "w8a8": frozenset({"weight_scale"}),
}


# The tensor that holds a layer's quantized weights, by the last part of its name, and that tensor's type.
WEIGHTS: Mapping[str, tuple[str, str]] = {
    "gptq": ("qweight", "I32"),
    "awq": ("qweight", "I32"),
    "fp8": ("weight", "F8_E4M3"),
    "w8a8": ("weight", "I8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """scheme       of MARKS: what `model.quantization` becomes
    group        gptq, awq: inputs that share a scale; -1: all
    act_order    gptq: groups are of inputs in another order, by g_idx
    zero_offset  gptq: what is added to stored zero points
    blocks       fp8: a scale is of BLOCK x BLOCK weights
    """

    scheme: str
    group: int = 0
    act_order: bool = False
    zero_offset: int = 0
    blocks: bool = False

    def quantizes(self, kinds: Mapping[str, StoredTensor]) -> bool:
        """Whether a layer whose tensors these are, by the last parts of their names, is stored quantized."""
        name, dtype = WEIGHTS[self.scheme]
        return name in kinds and kinds[name].dtype == dtype

    def splits(self, parts: Sequence[int]) -> bool:
        """Whether layers of so many output features can't stand side by side as one: a block of weights with one
        scale would have some of two of them."""
        return self.blocks and any(features % BLOCK for features in parts[:-1])


class _Unknown(Exception):
    """What of a quantization_config is not known."""


def stored_quantization(config: Mapping[str, Any]) -> StoredQuantization | None:
    """What the model's config says, None where weights are plain. Raises ModelError for what can't be read."""
    stored = config.get("quantization_config") or config.get("compression_config")
    if not stored:
        return None
    method = stored.get("quant_method", "unnamed") if isinstance(stored, Mapping) else stored
    try:
        if not isinstance(stored, Mapping) or not isinstance(method, str) or method not in _READERS:
            raise _Unknown("")
        return _READERS[method](stored)
    except _Unknown as error:
        why = f", {error}" if str(error) else ""
        raise ModelError(
            f"the checkpoint is quantized (quantization_config, method {method!r}{why}), which is not supported; "
            "use the original checkpoint, or a GGUF file of the model"
        ) from None


def _gptq(stored: Mapping[str, Any]) -> StoredQuantization:
    _known(stored, "bits", 4)
    layout = _layout(stored, "gptq", "gptq_v2")
    _known(stored, "is_marlin_format", None, False)
    _known(stored, "pack_dtype", None, "int32")
    _nothing(stored, "adapter")
    dynamic = stored.get("dynamic") or {}
    # Rules "-:..." leave layers out, which their tensors say as well; others give layers bits and groups of their own.
    if not isinstance(dynamic, Mapping) or any(not str(rule).startswith("-:") for rule in dynamic):
        raise _Unknown(f"with rules for single layers (dynamic {dynamic!r})")
    return StoredQuantization(
        scheme="gptq",
        group=_known(stored, "group_size", *GROUPS),
        act_order=bool(_known(stored, "desc_act", None, False, True)),
        zero_offset=0 if layout == "gptq_v2" else 1,
    )


def _awq(stored: Mapping[str, Any]) -> StoredQuantization:
    _known(stored, "w_bit" if "w_bit" in stored else "bits", 4)
    _known(stored, "version", None, "gemm", "GEMM")
    _layout(stored, "gemm")
    _known(stored, "zero_point", None, True)
    group = _known(stored, "q_group_size" if "q_group_size" in stored else "group_size", *GROUPS)
    return StoredQuantization(scheme="awq", group=group)


def _fp8(stored: Mapping[str, Any]) -> StoredQuantization:
    _known(stored, "fmt", None, "e4m3")
    _known(stored, "activation_scheme", None, "dynamic")
    _nothing(stored, "kv_cache_scheme")
    block = _known(stored, "weight_block_size", None, [BLOCK, BLOCK])
    return StoredQuantization(scheme="fp8", blocks=block is not None)


def _compressed_tensors(stored: Mapping[str, Any]) -> StoredQuantization:
    _known(stored, "format", None, "float-quantized", "int-quantized", "naive-quantized")
    _nothing(stored, "kv_cache_scheme", "transform_config")
    sparsity = stored.get("sparsity_config")
    # Of weights with many zeros that are stored like any others it says how many.
    if not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense":
        _nothing(stored, "sparsity_config")
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _Unknown(f"config_groups {list(groups) if isinstance(groups, Mapping) else groups!r}; one is known")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    activations = group.get("input_activations") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(activations, Mapping):
        raise _Unknown("config_groups without weights and input_activations; both are needed")
    _nothing(group, "output_activations")
    kind = _known(weights, "type", "float", "int")
    strategy = _known(weights, "strategy", *(("tensor", "channel", "block") if kind == "float" else ("channel",)))
    blocks = strategy == "block"
    if blocks:
        _known(weights, "block_structure", [BLOCK, BLOCK])
    _known(weights, "dynamic", None, False)
    _known(activations, "type", kind)
    _known(activations, "dynamic", True)
    if _known(activations, "strategy", *(("group",) if blocks else ("token", "tensor"))) == "group":
        _known(activations, "group_size", BLOCK)
    for part in (weights, activations):
        _known(part, "num_bits", 8)
        _known(part, "symmetric", None, True)
        _known(part, "actorder", None)
    return StoredQuantization(scheme="fp8" if kind == "float" else "w8a8", blocks=blocks)


def _known(stored: Mapping[str, Any], key: str, *values: Any) -> Any:
    """The value of a key, which is None where it is missing; one of `values`, by type too."""
    value = stored.get(key)
    if not any(type(value) is type(known) and value == known for known in values):
        raise _Unknown(f"{key} {value!r}; known: {', '.join(map(str, values))}")
    return value


def _nothing(stored: Mapping[str, Any], *keys: str) -> None:
    """What these keys would say is not computed here."""
    for key in keys:
        if stored.get(key):
            raise _Unknown(f"with {key}")


def _layout(stored: Mapping[str, Any], *known: str) -> str | None:
    """How words are laid out, which a newer and an older key say; None where both are missing."""
    found: set[str] = {_known(stored, key, None, *known) for key in ("checkpoint_format", "format")} - {None}
    if len(found) > 1:
        raise _Unknown(f"checkpoint_format {stored['checkpoint_format']!r} and format {stored['format']!r}")
    return found.pop() if found else None


_READERS: Mapping[str, Callable[[Mapping[str, Any]], StoredQuantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}
