"""Which models can run, told from their files alone: architecture, config fields, quantization. No torch.

`models.registry` builds what is named here; a job asks before anything is written or started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.modelfiles import llama_config
from batchinfer.modelfiles.files import ModelFiles

# What reads and checks the config of each architecture.
ARCHITECTURES: Mapping[str, Callable[[str, Mapping[str, Any]], object]] = dict.fromkeys(
    llama_config.ARCHITECTURES, llama_config.LlamaConfig.from_config
)


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


def refuse_stored_quantization(config: Mapping[str, Any]) -> None:
    """Raises ModelError where the checkpoint's weights are quantized in a way that can't be read."""
    stored = config.get("quantization_config") or config.get("compression_config")
    if stored:
        method = stored.get("quant_method", "unnamed") if isinstance(stored, Mapping) else stored
        raise ModelError(
            f"the checkpoint is quantized (quantization_config, method {method!r}), which is not supported; "
            "use the original checkpoint, or a GGUF file of the model"
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
    ]
)


def refuse_quantized_tensors(files: ModelFiles) -> None:
    """Raises ModelError where tensors are quantized though the config does not say so: GPTQ and AWQ checkpoints of an
    older kind say it in a file of their own."""
    for name, tensor in files.tensors.items():
        if name.rpartition(".")[2] in _QUANTIZED:
            raise ModelError(
                f"the checkpoint is quantized (tensor {name!r} in {tensor.file.name}), which is not supported; "
                "use the original checkpoint, or a GGUF file of the model"
            )


def check_supported(files: ModelFiles) -> None:
    """Raises ModelError, naming the model, where loading it would be refused for what its config says."""
    if files.kind == "fake":
        return
    try:
        architecture = architecture_of(files.config)
        refuse_stored_quantization(files.config)
        refuse_quantized_tensors(files)
        ARCHITECTURES[architecture](architecture, files.config)
    except ModelError as error:
        raise ModelError(f"{files.root}: {error}") from error
