"""Layers: what owns parameters and calls the operations of the kernel table. Sharding will live here too."""

from batchinfer.layers.embedding import Embedding, LMHead
from batchinfer.layers.experts import Router, SparseMLP
from batchinfer.layers.latent import LatentUp
from batchinfer.layers.linear import Linear
from batchinfer.layers.maker import LayerMaker
from batchinfer.layers.mlp import GatedMLP
from batchinfer.layers.norm import RMSNorm
from batchinfer.layers.rope import Rope

__all__ = [
    "Embedding",
    "GatedMLP",
    "LMHead",
    "LatentUp",
    "LayerMaker",
    "Linear",
    "RMSNorm",
    "Rope",
    "Router",
    "SparseMLP",
]
