"""Checkpoints into parameters: explicit name rules, strict both ways (`rules`), and the copying (`loading`)."""

from batchinfer.weights.loading import Fill, Loadable, RowSink, equal_values, fill_weights, load_weights
from batchinfer.weights.rules import Ignore, Part, Rule, WeightError, stored_parts

__all__ = [
    "Fill",
    "Ignore",
    "Loadable",
    "Part",
    "RowSink",
    "Rule",
    "WeightError",
    "equal_values",
    "fill_weights",
    "load_weights",
    "stored_parts",
]
