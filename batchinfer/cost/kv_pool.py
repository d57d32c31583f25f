"""What a pool of KV blocks must hold at least. Planning a job asks as well as the engine."""

from __future__ import annotations

from batchinfer.errors import ConfigError


def check_pool(num_blocks: int, source: str, *, block_bytes: int, block_size: int, max_model_len: int) -> None:
    """Raises ConfigError where so many blocks, a number that comes from `source`, can't hold one sequence of
    max_model_len tokens.

    block_bytes   of one block in every layer
    block_size    tokens in a block
    """
    per_sequence = -(-max_model_len // block_size)
    if num_blocks < per_sequence:
        need = per_sequence * block_bytes
        raise ConfigError(
            f"KV cache of {num_blocks * block_bytes / 2**20:.0f} MiB ({source}) can't hold one sequence of "
            f"engine.max_model_len {max_model_len} tokens, which takes {need / 2**20:.0f} MiB; lower "
            "engine.max_model_len or raise engine.kv_cache_memory"
        )
