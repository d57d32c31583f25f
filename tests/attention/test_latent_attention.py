"""Latent attention in plain torch: against its specification, and a row's bytes in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batchinfer_kernels import mla, reference
from batchinfer_kernels.probe import RowRule, find_row_rule
from batchinfer_kernels.table import resolve
from torch import Tensor

from batchinfer.attention.backend import TiledLatentAttention, make_attention
from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import StepBatch, product_tiles

RANK, TURNED, HEADS, SCALE = 32, 8, 3, 0.2
BLOCK, SPLIT, NUM_BLOCKS = 4, 16, 60
TABLE = [7, 3, 12, 0, 9, 4, 1, 11, 5, 2]
SPEC = AttentionSpec(num_heads=HEADS, num_kv_heads=1, head_dim=RANK + TURNED, scale=SCALE, latent_rank=RANK)
SIZES = {"block_size": BLOCK, "split_size": SPLIT, "device": torch.device("cpu")}


class Latents:
    """A backend with a cache of its own, full of NaN."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        tiles = {"head_dim": RANK + TURNED, "group": HEADS, "num_kv_heads": 1, "split_size": SPLIT, "block_size": BLOCK}
        found = find_row_rule([(64, 64)], attention=lambda rule: product_tiles(rule=rule, **tiles))
        assert found.holds
        self.backend = TiledLatentAttention(SPEC, resolve("cpu", rows=found.rule), kv_dtype=dtype, **SIZES)
        self.cache, same = self.backend.new_caches(NUM_BLOCKS)
        assert same is self.cache
        self.cache.fill_(torch.nan)

    def run(self, inputs: list[Tensor], starts: list[int], lengths: list[int], tables: list[list[int]]) -> Tensor:
        width = max(map(len, tables))
        padded = np.array([table + [0] * (width - len(table)) for table in tables])
        batch = StepBatch(starts=np.array(starts), lengths=np.array(lengths), block_tables=padded)
        q, rotated, latents = inputs
        return self.backend.run(q, rotated, latents, self.cache, self.cache, self.backend.plan(batch), spec=SPEC)

    def in_steps(self, inputs: list[Tensor], steps: list[int]) -> Tensor:
        outputs, start = [], 0
        for tokens in steps:
            outputs.append(self.run([x[start : start + tokens] for x in inputs], [start], [tokens], [TABLE]))
            start += tokens
        return torch.cat(outputs)


def inputs_of(length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, RANK + TURNED), (1, TURNED), (1, RANK))
    return [torch.randn(length, *shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [[1], [16], [17], [37], [30, 1, 1]])
def test_against_the_specification(dtype: torch.dtype, steps: list[int]) -> None:
    latents, length = Latents(dtype), sum(steps)
    inputs = inputs_of(length)
    found = latents.in_steps(inputs, steps)
    rows = torch.cat((inputs[2], inputs[1]), -1)[:, 0].to(dtype)
    at = torch.arange(length)
    assert torch.equal(latents.cache[torch.tensor(TABLE)[at // BLOCK], 0, at % BLOCK], rows)
    cache, table = latents.cache[:, 0].double(), torch.tensor(TABLE)
    parts = [
        mla.split_attention(inputs[0].double(), cache, table, at, rank=RANK, split=split, split_size=SPLIT, scale=SCALE)
        for split in range(-(-length // SPLIT))
    ]
    expected = reference.merge_splits([out for out, _ in parts], [lse for _, lse in parts])
    assert found.shape == expected.shape == (length, HEADS, RANK)
    assert (found - expected).abs().max() < 1e-5


def test_a_sequence_does_not_depend_on_its_batch_or_its_chunks() -> None:
    length = 37
    inputs = inputs_of(length)
    whole = Latents().in_steps(inputs, [length])
    for steps in ([16, 16, 5], [1, 17, 18, 1], [36, 1], [1] * length):
        assert torch.equal(Latents().in_steps(inputs, steps), whole), steps
    others = inputs_of(6, seed=9)
    together = [torch.cat(pair) for pair in zip(others, inputs, strict=True)]
    tables = [[40, 41], [20 + block for block in TABLE]]
    assert torch.equal(Latents().run(together, [0, 0], [6, length], tables)[6:], whole)


def test_a_split_that_is_shared_changes_no_bytes() -> None:
    latents, inputs = Latents(), inputs_of(SPLIT + 1)
    latents.run([x[:SPLIT] for x in inputs], [0], [SPLIT], [[0, 1, 2, 3]])
    last = [x[SPLIT:].repeat(5, 1, 1) for x in inputs]
    out = latents.run(last, [SPLIT] * 5, [1] * 5, [[0, 1, 2, 3, 10 + i] for i in range(5)])
    assert out.isfinite().all() and all(torch.equal(row, out[0]) for row in out)


@pytest.mark.parametrize("where", [1, 2], ids=["rotated", "latent"])
def test_a_sick_token_is_kept_from_those_before_it(where: int) -> None:
    length, sick = 21, 18
    inputs = inputs_of(length)
    healthy = Latents().in_steps(inputs, [length])
    inputs[where][sick, 0, 5] = torch.inf
    found = Latents().in_steps(inputs, [length])
    assert torch.equal(found[:sick], healthy[:sick])
    assert found[sick:].isnan().all()


@pytest.mark.parametrize("rule", [None, RowRule(min_rows=16, tile_rows=16)], ids=str)
def test_projections_of_heads_do_not_depend_on_the_number_of_tokens(rule: RowRule | None) -> None:
    """And are those of the specification; `pairs` are put into halves first."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(40, HEADS, 16 + TURNED, generator=generator)
    up, down = (torch.randn(HEADS, *shape, generator=generator) for shape in ((RANK, 16), (12, RANK)))
    angles = torch.arange(40)[:, None] * torch.rand(TURNED // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    ops = mla.make_latent_ops(rule or find_row_rule([(RANK, 16), (12, RANK)]).rule)
    absorbed = ops.absorb(q, up, cos, sin, pairs=True)
    expanded = ops.expand(absorbed[..., :RANK], down)
    for tokens in (1, 2, 3, 5, 17):
        found = ops.absorb(q[:tokens], up, cos[:tokens], sin[:tokens], pairs=True)
        assert torch.equal(found, absorbed[:tokens])
        assert torch.equal(ops.expand(found[..., :RANK], down), expanded[:tokens])
    exact = torch.einsum("thp,hcp->thc", q[..., :16].double(), up.double())
    assert (absorbed[..., :RANK] - exact).abs().max() < 1e-4
    assert (expanded - torch.einsum("thc,hvc->thv", exact, down.double())).abs().max() < 1e-3
    pairs = torch.complex(q[..., 16::2], q[..., 17::2]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(absorbed[..., RANK:], torch.cat((pairs.real, pairs.imag), -1), atol=1e-5)
    in_halves = torch.cat((q[..., :16], mla.halves(q[..., 16:])), -1)
    assert torch.equal(ops.absorb(in_halves, up, cos, sin, pairs=False), absorbed)


def test_which_backend_it_is() -> None:
    for kernels in ("reference", "cpu"):
        backend = make_attention(SPEC, resolve(kernels), kv_dtype=torch.bfloat16, **SIZES)
        assert isinstance(backend, TiledLatentAttention) and backend.kv_dtype == torch.bfloat16


@pytest.mark.parametrize("change", [{"num_kv_heads": 3}, {"latent_rank": 40}, {"window": 8}, {"softcap": 5.0}], ids=str)
def test_what_latent_attention_can_not_be(change: dict[str, float]) -> None:
    values = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 40, "scale": 1.0, "latent_rank": 32}
    with pytest.raises(AssertionError):
        AttentionSpec(**{**values, **change})  # type: ignore[arg-type]
