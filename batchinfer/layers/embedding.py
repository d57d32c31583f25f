"""Token embedding and the head that gives logits; tied, the head's weight is the embedding's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor

from batchinfer.layers.linear import Linear
from batchinfer.layers.weight import WeightLayer
from batchinfer.modelfiles import StoredTensor
from batchinfer.quant import LinearScheme


class Embedding(WeightLayer):
    """Rows of weight [V, H] at token ids."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.ops.embedding(token_ids, self.weight)


class LMHead(Linear):
    """Logits float32 [S, V] of hidden states [S, H]; the whole head is sensitive. `tied_to`: its weight is this."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None,
        scheme: LinearScheme,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        name: str = "",
        stored: Mapping[str, Mapping[str, StoredTensor]] | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            {"": vocab_size},
            bias=False,
            sensitive=("",),
            shared=None if tied_to is None else tied_to.weight,
            scheme=scheme,
            ops=ops,
            dtype=dtype,
            device=device,
            name=name,
            stored=stored,
        )

    def forward(self, x: Any, residual: Tensor | None = None) -> Tensor:
        assert residual is None
        return self.weights.logits(x)

    def argmax(self, x: Any) -> tuple[Tensor, Tensor]:
        """(int64 [S], the token with the largest logit, of equal ones the lowest; bool [S], whether all logits of the
        row are finite)."""
        return self.weights.argmax(x)
