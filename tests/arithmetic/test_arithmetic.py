"""What "auto" becomes for a model on a machine, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batchinfer_kernels import fp8

from batchinfer.arithmetic import Arithmetic, Machine, resolve_arithmetic, this_machine
from batchinfer.errors import ConfigError
from batchinfer.modelfiles import ModelFiles, TokenizerFiles, open_model, stored_quantization
from batchinfer.testing.tiny import tiny_config

MEND = "install gcc"
SUITED = Machine(vector_level="avx512", product_level="avx512_bf16")
NO_COMPILER = Machine(vector_level="avx512", product_level="avx512_vnni", obstacle="no C compiler", mend=MEND)
GPU = replace(NO_COMPILER, triton_on_cpu="no GPU", triton_on_gpu=None)
OLDER = Machine(vector_level="avx2", product_level="avx2", obstacle="this processor lacks avx512f")
H200 = replace(GPU, gpu_level="sm_90", gpu_name="NVIDIA H200")
INTERPRETER = replace(OLDER, triton_on_cpu=None)


def resolved(
    machine: Machine,
    *,
    stored: str = "bfloat16",
    quantized: dict[str, Any] | None = None,
    architecture: str = "LlamaForCausalLM",
    model: dict[str, Any] | None = None,
    **options: Any,
) -> Arithmetic:
    """model: of which config.json says more than the architecture."""
    config = {"architectures": [architecture], **(model or {}), "torch_dtype": stored, "quantization_config": quantized}
    files = ModelFiles(
        name="m", kind="hf", root=Path("m"), config=config, tokenizer=TokenizerFiles(kind="tokenizer_json")
    )
    return resolve_arithmetic(files, machine, **options)


def values(found: Arithmetic) -> tuple[str, str, str, str, str | None]:
    return found.dtype, found.quantization, found.kv_cache_dtype, found.kernels, found.instruction_level


INT8 = ("float32", "int8", "int8", "native", "avx512_bf16")


@pytest.mark.parametrize(
    ("machine", "options", "expected"),
    [
        (SUITED, {}, INT8),
        (SUITED, {"quantization": "int8"}, INT8),
        (SUITED, {"quantization": "int8", "dtype": "float32"}, INT8),
        (SUITED, {"kv_cache_dtype": "float32"}, ("float32", "int8", "float32", "native", "avx512_bf16")),
        # As jobs were frozen before int8 was there.
        (SUITED, {"kv_cache_dtype": "bfloat16"}, ("float32", "int8", "bfloat16", "native", "avx512_bf16")),
        (OLDER, {"kv_cache_dtype": "int8"}, ("float32", "none", "int8", "cpu", "avx2")),
        (SUITED, {"quantization": "none"}, ("float32", "none", "float32", "native", "avx512_bf16")),
        # A dtype that is given is what was asked for.
        (SUITED, {"dtype": "float32"}, ("float32", "none", "float32", "native", "avx512_bf16")),
        (SUITED, {"dtype": "bfloat16"}, ("bfloat16", "none", "bfloat16", "native", "avx512_bf16")),
        (SUITED, {"dtype": "float16"}, ("float16", "none", "float16", "native", "avx512_bf16")),
        (SUITED, {"kernels": "cpu"}, ("float32", "none", "float32", "cpu", "avx512")),
        (SUITED, {"kernels": "cpu", "quantization": "int8"}, ("float32", "int8", "float32", "cpu", "avx512_bf16")),
        (SUITED, {"kernels": "reference"}, ("float32", "none", "float32", "reference", "avx512")),
        (NO_COMPILER, {}, ("float32", "none", "float32", "cpu", "avx512")),
        (NO_COMPILER, {"quantization": "int8"}, ("float32", "int8", "float32", "cpu", "avx512_vnni")),
        (OLDER, {}, ("float32", "none", "float32", "cpu", "avx2")),
        (OLDER, {"dtype": "bfloat16"}, ("bfloat16", "none", "bfloat16", "cpu", "avx2")),
        (SUITED, {"device": "cuda"}, ("bfloat16", "none", "bfloat16", "cpu", None)),
        (SUITED, {"device": "cuda:1", "quantization": "int8"}, ("float32", "int8", "float32", "cpu", None)),
        (GPU, {"device": "cuda"}, ("bfloat16", "none", "bfloat16", "triton", None)),
        (GPU, {"device": "cuda", "kernels": "triton"}, ("bfloat16", "none", "bfloat16", "triton", None)),
        (GPU, {"device": "cuda", "dtype": "float16"}, ("float16", "none", "float16", "triton", None)),
        (GPU, {"device": "cuda", "kv_cache_dtype": "int8"}, ("bfloat16", "none", "int8", "triton", None)),
        (GPU, {"device": "cuda", "kernels": "cpu"}, ("bfloat16", "none", "bfloat16", "cpu", None)),
        # What Triton's kernels are not for falls to plain torch.
        (GPU, {"device": "cuda", "dtype": "float32"}, ("float32", "none", "float32", "cpu", None)),
        (GPU, {"device": "cuda", "kv_cache_dtype": "float32"}, ("bfloat16", "none", "float32", "cpu", None)),
        (GPU, {"device": "cuda", "quantization": "int8"}, ("bfloat16", "w8a8", "bfloat16", "triton", None)),
        (
            GPU,
            {"device": "cuda", "quantization": "int8", "dtype": "float16"},
            ("float16", "w8a8", "float16", "triton", None),
        ),
        (
            GPU,
            {"device": "cuda", "quantization": "int8", "kernels": "cpu"},
            ("float32", "int8", "float32", "cpu", None),
        ),
        (GPU, {"device": "cuda", "quantization": "fp8"}, ("bfloat16", "fp8", "bfloat16", "triton", None)),
        (SUITED, {"kernels": "reference", "quantization": "fp8"}, ("float32", "fp8", "float32", "reference", "avx512")),
        (H200, {"device": "cuda"}, ("bfloat16", "none", "bfloat16", "triton", "sm_90")),
        (H200, {"device": "cuda", "kernels": "cpu"}, ("bfloat16", "none", "bfloat16", "cpu", "sm_90, NVIDIA H200")),
        (H200, {}, ("float32", "none", "float32", "cpu", "avx512")),
        (GPU, {}, ("float32", "none", "float32", "cpu", "avx512")),
        (INTERPRETER, {"kernels": "triton"}, ("float32", "none", "float32", "triton", "avx2")),
    ],
)
def test_what_auto_becomes(machine: Machine, options: dict[str, str], expected: tuple[Any, ...]) -> None:
    found = resolved(machine, **options)
    assert values(found) == expected
    assert found.sources.keys() == {"dtype", "quantization", "kv_cache_dtype", "kernels", "instruction_level"}
    for name, source in found.sources.items():
        if name != "instruction_level":
            assert (source == "user") == (name in options)
    # Frozen and resolved again, as a job that goes on, it is the same.
    again = {name: getattr(found, name) for name in ("dtype", "quantization", "kv_cache_dtype", "kernels")}
    assert values(resolved(machine, device=options.get("device", "auto"), **again)) == expected


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("machine", "quantized", "options", "expected"),
    [
        (GPU, GPTQ, {"device": "cuda"}, ("float16", "gptq", "float16", "triton", None)),
        (GPU, GPTQ, {"device": "cuda", "dtype": "bfloat16"}, ("bfloat16", "gptq", "bfloat16", "triton", None)),
        (GPU, FP8, {"device": "cuda", "quantization": "fp8"}, ("float16", "fp8", "float16", "triton", None)),
        # Kernels without such products multiply what the weights stand for.
        (SUITED, GPTQ, {}, ("float32", "gptq", "float32", "native", "avx512_bf16")),
        (OLDER, FP8, {}, ("float32", "fp8", "float32", "cpu", "avx2")),
        (NO_COMPILER, GPTQ, {}, ("float32", "gptq", "float32", "cpu", "avx512")),
    ],
)
def test_a_checkpoint_that_is_stored_quantized_stays_so(
    machine: Machine, quantized: dict[str, Any], options: dict[str, str], expected: tuple[Any, ...]
) -> None:
    found = resolved(machine, stored="float16", quantized=quantized, **options)
    assert values(found) == expected
    if "quantization" not in options:
        assert found.sources["quantization"] == f"auto: the checkpoint's {expected[1]}"
    assert found.degraded is None
    again = {name: getattr(found, name) for name in ("dtype", "quantization", "kv_cache_dtype", "kernels")}
    again["device"] = options.get("device", "auto")
    assert values(resolved(machine, stored="float16", quantized=quantized, **again)) == expected
    for other in ("none", "int8"):
        with pytest.raises(ConfigError, match=f"weights are stored as {expected[1]}"):
            resolved(machine, quantized=quantized, **(options | {"quantization": other}))


def test_experts_with_orders_of_their_own_are_not_multiplied_together() -> None:
    ordered = GPTQ | {"desc_act": True}
    gpu: dict[str, Any] = {"machine": GPU, "device": "cuda"}
    dense, sparse = tiny_config("llama"), tiny_config("mixtral")
    found = resolved(**gpu, quantized=ordered, model=sparse)
    assert (found.kernels, found.quantization) == ("cpu", "gptq")
    assert "since triton can't be used: experts whose inputs have orders of their own" in found.sources["kernels"]
    with pytest.raises(ConfigError, match=r"engine\.kernels triton can't be used here: experts .*desc_act"):
        resolved(**gpu, quantized=ordered, model=sparse, kernels="triton")
    for quantized, model in ((ordered, dense), (GPTQ, sparse), (ordered | {"group_size": -1}, sparse), (None, sparse)):
        assert resolved(**gpu, quantized=quantized, model=model).kernels == "triton"


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # DeepSeek's
EIGHT = {"quantization": "int8"}
INT8_CACHE = {"kv_cache_dtype": "int8"}


@pytest.mark.parametrize(
    ("family", "sizes", "options", "says"),
    [
        ("llama", {"head_dim": 264}, {}, "heads have 264 dimensions, and at most 256 .*head_dim in the model's config"),
        (
            "mistral",
            {"head_dim": None, "hidden_size": 1056},
            {},
            "heads have 264 dimensions, .*hidden_size over num_attention_heads in the model's config",
        ),
        ("mistral", {"hidden_size": 16_388}, {}, "rows have 16,388 numbers, and at most 16,384 can be .hidden_size"),
        (
            "llama",
            {"num_attention_heads": 130, "head_dim": 128},
            EIGHT,
            r"rows have 16,640 numbers, .* \(num_attention_heads times head_dim in the model's config\)",
        ),
        (
            "deepseek-v2",
            LATENT | {"kv_lora_rank": 384},
            {},
            "latents have 384 numbers, and only powers of two from 16 to 512",
        ),
        ("deepseek-v2", LATENT | {"kv_lora_rank": 1024}, {}, "latents have 1024 numbers, .*kv_lora_rank"),
        (
            "deepseek-v3",
            LATENT | {"qk_rope_head_dim": 96},
            {},
            "rotated parts of keys have 96 numbers, .*from 16 to 256",
        ),
        (
            "deepseek-v3",
            LATENT | {"qk_rope_head_dim": 8},
            {},
            "rotated parts of keys have 8 numbers, .*qk_rope_head_dim",
        ),
        ("deepseek-v3", LATENT | {"q_lora_rank": 20_000}, {}, "rows have 20,000 numbers, .*q_lora_rank"),
        (
            "deepseek-v3",
            LATENT | {"v_head_dim": 8192},
            {"quantization": "fp8"},
            "rows have 32,768 numbers, .*num_attention_heads times v_head_dim",
        ),
    ],
)
def test_sizes_that_triton_has_no_kernels_for(
    family: str, sizes: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    """Told from the config. Left to choose, plain torch runs such a model, and that is said; what is just within
    the limits runs on Triton's kernels (the interpreter as well)."""
    model = tiny_config(family, num_key_value_heads=None, **sizes)
    for machine, where in ((H200, {"device": "cuda"}), (INTERPRETER, {"dtype": "float32"})):
        with pytest.raises(ConfigError, match=rf"engine\.kernels triton can't be used here: {says}.*; leave .* to cpu"):
            resolved(machine, model=model, kernels="triton", **where, **options)
    if options != {"quantization": "fp8"}:  # which torch has not
        found = resolved(H200, model=model, device="cuda", **options)
        assert found.kernels == "cpu" and found.degraded is not None
        assert re.search(f"Triton's kernels can't run this model: {says}", found.degraded)
        assert re.search(f"since triton can't be used: {says}", found.sources["kernels"])
    if options:
        assert resolved(H200, model=model, device="cuda", kernels="triton").kernels == "triton"


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {"head_dim": 256}, INT8_CACHE),
        ("qwen3", {"head_dim": 26}, INT8_CACHE),
        ("mistral", {"hidden_size": 16_384}, {}),
        ("llama", {"num_attention_heads": 128, "head_dim": 128}, EIGHT),
        ("deepseek-v2", LATENT | {"qk_rope_head_dim": 256}, {}),
        ("deepseek-v3", LATENT | {"num_attention_heads": 128, "v_head_dim": 128, "q_lora_rank": 1536}, EIGHT),
    ],
)
def test_the_largest_sizes_that_triton_has_kernels_for(
    family: str, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    found = resolved(H200, model=tiny_config(family, num_key_value_heads=None, **sizes), device="cuda", **options)
    assert found.kernels == "triton" and found.degraded is None


def test_experts_whose_scales_are_of_blocks_that_gate_and_up_would_share() -> None:
    model, gpu = tiny_config("mixtral", intermediate_size=192), {"quantized": FP8, "device": "cuda"}
    with pytest.raises(
        ConfigError, match=r"triton .*: an expert's gate and up can't be one product: their 192 outputs"
    ):
        resolved(H200, model=model, kernels="triton", **gpu)
    assert resolved(H200, model=model, **gpu).kernels == "cpu"
    for fitting in (tiny_config("mixtral", intermediate_size=256), tiny_config("llama", intermediate_size=192)):
        assert resolved(H200, model=fitting, **gpu).kernels == "triton"
    by_channel = {"quant_method": "fp8"}
    assert resolved(H200, model=model, quantized=by_channel, device="cuda").kernels == "triton"
    assert stored_quantization.BLOCK == fp8.BLOCK


def test_what_weights_take() -> None:
    assert resolved(GPU, device="cuda", quantization="int8").weights == "int8"
    assert resolved(GPU, device="cuda").weights == "bfloat16"
    assert resolved(GPU, device="cuda", quantized=GPTQ).weights == "int4"


def test_the_level_counts_only_where_bytes_follow_it() -> None:
    """float32 through torch is the same on all processors with AVX-512; the C files use no more than AVX512_BF16."""
    amx = Machine(vector_level="avx512", product_level="amx")
    assert resolved(amx, kernels="cpu").instruction_level == resolved(SUITED, kernels="cpu").instruction_level
    assert resolved(amx).instruction_level == resolved(SUITED).instruction_level
    assert resolved(amx, dtype="bfloat16").instruction_level == "amx"


def test_the_level_of_a_gpu() -> None:
    """torch's products follow the model of a GPU, Triton's its architecture alone. An instance is of its GPU."""
    part, other = (replace(H200, gpu_name=f"NVIDIA {name}") for name in ("H200 MIG 1g.18gb", "H100 80GB HBM3"))
    for kernels, same in (("triton", True), ("cpu", False)):
        whole = resolved(H200, device="cuda", kernels=kernels).instruction_level
        assert resolved(part, device="cuda", kernels=kernels).instruction_level == whole
        assert (resolved(other, device="cuda", kernels=kernels).instruction_level == whole) == same


def test_sources_say_why() -> None:
    assert resolved(SUITED).sources["quantization"] == "auto: this CPU has AVX-512 VNNI"
    assert resolved(SUITED, dtype="bfloat16").sources["quantization"] == "auto: model.dtype is given"
    assert resolved(SUITED, kernels="cpu").sources["quantization"] == "auto: engine.kernels is cpu"
    assert resolved(OLDER).sources["quantization"].endswith("can't be used here: this processor lacks avx512f")
    assert str(resolved(SUITED)) == "int8, KV cache int8, native kernels"
    assert str(resolved(OLDER)) == "float32, KV cache float32, cpu kernels"


@pytest.mark.parametrize(
    ("machine", "options", "says"),
    [
        (NO_COMPILER, {}, "not in int8"),
        (NO_COMPILER, {"quantization": "int8"}, "int8 is computed by torch"),
        (NO_COMPILER, {"quantization": "none"}, None),
        (NO_COMPILER, {"dtype": "float32"}, None),
        (NO_COMPILER, {"kernels": "cpu"}, None),
        (NO_COMPILER, {"device": "cuda"}, None),
        (OLDER, {}, None),  # nothing would help
        (SUITED, {}, None),
    ],
)
def test_what_could_be_faster_is_said_with_how_to_mend_it(
    machine: Machine, options: dict[str, str], says: str | None
) -> None:
    degraded = resolved(machine, **options).degraded
    if says is None:
        assert degraded is None
    else:
        assert degraded is not None
        assert "AVX-512 VNNI, but no C compiler" in degraded and says in degraded and degraded.endswith(MEND)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantization": "int4"}, r"model\.quantization: 'int4' is planned and not there yet; use auto, none or int8"),
        ({"quantization": "fp8"}, r"fp8 needs engine\.kernels triton with engine\.device cuda .* are native \(auto: "),
        ({"quantization": "w8a8", "kernels": "cpu"}, r"w8a8 needs .* triton .* here they are cpu \(user\)"),
        ({"quantization": "awq"}, r"model\.quantization awq: the checkpoint is not stored so; use none, int8 or fp8"),
        ({"quantization": "int3"}, r"model\.quantization must be auto, none or int8 or .*, got 'int3'"),
        ({"kv_cache_dtype": "fp8"}, r"model\.kv_cache_dtype: 'fp8' is planned"),
        ({"kv_cache_dtype": "half"}, r"model\.kv_cache_dtype must be auto, float32 or bfloat16 or float16 or int8"),
        ({"kernels": "cuda"}, r"engine\.kernels must be auto"),
        ({"dtype": "half"}, r"model\.dtype must be auto"),
        ({"dtype": "bfloat16", "quantization": "int8"}, "don't go together"),
        ({"kernels": "native", "device": "cuda"}, r"engine\.kernels native is for CPUs"),
    ],
)
def test_what_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(SUITED, **options)


def test_kernels_that_were_asked_for_and_can_not_be_had() -> None:
    with pytest.raises(ConfigError, match=r"can't be used here: no C compiler; install gcc, or set engine\.kernels to"):
        resolved(NO_COMPILER, kernels="native")
    with pytest.raises(ConfigError, match=r"here: this processor lacks avx512f, or set engine\.kernels to cpu"):
        resolved(OLDER, kernels="native")


@pytest.mark.parametrize(
    ("machine", "options", "says"),
    [
        (SUITED, {"device": "cuda"}, "the package triton is not installed"),
        (GPU, {}, "no GPU"),
        (GPU, {"device": "cuda", "dtype": "float32"}, "float32 do not fit a GPU's shared memory"),
        (GPU, {"device": "cuda", "kv_cache_dtype": "float32"}, "float32 do not fit a GPU's shared memory"),
        (INTERPRETER, {"dtype": "bfloat16"}, "interpreter computes wrong numbers in bfloat16"),
    ],
)
def test_triton_where_it_can_not_be_had(machine: Machine, options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.kernels triton can't be used here: .*{says}"):
        resolved(machine, kernels="triton", **options)


def test_a_fake_model_computes_nothing() -> None:
    found = resolve_arithmetic(open_model("fake://hash"), SUITED)
    assert (found.quantization, found.kernels, found.instruction_level) == ("none", "fake", None)


def test_this_machine() -> None:
    found = this_machine()
    assert found.product_level == "amx" or found.product_level.startswith(found.vector_level)
    assert found.obstacle is not None or found.product_level in ("avx512_vnni", "avx512_bf16", "amx")


@pytest.mark.parametrize(
    ("machine", "options", "expected"),
    [
        (SUITED, {}, ("float32", "int8", "bfloat16", "native", "avx512_bf16")),
        (SUITED, {"kv_cache_dtype": "float32"}, ("float32", "int8", "float32", "native", "avx512_bf16")),
        (SUITED, {"quantization": "none"}, ("float32", "none", "float32", "native", "avx512_bf16")),
        (SUITED, {"dtype": "bfloat16"}, ("bfloat16", "none", "bfloat16", "native", "avx512_bf16")),
        (NO_COMPILER, {"quantization": "int8"}, ("float32", "int8", "float32", "cpu", "avx512_vnni")),
        (H200, {"device": "cuda"}, ("bfloat16", "none", "bfloat16", "triton", "sm_90")),
        (H200, {"device": "cuda", "quantization": "fp8"}, ("bfloat16", "fp8", "bfloat16", "triton", "sm_90")),
    ],
)
def test_latent_attention_has_no_cache_in_int8(
    machine: Machine, options: dict[str, str], expected: tuple[str, ...]
) -> None:
    for architecture in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"):
        assert values(resolved(machine, architecture=architecture, **options)) == expected
    with pytest.raises(ConfigError, match=r"model\.kv_cache_dtype int8: the model has latent attention"):
        resolved(machine, architecture="DeepseekV3ForCausalLM", **{**options, "kv_cache_dtype": "int8"})


def test_latent_attention_of_triton_has_a_cache_of_the_models_type() -> None:
    model = {"architecture": "DeepseekV3ForCausalLM", "device": "cuda"}
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype float16: with engine\.kernels triton .* model's dtype, bfloat"
    ):
        resolved(H200, kv_cache_dtype="float16", **model)
    assert resolved(H200, kv_cache_dtype="float16", dtype="float16", **model).kernels == "triton"
    assert resolved(H200, kv_cache_dtype="float16", kernels="cpu", **model).kv_cache_dtype == "float16"
