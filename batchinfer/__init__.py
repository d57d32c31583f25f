"""Offline batch LLM inference: a dataset of prompts in, the same dataset with completions out.

Names are loaded when they are first used, so that `import batchinfer` loads neither torch nor dask.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.cluster.api import map as map
    from batchinfer.cluster.api import submit
    from batchinfer.engine.llm import LLM
    from batchinfer.job.spec import JobSpec
    from batchinfer.types.request import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.2.0"

_HOMES = {
    "LLM": "batchinfer.engine.llm",
    "SamplingParams": "batchinfer.types.request",
    "RequestOutput": "batchinfer.types.request",
    "CompletionOutput": "batchinfer.types.request",
    "JobSpec": "batchinfer.job.spec",
    "submit": "batchinfer.cluster.api",
    "map": "batchinfer.cluster.api",
}

# `map` is left out, so that a star import does not hide the builtin.
__all__ = ["LLM", "CompletionOutput", "JobSpec", "RequestOutput", "SamplingParams", "__version__", "submit"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchinfer' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
