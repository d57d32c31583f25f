"""Checkpoints into parameters: explicit name rules, strict both ways (`rules`), and the copying (`loading`)."""

from batchinfer.weights.loading import Loadable, RowSink, equal_values, load_weights
from batchinfer.weights.rules import Ignore, Part, Rule, WeightError, stored_parts

__all__ = [
    "Ignore",
    "Loadable",
    "Part",
    "RowSink",
    "Rule",
    "WeightError",
    "equal_values",
    "load_weights",
    "stored_parts",
]
