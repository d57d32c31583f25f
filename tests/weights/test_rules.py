"""Rules are strict both ways: every stored tensor and every part of the model is accounted for."""

from __future__ import annotations

import pytest

from batchinfer.errors import ModelError
from batchinfer.weights import Ignore, Rule, WeightError
from batchinfer.weights.rules import match

RULES = (
    Rule(stored="a.{i}.{p}_proj.{kind}", parameter="layers.{i}.qkv.{kind}", part="{p}"),
    Rule(stored="norm.weight", parameter="norm.weight"),
)
IGNORES = (Ignore(stored="a.{i}.inv_freq", reason="computed"),)
PARTS = {("layers.1.qkv.weight", "q"), ("layers.1.qkv.weight", "k"), ("norm.weight", "")}
STORED = ["a.1.q_proj.weight", "a.1.k_proj.weight", "norm.weight", "a.1.inv_freq"]


def test_each_tensor_finds_its_part() -> None:
    found = match(STORED, PARTS, RULES, IGNORES, where="model")
    assert {name: part for name, (part, _) in found.items()} == {
        "a.1.q_proj.weight": ("layers.1.qkv.weight", "q"),
        "a.1.k_proj.weight": ("layers.1.qkv.weight", "k"),
        "norm.weight": ("norm.weight", ""),
    }


def test_both_sides_are_listed() -> None:
    stored = [*STORED[:1], *STORED[2:], "a.1.v_proj.weight", "a.10.q_proj.weight", "b.bias", "xnorm.weight"]
    with pytest.raises(WeightError) as caught:
        match(stored, PARTS, RULES, IGNORES, where="the/model")
    text = str(caught.value)
    assert text.startswith("the/model: ")
    assert (
        "in the checkpoint, not in the model (4): a.1.v_proj.weight, a.10.q_proj.weight, b.bias, xnorm.weight" in text
    )
    assert "in the model, not in the checkpoint (1): a.1.k_proj.weight" in text
    assert isinstance(caught.value, ModelError)


def test_long_lists_are_cut() -> None:
    with pytest.raises(WeightError, match=r"\(40\): .* and 28 more"):
        match([*STORED, *(f"x{n}" for n in range(40))], PARTS, RULES, IGNORES, where="m")


def test_two_tensors_for_one_part() -> None:
    rules = (*RULES, Rule(stored="final_norm.weight", parameter="norm.weight"))
    with pytest.raises(WeightError, match="two tensors for one parameter"):
        match([*STORED, "final_norm.weight"], PARTS, rules, IGNORES, where="m")


def test_a_dot_in_a_pattern_is_a_dot() -> None:
    with pytest.raises(WeightError, match="normxweight"):
        match([*STORED[:2], "normxweight"], PARTS, RULES, IGNORES, where="m")


def test_what_is_ignored_is_so_also_where_a_rule_matches() -> None:
    stored = [*STORED, "a.10.q_proj.weight", "a.10.more.of.it"]
    with pytest.raises(WeightError, match=r"\(2\): a\.10\.more\.of\.it, a\.10\.q_proj\.weight\n"):
        match(stored, PARTS, RULES, IGNORES, where="m")
    further = (*IGNORES, Ignore(stored="a.10.{rest}", reason="another model's"))
    assert match(stored, PARTS, RULES, further, where="m").keys() == set(STORED[:3])
    needed = (*IGNORES, Ignore(stored="norm.{rest}", reason="a mistake"))
    with pytest.raises(WeightError, match=r"in the model, not in the checkpoint \(1\): norm\.weight"):
        match(STORED, PARTS, RULES, needed, where="m")


def test_rules_that_overlap_are_our_bug() -> None:
    rules = (*RULES, Rule(stored="{any}.weight", parameter="other"))
    with pytest.raises(AssertionError, match="matches several rules"):
        match(STORED, PARTS, rules, IGNORES, where="m")
