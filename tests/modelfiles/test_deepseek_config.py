"""What DeepSeek's configs say, and what of it is refused by name. No weights."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.errors import ModelError
from batchinfer.modelfiles.deepseek_config import DeepseekConfig, is_latent
from batchinfer.modelfiles.experts_config import ExpertsConfig
from batchinfer.testing.tiny import tiny_config

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# As released.
V2_LITE: dict[str, Any] = {
    "architectures": [V2],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3_ITSELF: dict[str, Any] = {
    **V2_LITE,
    "architectures": [V3],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def read(config: dict[str, Any]) -> DeepseekConfig:
    return DeepseekConfig.from_config(config["architectures"][0], config)


def test_v2_lite() -> None:
    found = read(V2_LITE)
    assert (found.q_rank, found.rank, found.row_size, found.pairs) == (None, 512, 576, True)
    assert found.scale == pytest.approx(192**-0.5 * (1 + 0.0707 * 3.6888794541) ** 2)
    assert found.rope.max_position_embeddings == 163840
    experts = ExpertsConfig(
        num_experts=64, top_k=6, intermediate_size=1408, wide_logits=True, renormalize=False, shared_size=2816
    )
    assert found.experts == (None, *[experts] * 26)


def test_v3() -> None:
    found = read(V3_ITSELF)
    assert (found.num_layers, found.num_stored_layers, found.q_rank) == (61, 62, 1536)
    assert found.scale == pytest.approx(0.1352337788)  # as its own code says it
    experts = ExpertsConfig(
        num_experts=256,
        top_k=8,
        intermediate_size=2048,
        wide_logits=True,
        scoring="sigmoid",
        correction_bias=True,
        scale=2.5,
        num_groups=8,
        top_groups=4,
        shared_size=2048,
    )
    assert found.experts == (None, None, None, *[experts] * 58)
    assert (24576, 1536) in found.product_shapes() and (2112, 7168) in found.product_shapes()
    assert found.router_shapes() == [(64, 7168)]


def test_groups_count_only_where_the_method_says_so() -> None:
    grouped = {**V2_LITE, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    for method, groups in (("greedy", (1, 1)), ("group_limited_greedy", (8, 3))):
        last = read({**grouped, "topk_method": method}).experts[-1]
        assert last is not None and (last.num_groups, last.top_groups, last.scale) == (*groups, 16.0)


@pytest.mark.parametrize(
    ("scaling", "temperature"),
    [
        (None, 1.0),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 0}, 1.0),
        ({**YARN, "mscale": None, "mscale_all_dim": None}, 1.0),
        ({**YARN, "factor": 0.5}, 1.0),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "factor": 10}, 1 + 0.05 * 2.302585093),
        ({"rope_type": "linear", "factor": 4.0}, 1.0),
    ],
    ids=str,
)
def test_scores_are_sharpened_by_mscale_all_dim_squared(scaling: dict[str, Any] | None, temperature: float) -> None:
    assert read({**V2_LITE, "rope_scaling": scaling}).scale == pytest.approx(192**-0.5 * temperature**2)


@pytest.mark.parametrize(("architecture", "value", "pairs"), [(V3, False, False), (V3, None, True), (V2, False, True)])
def test_numbers_that_turn_together_are_neighbours_unless_v3_says_not(
    architecture: str, value: bool | None, pairs: bool
) -> None:
    config = {**V3_ITSELF, "topk_method": None, "scoring_func": None, "routed_scaling_factor": 1.0}
    assert read({**config, "architectures": [architecture], "rope_interleave": value}).pairs == pairs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": ...}, "q_lora_rank is missing"),
        ({"q_lora_rank": 0}, "q_lora_rank in the model's config must be a positive integer, got 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank .* positive integer"),
        ({"qk_rope_head_dim": 7}, "RoPE over 7 of 7"),
        ({"v_head_dim": "128"}, "v_head_dim .* positive integer"),
        ({"num_key_value_heads": 8}, "num_key_value_heads .* is not num_attention_heads 16"),
        ({"attention_bias": True}, "attention_bias .* not supported for DeepseekV2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor .* rotates 32 of qk_rope_head_dim 64"),
        ({"rope_scaling": {**YARN, "mscale_all_dim": 0}}, "mscale 0.707 and mscale_all_dim 0.0 .* both are needed"),
        ({"rope_scaling": {**YARN, "mscale": None}}, "mscale 0.0 and mscale_all_dim 0.707"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, "attention_factor .* not supported in this family"),
        ({"first_k_dense_replace": ...}, "first_k_dense_replace .* at least 0, got None"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (
            {"scoring_func": "sigmoid"},
            "scoring_func 'sigmoid' .* not supported for DeepseekV2ForCausalLM; supported: softmax",
        ),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' .*; supported: greedy, group_limited_greedy"),
        ({"norm_topk_prob": True, "routed_scaling_factor": 2.0}, "norm_topk_prob with routed_scaling_factor 2.0"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok 65 is more than the 64"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers .* at least 0"),
    ],
    ids=str,
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**V2_LITE, **change}.items() if value is not ...}
    with pytest.raises(ModelError, match=message):
        read(config)


@pytest.mark.parametrize("key", ["norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"])
@pytest.mark.parametrize("left", [..., None])
def test_what_v3_must_say_of_its_experts(key: str, left: Any) -> None:
    """Without it there would be other numbers than programs that have defaults for V3 compute."""
    config = {name: value for name, value in {**V3_ITSELF, key: left}.items() if value is not ...}
    with pytest.raises(ModelError, match=key):
        read(config)
    assert read({**config, "n_routed_experts": None}).experts == (None,) * 61


@pytest.mark.parametrize("key", ["n_group", "topk_group"])
def test_groups_that_count_must_be_told_of_v2_too(key: str) -> None:
    config = {**V2_LITE, "n_group": 8, "topk_group": 3, key: None}
    assert read(config).experts[-1] == read(V2_LITE).experts[-1]
    with pytest.raises(ModelError, match=f"{key} .* positive integer, got None"):
        read({**config, "topk_method": "group_limited_greedy"})


def test_which_models_are_latent() -> None:
    assert is_latent(V2_LITE) and is_latent(V3_ITSELF)
    for config in (tiny_config(), {}, {"architectures": None}, {"architectures": V3}, {"architectures": [3, {}]}):
        assert not is_latent(config)
