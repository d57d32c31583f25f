"""Frozen options of the engine. What the user wrote (the job file) is `job.spec`; resolved facts are other types."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from batchinfer.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# The least value of each whole number; "auto" or None where the field's default is that.
_LEAST = {
    "tensor_parallel_size": 1,
    "max_model_len": 2,  # a prompt and a new token
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "kv_cache_memory": 1,
    "block_size": 1,
    "split_size": 1,
    "num_threads": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. "auto" and None are resolved when it is built, from facts. Raises ConfigError on
    what can't be right for any model; what a model or machine can't do is said when the engine is built.

    model               Hugging Face folder, .gguf file, hub id, or `fake://...` (see runner.fake)
    max_model_len       None: the model's own limit
    kv_cache_memory     bytes, or "auto"
    gpu_memory_utilization   the part of a GPU's memory that the engine may take in all, where kv_cache_memory is "auto"
    num_threads         CPU threads of this engine; None: all cores of this process
    block_size          tokens in a KV block
    split_size          tokens in a KV split of attention, a multiple of block_size; fixes the order of additions, so it
                        is semantic
    kernels             native (C), cpu (plain torch), reference (its specification), triton (NVIDIA GPUs); see
                        `arithmetic`. Over an int8 KV cache native also rounds queries and
                        weights (`kv8.split_attention`), the others do not
    instruction_level   of a job that was frozen on some machine: one that has another is refused; None: any
    deterministic       False allows kernels whose sums follow the number of rows: Triton's do then
    cuda_graphs         whether steps without prompts are launched as CUDA graphs; "auto": on GPUs with Triton's kernels
    async_scheduling    whether a step is planned and launched while the GPU is at work on the one before it, which
                        changes no token; "auto": with Triton's kernels
    seed                of random streams, for whoever makes requests (`LLM`, a job); the engine itself has none
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    deterministic: bool = True
    cuda_graphs: bool | Literal["auto"] = "auto"
    async_scheduling: bool | Literal["auto"] = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | Literal["auto"] = "auto"
    max_num_batched_tokens: int | Literal["auto"] = "auto"
    kv_cache_memory: int | Literal["auto"] = "auto"
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    block_size: int = 16
    split_size: int = 256
    kernels: str = "auto"
    instruction_level: str | None = None
    seed: int | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if name in _LEAST and value != option.default:
                _check_number(name, value, "" if isinstance(option.default, int) else f"{option.default!r} or ")
            elif isinstance(option.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"engine.{name} must be true or false, got {value!r}")
        for name in ("cuda_graphs", "async_scheduling"):
            value = getattr(self, name)
            if value != "auto" and not isinstance(value, bool):
                raise ConfigError(f"engine.{name} must be 'auto', true or false, got {value!r}")
        share: Any = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
            raise ConfigError(f"engine.gpu_memory_utilization must be above 0 and at most 1, got {share!r}")
        if self.split_size % self.block_size:
            whole = -(-self.split_size // self.block_size) * self.block_size
            raise ConfigError(
                f"engine.split_size {self.split_size} must be a multiple of engine.block_size {self.block_size}; use "
                f"split_size {whole}, or another block_size"
            )

    def check_kernels(self, kernels: str) -> None:
        """Raises ConfigError for an option that needs other kernels than these, which are resolved ("fake": those of a
        model that is one)."""
        for name in ("cuda_graphs", "async_scheduling"):
            if getattr(self, name) is True and kernels != "triton":
                raise ConfigError(
                    f"engine.{name}: true needs engine.kernels triton, here they are {kernels}; leave it out"
                )


def _check_number(name: str, value: Any, otherwise: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"engine.{name} must be {otherwise}a whole number, got {value!r}")
    if value < _LEAST[name]:
        raise ConfigError(f"engine.{name} must be at least {_LEAST[name]}, got {value}")
