"""Latent attention and its store in the interpreter: against the reference, and against what is not absorbed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batchinfer_kernels import mla, reference
from batchinfer_kernels.triton import mla_heads
from batchinfer_kernels.triton.attention import TilePlan
from batchinfer_kernels.triton.mla import store
from batchinfer_kernels.turning import Turning
from torch import Tensor

from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import StepBatch
from batchinfer.attention.triton import TritonLatentAttention
from batchinfer.errors import ConfigError
from tests.kernels.triton.accuracy import check_close
from tests.kernels.triton.device import DEVICE, HOST, ON_GPU, ROWS, WIDE
from tests.kernels.triton.paged import BLOCK, SPLIT, batch_of, normal

RANK, TURNED, SCALE = 32, 16, 0.2
TABLE = [7, 3, 12, 0, 9, 4, 1, 11, 5, 2]


class Latents:
    """A backend with a cache of its own, full of NaN."""

    def __init__(self, heads: int, dtype: torch.dtype = WIDE, rank: int = RANK, turned: int = TURNED) -> None:
        self.heads, self.rank, self.turned, self.dtype = heads, rank, turned, dtype
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=1, head_dim=rank + turned, scale=SCALE, latent_rank=rank
        )
        self.backend = TritonLatentAttention(
            self.spec, block_size=BLOCK, split_size=SPLIT, device=DEVICE, kv_dtype=dtype
        )
        self.cache, same = self.backend.new_caches(60)
        assert same is self.cache
        self.cache.fill_(torch.nan)

    def inputs(self, length: int, seed: int = 0) -> list[Tensor]:
        """Queries, latents and rotated parts; the latter two parts of one product."""
        both = normal(length, self.rank + self.turned, seed=seed + 1, dtype=self.dtype)
        q = normal(length, self.heads, self.rank + self.turned, seed=seed, dtype=self.dtype)
        return [q, *both.split([self.rank, self.turned], -1)]

    def run(self, inputs: list[Tensor], start: list[int], lengths: list[int], tables: list[list[int]]) -> Tensor:
        plan = self.plan(batch_of(start, lengths, tables))
        q, latents, rotated = inputs
        return self.backend.run(q, rotated[:, None], latents[:, None], self.cache, self.cache, plan, spec=self.spec)

    def plan(self, batch: StepBatch) -> TilePlan:
        with HOST:  # where plans are made
            return self.backend.plan(batch)

    def in_steps(self, inputs: list[Tensor], steps: list[int]) -> Tensor:
        outputs, start = [], 0
        for tokens in steps:
            at = [x[start : start + tokens] for x in inputs]
            outputs.append(self.run(at, [start], [tokens], [TABLE]))
            start += tokens
        return torch.cat(outputs)

    def expected(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        splits = -(-len(q) // SPLIT)
        at = {"rank": self.rank, "split_size": SPLIT, "scale": SCALE}
        cache, positions, table = self.cache.to(dtype), torch.arange(len(q)), torch.tensor(TABLE)
        parts = [mla.split_attention(q, cache, table, positions, split=s, **at) for s in range(splits)]
        return reference.merge_splits([out for out, _ in parts], [lse for _, lse in parts])


@pytest.mark.parametrize(
    "heads, dtype, rank, turned, steps",
    [
        (16, WIDE, RANK, TURNED, [19]),
        (6, WIDE, RANK, TURNED, [33]),
        (40, torch.float16, RANK, TURNED, [16, 1]),
        (128, torch.float16, 512, 64, [1, 1, 1]),
    ],
)
def test_against_the_reference(heads: int, dtype: torch.dtype, rank: int, turned: int, steps: list[int]) -> None:
    latents = Latents(heads, dtype, rank, turned)
    inputs = latents.inputs(sum(steps))
    found = latents.in_steps(inputs, steps)
    rows = torch.cat(inputs[1:], -1)
    at = torch.arange(len(rows))
    assert torch.equal(latents.cache[torch.tensor(TABLE)[at // BLOCK], at % BLOCK], rows)
    check_close(
        found,
        lambda as_type: latents.expected(as_type(inputs[0]), as_type(torch.empty(0)).dtype),
        ulps=2.0,
    )


def test_absorbed_attention_is_that_of_the_heads_own_keys_and_values() -> None:
    heads, plain, length = 4, 8, 19
    up, down = normal(heads, plain, RANK, seed=5).double(), normal(heads, plain, RANK, seed=6).double()
    dtype = torch.float16 if ON_GPU else torch.float32
    latents = Latents(heads, dtype)
    q, latent, turned = latents.inputs(length)
    q_plain = normal(length, heads, plain, seed=7).double()
    q = torch.cat((torch.einsum("thp,hpc->thc", q_plain, up).to(dtype), q[..., RANK:]), -1)
    found = torch.einsum("thc,hpc->thp", latents.in_steps([q, latent, turned], [length]).double(), down)
    keys, values = (torch.einsum("sc,hpc->shp", latent.double(), x) for x in (up, down))
    scores = torch.einsum("thp,shp->hts", q_plain, keys)
    scores = SCALE * (scores + torch.einsum("thr,sr->hts", q[..., RANK:].double(), turned.double()))
    weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    assert (found - torch.einsum("hts,shp->thp", weights, values)).abs().max() < (0.1 if ON_GPU else 1e-4)


def test_a_sequence_does_not_depend_on_its_batch_or_its_chunks() -> None:
    length = 19
    inputs = Latents(16).inputs(length)
    whole = Latents(16).in_steps(inputs, [length])
    for steps in ([16, 3], [1, 17, 1]):
        assert torch.equal(Latents(16).in_steps(inputs, steps), whole), steps
    latents = Latents(16)
    others = latents.inputs(5, seed=9)
    among = latents.run(
        [torch.cat(pair) for pair in zip(others, inputs, strict=True)],
        [0, 0],
        [5, length],
        [[40, 41], [20 + block for block in TABLE]],
    )
    assert torch.equal(among[5:], whole)


def test_a_shared_split_changes_no_bytes() -> None:
    latents = Latents(16)
    inputs = latents.inputs(SPLIT + 1)
    latents.run([x[:SPLIT] for x in inputs], [0], [SPLIT], [[0, 1, 2, 3]])
    last = [x[SPLIT:].repeat(5, *[1] * (x.dim() - 1)) for x in inputs]
    out = latents.run(last, [SPLIT] * 5, [1] * 5, [[0, 1, 2, 3, 10 + i] for i in range(5)])
    assert out.isfinite().all() and all(torch.equal(row, out[0]) for row in out)


@pytest.mark.parametrize("where", [1, 2], ids=["latent", "rotated"])
def test_a_sick_token_is_kept_from_those_before_it(where: int) -> None:
    length, sick = 21, 18
    latents = Latents(16)
    inputs = latents.inputs(length)
    healthy = latents.in_steps(inputs, [length])
    inputs[where][sick, 5] = torch.inf
    found = Latents(16).in_steps(inputs, [length])
    assert torch.equal(found[:sick], healthy[:sick])
    assert found[sick:].isnan().all()


@pytest.mark.parametrize("dtype", ROWS)
def test_the_store_norms_latents_turns_the_rest_and_clears_fresh_blocks(dtype: torch.dtype) -> None:
    latents = Latents(16, dtype)
    _, latent, turned = latents.inputs(7)
    weight = torch.rand(RANK).to(dtype)
    angles = torch.arange(7)[:, None] * torch.rand(TURNED // 2)
    cos, sin = angles.cos(), angles.sin()
    plan = latents.plan(batch_of([2], [7], [[1, 0, 2]]))
    store(latent, turned, latents.cache, plan, Turning(cos=cos, sin=sin, k_weight=weight, eps=1e-6))
    at = torch.arange(2, 9)
    found = latents.cache[torch.tensor([1, 0, 2])[at // BLOCK], at % BLOCK]
    check_close(found[:, :RANK], lambda as_type: reference.rms_norm(as_type(latent), as_type(weight), 1e-6))

    def rotated(as_type):  # type: ignore[no-untyped-def]
        x = as_type(turned)[:, None]
        return reference.rope(x, x, cos, sin)[0][:, 0]

    check_close(found[:, RANK:], rotated)
    right = torch.full_like(latents.cache, torch.nan)
    mla.write(latent, turned, right, plan.slots.long(), plan.fresh_blocks.long())
    assert torch.equal(latents.cache.isnan(), right.isnan())
    assert (latents.cache[2, 1:] == 0).all()


def test_the_store_leaves_out_tokens_without_a_slot() -> None:
    latents = Latents(16)
    _, latent, turned = latents.inputs(3)
    plan = latents.backend.plan(batch_of([0], [3], [[0]]))
    around = torch.full((61, BLOCK, RANK + TURNED), torch.nan)  # a block more, before the cache
    store(latent, turned, around[1:], replace(plan, slots=torch.tensor([0, -1, 2], dtype=torch.int32)))
    stored = around[1, [0, 2]]
    assert torch.equal(stored, torch.cat((latent, turned), -1)[[0, 2]])
    around[1, [0, 2]] = torch.nan
    around[1, 3] = torch.nan  # cleared, as the end of a fresh block
    assert around.isnan().all()


def test_sizes_that_tiles_can_not_have_are_refused() -> None:
    for rank, turned, what in (
        (48, 16, "latents have 48"),
        (8, 16, "latents have 8"),
        (1024, 16, "latents have 1024"),
        (32, 8, "rotated parts of keys have 8"),
        (32, 512, "rotated parts of keys have 512"),
    ):
        with pytest.raises(ConfigError, match=rf"kernels triton can't be used here: {what} numbers, .*; use .* cpu"):
            Latents(4, rank=rank, turned=turned)


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("pairs", [True, False])
def test_absorbing_and_expanding_against_the_reference(dtype: torch.dtype, pairs: bool) -> None:
    """Tokens of a block and one more, which lie apart; outputs and depths that are no multiples of a block."""
    tokens, heads, plain, value = 65, 3, 24, 20
    both = normal(tokens, heads * (plain + TURNED) + 8, seed=1, dtype=dtype)
    q = both[:, : heads * (plain + TURNED)].view(tokens, heads, plain + TURNED)
    up, down = normal(heads, 136, plain, seed=2, dtype=dtype), normal(heads, value, 136, seed=3, dtype=dtype)
    angles = torch.arange(tokens)[:, None] * torch.rand(TURNED // 2)
    cos, sin = angles.cos(), angles.sin()
    found = mla_heads.absorb(q, up, cos, sin, pairs=pairs)
    check_close(found, lambda as_type: mla.absorb(as_type(q), as_type(up), cos, sin, pairs=pairs))
    for first, last in ((0, 1), (3, 40), (64, 65)):
        part = mla_heads.absorb(q[first:last], up, cos[first:last], sin[first:last], pairs=pairs)
        assert torch.equal(part, found[first:last])
    latents = normal(tokens, heads, 136, seed=4, dtype=dtype)
    found = mla_heads.expand(latents, down)
    check_close(found, lambda as_type: mla.expand(as_type(latents), as_type(down)))
    assert torch.equal(mla_heads.expand(latents[7:9], down), found[7:9])
