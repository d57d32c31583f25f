"""Log-probabilities for reports: of the model's raw logits, before penalties, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.types.request import TokenLogprobs

_PIECE = 512  # numbers that are added up by one thread


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of raw logits float32 [R, V]: of token_ids[r], with the num_top[r] most likely tokens.

    The rank of a token is one more than the number of tokens with a larger logit. Equal ones stand by id, also where
    not all of them are told: a row's entry does not follow from how many tokens other rows ask for.
    """
    lse = _log_sum_exp(logits)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    own = logits.gather(1, chosen)
    ranks = ((logits > own).sum(-1) + 1).tolist()
    own_logprobs = (own[:, 0].double() - lse).tolist()
    tops = _top_tokens(logits, lse, num_top) if any(num_top) else [()] * len(token_ids)
    return [
        TokenLogprobs(int(token), logprob, rank, top)
        for token, logprob, rank, top in zip(token_ids, own_logprobs, ranks, tops, strict=True)
    ]


def _log_sum_exp(logits: Tensor) -> Tensor:
    """float64 [R] of finite logits float32 [R, V], the same for any number of rows and threads: the sum over a row that
    is alone would be split over threads, in parts that follow from how many there are."""
    highest = logits.amax(-1, keepdim=True).double()
    powers = torch.exp(logits.double() - highest)
    pieces = F.pad(powers, (0, -powers.shape[1] % _PIECE)).view(len(powers), -1, _PIECE)
    return highest[:, 0] + pieces.sum(-1).sum(-1).log()


def _top_tokens(logits: Tensor, lse: Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """(id, log-probability) of the num_top[r] most likely tokens of each row, equal ones by id."""
    vocab = logits.shape[-1]
    values, ids = logits.topk(min(max(num_top) + 1, vocab), dim=-1)  # one more: whether equal ones are left out
    logprobs = (values.double() - lse[:, None]).tolist()
    tops = []
    for r, (row_ids, row_logprobs, count) in enumerate(zip(ids.tolist(), logprobs, num_top, strict=True)):
        count = min(count, vocab)
        if 0 < count < len(row_ids) and row_logprobs[count - 1] == row_logprobs[count]:
            num_above = row_logprobs.index(row_logprobs[count])
            equal = torch.nonzero(logits[r] == values[r, count])[: count - num_above, 0]
            row_ids = row_ids[:num_above] + equal.tolist()
        top = list(zip(row_ids, row_logprobs, strict=False))[:count]
        tops.append(tuple(sorted(top, key=lambda item: (-item[1], item[0]))))
    return tops
