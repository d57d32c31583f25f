"""Rows to sample: what the engine's sampler takes, and the same as tensors."""

from __future__ import annotations

from typing import Any

import torch
from batchinfer_kernels.sampling import Drawing

from batchinfer.runner.sampler import SampleRow
from batchinfer.runner.sequence_state import SequenceState
from batchinfer.types.request import SamplingParams
from batchinfer.types.step import SequenceSpec

CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1e-300},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": -1},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.3},
    {"top_k": 100_000, "top_p": 0.95},
]


def sample_row(key: int, position: int, **params: Any) -> SampleRow:
    spec = SequenceSpec(
        seq_id=0,
        prompt_token_ids=[1],
        sampling=SamplingParams(**params),
        sample_key=key,
        stop_token_ids=frozenset(),
    )
    return SampleRow(SequenceState(spec, 1), position)


def drawing(rows: list[SampleRow]) -> Drawing:
    params = [row.state.spec.sampling for row in rows]
    keys = [row.state.spec.sample_key for row in rows]
    return Drawing(
        keys=torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys], dtype=torch.int64),
        positions=torch.tensor([row.output_position for row in rows], dtype=torch.int64),
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
    )
