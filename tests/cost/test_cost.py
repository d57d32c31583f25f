"""The cost model against numbers that can be had by hand, or are told of the models and devices."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import resolve

from batchinfer.cost import JobTokens, ModelShape, find_device, parse_device, predict
from batchinfer.cost.devices import DEVICES
from batchinfer.cost.roofline import CostModel
from batchinfer.errors import ConfigError
from batchinfer.layers import SparseMLP
from batchinfer.modelfiles import open_model
from batchinfer.modelfiles.llama_config import LlamaConfig
from batchinfer.models import load_model
from batchinfer.testing.tiny import make_tiny, tensor_draws, tiny_config

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
QWEN3_30B_A3B = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
GPT_OSS_20B = {
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def shape_of(config: dict[str, object]) -> ModelShape:
    shape = ModelShape.from_config(config)
    assert shape is not None
    return shape


def cost(
    shape: ModelShape, device: str = "H100", weights: str = "bfloat16", kv: str = "bfloat16", group: int = 0
) -> CostModel:
    return CostModel(shape=shape, device=parse_device(device), weights=weights, kv_cache_dtype=kv, group=group)


def decode_s(model: CostModel, batch: int, context: int = 0) -> float:
    return model.seconds(model.decode_step(batch, context))


def test_the_classic_numbers_of_70_billion_parameters() -> None:
    shape = ModelShape(layer_weights=70_000_000_000, head_weights=0)
    one = decode_s(cost(shape, weights="float16"), 1)
    assert one == pytest.approx(0.0418, rel=1e-3), "140 GB at 3.35 TB/s"
    assert 1 / one == pytest.approx(24, rel=5e-3)
    assert decode_s(cost(shape, weights="int4"), 1) == pytest.approx(one / 4)
    assert decode_s(cost(shape, weights="fp8"), 1) == pytest.approx(one / 2)
    # As many operations as bytes: two for each weight of two bytes.
    assert cost(shape).balanced_batch() == pytest.approx(989.4e12 / 3.35e12, abs=1)
    assert decode_s(cost(shape), 290) == pytest.approx(one)
    assert decode_s(cost(shape), 592) == pytest.approx(2 * one, rel=0.01)


def test_the_demo_models_shape() -> None:
    demo = shape_of(
        {
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "vocab_size": 49152,
        }
    )
    assert (demo.layer_weights, demo.head_weights) == (106_168_320, 28_311_552)
    assert demo.kv_bytes_per_token("float32") == 2 * 30 * 3 * 64 * 4


def test_parameters_are_those_of_the_models() -> None:
    assert shape_of(LLAMA_8B).num_parameters == 8_030_261_248
    assert shape_of(LLAMA_70B).num_parameters == 70_553_706_496
    assert shape_of(QWEN3_30B_A3B).num_parameters == pytest.approx(30.53e9, rel=1e-3)
    assert shape_of(QWEN3_30B_A3B).active_weights == pytest.approx(2.73e9, rel=1e-2), "3.3e9 with head and embeddings"
    assert shape_of(GPT_OSS_20B).num_parameters == pytest.approx(20.9e9, rel=2e-3)
    assert shape_of(GPT_OSS_20B).active_weights + 201088 * 2880 == pytest.approx(3.61e9, rel=1e-2)
    assert shape_of(DEEPSEEK_V3).num_parameters == pytest.approx(671.0e9, rel=1e-3)
    assert shape_of(DEEPSEEK_V3).active_weights + 129280 * 7168 == pytest.approx(37e9, rel=2e-2)


def test_tied_embeddings_are_there_once() -> None:
    shape = shape_of(LLAMA_8B | {"tie_word_embeddings": True})
    assert shape_of(LLAMA_8B).num_parameters - shape.num_parameters == 128256 * 4096


def test_kv_cache() -> None:
    llama = shape_of(LLAMA_8B)
    assert llama.kv_bytes_per_token("bfloat16") == 131_072
    assert llama.kv_bytes_per_token("float32") == 262_144
    assert llama.kv_bytes_per_token("fp8") == 65_536
    assert llama.kv_bytes_per_token("int8") == 2 * 32 * 8 * (128 + 4)
    assert shape_of(LLAMA_70B).kv_bytes_per_token("bfloat16") == 327_680
    assert shape_of(DEEPSEEK_V3).kv_bytes_per_token("bfloat16") == 61 * 576 * 2


def test_memory_of_weights() -> None:
    assert cost(shape_of(LLAMA_8B)).weight_bytes == 2 * 8_030_261_248
    layers = shape_of(LLAMA_8B).layer_weights
    assert layers == 6_979_321_856
    outputs = shape_of(LLAMA_8B).layer_outputs
    assert outputs == 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    plain = 2 * (8_030_261_248 - layers)
    assert cost(shape_of(LLAMA_8B), weights="int4").weight_bytes == layers / 2 + 2 * outputs + plain
    assert cost(shape_of(LLAMA_8B), weights="int8").weight_bytes == layers + 4 * outputs + plain
    assert cost(shape_of(LLAMA_8B), weights="fp8").weight_bytes == layers + 4 * outputs + plain
    # A scale of 16 bits and a zero point of 8 for 128 weights; 4 bytes for a block of 128 x 128.
    assert cost(shape_of(LLAMA_8B), weights="int4", group=128).weight_bytes == layers * (4 + 24 / 128) / 8 + plain
    assert cost(shape_of(LLAMA_8B), weights="fp8", group=128 * 128).weight_bytes == layers * (1 + 4 / 16384) + plain
    assert cost(shape_of(LLAMA_8B), group=128).weight_bytes == cost(shape_of(LLAMA_8B)).weight_bytes


def test_scales_are_read_with_the_weights_that_they_are_of() -> None:
    def read(weights: str, batch: int, group: int = 0) -> float:
        return cost(shape_of(QWEN3_30B_A3B), weights=weights, group=group).decode_step(batch, 0).num_bytes

    shape = shape_of(QWEN3_30B_A3B)
    assert shape.expert_outputs == 2 * 768 + 2048
    one = 48 * (32 * 128 + 2 * 4 * 128 + 2048 + 8 * shape.expert_outputs)
    quantized = shape.active_weights - 48 * 2048 * 128  # but routers
    assert read("int8", 1) == pytest.approx(read("bfloat16", 1) - quantized + 4 * one)
    least = read("int4", 64, 128) - read("int4", 64) + 2 * shape.touched_outputs(64)
    assert least == pytest.approx(24 / 8 / 128 * (shape.touched_weights(64) - shape.plain_weights))


@pytest.mark.parametrize(("quantization", "weights"), [("none", "bfloat16"), ("w8a8", "int8"), ("fp8", "fp8")])
@pytest.mark.parametrize("family", ["llama", "smollm", "mixtral", "qwen2-moe", "deepseek-v2", "deepseek-v3"])
def test_bytes_are_those_that_the_engine_keeps(tmp_path: Path, family: str, quantization: str, weights: str) -> None:
    """But for biases, norms of latents and what fills up routers, which the cost leaves out, and that routers may be in
    float32."""
    folder = make_tiny(tmp_path / "model", family, dtype=torch.bfloat16)
    files = open_model(str(folder))
    model: Any = load_model(files, ops=resolve("reference"), dtype="bfloat16", quantization=quantization)
    kept = model.num_parameter_bytes() - sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if name.endswith((".bias", ".q_norm.weight", ".kv_norm.weight", ".router.weight"))
    )
    routers = 0
    for layer in model.layers:
        if isinstance(layer.mlp, SparseMLP):
            routers += 64 * layer.mlp.config.num_experts
    assert cost(shape_of(dict(files.config)), weights=weights).weight_bytes == kept + 2 * routers


def test_what_stays_plain_is_read_and_multiplied_as_such() -> None:
    """Of DeepSeek-V3's layers, in FP8: the up-projection of latents and the routers."""
    shape = shape_of(DEEPSEEK_V3)
    up, router = 512 * 128 * (128 + 128), 7168 * 256
    assert shape.plain_weights == 61 * up + 58 * router
    in_fp8, plain = cost(shape, weights="fp8", group=128 * 128), cost(shape)
    for work, other in (
        (in_fp8.decode_step(4, 0), plain.decode_step(4, 0)),
        (in_fp8.prefill(4 * 100, 4), plain.prefill(4 * 100, 4)),
    ):
        assert (work.operations, work.other_operations) == (other.operations, other.other_operations)
    step = in_fp8.decode_step(4, 0)
    assert step.operations == 2 * 4 * (shape.active_weights - shape.plain_weights)
    assert step.other_operations == 2 * 4 * (shape.plain_weights + shape.head_weights)
    saved = plain.decode_step(4, 0).num_bytes - step.num_bytes
    assert saved == pytest.approx((1 - 4 / 16384) * (shape.touched_weights(4) - shape.plain_weights))


def test_a_decode_step_by_hand() -> None:
    """Llama-3.1-8B, 256 rows that see 1,024 tokens each."""
    work = cost(shape_of(LLAMA_8B)).decode_step(256, 1024)
    head = 128256 * 4096
    assert work.num_bytes == 2 * (6_979_321_856 + head) + 256 * 1025 * 131_072
    assert work.operations == 2 * 256 * 6_979_321_856
    assert work.other_operations == 256 * (2 * head + 4 * 32 * 32 * 128 * 1024)


def test_a_prefill_by_hand() -> None:
    """8 prompts of 2,048 tokens."""
    work = cost(shape_of(LLAMA_8B)).prefill(8 * 2048, 8)
    head = 128256 * 4096
    assert work.operations == 2 * 8 * 2048 * 6_979_321_856
    assert work.other_operations == 2 * 8 * head + 4 * 32 * 32 * 128 * 8 * 2048 * 1024
    assert work.num_bytes == 2 * 2 * (6_979_321_856 + head) + 8 * 2048 * 131_072, "two steps of 8,192 tokens"


def test_shared_tokens_are_read_once() -> None:
    model = cost(shape_of(LLAMA_8B))
    apart, shared = model.decode_step(100, 1100), model.decode_step(100, 100, shared=1000)
    assert apart.num_bytes - shared.num_bytes == 99 * 1000 * 131_072
    assert apart.other_operations == shared.other_operations


def test_with_a_long_context_decoding_is_always_bound_by_memory() -> None:
    """The KV cache is read for one row alone, unlike the weights."""
    model = cost(shape_of(LLAMA_8B))
    assert model.balanced_batch() == pytest.approx(296, abs=1)
    with_little = model.balanced_batch(64)
    assert with_little is not None and with_little > 340
    assert model.balanced_batch(1024) is None


def test_experts_that_a_step_touches() -> None:
    shape = shape_of(QWEN3_30B_A3B)
    experts = shape.all_expert_weights
    assert shape.touched_weights(1) == pytest.approx(shape.active_weights)
    assert shape.touched_weights(2) - shape.layer_weights == pytest.approx(experts * (16 - 8 * 8 / 128) / 128)
    assert shape.touched_weights(4096) == pytest.approx(shape.layer_weights + experts)
    dense = ModelShape(layer_weights=shape.layer_weights + experts, head_weights=0)
    balanced, of_dense = cost(shape).balanced_batch(), cost(dense).balanced_batch()
    assert balanced is not None and of_dense is not None
    assert balanced > 5 * of_dense, "few rows share an expert"


def test_windows() -> None:
    shape = shape_of(GPT_OSS_20B)
    assert (shape.window, shape.windowed) == (128, 0.5)
    assert shape.seen_tokens(100) == 100 and shape.seen_tokens(1128) == 628
    assert shape.kv_bytes_per_token("bfloat16") == 2 * 24 * 2 * 8 * 64, "the cache keeps what has left the window"
    far, near = cost(shape).decode_step(1, 1128), cost(shape).decode_step(1, 128)
    assert far.num_bytes - near.num_bytes == 500 * shape.kv_bytes_per_token("bfloat16"), "but it is not read"


@pytest.mark.parametrize(
    ("keys", "window", "share"),
    [
        ({"sliding_window": 4096}, 4096, 1.0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0, 0.0),
        ({"sliding_window": None}, 0, 0.0),
        # Where config.json leaves it out, the class of the config has one.
        ({"architectures": ["MistralForCausalLM"]}, 4096, 1.0),
        ({"model_type": "mistral"}, 4096, 1.0),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0.0),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, 1024, 1.0),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 4096}, 0, 0.0),
        ({"model_type": "qwen2", "sliding_window": 4096}, 0, 0.0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, 4096, 4 / 32),
        ({"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 8}, 9, 0.75),
        ({"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 99}, 9, 0.0),
        # Gemma's: each sixth layer sees everything.
        ({"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 6}, 1024, 27 / 32),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 24 + ["sliding_attention"] * 8}, 9, 0.25),
    ],
)
def test_which_layers_have_a_window(keys: dict[str, object], window: int, share: float) -> None:
    shape = shape_of(LLAMA_8B | keys)
    assert (shape.window, shape.windowed) == (window, pytest.approx(share))


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("window", [{}, {"sliding_window": 512}, {"sliding_window": 512, "use_sliding_window": True}])
@pytest.mark.parametrize("head_dim", [{}, {"head_dim": None}, {"head_dim": 64}])
def test_what_a_config_leaves_out_is_what_the_engine_takes(
    architecture: str, window: dict[str, object], head_dim: dict[str, object]
) -> None:
    config = LLAMA_8B | {"architectures": [architecture], "max_position_embeddings": 4096} | window | head_dim
    config |= {"num_attention_heads": 16}  # of 256, where nothing says otherwise
    built = LlamaConfig.from_config(architecture, config)
    shape = shape_of(config)
    assert shape.kv_values == 2 * 32 * built.num_kv_heads * built.head_dim
    windows = [w for w in built.windows if w is not None]
    assert (shape.window if shape.windowed else 0, shape.windowed) == (max(windows, default=0), len(windows) / 32)


def test_layers_without_experts() -> None:
    whole = shape_of(QWEN3_30B_A3B)
    for keys in ({"mlp_only_layers": [0, 7]}, {"first_k_dense_replace": 2}):
        shape = shape_of(QWEN3_30B_A3B | keys)
        assert shape.expert_layers == 46
        assert shape.layer_weights - whole.layer_weights == 2 * (3 * 2048 * 6144 - 2048 * 128)
    assert shape_of(QWEN3_30B_A3B | {"decoder_sparse_step": 2}).expert_layers == 24


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mixtral", {}),
        ("qwen2-moe", {}),
        ("qwen2-moe", {"mlp_only_layers": [1]}),
        ("qwen3-moe", {"decoder_sparse_step": 3}),
        ("qwen3-moe", {"sliding_window": 64, "use_sliding_window": False}),
    ],
)
@pytest.mark.parametrize("said", ["architectures", "model_type"])
def test_mixtures_of_experts_are_as_large_as_what_is_stored(family: str, config: dict[str, Any], said: str) -> None:
    made = tiny_config(family, num_hidden_layers=7, **config)
    built = LlamaConfig.from_config(made["architectures"][0], made)
    sparse = [experts for experts in built.experts if experts is not None]
    stored = tensor_draws(made)
    sizes = {name: math.prod(draw.shape) for name, draw in stored.items() if len(draw.shape) == 2}
    shape = shape_of({key: value for key, value in made.items() if key == said or key not in _SAYING})
    gates = sum(size for name, size in sizes.items() if "shared_expert_gate" in name)
    assert shape.num_parameters - shape.norm_weights == sum(sizes.values()) - gates
    assert (shape.expert_layers, shape.num_experts) == (len(sparse), sparse[0].num_experts)
    assert shape.experts_per_token == sparse[0].top_k and shape.windowed == 0


_SAYING = ("architectures", "model_type")


@pytest.mark.parametrize("missing", LLAMA_8B)
def test_a_config_that_does_not_say_enough(missing: str) -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != missing}
    shape = ModelShape.from_config(config)
    assert (shape is None) == (missing != "num_key_value_heads")
    assert ModelShape.from_config(config | {missing: "many"}) == shape


def test_devices() -> None:
    assert parse_device("H100") == parse_device("NVIDIA h100-sxm5") == DEVICES["H100"]
    assert parse_device("H100 PCIe").bandwidth == 2.0e12
    four = parse_device("4xH100")
    assert str(four) == "4 x H100" and four.bandwidth == 4 * 3.35e12 and four.memory_bytes == 4 * 81_559 * 2**20
    measured = parse_device("H100, bandwidth=3e12, bfloat16=7e14")
    assert measured.bandwidth == 3e12 and measured.rate("bfloat16") == 7e14 and measured.rate("int8") == 1978.9e12
    mine = parse_device("mine,bandwidth=1e12,memory=24e9,bfloat16=1e14")
    assert (mine.name, mine.memory_bytes) == ("mine", 24e9)
    assert mine.rate("fp8") == 1e14, "converted to bfloat16"


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ],
)
def test_devices_by_the_names_that_cuda_has_for_them(name: str, device: str) -> None:
    assert find_device(name) == DEVICES[device]
    assert find_device(f"{name} Mini") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H1000", "known are A100-40GB, A100-80GB, H100"),
        ("mine,bandwidth=1e12", "'mine' is not known"),
        ("H100,speed=3", "'speed' is not known"),
        ("H100,bandwidth=fast", "'fast'"),
        ("H100,memory=-1", "positive"),
        ("H100,memory=nan", "positive"),
        ("0xH100", "not understood"),
        ("00xH100", "not understood"),
        ("", "not understood"),
    ],
)
def test_devices_that_are_not_understood(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_device(text)


JOB = JobTokens(rows=512, prompt_tokens=512 * 1024, shared_tokens=0, output_tokens=512 * 512)


def test_a_job() -> None:
    found = predict(shape_of(LLAMA_8B), DEVICES["H200"], weights="bfloat16", kv_cache_dtype="bfloat16", job=JOB)
    assert found is not None
    assert found.num_devices == 1 and found.row_tokens == 1536
    assert found.most_rows == int((0.9 * 143_771 * 2**20 - 2 * 8_030_261_248) / (1536 * 131_072)) == 594
    assert found.batch == 512 and found.bound == "memory"
    bytes_of_step = 2 * (6_979_321_856 + 128256 * 4096) + 512 * (1024 + 256 + 1) * 131_072
    assert found.step_s == pytest.approx(bytes_of_step / 4.8e12)
    assert found.decode_s == pytest.approx(511 * found.step_s)
    assert found.decode_tokens_per_s == pytest.approx(512 / found.step_s)
    assert found.prefill_s == pytest.approx(found.prefill_operations / 989.4e12)
    assert found.total_s == found.prefill_s + found.decode_s


def test_a_job_whose_rows_do_not_all_fit_takes_longer() -> None:
    def seconds(job: JobTokens) -> float:
        found = predict(shape_of(LLAMA_8B), DEVICES["H100"], weights="bfloat16", kv_cache_dtype="bfloat16", job=job)
        assert found is not None
        return found.decode_s

    assert seconds(JOB) > 1.4 * 511 / 512 * seconds(replace(JOB, prompt_tokens=512 * 256))
    assert seconds(replace(JOB, shared_tokens=512 * 1000)) < 0.5 * seconds(JOB), "less memory, and less to read"


def test_a_model_that_is_too_large_for_one_device() -> None:
    shape = shape_of(LLAMA_70B)
    formats = {"weights": "bfloat16", "kv_cache_dtype": "bfloat16"}
    found = predict(shape, DEVICES["H100"], **formats, job=JOB)
    assert found is not None and (found.num_devices, found.device) == (2, "2 x H100")
    assert found.single_step_s == pytest.approx(0.5 * 2 * (70_553_706_496 - 8192 * 128256) / 3.35e12, rel=0.02)
    assert predict(shape, parse_device("2xA100-40GB"), **formats, job=JOB) is None
    assert predict(ModelShape(layer_weights=10**14, head_weights=0), DEVICES["H100"], **formats, job=JOB) is None
    quantized = predict(shape, DEVICES["H100"], weights="int4", kv_cache_dtype="bfloat16", job=JOB)
    assert quantized is not None and quantized.num_devices == 1
