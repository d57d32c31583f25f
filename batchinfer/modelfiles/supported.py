"""Which models can run, told from their files alone: architecture, config fields, quantization. No torch.

`models.registry` builds what is named here; a job asks before anything is written or started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.modelfiles import deepseek_config, llama_config
from batchinfer.modelfiles.deepseek_config import DeepseekConfig
from batchinfer.modelfiles.files import ModelFiles
from batchinfer.modelfiles.llama_config import LlamaConfig
from batchinfer.modelfiles.stored_quantization import MARKS, StoredQuantization, stored_quantization

# What reads and checks the config of each architecture.
ARCHITECTURES: Mapping[str, Callable[[str, Mapping[str, Any]], LlamaConfig | DeepseekConfig]] = {
    **dict.fromkeys(llama_config.ARCHITECTURES, LlamaConfig.from_config),
    **dict.fromkeys(deepseek_config.ARCHITECTURES, DeepseekConfig.from_config),
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that the config names. Raises ModelError where it is unknown, with the list of known ones."""
    names = config.get("architectures")
    names = [] if names is None else names
    if not isinstance(names, list):
        raise ModelError(f"architectures in the model's config must be a list, got {names!r}")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return str(name)
    said = ", ".join(map(str, names)) or f"none (model_type {config.get('model_type')!r})"
    raise ModelError(
        f"architecture {said} is not supported; supported are {', '.join(sorted(ARCHITECTURES))} "
        "(architectures in the model's config)"
    )


# Last parts of the names under which quantized checkpoints keep their tensors.
_QUANTIZED = frozenset(
    [
        "qweight",
        "qzeros",
        "g_idx",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_zero_point",
        "absmax",
        "SCB",
        "input_scale",
        "output_scale",
        "k_scale",
        "v_scale",
    ]
)


def check_quantized_tensors(files: ModelFiles) -> None:
    """Raises ModelError where tensors are quantized though the config does not say so (GPTQ and AWQ checkpoints of an
    older kind say it in a file of their own), or in another way, and where none is though it does."""
    stored = stored_quantization(files.config)
    marks: frozenset[str] = frozenset() if stored is None else MARKS[stored.scheme]
    lasts = {name: name.rpartition(".")[2] for name in files.tensors}
    for name, last in lasts.items():
        if last in _QUANTIZED - marks:
            raise ModelError(
                f"the checkpoint is quantized (tensor {name!r} in {files.tensors[name].file.name}), which is not "
                f"supported{_without(stored)}; use the original checkpoint, or a GGUF file of the model"
            )
    if stored is not None and marks.isdisjoint(lasts.values()):
        raise ModelError(
            f"the checkpoint is quantized ({stored.scheme}, as quantization_config says), but it has no tensor "
            f"{' or '.join(sorted(marks))}: the files are not those that the config describes"
        )


def _without(stored: StoredQuantization | None) -> str:
    return " without a quantization_config in config.json" if stored is None else f" in a checkpoint of {stored.scheme}"


def read_config(config: Mapping[str, Any]) -> LlamaConfig | DeepseekConfig:
    """Resolved and checked. Raises ModelError for what is not supported."""
    architecture = architecture_of(config)
    return ARCHITECTURES[architecture](architecture, config)


def check_supported(files: ModelFiles) -> None:
    """Raises ModelError, naming the model, where loading it would be refused for what its config says."""
    if files.kind == "fake":
        return
    try:
        architecture_of(files.config)
        check_quantized_tensors(files)
        read_config(files.config)
    except ModelError as error:
        raise ModelError(f"{files.root}: {error}") from error
