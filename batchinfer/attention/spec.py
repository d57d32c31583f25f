"""What a layer's attention is. A model states one per layer; layers with equal windows share block tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    scale    scores are q.k * scale
    window   a query sees its own position and the window - 1 before it; None sees all
    softcap  scores become softcap * tanh(scores / softcap)
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
