"""The gated MLP: one product for gate and up, one for down."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from batchinfer.layers.maker import LayerMaker
from batchinfer.quant import Stack


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), of hidden_size by intermediate_size.

    name    its name in the model
    places  of `gate_up` and `down`: see `Linear`
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        make: LayerMaker,
        *,
        name: str,
        bias: bool = False,
        places: tuple[tuple[Stack, int], tuple[Stack, int]] | tuple[None, None] = (None, None),
    ) -> None:
        super().__init__()
        parts = {"gate": intermediate_size, "up": intermediate_size}
        first, second = places
        self.gate_up = make.linear(hidden_size, parts, bias=bias, gated=True, place=first, name=f"{name}.gate_up")
        self.down = make.linear(intermediate_size, {"": hidden_size}, bias=bias, place=second, name=f"{name}.down")

    def forward(self, x: Any, residual: Tensor | None = None) -> Tensor:
        """[T, H] of x [T, H], which may also be what a norm that feeds `gate_up` gave; + residual [T, H], which may be
        overwritten."""
        return self.down.forward(self.gate_up.gated(x, self.down), residual)
