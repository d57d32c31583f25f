"""What a scheme is told of a linear layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """y [T, N] = x [T, K] W^T.

    in_features    K
    out_features   N
    num_sensitive  the last output features whose errors count for more: a scheme that lowers precision keeps those
    gated          N is [gate | up], and only `gated` is asked for
    """

    in_features: int
    out_features: int
    num_sensitive: int = 0
    gated: bool = False
