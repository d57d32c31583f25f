"""Token embedding and the head that gives logits; tied, they are one tensor."""

from __future__ import annotations

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor, nn

from batchinfer.weights import Part


class Embedding(nn.Module):
    """Rows of weight [V, H] at token ids."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.ops.embedding(token_ids, self.weight)

    def parts(self) -> dict[Part, tuple[int, ...]]:
        return {("weight", ""): tuple(self.weight.shape)}

    def target(self, part: Part) -> Tensor:
        return self.weight.data

    def loaded(self) -> None:
        pass


class LMHead(nn.Module):
    """Logits float32 [S, V] of hidden states [S, H]. `tied_to` shares that embedding's weight: nothing to load."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight
        else:
            self.weight = nn.Parameter(
                torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), requires_grad=False
            )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.weight).float()

    def parts(self) -> dict[Part, tuple[int, ...]]:
        return {} if self.tied else {("weight", ""): tuple(self.weight.shape)}

    def target(self, part: Part) -> Tensor:
        return self.weight.data

    def loaded(self) -> None:
        pass
