"""Offline batch LLM inference: a dataset of prompts in, the same dataset with completions out."""

__version__ = "0.1.0"
