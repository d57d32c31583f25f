"""SamplingParams: what is taken and what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.errors import ConfigError
from batchinfer.types.request import SAMPLING_FIELDS, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "0"),
        ("logit_bias", [1]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: float("inf")}),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["a", None]),
        ("stop", 5),
        ("stop", b"a"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", 5),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", True),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
    ],
)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^sampling.{name} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "a"}, ("a",)),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop": None}, ()),
        ({"stop_token_ids": None}, ()),
        ({"stop_token_ids": [1, 2]}, (1, 2)),
    ],
)
def test_lists_are_kept_as_tuples(given: dict[str, Any], kept: tuple[Any, ...]) -> None:
    (name,) = given
    assert getattr(SamplingParams(**given), name) == kept


def test_the_defaults_cut_nothing_off() -> None:
    params = SamplingParams()
    assert params.max_tokens is None
    assert not params.has_penalties
    assert not params.greedy
    assert SamplingParams(top_k=1).greedy
    assert SamplingParams(**{name: getattr(params, name) for name in SAMPLING_FIELDS}) == params
