"""Rows to what the engine needs: `prepare_rows`. The planner's inner loop.

Responsible for: rendering, tokenizing in one batch, empty and over-long prompts, per-row settings; one outcome a row.
Not for: reading rows, storing what comes out (the job and data rooms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.text.prompts import PromptRenderer
from batchinfer.text.sampling import SamplingColumns
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.types.rows import ErrorClass, RowError

# Texts longer than this, and than so many characters a token, hardly ever fit. They are counted in slices first,
# because encoding 30 MB in one piece takes gigabytes.
_SLICE_CHARS = 1 << 18
_CHARS_PER_TOKEN = 8
_MAX_TOKENS_OFF_PER_SLICE = 64  # a cut inside a word changes the count a little


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can run. `overrides` are its own sampling settings as JSON-like values (`apply_overrides`)."""

    token_ids: list[int]
    overrides: dict[str, Any] | None = None


def prepare_rows(
    renderer: PromptRenderer,
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    *,
    sampling: SamplingColumns | None = None,
    max_model_len: int | None = None,
) -> list[PreparedRow | RowError]:
    """One outcome a row, in order. With `max_model_len`, a prompt that leaves no room for a new token is an error."""
    outcomes: list[PreparedRow | RowError | None] = [None] * len(rows)
    overrides: list[dict[str, Any] | None] = [None] * len(rows)
    groups: dict[tuple[bool, bool], tuple[list[int], list[str]]] = {}
    max_chars = None if max_model_len is None else max(_SLICE_CHARS, max_model_len * _CHARS_PER_TOKEN)
    for n, row in enumerate(rows):
        if sampling is not None:
            own = sampling.overrides(row)
            if isinstance(own, RowError):
                outcomes[n] = own
                continue
            overrides[n] = own
        prompt = renderer.render(row)
        if isinstance(prompt, RowError):
            outcomes[n] = prompt
            continue
        text = prompt.text if prompt.masked is None else prompt.masked
        if max_chars is not None and max_model_len is not None and len(text) > max_chars:
            estimate, off = _estimated_tokens(tokenizer, text)
            if estimate - off >= max_model_len:
                outcomes[n] = _too_long(f"about {estimate:,}", max_model_len)
                continue
        indices, texts = groups.setdefault((prompt.add_special_tokens, prompt.masked is not None), ([], []))
        indices.append(n)
        texts.append(text)
    for (add_special_tokens, masked), (indices, texts) in groups.items():
        encode = renderer.tokenizer.encode_masked_batch if masked else tokenizer.encode_batch
        for n, ids in zip(indices, encode(texts, add_special_tokens=add_special_tokens), strict=True):
            if not ids:
                outcomes[n] = RowError(
                    ErrorClass.INVALID_PROMPT, "the prompt is empty: no tokens, so there is nothing to go on from"
                )
            elif max_model_len is not None and len(ids) >= max_model_len:
                outcomes[n] = _too_long(f"{len(ids):,}", max_model_len)
            else:
                outcomes[n] = PreparedRow(ids, overrides[n])
    assert all(outcome is not None for outcome in outcomes)
    return outcomes  # type: ignore[return-value]


def _too_long(tokens: str, max_model_len: int) -> RowError:
    return RowError(
        ErrorClass.PROMPT_TOO_LONG,
        f"the prompt has {tokens} tokens; max_model_len is {max_model_len:,}, so at most {max_model_len - 1:,} fit",
    )


def _estimated_tokens(tokenizer: Tokenizer, text: str) -> tuple[int, int]:
    """The count, and how much it may be off."""
    starts = range(0, len(text), _SLICE_CHARS)
    count = sum(len(tokenizer.encode(text[at : at + _SLICE_CHARS], add_special_tokens=False)) for at in starts)
    return count, _MAX_TOKENS_OFF_PER_SLICE * len(starts)
