"""What the largest step leaves of a GPU's memory for KV blocks: it is run, with blocks of its own, and measured.

Not for how many blocks there are then (`kv_memory`): their number changes no bytes, so it may follow what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from batchinfer.types.request import MAX_LOGPROBS, SamplingParams
from batchinfer.types.step import Chunk, SequenceSpec, StepPlan


class MemoryMeter(Protocol):
    """Bytes of one device."""

    def begin(self) -> None: ...

    def end(self) -> int:
        """The most that this process's tensors took since `begin`, and what lay between them. What is not used any
        more is given back."""
        ...

    def outside_bytes(self) -> int:
        """What is taken beside that, by the driver and by other processes."""
        ...

    def total_bytes(self) -> int: ...


class CudaMeter:
    """A MemoryMeter of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> int:
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        return peak

    def outside_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total) - int(free) - torch.cuda.memory_reserved(self._device)

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])


def spare_bytes(*, total: int, utilization: float, outside: int, peak: int, peak_kv: int) -> int:
    """What may be given to KV blocks, of `utilization` of a device's memory: all but what is taken outside of this
    process's tensors, and their peak without the blocks (peak_kv) that the measured step had."""
    return max(0, int(total * utilization) - outside - (peak - peak_kv))


def measure_spare(run: Callable[[], None], meter: MemoryMeter, *, utilization: float, peak_kv: int) -> int:
    """`spare_bytes` as measured while `run` runs the largest step over blocks of peak_kv bytes, which it makes."""
    meter.begin()
    run()
    peak = meter.end()
    return spare_bytes(
        total=meter.total_bytes(),
        utilization=utilization,
        outside=meter.outside_bytes(),
        peak=peak,
        peak_kv=peak_kv,
    )


def largest_step(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int, num_groups: int
) -> StepPlan:
    """A first step of as many prompts and tokens as there may be, all sampled in the way that takes most memory.

    Sequences use the same blocks, of each group as many as one of them needs: what they compute is of no matter. Chunks
    far behind in long sequences may have more partial results of attention, within `attention.triton.PARTIAL_BYTES`.
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    lengths = [1] * num_seqs
    rest = max_num_batched_tokens - num_seqs
    for i in range(num_seqs):
        more = min(rest, max_model_len - 1)
        lengths[i] += more
        rest -= more
    sampling = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=MAX_LOGPROBS)
    tables: tuple[Sequence[int], ...] = (list(range(-(-max(lengths) // block_size))),) * num_groups
    return StepPlan(
        0,
        tuple(Chunk(i, 0, (0,) * length, tables, 1) for i, length in enumerate(lengths)),
        tuple(
            SequenceSpec(seq_id=i, prompt_token_ids=(0,) * length, sampling=sampling, sample_key=i)
            for i, length in enumerate(lengths)
        ),
    )
