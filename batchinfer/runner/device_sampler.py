"""Choosing tokens where the logits lie, by the kernel table's `SamplingOps`: the tokens that `sampler` would choose.

The host waits once, for all tokens of a step, and before that only for rows whose log-probabilities are asked for. It
need not wait before the next step is launched, which then takes the tokens from where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from batchinfer_kernels.sampling import Drawing, SamplingOps
from torch import Tensor

from batchinfer.attention.staging import Event, Staging
from batchinfer.models import CausalLM
from batchinfer.runner.logprobs import token_logprobs
from batchinfer.runner.sampler import SampleRow, adjust, split_rows
from batchinfer.types.request import TokenLogprobs

_NOT_FINITE = -1
# Each of a drawing's arrays begins at a multiple of so many numbers: kernels are compiled for aligned addresses.
_ALIGNED = 16
_MOST_INT32 = 2**31 - 1


class Drawn:
    """The tokens of a step, which are there once the device has come so far.

    tokens    int64 [R] on the device, in the order of `order`; negative where the row's logits are not finite
    order     by place, the row
    logprobs  by row, ascending, where asked for
    """

    __slots__ = ("_event", "_host", "logprobs", "order", "tokens")

    def __init__(self, tokens: Tensor, order: Sequence[int], logprobs: dict[int, TokenLogprobs]) -> None:
        self.tokens, self.order, self.logprobs = tokens, order, logprobs
        self._host = tokens
        self._event: Event | None = None

    def send(self) -> None:
        """Begins to copy the tokens to the host, so that `by_row` waits for this step and not for those behind it."""
        if self.tokens.is_cuda:
            self._host = self.tokens.to("cpu", non_blocking=True)  # into memory that torch pins, and keeps until then
            self._event = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

    def by_row(self) -> dict[int, int]:
        """Waits for the tokens: of the rows whose logits are all finite."""
        if self._event is not None:
            self._event.synchronize()
        return {r: token for r, token in zip(self.order, self._host.tolist(), strict=True) if token != _NOT_FINITE}


class DeviceSampler:
    """Samples what a step has to sample. part_rows: rows of logits that exist at a time."""

    def __init__(self, ops: SamplingOps, device: torch.device, *, part_rows: int) -> None:
        self._ops, self._device, self._part_rows = ops, device, part_rows
        # One each, so that of what a step writes nothing waits for the step under way.
        self._index_staging, self._row_staging = Staging(device, torch.int64), Staging(device, torch.int64)

    def sample(self, model: CausalLM, hidden: Tensor, rows: Sequence[SampleRow], at: Sequence[int]) -> Drawn:
        """Puts the drawing of the rows' tokens into the device's queue. at: which of the hidden states is a row's."""
        plain, others = split_rows(rows)
        order = plain + others
        if not order:
            return Drawn(torch.empty(0, dtype=torch.int64), [], {})
        states = hidden
        if len(hidden) > len(order) or any(at[r] != i for i, r in enumerate(order)):
            states = hidden.index_select(0, self._indices([at[r] for r in order]))
        found: list[Tensor] = []
        logprobs: dict[int, TokenLogprobs] = {}
        if plain:
            tokens, finite = model.greedy(states[: len(plain)])
            found.append(torch.where(finite, tokens, _NOT_FINITE))
        drawings = self._drawings([rows[r] for r in others])
        for begin, drawing in zip(range(0, len(others), self._part_rows), drawings, strict=True):
            part = others[begin : begin + self._part_rows]
            first = len(plain) + begin
            logits = model.compute_logits(states[first : first + len(part)])
            chosen = [rows[r] for r in part]
            reported = [i for i, row in enumerate(chosen) if row.state.spec.sampling.logprobs is not None]
            raw = logits[reported] if reported else None  # a copy: sampling overwrites logits
            tokens = self._draw(logits, chosen, drawing)
            found.append(tokens)
            if raw is not None:
                logprobs |= {part[i]: entry for i, entry in _entries(raw, tokens, chosen, reported)}
        return Drawn(torch.cat(found), order, logprobs)

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow], drawing: Drawing) -> Tensor:
        """int64 [R] of raw logits [R, V], which are overwritten."""
        _, finite = self._ops.greedy(logits)
        adjust(logits, rows)
        return torch.where(finite, self._ops.sample(logits, drawing), _NOT_FINITE)

    def _indices(self, at: Sequence[int]) -> Tensor:
        host = self._index_staging.write(len(at))
        host.numpy()[:] = at
        return self._moved(host, self._index_staging)

    def _drawings(self, rows: Sequence[SampleRow]) -> list[Drawing]:
        """Of each part of so many rows; in one copy, since the host would wait for the last but one before a third."""
        if not rows:
            return []
        params = [row.state.spec.sampling for row in rows]
        count = len(rows)
        host = self._row_staging.write(6 * -(-count // _ALIGNED) * _ALIGNED).view(6, -1)
        whole = host.numpy()[:, :count]
        floats = host.numpy().view(np.float64)[:, :count]
        whole[0] = np.array([row.state.spec.sample_key for row in rows], dtype=np.uint64).view(np.int64)
        whole[1] = [row.output_position for row in rows]
        host.numpy()[2].view(np.int32)[:count] = [min(p.top_k, _MOST_INT32) for p in params]
        floats[3] = [p.temperature for p in params]
        floats[4] = [p.top_p for p in params]
        floats[5] = [p.min_p for p in params]
        moved = self._moved(host, self._row_staging)
        keys, positions = moved[0], moved[1]
        top_k = moved[2].view(torch.int32)
        temperature, top_p, min_p = moved[3:].view(torch.float64)
        return [
            Drawing(
                keys=keys[begin:end],
                positions=positions[begin:end],
                top_k=top_k[begin:end],
                temperature=temperature[begin:end],
                top_p=top_p[begin:end],
                min_p=min_p[begin:end],
            )
            for begin in range(0, count, self._part_rows)
            for end in [min(begin + self._part_rows, count)]
        ]

    def _moved(self, host: Tensor, staging: Staging) -> Tensor:
        moved = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        moved.copy_(host, non_blocking=True)
        staging.sent()
        return moved


def _entries(
    raw: Tensor, tokens: Tensor, rows: Sequence[SampleRow], reported: Sequence[int]
) -> Iterator[tuple[int, TokenLogprobs]]:
    """Of those of the reported rows that are finite. raw: their logits; tokens: of all rows."""
    chosen = tokens.tolist()
    kept = [(nth, i) for nth, i in enumerate(reported) if chosen[i] != _NOT_FINITE]
    if not kept:
        return
    if len(kept) < len(reported):
        raw = raw[[nth for nth, _ in kept]]
    num_top = [rows[i].state.spec.sampling.logprobs or 0 for _, i in kept]
    entries = token_logprobs(raw, [chosen[i] for _, i in kept], num_top)
    yield from ((i, entry) for (_, i), entry in zip(kept, entries, strict=True))
