"""Log-probabilities for reports: of the model's raw logits, before penalties, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.types.request import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of raw logits float32 [R, V]: of token_ids[r], with the num_top[r] most likely tokens.

    The rank of a token is one more than the number of tokens with a larger logit. Equal ones stand by id.
    """
    lse = torch.logsumexp(logits.double(), dim=-1)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    own = logits.gather(1, chosen)
    ranks = ((logits > own).sum(-1) + 1).tolist()
    own_logprobs = (own[:, 0].double() - lse).tolist()
    most = min(max(num_top, default=0), logits.shape[-1])
    tops: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    if most:
        values, ids = logits.topk(most, dim=-1)
        for top, row_ids, row_values in zip(tops, ids.tolist(), (values.double() - lse[:, None]).tolist(), strict=True):
            top.extend(sorted(zip(row_ids, row_values, strict=True), key=lambda item: (-item[1], item[0])))
    return [
        TokenLogprobs(int(token), logprob, rank, tuple(top[:count]))
        for token, logprob, rank, top, count in zip(token_ids, own_logprobs, ranks, tops, num_top, strict=True)
    ]
