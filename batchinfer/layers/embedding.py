"""Token embedding and the head that gives logits; tied, they are one tensor."""

from __future__ import annotations

from torch import Tensor

from batchinfer.layers.weight import WeightLayer


class Embedding(WeightLayer):
    """Rows of weight [V, H] at token ids."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.ops.embedding(token_ids, self.weight)


class LMHead(WeightLayer):
    """Logits float32 [S, V] of hidden states [S, H]; tied where it shares the embedding's weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.weight).float()
