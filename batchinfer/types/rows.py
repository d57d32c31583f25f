"""Rows and how they end. Row identity is (file's path relative to the input's root, row index in it)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ErrorClass(StrEnum):
    """The closed list of reasons for which a row has no completion. Stored in `error.class` of the output."""

    INVALID_PROMPT = "invalid_prompt"  # null, NaN, wrong type, empty with nothing to condition on
    INVALID_ROW = "invalid_row"  # the row itself can't be read: broken JSON, broken UTF-8
    INVALID_SAMPLING = "invalid_sampling"  # a per-row sampling setting is out of range or of the wrong type
    TEMPLATE_ERROR = "template_error"  # the prompt or chat template refused the row
    TEMPLATE_TIMEOUT = "template_timeout"  # rendering took longer than its limit
    PROMPT_TOO_LONG = "prompt_too_long"  # prompt tokens leave no room in max_model_len
    NON_FINITE_LOGITS = "non_finite_logits"  # NaN or infinity where a token should be sampled
    OUT_OF_MEMORY = "out_of_memory"  # the row alone does not fit
    ENGINE_CRASH = "engine_crash"  # the row alone kills its engine
    INTERNAL = "internal"  # a bug in batchinfer; the message says where

    @property
    def retryable(self) -> bool:
        """Whether running the same row again, perhaps under changed limits or settings, can help."""
        return self in _RETRYABLE


_RETRYABLE = frozenset(
    {
        ErrorClass.TEMPLATE_TIMEOUT,
        ErrorClass.PROMPT_TOO_LONG,
        ErrorClass.NON_FINITE_LOGITS,
        ErrorClass.OUT_OF_MEMORY,
        ErrorClass.ENGINE_CRASH,
        ErrorClass.INTERNAL,
    }
)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no completion."""

    error_class: ErrorClass
    message: str
