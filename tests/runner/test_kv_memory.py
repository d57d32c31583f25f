"""How many blocks there are, and from what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import resolve

from batchinfer.arithmetic import KV_CACHE_DTYPES
from batchinfer.attention.backend import make_attention
from batchinfer.attention.spec import AttentionSpec
from batchinfer.cost import ModelShape
from batchinfer.errors import ConfigError
from batchinfer.runner.kv_memory import KVLayout, allocate, bytes_per_block, free_memory, resolve_num_blocks
from batchinfer.runner.sequence_state import BlockRow

SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
SLIDING = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, window=8)


def blocks(kv_cache_memory: int | str = "auto", **options: Any) -> tuple[int, str]:
    settings: dict[str, Any] = {
        "block_bytes": 1000,
        "block_size": 16,
        "max_model_len": 100,
        "max_num_seqs": 5,
        "free_bytes": 100_000,
        "share": 0.5,
    }
    return resolve_num_blocks(kv_cache_memory, **settings | options)


def test_auto_is_what_can_be_used_within_a_share_of_free_memory() -> None:
    assert blocks() == (35, "auto: max_num_seqs sequences of max_model_len tokens")
    assert blocks(max_num_seqs=50)[0] == 50
    assert "50% of" in blocks(max_num_seqs=50)[1]
    assert blocks(8000) == (8, "engine.kv_cache_memory")


def test_auto_plans_for_shorter_sequences_where_told_and_always_for_a_whole_one() -> None:
    assert blocks(auto_len=40) == (15, "auto: max_num_seqs sequences of 40 tokens")
    assert blocks(auto_len=8)[0] == 7
    assert blocks(auto_len=500) == blocks()


def test_too_little_for_one_sequence_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"lower engine.max_model_len or raise engine.kv_cache_memory"):
        blocks(6999)
    assert blocks(7000)[0] == 7


def test_layers_are_grouped_by_window_and_share_nothing_else() -> None:
    specs = [SPEC, SLIDING, SPEC]
    layout = KVLayout.of(specs)
    assert layout == KVLayout(group_of_layer=(0, 1, 0), windows=(None, 8))
    assert bytes_per_block(specs, 16, torch.bfloat16) == 3 * 2 * 3 * 64 * 16 * 2
    assert bytes_per_block(specs, 16, torch.int8) == 3 * 2 * 3 * (64 + 4) * 16
    device, ops = torch.device("cpu"), resolve("cpu")
    backends = [
        make_attention(spec, ops, kv_dtype=torch.bfloat16, block_size=16, split_size=256, device=device)
        for spec in specs[:2]
    ]
    layers, groups = allocate(specs, layout, backends, num_blocks=5, block_size=16)
    assert [g.window for g in groups] == [None, 8]
    assert {layer.k_cache.shape for layer in layers} == {(5, 3, 16, 64)}
    assert {layer.v_cache.dtype for layer in layers} == {torch.bfloat16}
    assert len({layer.v_cache.data_ptr() for layer in layers}) == 3


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("num_kv_heads", [3, 9])
def test_a_plan_says_the_bytes_that_blocks_take(dtype: str, num_kv_heads: int) -> None:
    config = {
        "num_hidden_layers": 5,
        "num_attention_heads": 9,
        "num_key_value_heads": num_kv_heads,
        "hidden_size": 9 * 64,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    specs = [replace(SPEC, num_kv_heads=num_kv_heads)] * 5
    shape = ModelShape.from_config(config)
    assert shape is not None and 16 * shape.kv_bytes_per_token(dtype) == bytes_per_block(
        specs, 16, getattr(torch, dtype)
    )


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_latents_have_one_row_for_a_token_in_one_cache(kernels: str) -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    specs = [AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=40, scale=1.0, latent_rank=32)] * 3
    layout = KVLayout.of(specs)
    assert layout == KVLayout(group_of_layer=(0, 0, 0), windows=(None,))
    device, ops = torch.device("cpu"), resolve(kernels)
    backend = make_attention(specs[0], ops, kv_dtype=torch.bfloat16, block_size=16, split_size=256, device=device)
    layers, _ = allocate(specs, layout, [backend], num_blocks=5, block_size=16)
    assert all(layer.v_cache is layer.k_cache and layer.in_c is None for layer in layers)
    block_bytes = bytes_per_block(specs, 16, torch.bfloat16)
    assert sum(layer.k_cache.nbytes for layer in layers) == 5 * block_bytes == 5 * 3 * 16 * 40 * 2
    shape = ModelShape.from_config(config)
    assert shape is not None and 16 * shape.kv_bytes_per_token("bfloat16") == block_bytes


def test_free_memory_is_a_sensible_number() -> None:
    assert 2**20 < free_memory(torch.device("cpu")) < 2**46


def test_block_row_follows_growth_and_replacement() -> None:
    row, table = BlockRow(), [4, 2]
    assert row.update(table).tolist() == [4, 2]
    table.append(9)
    assert row.update(table).tolist() == [4, 2, 9]
    table.extend(range(40))
    assert row.update(table).tolist() == table
    table[1] = 77  # the same length, another block: pre-empted and back
    assert row.update(table).tolist() == table
    assert row.update(tuple(table[:2])).tolist() == table[:2]
    assert row.update([4, 77, 1]).tolist() == [4, 77, 1]
