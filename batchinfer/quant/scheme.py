"""What a quantization scheme is, and the choice of one from the checkpoint's and the user's words.

To add a scheme: a file beside this one, an entry in `resolve_scheme`, its detection from `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.errors import ConfigError
from batchinfer.modelfiles.supported import refuse_stored_quantization
from batchinfer.quant.unquantized import Unquantized

PLANNED = ("int8", "int4", "fp8")


class LinearScheme(Protocol):
    """Weights of one linear layer, whose output is made of parts laid side by side (q, k and v; gate and up)."""

    name: str

    def params(
        self, in_features: int, part_features: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Tensors to keep, by name, not yet filled."""
        ...

    def target(self, params: dict[str, Tensor], start: int, stop: int) -> Tensor:
        """Memory for output features start .. stop of the stored weight [out, in], about to be read.

        A scheme that packs while loading puts a staging tensor into `params` here and takes it out in `finish`:
        layers are read one after the other, so only a few of those exist at a time.
        """
        ...

    def finish(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to keep from now on; called once, when all parts are filled."""
        ...

    def linear(self, ops: Ops, x: Tensor, params: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """y [T, out] = x [T, in] weight^T + bias."""
        ...


def resolve_scheme(quantization: str, config: Mapping[str, Any]) -> LinearScheme:
    """The scheme for what the user asked ("auto" is as stored) and what the checkpoint's config says."""
    refuse_stored_quantization(config)
    if quantization in ("auto", "none"):
        return Unquantized()
    if quantization in PLANNED:
        raise ConfigError(f"model.quantization: {quantization!r} is planned and not there yet; use auto or none")
    raise ConfigError(f"model.quantization must be auto or none, got {quantization!r}")
