"""Every kernel over shapes of real models, as work that can be timed: what it moves, what it computes, what comes out.

`cases` has them by name; benches that compare take theirs from the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from batchinfer_kernels import fp8, mxfp4, w4
from batchinfer_kernels.activation_formats import quantize
from batchinfer_kernels.sampling import Drawing
from batchinfer_kernels.triton import lm_head, mla_heads, routing, sampling
from batchinfer_kernels.triton import quantize as quantizing
from batchinfer_kernels.triton.activations import activation, activation_quantized
from batchinfer_kernels.triton.experts import block_size as experts_block
from batchinfer_kernels.triton.experts import combine, experts_linear
from batchinfer_kernels.triton.kv_store import int8_parts
from batchinfer_kernels.triton.linear import linear
from batchinfer_kernels.triton.linear_fp8 import linear_fp8
from batchinfer_kernels.triton.linear_int8 import linear_int8
from batchinfer_kernels.triton.linear_mxfp4 import linear_mxfp4
from batchinfer_kernels.triton.linear_w4 import linear_w4
from batchinfer_kernels.triton.norms import rms_norm, rms_norm_quantized
from torch import Tensor

from batchinfer.attention.spec import AttentionSpec
from batchinfer.attention.tiles import StepBatch
from batchinfer.attention.triton import TritonAttention, TritonLatentAttention
from batchinfer.testing.gpu.sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """run: once, with what came out. num_bytes: that must be read and written. operations: of matrix units, whose rate
    is `speed` times that of the dtype in which the device was measured."""

    run: Callable[[], Any]
    num_bytes: float
    operations: float = 0.0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """make: the work, with random operands on the device; `made` draws the same ones each time."""

    name: str
    make: Callable[[], Work]

    def made(self) -> Work:
        torch.manual_seed(0)
        return self.make()


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes work of sizes on a device; numbers are random, from a fixed seed."""

    sizes: Sizes
    device: torch.device

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.sizes.dtype, device=self.device).normal_(0.0, std)

    def bytes(self, *shape: int, most: int = 256) -> Tensor:
        return torch.randint(most, shape, dtype=torch.uint8, device=self.device)

    # ---------------------------------------------------------------- products: rows [T, K], weights [N, K]

    def plain(self, rows: int, features: int, depth: int, *, deterministic: bool = True) -> Work:
        x, weight = self.normal(rows, depth), self.normal(features, depth, std=depth**-0.5)
        return _product(lambda: linear(x, weight, deterministic=deterministic), x, weight)

    def torch_product(self, rows: int, features: int, depth: int) -> Work:
        """torch's own, which is what others use."""
        x, weight = self.normal(rows, depth), self.normal(features, depth, std=depth**-0.5)
        return _product(lambda: torch.nn.functional.linear(x, weight), x, weight)

    def int8(self, rows: int, features: int, depth: int) -> Work:
        x, x_scales = quantize(self.normal(rows, depth), "int8")
        weight, scales = quantize(self.normal(features, depth), "int8")
        dtype = self.sizes.dtype
        return _product(lambda: linear_int8(x, x_scales, weight, scales, dtype=dtype), x, weight, dtype, speed=2.0)

    def fp8(self, rows: int, features: int, depth: int, *, blocks: bool) -> Work:
        x, x_scales = quantize(self.normal(rows, depth), "fp8_groups" if blocks else "fp8")
        wide = self.normal(features, depth, std=depth**-0.5)
        weight, scales = fp8.quantize_blocks(wide) if blocks else quantize(wide, "fp8")
        dtype = self.sizes.dtype
        return _product(lambda: linear_fp8(x, x_scales, weight, scales, dtype=dtype), x, weight, dtype, speed=2.0)

    def w4(self, rows: int, features: int, depth: int) -> Work:
        group = 128 if depth % 128 == 0 else 32
        scales = torch.rand(depth // group, features, device=self.device).to(self.sizes.dtype) * depth**-0.5
        packed = w4.pack(self.bytes(features, depth, most=16), scales, None, group=group)
        x = self.normal(rows, depth)
        return _product(lambda: linear_w4(x, packed), x, packed.codes, x.dtype, features=features)

    def mxfp4(self, rows: int, features: int, depth: int) -> Work:
        scales = torch.full((features, depth // 32), 120, dtype=torch.uint8, device=self.device)
        packed = mxfp4.pack(self.bytes(features, depth // 32, 16), scales)
        x = self.normal(rows, depth)
        return _product(lambda: linear_mxfp4(x, packed), x, packed.codes, x.dtype, features=features)

    def experts(self, rows: int) -> Work:
        """A whole layer of experts: router, order, both products, activation, sum."""
        at, hidden, inner = self.sizes.experts, self.sizes.sparse.hidden_size, self.sizes.experts.intermediate_size
        x, gate = self.normal(rows, hidden), self.normal(at.num_experts, hidden, std=hidden**-0.5)
        up = self.normal(at.num_experts, 2 * inner, hidden, std=hidden**-0.5)
        down = self.normal(at.num_experts, hidden, inner, std=inner**-0.5)
        size = experts_block("plain", self.device)

        def chosen() -> tuple[Tensor, Tensor]:
            logits = lm_head.logits(x, gate).to(x.dtype)
            return routing.softmax_top_k(logits, at.top_k, renormalize=at.renormalize)

        def run() -> Tensor:
            weights, ids = chosen()
            aligned = routing.align(ids, at.num_experts, size)
            gated = activation(experts_linear(x, up, aligned), "silu")
            return combine(experts_linear(gated, down, aligned), weights, ids)

        _, ids = chosen()
        busy = int(torch.bincount(ids.flatten()).count_nonzero()) / at.num_experts  # the others are not read
        num_bytes = busy * (up.nbytes + down.nbytes) + gate.nbytes + 2 * x.nbytes
        return Work(run=run, num_bytes=num_bytes, operations=6.0 * rows * at.top_k * hidden * inner)

    # ---------------------------------------------------------------- rows

    def norm(self, rows: int, name: str | None) -> Work:
        width = self.sizes.dense.hidden_size
        x, residual, weight = self.normal(rows, width), self.normal(rows, width), self.normal(width)
        out_bytes = x.nbytes if name is None else x.numel()
        if name is None:
            return Work(run=lambda: rms_norm(x, weight, 1e-5, residual), num_bytes=3 * x.nbytes + out_bytes)
        return Work(run=lambda: rms_norm_quantized(x, weight, 1e-5, name, residual), num_bytes=3 * x.nbytes + out_bytes)

    def activation(self, rows: int, name: str | None) -> Work:
        gate_up = self.normal(rows, 2 * self.sizes.dense.intermediate_size)
        if name is None:
            return Work(run=lambda: activation(gate_up, "silu"), num_bytes=1.5 * gate_up.nbytes)
        num_bytes = gate_up.nbytes + gate_up.numel() // 2
        return Work(run=lambda: activation_quantized(gate_up, "silu", name), num_bytes=num_bytes)

    def quantize(self, rows: int, name: str) -> Work:
        x = self.normal(rows, self.sizes.dense.hidden_size)
        return Work(run=lambda: quantizing.quantize(x, name), num_bytes=x.nbytes + x.numel())

    # ---------------------------------------------------------------- the head, and tokens

    def head(self, rows: int, *, argmax: bool) -> Work:
        width, vocab = self.sizes.dense.hidden_size, self.sizes.dense.vocab_size
        x, weight = self.normal(rows, width), self.normal(vocab, width, std=width**-0.5)
        operations = 2.0 * rows * vocab * width
        if argmax:
            return Work(run=lambda: lm_head.argmax(x, weight), num_bytes=weight.nbytes, operations=operations)
        num_bytes = weight.nbytes + 4 * rows * vocab
        return Work(run=lambda: lm_head.logits(x, weight), num_bytes=num_bytes, operations=operations)

    def greedy(self, rows: int) -> Work:
        logits = self._logits(rows)
        return Work(run=lambda: sampling.greedy(logits), num_bytes=logits.nbytes)

    def sample(self, rows: int) -> Work:
        logits, device = self._logits(rows), self.device
        drawing = Drawing(
            keys=torch.arange(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            temperature=torch.full((rows,), 0.8, dtype=torch.float64, device=device),
            top_k=torch.full((rows,), 50, dtype=torch.int32, device=device),
            top_p=torch.full((rows,), 0.9, dtype=torch.float64, device=device),
            min_p=torch.zeros(rows, dtype=torch.float64, device=device),
        )
        return Work(run=lambda: sampling.sample(logits, drawing), num_bytes=logits.nbytes)

    def _logits(self, rows: int) -> Tensor:
        return torch.randn(rows, self.sizes.dense.vocab_size, device=self.device)

    # ---------------------------------------------------------------- attention

    def attention(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        *,
        shared: int = 0,
        kv_dtype: torch.dtype | None = None,
        deterministic: bool = True,
    ) -> Work:
        """One layer's, store and merge with it, for sequences with so many tokens behind them and so many now. The
        first `shared` tokens of all, whole blocks, lie in the same ones. The plan is made before."""
        at, dense = self.sizes, self.sizes.dense
        heads, kv_heads, head_dim = dense.num_heads, dense.num_kv_heads, dense.head_dim
        spec = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)
        backend = TritonAttention(
            spec,
            block_size=at.block_size,
            split_size=at.split_size,
            device=self.device,
            kv_dtype=kv_dtype or at.dtype,
            deterministic=deterministic,
        )
        batch, num_blocks = step_batch(starts, lengths, at.block_size, shared)
        caches = backend.new_caches(num_blocks)
        for cache in caches:
            _randomize(cache, head_dim)
        plan = backend.plan(batch)
        tokens = sum(lengths)
        q, k, v = (self.normal(tokens, count, head_dim) for count in (heads, kv_heads, kv_heads))
        block_bytes = sum(cache[0].nbytes for cache in caches)
        pairs = sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, lengths, strict=True))
        return Work(
            run=lambda: backend.run(q, k, v, *caches, plan, spec=spec),
            num_bytes=num_blocks * block_bytes + 2 * q.nbytes,
            operations=4.0 * heads * head_dim * pairs,
        )

    def latent(self, seqs: int, context: int) -> Work:
        """Latent attention of one layer, decoding."""
        at = self.sizes.latent
        width = at.row_size
        spec = AttentionSpec(
            num_heads=at.num_heads, num_kv_heads=1, head_dim=width, scale=at.scale, latent_rank=at.rank
        )
        backend = TritonLatentAttention(
            spec,
            block_size=self.sizes.block_size,
            split_size=self.sizes.split_size,
            device=self.device,
            kv_dtype=self.sizes.dtype,
        )
        batch, num_blocks = step_batch([context - 1] * seqs, [1] * seqs, self.sizes.block_size)
        caches = backend.new_caches(num_blocks)
        caches[0].normal_()
        plan = backend.plan(batch)
        q, latents, rotated = (
            self.normal(seqs, at.num_heads, width),
            self.normal(seqs, 1, at.rank),
            self.normal(seqs, 1, at.rotated_dim),
        )
        return Work(
            run=lambda: backend.run(q, rotated, latents, *caches, plan, spec=spec),
            num_bytes=seqs * context * width * caches[0].itemsize + 2 * q.nbytes,
            operations=2.0 * seqs * context * at.num_heads * (width + at.rank),
        )

    def latent_heads(self, rows: int) -> Work:
        """What stands around it: queries are absorbed, results made of latents."""
        at = self.sizes.latent
        q = self.normal(rows, at.num_heads, at.plain_dim + at.rotated_dim)
        latents = self.normal(rows, at.num_heads, at.rank)
        up = self.normal(at.num_heads, at.rank, at.plain_dim, std=at.plain_dim**-0.5)
        down = self.normal(at.num_heads, at.value_dim, at.rank, std=at.rank**-0.5)
        angles = torch.rand(rows, at.rotated_dim // 2, device=self.device)
        cos, sin = angles.cos(), angles.sin()

        return Work(
            run=lambda: (mla_heads.absorb(q, up, cos, sin, pairs=True), mla_heads.expand(latents, down)),
            num_bytes=up.nbytes + down.nbytes + 2 * (q.nbytes + latents.nbytes),
            operations=2.0 * rows * at.num_heads * at.rank * (at.plain_dim + at.value_dim),
        )


def step_batch(
    starts: Sequence[int], lengths: Sequence[int], block_size: int, shared: int = 0
) -> tuple[StepBatch, int]:
    """(a step of sequences of which the first `shared` tokens, whole blocks, are in the same blocks; how many blocks it
    takes). Blocks lie in random order."""
    common = shared // block_size
    own = [-(-(start + n) // block_size) - common for start, n in zip(starts, lengths, strict=True)]
    num_blocks = common + sum(own)
    order = np.random.default_rng(0).permutation(num_blocks)
    tables = np.zeros((len(starts), common + max(own)), dtype=np.int64)
    tables[:, :common] = order[:common]
    begin = common
    for table, count in zip(tables, own, strict=True):
        table[common : common + count] = order[begin : begin + count]
        begin += count
    return StepBatch(starts=np.array(starts), lengths=np.array(lengths), block_tables=tables), num_blocks


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """All kernels, as prompts (`many` rows) and decoding (`few`, or the decoding batch) have them."""
    make, few, many, batch = Maker(sizes=sizes, device=device), sizes.few_rows, sizes.many_rows, sizes.decode_seqs
    for name, (n, k) in sizes.products.items():
        for rows in (batch, many):
            yield Case(f"linear.{name} {rows}", partial(make.plain, rows, n, k))
    n, k = sizes.products["gate_up"]
    for rows in (few, 8 * few):
        yield Case(f"linear.gate_up {rows} not deterministic", partial(make.plain, rows, n, k, deterministic=False))
    yield Case(f"linear_int8 {many}", partial(make.int8, many, n, k))
    yield Case(f"linear_fp8.channel {many}", partial(make.fp8, many, n, k, blocks=False))
    yield Case(f"linear_fp8.block {many}", partial(make.fp8, many, n, k, blocks=True))
    for rows in (few, batch):
        yield Case(f"linear_w4 {rows}", partial(make.w4, rows, n, k))
        yield Case(f"linear_mxfp4 {rows}", partial(make.mxfp4, rows, n, k))
    for rows in (few, batch, many):
        yield Case(f"experts {rows}", partial(make.experts, rows))
    for form in (None, "int8", "fp8", "fp8_groups"):
        suffix = f".{form}" if form else ""
        yield Case(f"rms_norm{suffix} {many}", partial(make.norm, many, form))
        yield Case(f"activation{suffix} {many}", partial(make.activation, many, form))
    yield Case(f"quantize.fp8_groups {many}", partial(make.quantize, many, "fp8_groups"))
    yield Case(f"lm_head.argmax {batch}", partial(make.head, batch, argmax=True))
    yield Case(f"lm_head.logits {batch}", partial(make.head, batch, argmax=False))
    yield Case(f"sampling.greedy {batch}", partial(make.greedy, batch))
    yield Case(f"sampling.sample {batch}", partial(make.sample, batch))
    context, prompts, tokens = sizes.decode_context, sizes.prefill_seqs, sizes.prefill_tokens
    decoding = partial(make.attention, [context - 1] * batch, [1] * batch)
    prefilling = partial(make.attention, [0] * prompts, [tokens] * prompts)
    yield Case(f"attention {batch} x {context}", decoding)
    yield Case(f"attention.float8 {batch} x {context}", partial(decoding, kv_dtype=torch.float8_e4m3fn))
    yield Case(f"attention.int8 {batch} x {context}", partial(decoding, kv_dtype=torch.int8))
    yield Case(f"attention {batch} x {context} not deterministic", partial(decoding, deterministic=False))
    yield Case(f"attention.prompts {prompts} x {tokens}", prefilling)
    yield Case(f"attention.prompts {prompts} x {tokens} not deterministic", partial(prefilling, deterministic=False))
    for rows in (batch, many):
        yield Case(f"latent_heads {rows}", partial(make.latent_heads, rows))
    yield Case(f"latent_attention {batch} x {sizes.latent_context}", partial(make.latent, batch, sizes.latent_context))


def _product(
    run: Callable[[], Tensor],
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype | None = None,
    *,
    features: int | None = None,
    speed: float = 1.0,
) -> Work:
    """dtype: of the result; features: where the weight's first dimension does not say it."""
    rows, depth = x.shape
    features = features or weight.shape[0]
    out_bytes = rows * features * (dtype or x.dtype).itemsize
    return Work(
        run=run,
        num_bytes=x.nbytes + weight.nbytes + out_bytes,
        operations=2.0 * rows * features * depth,
        speed=speed,
    )


def _randomize(cache: Tensor, head_dim: int) -> None:
    """Any keys and values."""
    if cache.dtype == torch.int8:
        codes, scales = int8_parts(cache, head_dim)
        codes.random_(-127, 128)
        scales.fill_(0.01)
    elif cache.dtype == torch.float8_e4m3fn:
        cache.copy_(torch.randn(cache.shape, device=cache.device))
    else:
        cache.normal_()
