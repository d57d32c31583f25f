"""How many KV blocks an engine gets, and the tensors that hold them.

The number of blocks changes no bytes of any completion, only speed, so it may follow free memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchinfer.attention.backend import AttentionBackend, kv_bytes
from batchinfer.attention.context import LayerCache
from batchinfer.attention.spec import AttentionSpec
from batchinfer.cost import check_pool
from batchinfer.errors import OutOfMemory
from batchinfer.runner.host import free_host_memory
from batchinfer.types.step import KVGroup

# Of the memory that is free once the model is loaded, the part that "auto" takes; the rest is for activations, the
# tokenizer, the job's own processes and the operating system's file cache.
FREE_SHARE = 0.6
# On the host, where the pool is in everybody's way: tokens that "auto" plans for a sequence. Rows run in the order
# of their prefixes, so a cache of what nobody will ask for again gains nothing; a batch of longer sequences has fewer
# of them at a time.
HOST_AUTO_LEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Which layers share block tables: `group_of_layer`, and the window of each group."""

    group_of_layer: tuple[int, ...]
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, specs: Sequence[AttentionSpec]) -> KVLayout:
        windows = tuple(dict.fromkeys(spec.window for spec in specs))
        return cls(group_of_layer=tuple(windows.index(spec.window) for spec in specs), windows=windows)


def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in every layer of every group."""
    return block_size * sum(spec.rows_per_token * kv_bytes(spec.head_dim, dtype) for spec in specs)


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated: of the GPU, or of the host within this process's limits."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory()


def resolve_num_blocks(
    kv_cache_memory: int | str,
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    free_bytes: int,
    share: float,
    auto_len: int | None = None,
    what: str = "free memory",
) -> tuple[int, str]:
    """(blocks of each group, where the number comes from).

    "auto" is what max_num_seqs sequences of max_model_len tokens can use, or of `auto_len` tokens where that is less
    (but always one whole sequence), at most `share` of the free memory, which is `what` in words. Raises ConfigError
    where not even one sequence of max_model_len tokens fits.
    """
    per_sequence = -(-max_model_len // block_size)
    if kv_cache_memory == "auto":
        planned = max_model_len if auto_len is None else min(auto_len, max_model_len)
        wanted = max(per_sequence, -(-planned // block_size) * max_num_seqs)
        affordable = int(free_bytes * share) // block_bytes
        num_blocks, source = min(wanted, affordable), f"auto: {share:.0%} of {free_bytes / 2**30:.1f} GiB {what}"
        if wanted <= affordable:
            length = "max_model_len" if planned == max_model_len else f"{planned:,}"
            source = f"auto: max_num_seqs sequences of {length} tokens"
    else:
        num_blocks, source = int(kv_cache_memory) // block_bytes, "engine.kv_cache_memory"
    check_pool(num_blocks, source, block_bytes=block_bytes, block_size=block_size, max_model_len=max_model_len)
    return num_blocks, source


def allocate(
    specs: Sequence[AttentionSpec],
    layout: KVLayout,
    backends: Sequence[AttentionBackend],
    *,
    num_blocks: int,
    block_size: int,
) -> tuple[tuple[LayerCache, ...], tuple[KVGroup, ...]]:
    """Caches of all layers, and the groups. `backends` are by group."""
    layers = []
    try:
        for spec, group in zip(specs, layout.group_of_layer, strict=True):
            k_cache, v_cache = backends[group].new_caches(num_blocks)
            in_c = backends[group].in_c(k_cache, v_cache, spec)
            layers.append(LayerCache(group=group, spec=spec, k_cache=k_cache, v_cache=v_cache, in_c=in_c))
    except (RuntimeError, MemoryError) as error:
        total = num_blocks * bytes_per_block(specs, block_size, backends[0].kv_dtype)
        raise OutOfMemory(
            f"can't allocate {total / 2**30:.1f} GiB of KV cache; lower engine.kv_cache_memory ({error})"
        ) from error
    groups = tuple(KVGroup(num_blocks=num_blocks, block_size=block_size, window=window) for window in layout.windows)
    return tuple(layers), groups
