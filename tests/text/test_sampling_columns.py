"""Per-row sampling settings."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.errors import ConfigError
from batchinfer.testing.small_tokenizers import CHATML
from batchinfer.text import (
    PreparedRow,
    PromptRenderer,
    PromptSpec,
    SamplingColumns,
    Tokenizer,
    apply_overrides,
    prepare_rows,
)
from batchinfer.types.request import SamplingParams
from batchinfer.types.rows import ErrorClass, RowError

BASE = SamplingParams(max_tokens=64, temperature=0.5, stop=["END"])


def overrides(name: str, value: Any) -> Any:
    return SamplingColumns({name: "c"}, BASE).overrides({"c": value})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", np.int8(7), 7),
        ("max_tokens", pa.scalar(7, pa.int8()), 7),
        ("max_tokens", 7.0, 7),  # an integer column with nulls, read as floats
        ("max_tokens", Decimal(7), 7),  # a column that holds an integer beyond 64 bits as well
        ("seed", Decimal(2**63), 2**63),
        ("temperature", np.float32(0.25), 0.25),
        ("temperature", Decimal("0.25"), 0.25),
        ("stop_token_ids", [Decimal(5), Decimal(7)], [5, 7]),
        ("logit_bias", {"5": Decimal("1.5")}, {5: 1.5}),
        ("logit_bias", [[Decimal(5), Decimal(1)]], {5: 1}),
        ("temperature", 1, 1),
        ("stop", np.array(["a", "b"], dtype=object), ["a", "b"]),
        ("stop", "a", ["a"]),
        ("stop", [], []),
        ("stop_token_ids", np.array([1, 2], dtype=np.int32), [1, 2]),
        ("logit_bias", [(5, 1.5), (np.int32(6), -1.0)], {5: 1.5, 6: -1.0}),
        ("logit_bias", {"5": 1.5, "6": None}, {5: 1.5}),
        ("seed", np.uint64(2**63), 2**63),
        ("ignore_eos", np.bool_(True), True),
    ],
)
def test_values_become_plain(name: str, value: Any, expected: Any) -> None:
    got = overrides(name, value)
    assert got == {name: expected}
    assert type(got[name]) is type(expected)
    through_json = json.loads(json.dumps(got))
    assert apply_overrides(BASE, through_json) == apply_overrides(BASE, got)


def test_null_is_the_jobs_default_and_empty_is_empty() -> None:
    assert overrides("stop", None) is None
    assert apply_overrides(BASE, None) is BASE
    assert apply_overrides(BASE, overrides("stop", [])).stop == ()
    both = SamplingColumns({"max_tokens": "a", "stop": "b"}, BASE)
    assert both.overrides({"a": None, "b": ["x"]}) == {"stop": ["x"]}
    assert both.columns() == ("a", "b")
    assert SamplingColumns({}, BASE).overrides({"a": 1}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", Decimal("1.5")),
        ("max_tokens", Decimal("NaN")),
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("max_tokens", math.inf),
        ("max_tokens", math.nan),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0),
        ("stop", [""]),
        ("stop", [None]),
        ("stop", 5),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": "y"}),
        ("logit_bias", 3),
        ("n", 0),
        ("min_tokens", 65),
        ("logprobs", 21),
        ("ignore_eos", 1),
    ],
)
def test_wrong_values_are_error_rows_that_name_column_and_setting(name: str, value: Any) -> None:
    error = overrides(name, value)
    assert isinstance(error, RowError) and error.error_class is ErrorClass.INVALID_SAMPLING
    assert "'c'" in error.message and f"sampling.{name}" in error.message


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'max_tokns'.*max_tokens"):
        SamplingColumns({"max_tokns": "c"}, BASE)


def test_only_named_columns_count(chatml: Tokenizer) -> None:
    renderer = PromptRenderer(PromptSpec(prompt_column="p"), chatml, {"default": CHATML})
    sampling = SamplingColumns({"max_tokens": "mine"}, BASE)
    rows = [
        {"p": "a", "mine": 5, "temperature": 9},
        {"p": "a", "mine": None},
        {"p": "a", "mine": 0},
        {"p": None, "mine": 5},
    ]
    got = prepare_rows(renderer, chatml, rows, sampling=sampling)
    assert got[0] == PreparedRow(chatml.encode("a"), {"max_tokens": 5})
    assert got[1] == PreparedRow(chatml.encode("a"), None)
    assert [error.error_class for error in got[2:] if isinstance(error, RowError)] == [
        ErrorClass.INVALID_SAMPLING,
        ErrorClass.INVALID_PROMPT,
    ]
