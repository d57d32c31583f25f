"""What a scheme is told of a linear layer, and of all layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from batchinfer_kernels.table import Ops

from batchinfer.modelfiles import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """y [T, N] = x [T, K] W^T.

    in_features    K
    out_features   N
    num_sensitive  the last output features whose errors count for more: a scheme that lowers precision keeps those
    gated          N is [gate | up], and only `gated` is asked for
    parts          output features of each part that is stored by itself, in order
    name           of the layer in the model, for messages
    stored         of a checkpoint that is stored quantized: each part's tensors, by the last part of their names
    """

    in_features: int
    out_features: int
    num_sensitive: int = 0
    gated: bool = False
    parts: tuple[int, ...] = ()
    name: str = ""
    stored: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What all layers of a model have in common.

    ops      their operations
    dtype    of hidden states, and of weights that a scheme keeps plain
    device   where weights are
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
