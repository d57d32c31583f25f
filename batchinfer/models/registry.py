"""Every architecture by name, and `load_model`.

To add a family: its config in `modelfiles` (named in `modelfiles.supported`), a file beside this one with `build` and
its weight rules, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from batchinfer_kernels.table import Ops
from torch import nn

from batchinfer.errors import ConfigError, ModelError
from batchinfer.layers import LayerMaker
from batchinfer.modelfiles import ModelFiles, deepseek_config, llama_config
from batchinfer.modelfiles.supported import architecture_of
from batchinfer.models import deepseek, llama
from batchinfer.models.base import BuildOptions, CausalLM
from batchinfer.models.dtype import resolve_dtype
from batchinfer.quant import resolve_scheme
from batchinfer.weights import Fill, fill_weights, load_weights

# Whose every product is a linear layer's or the head's, and so the quantization scheme's; a router's is not.
ALL_LINEAR = frozenset(name for name, variant in llama_config.ARCHITECTURES.items() if variant.experts is None)

Build = Callable[[str, ModelFiles, BuildOptions], CausalLM]
ARCHITECTURES: Mapping[str, Build] = {
    **dict.fromkeys(llama_config.ARCHITECTURES, llama.build),
    **dict.fromkeys(deepseek_config.ARCHITECTURES, deepseek.build),
}


def load_model(
    files: ModelFiles,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    ops: Ops,
    quantization: str = "none",
    max_model_len: int | None = None,
    num_threads: int | None = None,
    fill: Fill | None = None,
) -> CausalLM:
    """Builds a model and fills it from its files.

    max_model_len   positions to prepare for; None is the model's own limit, more than that is refused
    num_threads     threads that read and dequantize; None is one per core
    fill            gives the numbers of tensors that are in no file: see `weights.fill_weights`
    Raises ModelError (WeightError among them) or ConfigError, before anything large is allocated where it can.
    """
    if files.kind == "fake":
        raise ModelError(f"{files.name}: a fake model has no weights to load; it runs with the fake runner only")
    device = torch.device(device)
    try:
        architecture = architecture_of(files.config)
        scheme = resolve_scheme(quantization, files.config)
        limit = files.max_model_len
        if max_model_len is not None and max_model_len > limit:
            raise ConfigError(f"engine.max_model_len {max_model_len} is more than the model's own {limit}")
        resolved, source = resolve_dtype(dtype, files.config, device)
        options = BuildOptions(
            max_model_len=max_model_len or limit,
            dtype_source=source,
            layers=LayerMaker(ops=ops, scheme=scheme, dtype=resolved, device=device),
        )
        model = ARCHITECTURES[architecture](architecture, files, options)
        assert isinstance(model, nn.Module)
        rules, ignores = model.weight_rules(files.kind)
        if fill is not None:
            fill_weights(model, files.tensors, rules, ignores, where=str(files.root), device=device, fill=fill)
        else:
            load_weights(
                model,
                files.tensors,
                rules,
                ignores,
                where=str(files.root),
                num_threads=num_threads,
                stored_types=scheme.stored_types,
            )
    except ModelError as error:
        if str(files.root) in str(error):
            raise
        raise ModelError(f"{files.root}: {error}") from error
    return model
