"""The store into caches, with norms and rotation before it, in the interpreter against the references."""

from __future__ import annotations

import pytest
import torch
from batchinfer_kernels import kv8, kv_fp8, reference
from batchinfer_kernels.probe import STRICT
from batchinfer_kernels.triton.attention import KIND, TilePlan
from batchinfer_kernels.triton.kv_store import int8_parts, new_caches, store
from batchinfer_kernels.turning import Turning
from torch import Tensor

from batchinfer.attention.tiles import AttentionShape
from batchinfer.attention.triton import plan_step
from batchinfer.layers.rope import Rope
from batchinfer.modelfiles.rope_config import RopeConfig
from tests.kernels.triton.accuracy import check_close
from tests.kernels.triton.device import DEVICE, HOST, ROWS, on_gpu
from tests.kernels.triton.paged import batch_of, normal

HEADS, GROUP, BLOCK = 2, 3, 4
# Three chunks: one into its second block, one to the end of its block, one that goes on in a block that it has.
STARTS, LENGTHS, TABLES = [0, 2, 1], [6, 2, 1], [[3, 1], [6], [0]]
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 5, 2, 3, 1], device=DEVICE)
BLOCKS = torch.tensor([3, 3, 3, 3, 1, 1, 6, 6, 0], device=DEVICE)
TOKENS, NUM_BLOCKS = 9, 7
FORMATS = (*ROWS, torch.float8_e4m3fn, torch.int8)


def plan_of(head_dim: int) -> TilePlan:
    shape = AttentionShape(
        num_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        block_size=BLOCK,
        split_size=16,
        window=None,
        row_rule=STRICT,
        device=DEVICE,
        query_sizes=(8,),
    )
    with HOST:  # where plans are made
        return plan_step(batch_of(STARTS, LENGTHS, TABLES), shape, {8: KIND})


def caches(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
    """Every byte is 255."""
    k_cache, v_cache = new_caches(NUM_BLOCKS, HEADS, BLOCK, head_dim, dtype=dtype, device=DEVICE)
    for cache in (k_cache, v_cache):
        cache.view(torch.uint8).fill_(255)
    return k_cache, v_cache


def inputs(head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of one product, as models have them."""
    heads = (HEADS * GROUP, HEADS, HEADS)
    product = normal(TOKENS, sum(heads) * head_dim, seed=head_dim, dtype=dtype)
    q, k, v = product.split([n * head_dim for n in heads], -1)
    return q.unflatten(-1, (-1, head_dim)), k.unflatten(-1, (-1, head_dim)), v.unflatten(-1, (-1, head_dim))


SCALES = torch.tensor([[0.5, 0.02], [0.01, 3.0]], device=DEVICE).unbind()


def run(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, turning: Turning | None = None) -> list[Tensor]:
    """q as it comes back, and the caches."""
    head_dim = q.shape[2]
    k_cache, v_cache = caches(dtype, head_dim)
    scales = SCALES if dtype == torch.float8_e4m3fn else (None, None)
    at = {"block_size": BLOCK, "turning": turning, "k_scales": scales[0], "v_scales": scales[1]}
    return [store(q, k, v, k_cache, v_cache, plan_of(head_dim), **at), k_cache, v_cache]


def expected_caches(k: Tensor, v: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """By `reference.kv_write`, in int8 of rows of `kv8`."""
    k_cache, v_cache = caches(dtype, k.shape[2])
    if dtype == torch.int8:
        k, v = kv8.to_rows(k, v)
        k_cache, v_cache = (x.view(NUM_BLOCKS, HEADS, BLOCK, -1) for x in (k_cache, v_cache))
    elif dtype == torch.float8_e4m3fn:
        k, v = (x.view(torch.uint8) for x in kv_fp8.to_codes(k, v, *SCALES))
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    else:
        k, v = k.to(dtype), v.to(dtype)
    rows = ((BLOCKS[:, None] * HEADS + torch.arange(HEADS)) * BLOCK + (POSITIONS % BLOCK)[:, None]).reshape(-1)
    reference.kv_write(k, v, k_cache, v_cache, rows, torch.tensor([1]))
    return [k_cache, v_cache]


def compare(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype, head_dim: int) -> None:
    """Bytes, of all slots; a NaN need not be the same one."""
    for ours, right in zip(found, expected, strict=True):
        if dtype == torch.int8:
            (codes, scales), (right_codes, right_scales) = int8_parts(ours, head_dim), kv8.split_rows(right)
            assert torch.equal(codes, right_codes)
            assert torch.equal(scales.nan_to_num(99.0), right_scales.nan_to_num(99.0))
        elif dtype == torch.float8_e4m3fn:
            assert torch.equal(ours.view(torch.uint8), right)
        else:
            assert torch.equal(ours.nan_to_num(99.0), right.nan_to_num(99.0))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_keys_and_values_are_where_the_reference_writes_them(dtype: torch.dtype, head_dim: int) -> None:
    """And nothing else is touched, except fresh blocks, which are cleared."""
    q, k, v = inputs(head_dim, dtype if dtype in ROWS else torch.float32)
    k[3], v[4] = 0, 0
    k[5, 1] *= 1e-4
    out, *found = run(q, k, v, dtype)
    compare(found, expected_caches(k, v, dtype), dtype, head_dim)
    right = kv8.turn(q.float().contiguous()) if dtype == torch.int8 else q
    assert torch.equal(out, right)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e6])
def test_a_sick_token_has_a_key_of_nan_and_a_value_of_zero(dtype: torch.dtype, value: float) -> None:
    """Also one that the cache can't hold, in float16; float8 goes no further than its largest number."""
    q, k, v = inputs(16, torch.float32)
    k[2, 0, 5] = value
    v[7, 1, 15] = value
    _, *found = run(q, k, v, dtype)
    expected = expected_caches(k, v, dtype)
    if dtype == torch.int8 and value != 1e6:  # a sick token's codes do not matter
        for cache, block, head, slot in ((found[0], 3, 0, 2), (found[0], 6, 1, 3)):
            at = expected[0][block, head, slot, :16]
            int8_parts(cache, 16)[0][block, head, slot] = at
    compare(found, expected, dtype, 16)


SCALINGS = {
    "default": {},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def turning_of(head_dim: int, rotary_dim: int, has_norm: bool, dtype: torch.dtype, kind: str) -> Turning:
    config = RopeConfig(
        kind=kind, theta=10000.0, rotary_dim=rotary_dim, max_position_embeddings=256, scaling=SCALINGS[kind]
    )
    cos, sin = Rope(config, max_model_len=256, device=DEVICE)(POSITIONS + 200)
    weights = [1 + normal(head_dim, seed=i, dtype=torch.float32).to(dtype) / 4 for i in (1, 2)]
    q_weight, k_weight = weights if has_norm else (None, None)
    return Turning(cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight, eps=1e-6)


def turned(q: Tensor, k: Tensor, at: Turning) -> tuple[Tensor, Tensor]:
    """By the references, one after the other, in the dtype of q and k."""
    if at.q_weight is not None and at.k_weight is not None:
        q = reference.rms_norm(q, at.q_weight.to(q.dtype), at.eps)
        k = reference.rms_norm(k, at.k_weight.to(k.dtype), at.eps)
    assert at.cos is not None and at.sin is not None
    return reference.rope(q, k, at.cos, at.sin)


@pytest.mark.parametrize(
    "head_dim, rotary_dim, has_norm, dtype, kind",
    [
        (16, 16, False, torch.float32, "default"),
        (64, 64, False, torch.float16, "llama3"),
        (128, 128, True, torch.float16, "yarn"),
        (80, 32, True, torch.float32, "default"),  # what is beyond 32 is not turned
        (96, 24, False, torch.float16, "default"),
        *on_gpu((128, 128, True, torch.bfloat16, "llama3"), (64, 64, False, torch.bfloat16, "default")),
    ],
)
def test_norms_and_rotation(head_dim: int, rotary_dim: int, has_norm: bool, dtype: torch.dtype, kind: str) -> None:
    q, k, v = inputs(head_dim, dtype)
    at = turning_of(head_dim, rotary_dim, has_norm, dtype, kind)
    out, k_cache, v_cache = run(q, k, v, dtype, at)
    slots = POSITIONS % BLOCK
    check_close(out, lambda as_type: turned(as_type(q), as_type(k), at)[0])
    check_close(k_cache[BLOCKS, :, slots], lambda as_type: turned(as_type(q), as_type(k), at)[1])
    assert torch.equal(v_cache[BLOCKS, :, slots], v)


def test_norms_alone() -> None:
    q, k, v = inputs(64, torch.float32)
    at = turning_of(64, 64, True, torch.float32, "default")
    out, k_cache, _ = run(q, k, v, torch.float32, Turning(q_weight=at.q_weight, k_weight=at.k_weight, eps=1e-6))
    for found, x, weight in ((out, q, at.q_weight), (k_cache[BLOCKS, :, POSITIONS % BLOCK], k, at.k_weight)):
        check_close(found, lambda as_type, x=x, weight=weight: reference.rms_norm(as_type(x), as_type(weight), 1e-6))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_coarse_caches_get_what_was_turned(dtype: torch.dtype) -> None:
    """The bytes that the plain store gives keys that were turned before."""
    q, k, v = inputs(48, torch.float16)
    at = turning_of(48, 48, True, torch.float16, "default")
    first_q, first_k, _ = run(q, k, v, torch.float16, at)
    keys = first_k[BLOCKS, :, POSITIONS % BLOCK]
    together, apart = run(q, k, v, dtype, at), run(first_q, keys, v, dtype)
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(*((x.view(torch.uint8) if x.dtype == dtype else x) for x in (a, b)))


def test_every_code_of_float8() -> None:
    """Numbers between any two codes, and halfway, go where torch puts them."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    numbers = torch.cat((codes, halves, halves * (1 - 2e-7), halves * (1 + 2e-7), torch.tensor([500.0])))
    k = torch.zeros(TOKENS * HEADS * 64)
    k[: len(numbers)], k[len(numbers) : 2 * len(numbers)] = numbers, -numbers
    k = k.view(TOKENS, HEADS, 64) * SCALES[0][:, None]
    q = torch.zeros(TOKENS, HEADS * GROUP, 64)
    _, *found = run(q, k, torch.zeros_like(k), torch.float8_e4m3fn)
    compare(found, expected_caches(k, torch.zeros_like(k), torch.float8_e4m3fn), torch.float8_e4m3fn, 64)
