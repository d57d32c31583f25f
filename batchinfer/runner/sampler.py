"""Choosing tokens from logits, vectorised over the batch; a row's token does not depend on the other rows.

The order of what is done to a row's logits: logit_bias, repetition penalty, frequency and presence penalties, the
mask of stop tokens under min_tokens, temperature, min_p, top_k, top_p. A token is then drawn by inverting the
cumulative distribution, in the order of token ids and in float64, at one uniform number of the row's stream
(`types.streams`). Raw logits that are not finite make the row an error. Log-probabilities are `logprobs`' part; what is
drawn where the logits lie, `device_sampler`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchinfer.runner.sequence_state import SequenceState
from batchinfer.runner.streams import uniform

Floats = npt.NDArray[np.float64]
# The cumulative distribution is summed in blocks of this many tokens; part of what fixes a draw.
_CDF_BLOCK = 256
_SLAB_ROWS = 8


class SampleRow(NamedTuple):
    """A row of logits: whose it is, and the output position (from 0) of the token that it decides."""

    state: SequenceState
    output_position: int


def split_rows(rows: Sequence[SampleRow]) -> tuple[list[int], list[int]]:
    """(Rows whose token is the one with the largest raw logit, and nothing else is asked of the logits; the others)."""
    plain = [r for r, (state, position) in enumerate(rows) if position >= state.argmax_from]
    if len(plain) == len(rows):
        return plain, []
    return plain, [r for r, (state, position) in enumerate(rows) if position < state.argmax_from]


class Sampler:
    """Samples for one vocabulary. Holds memory that is used again in every step."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        # Few rows, so that they stay in the caches from the logits to the token.
        self._weights = torch.empty(
            _SLAB_ROWS, -(-vocab_size // _CDF_BLOCK) * _CDF_BLOCK, dtype=torch.float64, device=device
        )

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """The token of each row of raw, finite logits float32 [R, V], which may be overwritten."""
        adjust(logits, rows)
        drawn = [r for r, row in enumerate(rows) if not row.state.spec.sampling.greedy]
        tokens: list[int] = logits.argmax(-1).tolist() if len(drawn) < len(rows) else [0] * len(rows)
        for begin in range(0, len(drawn), _SLAB_ROWS):
            part = drawn[begin : begin + _SLAB_ROWS]
            chosen = logits if len(part) == len(rows) else logits[part]
            for r, token in zip(part, self._draw(chosen, [rows[r] for r in part]), strict=True):
                tokens[r] = token
        return tokens

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        vocab = self._vocab_size
        params = [row.state.spec.sampling for row in rows]
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=logits.device)
        # Not normalised: the largest weight of a row is 1. The padding has weight 0.
        weights = self._weights[: len(rows)]
        weights[:, :vocab] = logits
        weights[:, vocab:] = -torch.inf
        # In this order no temperature is too small: 0 stays 0, and what overflows has weight 0.
        weights.sub_(weights.amax(-1, keepdim=True)).div_(temperature[:, None]).exp_()
        table: Floats = weights.cpu().numpy()
        for r, p in enumerate(params):
            if p.min_p > 0 or 0 < p.top_k < vocab or p.top_p < 1:
                _truncate(table[r, :vocab], top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
        keys = np.array([row.state.spec.sample_key for row in rows], dtype=np.uint64)
        positions = np.array([row.output_position for row in rows], dtype=np.int64)
        return _invert(table, uniform(keys, positions))


def adjust(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Applies bias, penalties and the min_tokens mask to logits [R, V], in place. Only masked ones are not finite."""
    vocab = logits.shape[-1]
    flat = logits.view(-1)
    masked: list[npt.NDArray[np.int64]] = []
    for r, row in enumerate(rows):
        state, p = row.state, row.state.spec.sampling
        if p.logit_bias:
            ids = torch.tensor([t for t in p.logit_bias if t < vocab], dtype=torch.int64, device="cpu")
            bias = torch.tensor([b for t, b in p.logit_bias.items() if t < vocab], dtype=logits.dtype, device="cpu")
            logits[r, _beside(ids, logits)] += _beside(bias, logits)
        if p.has_penalties:
            _penalize(logits[r], row)
        if p.logit_bias or p.has_penalties:
            torch.nan_to_num_(logits[r], nan=0.0)  # a huge bias or penalty: the largest numbers stand for infinity
        if row.output_position < p.min_tokens and len(state.stop_ids):
            masked.append(r * vocab + state.stop_ids[state.stop_ids < vocab])
    if masked:
        flat[_beside(torch.from_numpy(np.concatenate(masked)), logits)] = -torch.inf


def _beside(tensor: Tensor, logits: Tensor) -> Tensor:
    """On the device of the logits; a GPU's copy is from pinned memory, so that the host does not wait for it."""
    return tensor.pin_memory().to(logits.device, non_blocking=True) if logits.device.type == "cuda" else tensor


def _penalize(logits: Tensor, row: SampleRow) -> None:
    p = row.state.spec.sampling
    output, counts = np.unique(row.state.output_before(row.output_position), return_counts=True)
    if p.repetition_penalty != 1.0:
        seen = _beside(torch.from_numpy(np.union1d(row.state.prompt_unique, output)), logits)
        value = logits[seen]
        logits[seen] = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
    if len(output) and (p.frequency_penalty or p.presence_penalty):
        penalty = torch.from_numpy(counts * p.frequency_penalty + p.presence_penalty).to(logits.dtype)
        logits[_beside(torch.from_numpy(output), logits)] -= _beside(penalty, logits)


def _truncate(weights: Floats, *, top_k: int, top_p: float, min_p: float) -> None:
    """Sets to zero what is not kept; weights [V], largest 1.

    min_p keeps weights of at least min_p, top_k the k largest and all equal to the k-th, top_p the fewest largest
    that have at least top_p of what is left then (of equal ones the lower ids).
    """
    if min_p > 0:
        weights[weights < min_p] = 0
    if 0 < top_k < len(weights):
        weights[weights < _kth_largest(weights, top_k)] = 0
    if top_p < 1:
        total = weights.sum()
        # Smaller weights than the last of these have less than 1 - top_p together. So the rest decides; mostly far
        # fewer do.
        for smallest in (1e-3, total * (1 - top_p) / len(weights)):
            ids = np.flatnonzero(weights >= smallest)
            if weights[ids].sum() >= top_p * total:
                break
        order = ids[np.argsort(-weights[ids], kind="stable")]
        mass = np.cumsum(weights[order])
        keep = order[: int(np.searchsorted(mass, top_p * total, side="left")) + 1]
        kept = weights[keep]
        weights[:] = 0
        weights[keep] = kept


def _kth_largest(weights: Floats, k: int) -> float:
    """The k-th largest weight. As many blocks have a weight of at least their k-th largest maximum, so no smaller
    weight can be it: few are left to be looked through."""
    whole = len(weights) // _CDF_BLOCK
    if k <= whole:
        maxima = weights[: whole * _CDF_BLOCK].reshape(whole, _CDF_BLOCK).max(1)
        weights = weights[weights >= np.partition(maxima, whole - k)[whole - k]]
    return float(np.partition(weights, len(weights) - k)[len(weights) - k])


def _invert(weights: Floats, uniforms: Floats) -> list[int]:
    """For each row of weights [R, V'] the first token at which the cumulative weight exceeds u of the total."""
    blocks = weights.reshape(len(weights), -1, _CDF_BLOCK)
    block_ends = np.cumsum(blocks.sum(-1), axis=1)
    targets = uniforms * block_ends[:, -1]
    tokens = []
    for r, target in enumerate(targets):
        block = min(int(np.searchsorted(block_ends[r], target, side="right")), blocks.shape[1] - 1)
        while block > 0 and not blocks[r, block].any():  # the target rounded up to the total
            block -= 1
        inside = blocks[r, block]
        start = block_ends[r, block - 1] if block else 0.0
        token = int(np.searchsorted(start + np.cumsum(inside), target, side="right"))
        # The block's own sum may differ from the running one in its last bit.
        token = min(token, int(np.flatnonzero(inside)[-1]))
        tokens.append(block * _CDF_BLOCK + token)
    return tokens
