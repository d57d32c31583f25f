"""The up-projection of latent attention, kept in the two forms that absorbed attention multiplies with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from batchinfer_kernels.table import Ops
from torch import Tensor, nn

from batchinfer.layers.linear import Linear
from batchinfer.modelfiles import StoredTensor
from batchinfer.quant import LinearScheme, Unquantized
from batchinfer.weights import Part, RowSink


class LatentUp(nn.Module):
    """From latents to each head's plain part of a key, and its value: `batchinfer_kernels.mla`.

    Stored as one projection [H * (P + V), C], of each head first the key's rows. Kept in the model's dtype whatever the
    scheme: queries are multiplied with it the other way round, where a scale would not be of an output. What a
    checkpoint stores quantized is dequantized. `name`, `stored`: see `LinearShape`.
    """

    def __init__(
        self,
        rank: int,
        num_heads: int,
        plain_dim: int,
        value_dim: int,
        *,
        scheme: LinearScheme,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        name: str = "",
        stored: Mapping[str, Mapping[str, StoredTensor]] | None = None,
    ) -> None:
        super().__init__()
        self.latent = ops.latent
        self._sizes = [plain_dim, value_dim]
        linear = Linear(
            rank,
            {"": num_heads * (plain_dim + value_dim)},
            bias=False,
            # Where there are no products with what is stored, a scheme gives plain weights.
            scheme=scheme if scheme.stored_types else Unquantized(),
            ops=replace(ops, formats=None),
            dtype=dtype,
            device=device,
            name=name,
            stored=stored,
        )
        self._parts = linear.parts()
        self._filling = [linear]  # no module of this one: it goes when both forms are there
        self.key_weight = _parameter(torch.empty(num_heads, rank, 0, dtype=dtype, device=device))  # then [H, C, P]
        self.value_weight = _parameter(torch.empty(num_heads, 0, rank, dtype=dtype, device=device))  # then [H, V, C]

    def absorb(self, q: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> Tensor:
        """Of queries [T, H, P + R]: [T, H, C + R]."""
        return self.latent.absorb(q, self.key_weight, cos, sin, pairs=pairs)

    def expand(self, latents: Tensor) -> Tensor:
        """Of weighted latents [T, H, C]: [T, H, V]."""
        return self.latent.expand(latents, self.value_weight)

    def parts(self) -> dict[Part, tuple[int, ...]]:
        return self._parts

    def target(self, part: Part) -> Tensor | RowSink:
        return self._filling[0].target(part)

    def loaded(self) -> None:
        weights = self._filling.pop().weights
        weights.finish()
        num_heads, rank, _ = self.key_weight.shape
        by_head = weights.params["weight"].view(num_heads, sum(self._sizes), rank)
        keys, values = by_head.split_with_sizes(self._sizes, dim=1)
        self.key_weight = _parameter(keys.transpose(1, 2).contiguous())
        self.value_weight = _parameter(values.contiguous())


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
