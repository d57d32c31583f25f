"""The gated MLP: one product for gate and up, one for down."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from batchinfer.layers.maker import LayerMaker


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), of hidden_size by intermediate_size; `name`: its name in the model."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, make: LayerMaker, *, name: str, bias: bool = False
    ) -> None:
        super().__init__()
        parts = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up = make.linear(hidden_size, parts, bias=bias, gated=True, name=f"{name}.gate_up")
        self.down = make.linear(intermediate_size, {"": hidden_size}, bias=bias, name=f"{name}.down")

    def forward(self, x: Any, residual: Tensor | None = None) -> Tensor:
        """[T, H] of x [T, H], which may also be what a norm that feeds `gate_up` gave; + residual [T, H], which may be
        overwritten."""
        return self.down.forward(self.gate_up.gated(x, self.down), residual)
