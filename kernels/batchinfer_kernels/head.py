"""The LM head: logits float32 of hidden states, or only which token has the largest; the specification in torch.

Legend: T rows, H hidden, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [T, V] (float64 of float64) of x [T, H] weight [V, H]^T, added in that type whatever x and weight are."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) @ weight.to(wide).T


def argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of `logits`: (int64 [T], the id of each row's largest, of equal ones the lowest; bool [T], whether all of the row
    are finite)."""
    found = logits(x, weight)
    return found.argmax(-1), found.isfinite().all(-1)
