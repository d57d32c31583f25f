"""What happens to queries and keys between the product that gives them and attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Turning:
    """Norms of each head (`reference.rms_norm`), then rotation (`reference.rope`).

    cos, sin            float32 [T, R / 2] for the tokens' positions, or None: no rotation
    q_weight, k_weight  [D] in q's dtype, the weights of the norms of each head, or None: no norms
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
