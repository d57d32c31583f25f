"""Models that can't run are refused from their files alone, before a job writes or starts anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ModelError
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import JobSpec
from batchinfer.modelfiles import open_model
from batchinfer.modelfiles.experts_config import ExpertsConfig
from batchinfer.modelfiles.supported import ARCHITECTURES, check_supported
from batchinfer.models.registry import ARCHITECTURES as BUILT
from batchinfer.testing.tiny import FAMILIES, make_tiny

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Gemma3ForCausalLM"]}, r"Gemma3ForCausalLM is not supported; supported are .*LlamaFor"),
    ({"architectures": None}, "architecture none"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers .* positive integer, got '2'"),
    ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, "'ntk' is not supported"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized .*'bitsandbytes'.* use the original"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"quantization_config": {"quant_method": "gptq", "desc_act": True}}, "method 'gptq', bits None"),
    (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        r"quantized \(gptq, as quantization_config says\), but it has no tensor g_idx or qweight or qzeros",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .* rotates 8 of 16 .* not supported for LlamaForCausalLM"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor .* not supported"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers .* is 10{12}; no model has more"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of"),
]

# Of every field that is read: a good value, and values of which nobody knows what they mean. A wrong guess would be
# another model: "false" is true in Python.
NO_NUMBER = ("4", "x", True, [], [1], {}, float("nan"), float("inf"))
FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
        (None, 0, -1, 1.5, *NO_NUMBER, 10**30),
    ),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), (0, -1, 1.5, *NO_NUMBER, 10**30)),
    "max_position_embeddings": (None, 0, -1, 1.5, "4", [], {}),
    "max_window_layers": (-1, 1.5, *NO_NUMBER),
    "layer_types": (3, "sliding_attention", True, [], ["sliding_attention"], [[]] * 3, {"a": 1}),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor"), (0, -1, *NO_NUMBER, 10**400)),
    "rms_norm_eps": (-1, *NO_NUMBER, 10**400),
    **dict.fromkeys(
        ("attention_bias", "tie_word_embeddings", "use_sliding_window"), (0, 1, "false", "true", [], {}, 1.0)
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (0, "linear", True, [], [{}], {"rope_type": 5}, {"factr": 2})),
    "architectures": (None, 0, "Qwen3ForCausalLM", [], [1], [[]], [{}], {}),
    "hidden_act": (0, "", "relu", []),
    "eos_token_id": ("2", [2, None], True, {}, 1.5),
}
# The same of experts.
COUNT = (None, 0, -1, 1.5, *NO_NUMBER, 10**30)
EXPERT_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), COUNT),
    "shared_expert_intermediate_size": COUNT,
    "decoder_sparse_step": (0, -1, 1.5, *NO_NUMBER),
    "mlp_only_layers": (0, "1", True, ["1"], [True], [1.0], {}),
    **dict.fromkeys(("norm_topk_prob", "qkv_bias", "use_sliding_window"), (0, 1, "false", [], {}, 1.0)),
}
SCALINGS: tuple[dict[str, Any], ...] = (
    *({"rope_type": "linear", "factor": value} for value in (0, -1, *NO_NUMBER)),
    *({"rope_type": "yarn", "factor": 4, key: "x"} for key in ("attention_factor", "beta_fast", "mscale", "truncate")),
    {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": None, "high_freq_factor": 4},
)


def test_what_is_called_supported_is_what_can_be_built() -> None:
    assert set(ARCHITECTURES) == set(BUILT)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tiny_member_is_supported(tmp_path: Path, family: str) -> None:
    check_supported(open_model(str(make_tiny(tmp_path / "tiny", family=family))))


def test_fake_models_are_supported() -> None:
    check_supported(open_model("fake://hash"))


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_job_refuses_before_anything_is_written(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = make_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "rows.parquet")
    spec = JobSpec.from_dict(
        {
            "model": {"path": str(folder)},
            "input": {"path": str(tmp_path / "rows.parquet"), "prompt": "{text}"},
            "output": {"path": str(tmp_path / "out")},
        }
    )
    with pytest.raises(ModelError, match=message) as caught:
        resolve_job(spec)
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "out").exists()


def refusal(folder: Path, stored: dict[str, Any], change: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(stored | change))
    with pytest.raises(ModelError) as caught:
        check_supported(open_model(str(folder)))
    return str(caught.value)


@pytest.mark.parametrize("key", FIELDS)
def test_a_field_of_another_type_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    folder = make_tiny(tmp_path / "tiny", "qwen3", use_sliding_window=True, sliding_window=8)
    stored = json.loads((folder / "config.json").read_text())
    for value in FIELDS[key]:
        said = refusal(folder, stored, {key: value})
        assert key in said and str(folder) in said, (value, said)
    (folder / "config.json").write_text(json.dumps(stored))
    check_supported(open_model(str(folder)))


@pytest.mark.parametrize("key", EXPERT_FIELDS)
def test_a_field_of_experts_of_another_type_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    folder = make_tiny(tmp_path / "tiny", "qwen2-moe")
    stored = json.loads((folder / "config.json").read_text())
    for value in EXPERT_FIELDS[key]:
        said = refusal(folder, stored, {key: value})
        assert key in said and str(folder) in said, (value, said)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts there are"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts there are"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window .* not supported"),
        ("qwen2-moe", {"use_sliding_window": True}, "use_sliding_window .* not supported"),
    ],
)
def test_experts_that_can_not_be(tmp_path: Path, family: str, change: dict[str, Any], message: str) -> None:
    folder = make_tiny(tmp_path / "tiny", family)
    said = refusal(folder, json.loads((folder / "config.json").read_text()), change)
    assert re.search(message, said), said


def test_groups_of_experts_that_can_not_be() -> None:
    good = {"num_experts": 8, "top_k": 4, "intermediate_size": 16, "num_groups": 4, "top_groups": 2}
    ExpertsConfig(**good)
    for change, message in (
        ({"num_groups": 3}, "do not make 3 groups"),
        ({"top_groups": 5}, "topk_group 5"),
        ({"top_groups": 1}, "no token could take 4"),
        ({"scoring": "sigmoid", "num_groups": 8, "top_groups": 4}, "two best"),
    ):
        with pytest.raises(ModelError, match=message):
            ExpertsConfig(**{**good, **change})


@pytest.mark.parametrize("factor", [0.5, 1.5, 1e308])
def test_a_part_of_each_head_is_refused_whatever_else_the_folder_says(tmp_path: Path, factor: float) -> None:
    folder = make_tiny(tmp_path / "tiny")
    stored = json.loads((folder / "config.json").read_text())
    for more in ({}, {"rope_dimension_count": 8}):
        assert "partial_rotary_factor" in refusal(folder, stored, {"partial_rotary_factor": factor, **more})
    (folder / "config.json").write_text(json.dumps(stored | {"rope_dimension_count": 8}))  # which means nothing there
    check_supported(open_model(str(folder)))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_numbers_of_a_rope_scaling_are_refused_by_their_names(tmp_path: Path, scaling: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "tiny")
    stored = json.loads((folder / "config.json").read_text())
    for place in ("rope_scaling", "rope_parameters"):
        said = refusal(folder, stored, {place: scaling})
        assert any(key in said for key in scaling if key not in ("rope_type",)) and str(folder) in said


@pytest.mark.parametrize("last", ["qweight", "g_idx", "weight_packed", "weight_scale_inv", "input_scale", "k_scale"])
def test_quantized_tensors_of_which_the_config_says_nothing(tmp_path: Path, last: str) -> None:
    """As older GPTQ and AWQ checkpoints have it, beside a quantize_config.json that other programs read."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{last}"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ModelError, match=rf"quantized \(tensor '[\w.]+\.{last}' in model\.safetensors\).*not supported"
    ):
        check_supported(open_model(str(folder)))
