"""Which experts a token takes, and the order in which assignments are multiplied; `experts` is the specification.

One program chooses for one token. Assignments are put in order in three steps: each chunk of them counts its experts,
one program turns counts into places, each chunk writes its assignments to theirs. Nothing depends on the order in which
programs run, and no shape on the ids, so that the host need not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels import experts
from batchinfer_kernels.experts import Aligned
from batchinfer_kernels.triton.variants import Variant
from batchinfer_kernels.tuning import CAPABILITIES, config

ROUTER_DEFAULTS = {capability: {"num_warps": 1, "num_stages": 1} for capability in CAPABILITIES}
ALIGN_DEFAULTS = {capability: {"CHUNK": 128, "num_warps": 8, "num_stages": 1} for capability in CAPABILITIES}


@triton.jit
def _sound(scores, there):
    """Scores to choose by: a very low number for NaN and below, less where there is no expert. So a choice exists, and
    two of them can be added."""
    scores = tl.where(scores == scores, tl.maximum(scores, -1e38), -1e38)
    return tl.where(there, scores, float("-inf"))


@triton.jit
def _choose(
    keys,  # float32 [BLOCK]: the largest are chosen
    values,  # float32 [BLOCK]: of which these are the weights
    weight_ptr,  # [TOP]
    id_ptr,  # [TOP]
    size,  # experts in a group
    scale,
    least,  # added to the sum of weights
    RENORMALIZE: tl.constexpr,
    TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,  # places for a group
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    out_at = tl.arange(0, TOP_BLOCK)
    weights = tl.zeros((TOP_BLOCK,), tl.float32)
    ids = tl.zeros((TOP_BLOCK,), tl.int32)
    for j in range(TOP):
        best = tl.argmax(keys, 0)  # of equal ones the first
        weights = tl.where(out_at == j, tl.sum(tl.where(at == best, values, 0.0)), weights)
        ids = tl.where(out_at == j, best // SIZE_BLOCK * size + best % SIZE_BLOCK, ids)
        keys = tl.where(at == best, float("-inf"), keys)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights) + least)
    tl.store(weight_ptr + out_at, weights * scale, mask=out_at < TOP)
    tl.store(id_ptr + out_at, ids, mask=out_at < TOP)


@triton.jit
def _limit(
    grouped,  # float32 [GROUPS_BLOCK, SIZE_BLOCK], of which groups
    scores,  # float32 [GROUPS_BLOCK] are largest
    TOP_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys [BLOCK], -inf outside the best groups."""
    group_at = tl.arange(0, GROUPS_BLOCK)
    kept = tl.zeros((GROUPS_BLOCK,), tl.int32)
    for _ in range(TOP_GROUPS):
        taken = group_at == tl.argmax(scores, 0)
        kept = tl.where(taken, 1, kept)
        scores = tl.where(taken, float("-inf"), scores)
    return tl.reshape(tl.where(kept[:, None] > 0, grouped, float("-inf")), (BLOCK,))


@triton.jit
def _softmax_top_k(
    logits_ptr,  # [T, E]
    weight_ptr,  # float32 [T, TOP]
    id_ptr,  # int32 [T, TOP]
    num_groups,
    size,  # experts in a group
    scale,
    TOP_GROUPS: tl.constexpr,  # 0: groups do not count
    RENORMALIZE: tl.constexpr,
    TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    BLOCK: tl.constexpr = GROUPS_BLOCK * SIZE_BLOCK
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = (at // SIZE_BLOCK < num_groups) & (at % SIZE_BLOCK < size)
    expert = at // SIZE_BLOCK * size + at % SIZE_BLOCK
    logits = tl.load(logits_ptr + row * num_groups * size + expert, mask=there, other=float("-inf")).to(tl.float32)
    keys = _sound(logits, there)
    values = tl.exp2((logits - tl.max(keys, 0)) * 1.4426950408889634)
    values = values / tl.sum(values)  # all NaN if one is
    if TOP_GROUPS > 0:
        grouped = tl.reshape(keys, (GROUPS_BLOCK, SIZE_BLOCK))
        keys = _limit(grouped, tl.max(grouped, 1), TOP_GROUPS, GROUPS_BLOCK, BLOCK)
    _choose(
        keys,
        values,
        weight_ptr + row * TOP,
        id_ptr + row * TOP,
        size,
        scale,
        0.0,
        RENORMALIZE,
        TOP,
        TOP_BLOCK,
        SIZE_BLOCK,
        BLOCK,
    )


@triton.jit
def _sigmoid_top_k(
    logits_ptr,  # [T, E]
    bias_ptr,  # float32 [E]
    weight_ptr,  # float32 [T, TOP]
    id_ptr,  # int32 [T, TOP]
    num_groups,
    size,  # experts in a group
    scale,
    least,
    TOP_GROUPS: tl.constexpr,  # 0: groups do not count
    RENORMALIZE: tl.constexpr,
    TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    BLOCK: tl.constexpr = GROUPS_BLOCK * SIZE_BLOCK
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = (at // SIZE_BLOCK < num_groups) & (at % SIZE_BLOCK < size)
    expert = at // SIZE_BLOCK * size + at % SIZE_BLOCK
    logits = tl.load(logits_ptr + row * num_groups * size + expert, mask=there, other=0.0).to(tl.float32)
    values = 1.0 / (1.0 + tl.exp2(logits * -1.4426950408889634))
    sick = tl.sum(tl.where(logits == logits, 0, 1)) > 0
    values = tl.where(sick, float("nan"), values)
    keys = _sound(values + tl.load(bias_ptr + expert, mask=there, other=0.0), there)
    if TOP_GROUPS > 0:
        grouped = tl.reshape(keys, (GROUPS_BLOCK, SIZE_BLOCK))
        best = tl.argmax(grouped, 1)
        others = tl.where(tl.arange(0, SIZE_BLOCK)[None, :] == best[:, None], float("-inf"), grouped)
        keys = _limit(grouped, tl.max(grouped, 1) + tl.max(others, 1), TOP_GROUPS, GROUPS_BLOCK, BLOCK)
    _choose(
        keys,
        values,
        weight_ptr + row * TOP,
        id_ptr + row * TOP,
        size,
        scale,
        least,
        RENORMALIZE,
        TOP,
        TOP_BLOCK,
        SIZE_BLOCK,
        BLOCK,
    )


def softmax_top_k(
    logits: Tensor,
    k: int,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`experts.softmax_top_k` of logits [T, E], contiguous."""
    size, limited = _groups(logits, k, num_groups, top_groups)
    weights, ids = _chosen(len(logits), k, logits.device)
    if len(logits):
        _softmax_top_k[(len(logits),)](
            logits,
            weights,
            ids,
            num_groups if limited else 1,
            size,
            scale,
            top_groups if limited else 0,
            renormalize,
            k,
            triton.next_power_of_2(k),
            triton.next_power_of_2(num_groups if limited else 1),
            triton.next_power_of_2(size),
            **config("router", ROUTER_DEFAULTS, logits.device),
        )
    return weights, ids


def sigmoid_top_k(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`experts.sigmoid_top_k` of logits [T, E], contiguous, and bias float32 [E]."""
    size, limited = _groups(logits, k, num_groups, top_groups)
    assert bias.shape == logits.shape[1:] and bias.dtype == torch.float32
    assert size > 1 or not limited
    weights, ids = _chosen(len(logits), k, logits.device)
    if len(logits):
        _sigmoid_top_k[(len(logits),)](
            logits,
            bias,
            weights,
            ids,
            num_groups if limited else 1,
            size,
            scale,
            experts.LEAST,
            top_groups if limited else 0,
            renormalize,
            k,
            triton.next_power_of_2(k),
            triton.next_power_of_2(num_groups if limited else 1),
            triton.next_power_of_2(size),
            **config("router", ROUTER_DEFAULTS, logits.device),
        )
    return weights, ids


def _groups(logits: Tensor, k: int, num_groups: int, top_groups: int) -> tuple[int, bool]:
    """(experts in a group, whether groups count); all experts are one where they do not."""
    num_experts = logits.shape[1]
    size, left = divmod(num_experts, num_groups)
    assert logits.is_contiguous() and not left and 0 < k <= size * top_groups
    limited = top_groups < num_groups
    return (size if limited else num_experts), limited


def _chosen(num_rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(num_rows, k, device=device), torch.empty(num_rows, k, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_slots"])
def _count(
    id_ptr,  # int32 [A]
    count_ptr,  # int32 [chunks, EXPERTS]: becomes how many a chunk has of each expert
    num_slots,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(id_ptr + at, mask=at < num_slots, other=-1)
    counts = tl.histogram(tl.maximum(ids, 0), EXPERTS, mask=ids >= 0)
    tl.store(count_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["num_chunks", "num_blocks"])
def _place(
    count_ptr,  # int32 [chunks, EXPERTS]: becomes where a chunk's first assignment to an expert goes
    expert_ptr,  # int32 [blocks]: becomes the expert of each
    num_chunks,
    num_blocks,
    SIZE: tl.constexpr,  # of a block
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,  # chunks, or blocks, at a time
):
    at = tl.arange(0, EXPERTS)
    rows = tl.arange(0, ROWS)
    totals = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_chunks, ROWS):
        chunks = start + rows
        there = (chunks < num_chunks)[:, None]
        totals += tl.sum(tl.load(count_ptr + chunks[:, None] * EXPERTS + at[None, :], mask=there, other=0), 0)
    padded = (totals + SIZE - 1) // SIZE * SIZE
    ends = tl.cumsum(padded, 0)
    places = ends - padded
    for start in range(0, num_chunks, ROWS):
        chunks = start + rows
        there = (chunks < num_chunks)[:, None]
        count_at = count_ptr + chunks[:, None] * EXPERTS + at[None, :]
        counts = tl.load(count_at, mask=there, other=0)
        tl.store(count_at, places[None, :] + tl.cumsum(counts, 0) - counts, mask=there)
        places += tl.sum(counts, 0)
    total = tl.max(ends, 0)
    for start in range(0, num_blocks, ROWS):
        blocks = start + rows
        expert = tl.sum((ends[None, :] <= (blocks * SIZE)[:, None]).to(tl.int32), 1)
        tl.store(expert_ptr + blocks, tl.where(blocks * SIZE < total, expert, -1), mask=blocks < num_blocks)


@triton.jit(do_not_specialize=["num_slots"])
def _write(
    id_ptr,  # int32 [A]
    place_ptr,  # int32 [chunks, EXPERTS]
    slot_ptr,  # int32 [blocks * size]
    num_slots,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    chunk = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    slots = chunk * CHUNK + at
    ids = tl.load(id_ptr + slots, mask=slots < num_slots, other=-1)
    same = ids[:, None] == tl.load(id_ptr + slots, mask=slots < num_slots, other=-1)[None, :]
    before = tl.sum((same & (at[None, :] < at[:, None])).to(tl.int32), 1)
    place = tl.load(place_ptr + chunk * EXPERTS + ids, mask=ids >= 0, other=0) + before
    tl.store(slot_ptr + place, slots, mask=ids >= 0)


def align(ids: Tensor, num_experts: int, size: int) -> Aligned:
    """`experts.align` of ids int32 [T, k], contiguous, all below num_experts."""
    assert ids.ndim == 2 and ids.is_contiguous() and ids.dtype == torch.int32
    num_slots, device = ids.numel(), ids.device
    blocks = experts.num_blocks(num_slots, num_experts, size)
    slots = torch.full((blocks * size,), num_slots, dtype=torch.int32, device=device)
    of_blocks = torch.empty(blocks, dtype=torch.int32, device=device)
    if num_slots:
        launch = dict(config("align", ALIGN_DEFAULTS, device))
        chunk = launch.pop("CHUNK")
        width = _width(num_experts)
        num_chunks = triton.cdiv(num_slots, chunk)
        places = torch.empty(num_chunks, width, dtype=torch.int32, device=device)
        _count[(num_chunks,)](ids, places, num_slots, chunk, width, **launch)
        _place[(1,)](places, of_blocks, num_chunks, blocks, size, width, 16, **launch)
        _write[(num_chunks,)](ids, places, slots, num_slots, chunk, width, **launch)
    return Aligned(slots=slots, experts=of_blocks, size=size, num_slots=num_slots)


def _width(num_experts: int) -> int:
    width: int = triton.next_power_of_2(num_experts)
    return max(32, width)


def variants() -> Iterator[Variant]:
    chosen = {"weight_ptr": "*fp32", "id_ptr": "*i32"}
    # Logits of Qwen3's routers (and Mixtral's) are of the model's type, those of DeepSeek-V2's float32.
    for num_experts, top, groups in ((128, 8, 0), (32, 4, 0), (160, 6, 3)):
        yield Variant(
            name=f"softmax_top_k.{num_experts}" + ".groups" * (groups > 0),
            kernel=_softmax_top_k,
            signature={
                "logits_ptr": "*fp32" if groups else "*bf16",
                **chosen,
                "num_groups": "i32",
                "size": "i32",
                "scale": "fp32",
            },
            constants={
                "TOP_GROUPS": groups,
                "RENORMALIZE": True,
                "TOP": top,
                "TOP_BLOCK": triton.next_power_of_2(top),
                "GROUPS_BLOCK": 8 if groups else 1,
                "SIZE_BLOCK": 32 if groups else num_experts,
            },
            configs=ROUTER_DEFAULTS,
            unaligned=frozenset({"num_groups", "size"} if groups else {"num_groups"}),
            is_default=num_experts == 128,
        )
    for groups in (0, 4):
        yield Variant(
            name="sigmoid_top_k" + ".groups" * (groups > 0),
            kernel=_sigmoid_top_k,
            signature={
                "logits_ptr": "*fp32",
                "bias_ptr": "*fp32",
                **chosen,
                **dict.fromkeys(("num_groups", "size"), "i32"),
                **dict.fromkeys(("scale", "least"), "fp32"),
            },
            constants={
                "TOP_GROUPS": groups,
                "RENORMALIZE": True,
                "TOP": 8,
                "TOP_BLOCK": 8,
                "GROUPS_BLOCK": 8 if groups else 1,
                "SIZE_BLOCK": 32 if groups else 256,
            },
            configs=ROUTER_DEFAULTS,
            unaligned=frozenset({"num_groups"}),
            is_default=groups > 0,
        )
    others = {capability: {"num_warps": 8, "num_stages": 1} for capability in CAPABILITIES}
    for num_experts in (32, 256):
        chunked = {"EXPERTS": num_experts}
        yield Variant(
            name=f"align.count.{num_experts}",
            kernel=_count,
            signature={"id_ptr": "*i32", "count_ptr": "*i32", "num_slots": "i32"},
            constants=chunked,
            configs=ALIGN_DEFAULTS,
            unaligned=frozenset({"num_slots"}),
            is_default=num_experts == 256,
        )
        yield Variant(
            name=f"align.place.{num_experts}",
            kernel=_place,
            signature={"count_ptr": "*i32", "expert_ptr": "*i32", "num_chunks": "i32", "num_blocks": "i32"},
            constants={**chunked, "SIZE": 64, "ROWS": 16},
            configs=others,
            unaligned=frozenset({"num_chunks", "num_blocks"}),
            is_default=num_experts == 256,
        )
        yield Variant(
            name=f"align.write.{num_experts}",
            kernel=_write,
            signature={"id_ptr": "*i32", "place_ptr": "*i32", "slot_ptr": "*i32", "num_slots": "i32"},
            constants=chunked,
            configs=ALIGN_DEFAULTS,
            unaligned=frozenset({"num_slots"}),
            is_default=num_experts == 256,
        )
