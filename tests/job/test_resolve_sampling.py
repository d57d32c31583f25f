"""Where sampling settings come from: the user, the model's generation_config, or the neutral value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchinfer.errors import ConfigError
from batchinfer.job.resolve import resolve_sampling
from batchinfer.job.spec import JobSpec
from batchinfer.modelfiles import open_model

SUGGESTED = {"temperature": 0.1, "repetition_penalty": 1.3, "do_sample": True, "top_k": 50}


def resolved(given, suggested):
    spec = JobSpec.from_dict(
        {
            "model": {"path": "fake://hash"},
            "input": {"path": "x", "prompt_column": "p"},
            "output": {"path": "o"},
            "sampling": given,
        }
    )
    return resolve_sampling(spec, replace(open_model("fake://hash"), generation_config=suggested))


def test_nothing_given_takes_the_models_settings_and_says_so():
    found = resolved({}, SUGGESTED)
    assert found["temperature"] == (0.1, "generation_config")
    assert found["top_k"] == (50, "generation_config")
    assert found["repetition_penalty"] == (1.3, "generation_config")
    assert found["top_p"] == (1.0, "default")
    assert found["max_tokens"] == (None, "default")


def test_one_given_setting_leaves_the_others_to_the_model():
    found = resolved({"temperature": 1.0}, SUGGESTED)
    assert found["temperature"] == (1.0, "user")
    assert found["top_k"] == (50, "generation_config")
    found = resolved({"top_p": 1.0}, SUGGESTED)
    assert found["top_p"] == (1.0, "user")
    assert found["temperature"] == (0.1, "generation_config")


def test_without_do_sample_it_is_greedy_whatever_values_lie_there():
    found = resolved({}, {**SUGGESTED, "do_sample": False})
    assert found["temperature"] == (0.0, "default")
    assert found["top_k"] == (0, "default")
    assert found["repetition_penalty"] == (1.3, "generation_config")
    assert resolved({}, {"temperature": 0.6})["temperature"] == (0.0, "default")
    assert resolved({}, {})["temperature"] == (0.0, "default")


def test_do_sample_without_a_temperature_is_one():
    assert resolved({}, {"do_sample": True})["temperature"] == (1.0, "generation_config")


def test_a_value_that_can_not_be_used_is_blamed_on_the_model():
    with pytest.raises(ConfigError, match="from the model's generation_config"):
        resolved({}, {"do_sample": True, "top_p": 7})
    assert resolved({"top_p": 0.5}, {"do_sample": True, "top_p": 7})["top_p"] == (0.5, "user")
