"""How a linear layer keeps and multiplies its weights. One file is one scheme; `scheme` says what a scheme is."""

from batchinfer.quant.scheme import LinearScheme, LinearWeights, resolve_scheme
from batchinfer.quant.shape import Basis, LinearShape
from batchinfer.quant.stack import Stack
from batchinfer.quant.unquantized import Unquantized

__all__ = ["Basis", "LinearScheme", "LinearShape", "LinearWeights", "Stack", "Unquantized", "resolve_scheme"]
