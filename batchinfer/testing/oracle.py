"""What `transformers` says about a model: float32, eager attention, one sequence at a time. Tests only."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Oracle:
    """A transformers model of a Hugging Face folder or of a .gguf file (on dequantized weights)."""

    def __init__(self, path: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, GgufConfig
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        path = Path(path)
        more: dict[str, Any] = {}
        if path.suffix == ".gguf":
            more = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
            path = path.parent
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, attn_implementation="eager", local_files_only=True, **more
        ).eval()
        # transformers renamed the argument within version 5.
        known = inspect.signature(self.model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [T, V] for a whole sequence in one pass."""
        logits: Tensor = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
        return logits

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], max_tokens: int, *, eos_token_ids: Collection[int] = ()) -> list[int]:
        """Up to max_tokens tokens, each the first of the largest logits; an end token is the last one."""
        return self.greedy_with_gaps(token_ids, max_tokens, eos_token_ids=eos_token_ids)[0]

    @torch.inference_mode()
    def greedy_with_gaps(
        self, token_ids: Sequence[int], max_tokens: int, *, eos_token_ids: Collection[int] = ()
    ) -> tuple[list[int], list[float]]:
        """`greedy`, and how far the best logit was above the second at each step (a near-tie may go either way)."""
        out: list[int] = []
        gaps: list[float] = []
        cache: Any = None
        feed = list(token_ids)
        while len(out) < max_tokens and (not out or out[-1] not in eos_token_ids):
            answer = self.model(torch.tensor([feed]), use_cache=True, **{self._cache_argument: cache})
            cache = answer[self._cache_argument]
            row = answer.logits[0, -1].float()
            best = row.topk(2).values
            gaps.append(float(best[0] - best[1]))
            out.append(int(row.argmax()))
            feed = out[-1:]
        return out, gaps

    def disagreements(self, token_ids: Sequence[int], completion: Sequence[int]) -> list[tuple[int, float]]:
        """Where a completion is not the greedy one: (position in it, how far its token's logit is below the best).

        One pass over prompt and completion: each token is judged after the completion's own tokens before it. An
        empty list says that `greedy` gives the same; entries of less than 1e-3 are near-ties.
        """
        logits = self.logits([*token_ids, *completion[:-1]])[len(token_ids) - 1 :]
        chosen = logits.gather(1, torch.tensor(list(completion))[:, None])[:, 0]
        behind = logits.amax(-1) - chosen
        wrong = (logits.argmax(-1) != torch.tensor(list(completion))).nonzero()[:, 0].tolist()
        return [(position, float(behind[position])) for position in wrong]
