"""GGUF files: metadata as a config, faults of the container, split files."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ModelError
from batchinfer.modelfiles import gguf_header, gguf_model, open_model
from batchinfer.modelfiles.llama_config import LlamaConfig
from batchinfer.testing.tiny import CHAT_TEMPLATE, tiny_config
from batchinfer.testing.tiny_gguf import EXPERTS, make_tiny_gguf


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_model(str(path))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "llama-head-dim", "llama-bias", "smollm", "qwen2", "qwen3"])
def test_the_config_is_that_of_the_hugging_face_model(tmp_path: Path, family: str) -> None:
    files = open_model(str(make_tiny_gguf(tmp_path / "tiny.gguf", family)))
    expected = tiny_config(family)
    for key in (
        "architectures",
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert files.config[key] == expected[key], key
    assert files.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    heads = expected["num_attention_heads"]
    assert files.config["head_dim"] == (expected.get("head_dim") or expected["hidden_size"] // heads)
    assert (files.kind, files.name, files.eos_token_ids) == ("gguf", "tiny", {2})
    assert files.chat_templates == {"default": CHAT_TEMPLATE}
    assert files.tokenizer.gguf is not None
    assert len(files.tokenizer.gguf["tokens"]) == 384
    assert files.tokenizer.gguf["add_bos_token"] is False


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_the_config_and_one_by_one(tmp_path: Path, family: str) -> None:
    files = open_model(str(make_tiny_gguf(tmp_path / "tiny.gguf", family, quant="F16", **EXPERTS[family])))
    expected = tiny_config(family, **EXPERTS[family])
    (architecture,) = files.config["architectures"]
    config, meant = (LlamaConfig.from_config(architecture, values) for values in (files.config, expected))
    assert config.experts == meant.experts and None not in config.experts
    assert (config.qkv_bias, config.qk_norm) == (meant.qkv_bias, meant.qk_norm)
    inner = meant.experts[0].intermediate_size  # type: ignore[union-attr]
    ups = [files.tensors[f"blk.1.ffn_up_exps.{i}.weight"] for i in range(8)]
    assert {(t.shape, t.nbytes, t.dtype) for t in ups} == {((inner, 64), 2 * 64 * inner, "F16")}
    assert [t.offset - ups[0].offset for t in ups] == [i * ups[0].nbytes for i in range(8)]
    assert "blk.1.ffn_up_exps.8.weight" not in files.tensors and "blk.1.ffn_up_exps.weight" not in files.tensors


def test_a_damaged_number_of_experts_makes_no_tensors(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "t.gguf", "mixtral", quant="F32")
    name = "blk.0.ffn_up_exps.weight"
    info = name.encode() + struct.pack("<IQQQ", 3, 64, 48, 8)
    assert path.read_bytes().count(info) == 1
    path.write_bytes(path.read_bytes().replace(info, name.encode() + struct.pack("<IQQQ", 3, 64, 0, 1 << 40)))
    tensors = open_model(str(path)).tensors
    assert tensors[name].shape == (1 << 40, 0, 64) and "blk.0.ffn_up_exps.0.weight" not in tensors


def test_weights_of_experts_that_do_not_add_up(tmp_path: Path) -> None:
    metadata = {"llama.expert_weights_norm": False}
    refused(make_tiny_gguf(tmp_path / "t.gguf", "mixtral", metadata=metadata), "llama.expert_weights_norm is false")
    metadata = {"qwen2.expert_count": 8}
    refused(make_tiny_gguf(tmp_path / "t.gguf", "qwen2", metadata=metadata), "qwen2.expert_count is 8; not supported")


def test_defaults_of_missing_metadata(tmp_path: Path) -> None:
    missing = {f"llama.{k}": None for k in ("attention.key_length", "attention.value_length", "rope.freq_base")}
    missing |= {"llama.attention.head_count_kv": None, "llama.rope.dimension_count": None, "llama.vocab_size": None}
    files = open_model(str(make_tiny_gguf(tmp_path / "t.gguf", "llama-mha", metadata=missing)))
    assert files.config["head_dim"] == 16
    assert files.config["num_key_value_heads"] == 4
    assert files.config["rope_parameters"]["rope_theta"] == 10000.0
    assert files.config["vocab_size"] == 384


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "attention.head_count"])
def test_needed_metadata(tmp_path: Path, key: str) -> None:
    path = make_tiny_gguf(tmp_path / "t.gguf", metadata={f"llama.{key}": None})
    refused(path, f"metadata key llama.{key} is missing")


def test_templates_and_end_tokens(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 9,
    }
    files = open_model(str(make_tiny_gguf(tmp_path / "t.gguf", metadata=metadata)))
    assert files.chat_templates == {"default": CHAT_TEMPLATE, "tool_use": "T"}
    assert files.eos_token_ids == {2, 7, 9}


def test_rope_scaling(tmp_path: Path) -> None:
    def rope(**metadata: Any) -> dict[str, Any]:
        named = {f"llama.rope.{key}": value for key, value in metadata.items()}
        path = make_tiny_gguf(tmp_path / "t.gguf", metadata=named)
        parameters: dict[str, Any] = open_model(str(path)).config["rope_parameters"]
        return parameters

    assert rope(**{"scaling.type": "linear", "scaling.factor": 4.0})["factor"] == 4.0
    assert rope(scale_linear=2.0) == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    yarn = rope(**{"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64})
    assert yarn["original_max_position_embeddings"] == 64
    assert yarn["attention_factor"] == pytest.approx(1.1386294)
    with pytest.raises(ModelError, match="RoPE scaling of type 'longrope' is not supported"):
        rope(**{"scaling.type": "longrope"})


def test_a_part_of_each_head_is_rotated(tmp_path: Path) -> None:
    files = open_model(str(make_tiny_gguf(tmp_path / "t.gguf", metadata={"llama.rope.dimension_count": 8})))
    config = LlamaConfig.from_config("LlamaForCausalLM", files.config)
    assert (config.head_dim, config.rope.rotary_dim) == (16, 8)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (
            {"general.architecture": "mamba"},
            "'mamba' is not supported; supported are llama, qwen2, qwen2moe, qwen3",
        ),
        (
            {"general.architecture": "gemma"},
            "'gemma' is not supported; supported are llama, qwen2, qwen2moe, qwen3",
        ),
        ({"llama.expert_count": 8}, "metadata key llama.expert_used_count is missing"),
        ({"llama.expert_gating_func": 2}, "llama.expert_gating_func is 2"),
        ({"llama.expert_group_count": 8}, "llama.expert_group_count is 8"),
        ({"llama.expert_weights_scale": 2.5}, "llama.expert_weights_scale is 2.5"),
        ({"llama.leading_dense_block_count": 1}, "llama.leading_dense_block_count is 1"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "differs from layer to layer"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is 64"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5"),
        ({"llama.attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping is 30.0"),
        ({"llama.logit_scale": 16.0}, "llama.logit_scale is 16.0"),
        ({"llama.embedding_scale": 12.0}, "llama.embedding_scale is 12.0"),
        ({"llama.residual_scale": 0.22}, "llama.residual_scale is 0.2"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False"),
        ({"llama.pooling_type": 1}, "llama.pooling_type is 1"),
        ({"llama.nextn_predict_layers": 1}, "llama.nextn_predict_layers is 1"),
        ({"llama.rope.dimension_sections": [1, 1]}, "llama.rope.dimension_sections is [1, 1]"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier is 0.1"),
        ({"llama.block_count": "three"}, "metadata of the wrong type"),
        ({"tokenizer.ggml.tokens": None}, "it holds no tokenizer"),
    ],
)
def test_refused_by_name(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    path = make_tiny_gguf(tmp_path / "t.gguf", metadata={k: v for k, v in metadata.items() if k[:7] != "general"})
    if "general.architecture" in metadata:
        length, name = b"\x05\0\0\0\0\0\0\0", metadata["general.architecture"].encode()
        path.write_bytes(path.read_bytes().replace(length + b"llama", length + name, 1))
    refused(path, words)


def test_metadata_that_say_it_is_not_there(tmp_path: Path) -> None:
    neutral = {f"llama.{key}": values[0] for key, values in gguf_model.UNSUPPORTED.items() if values}
    files = open_model(str(make_tiny_gguf(tmp_path / "t.gguf", metadata=neutral)))
    assert files.config == open_model(str(make_tiny_gguf(tmp_path / "plain.gguf"))).config


def test_other_versions_and_byte_orders(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "t.gguf")
    data = bytearray(path.read_bytes())
    for version, words in ((1, "GGUF version 1"), (4, "GGUF version 4"), (3 << 24, "big-endian")):
        struct.pack_into("<I", data, 4, version)
        path.write_bytes(data)
        refused(path, words)
    path.write_bytes(b"GGML" + data[4:])
    refused(path, "not a GGUF file")
    path.write_bytes(b"")
    refused(path, "empty")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(path, "Git LFS pointer")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "t.gguf", num_hidden_layers=1)
    data = path.read_bytes()
    header_end = min(t.offset for t in open_model(str(path)).tensors.values())
    for size in [*range(4, header_end, 97), header_end, len(data) - 33]:
        path.write_bytes(data[:size])
        refused(path, "truncated")


def test_flipped_bytes_are_a_model_error_or_nothing(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "t.gguf", num_hidden_layers=1)
    data = path.read_bytes()
    header_end = min(t.offset for t in open_model(str(path)).tensors.values())
    rng = random.Random(0)
    caught = 0
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.randrange(4, header_end)] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            open_model(str(path))
        except ModelError as error:
            caught += 1
            assert str(path) in str(error) or "max_position" in str(error)
    assert caught > 20


def test_an_unknown_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_gguf(tmp_path / "t.gguf", quant="Q8_0")
    monkeypatch.delitem(gguf_header.GGML_TYPES, 8)
    refused(path, "is of GGUF type number 8")


def split(path: Path, num_parts: int = 2) -> list[Path]:
    """Splits a tiny model as gguf-split does: metadata in the first part, tensors over all."""
    import gguf

    files = open_model(str(path))
    names = list(files.tensors)
    parts = []
    reader = gguf.GGUFReader(str(path))
    stored = {t.name: t for t in reader.tensors}
    for number in range(num_parts):
        part = path.with_name(f"{path.stem}-{number + 1:05d}-of-{num_parts:05d}.gguf")
        writer = gguf.GGUFWriter(str(part), "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if key.startswith("GGUF.") or key == "general.architecture":
                    continue
                sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(names))
        for name in names[number * len(names) // num_parts : (number + 1) * len(names) // num_parts]:
            writer.add_tensor(name, stored[name].data, raw_dtype=stored[name].tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


def test_split_files(tmp_path: Path) -> None:
    whole = make_tiny_gguf(tmp_path / "t.gguf", quant="Q8_0")
    expected = open_model(str(whole))
    first, second = split(whole)
    whole.unlink()
    files = open_model(str(first))
    assert files.weight_files == (first, second)
    assert files.config == expected.config
    assert files.tensors.keys() == expected.tensors.keys()
    assert {t.file for t in files.tensors.values()} == {first, second}
    assert open_model(str(tmp_path)).root == first
    refused(second, "part 00002 of a split GGUF model; give the path of the first")
    second.rename(tmp_path / "elsewhere")
    refused(first, "t-00002-of-00002.gguf: missing")
    (tmp_path / "elsewhere").rename(second)
    renamed = first.rename(tmp_path / "model.gguf")
    refused(renamed, "isn't named NAME-00001-of-00002.gguf")
