"""Models: one file is one family. `registry.load_model` builds one from opened files."""

from batchinfer.models.base import CausalLM, ModelFacts
from batchinfer.models.registry import load_model

__all__ = ["CausalLM", "ModelFacts", "load_model"]
