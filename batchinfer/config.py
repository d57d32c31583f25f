"""Frozen options of the engine. What the user wrote (the job file) is `job.spec`; resolved facts are other types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. "auto" and None are resolved when it is built, from facts.

    model               Hugging Face folder, .gguf file, hub id, or `fake://...` (see runner.fake)
    max_model_len       None: the model's own limit
    kv_cache_memory     bytes, or "auto"
    num_threads         CPU threads of this engine; None: all cores of this process
    block_size          tokens in a KV block
    split_size          tokens in a KV split of attention; fixes the order of additions, so it is semantic
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    deterministic: bool = True
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | Literal["auto"] = "auto"
    max_num_batched_tokens: int | Literal["auto"] = "auto"
    kv_cache_memory: int | Literal["auto"] = "auto"
    enable_prefix_caching: bool = True
    block_size: int = 16
    split_size: int = 256
    seed: int | None = None
    num_threads: int | None = None
