"""What a layer's attention is. A model states one per layer; layers with equal windows share block tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention of one layer, or latent attention (`batchinfer_kernels.mla`).

    scale        scores are q.k * scale
    window       a query sees its own position and the window - 1 before it; None sees all
    softcap      scores become softcap * tanh(scores / softcap)
    latent_rank  of latent attention: a token has one row of head_dim numbers in the cache, for all heads; it is their
                 key, and its first latent_rank numbers are their value. None: each KV head has keys and values
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    latent_rank: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.latent_rank is not None:
            assert self.num_kv_heads == 1 and 0 < self.latent_rank < self.head_dim
            assert self.window is None and self.softcap is None

    @property
    def rows_per_token(self) -> int:
        """Rows of head_dim numbers that a token takes in the cache."""
        return 2 * self.num_kv_heads if self.latent_rank is None else 1
