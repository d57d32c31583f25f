"""What may stand under model.path, and what each wrong thing there is told."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.errors import ModelError
from batchinfer.modelfiles import open_model
from batchinfer.modelfiles.fake import BOS_TOKEN_ID, EOS_TOKEN_ID
from batchinfer.testing.tiny import make_tiny
from batchinfer.testing.tiny_gguf import make_tiny_gguf


def test_a_folder(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", "llama3")
    files = open_model(str(folder))
    assert (files.kind, files.name, files.root) == ("hf", "tiny", folder)
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.weight_files == (folder / "model.safetensors",)
    assert files.tokenizer.json_path == folder / "tokenizer.json"
    assert files.tokenizer.config["bos_token"] == "<|im_start|>"
    assert "chat_template" not in files.tokenizer.config
    assert files.tensors["lm_head.weight"].shape == (384, 64)
    assert files.num_parameters == sum(t.nbytes for t in files.tensors.values()) // 4


def test_the_limit_is_not_multiplied_by_the_rope_factor(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", "llama-yarn")
    assert open_model(str(folder)).max_model_len == 512


@pytest.mark.parametrize("value", [None, 0, "512"])
def test_no_limit_is_an_error(tmp_path: Path, value: object) -> None:
    folder = make_tiny(tmp_path / "tiny", max_position_embeddings=value)
    with pytest.raises(ModelError, match="max_position_embeddings"):
        _ = open_model(str(folder)).max_model_len


def test_everything_can_be_sent_to_another_process(tmp_path: Path) -> None:
    for files in (
        open_model(str(make_tiny(tmp_path / "tiny"))),
        open_model(str(make_tiny_gguf(tmp_path / "tiny.gguf"))),
        open_model("fake://hash"),
    ):
        assert pickle.loads(pickle.dumps(files)) == files
        assert pickle.loads(pickle.dumps(files.tokenizer)).hash() == files.tokenizer_hash()


def test_a_folder_that_holds_one_gguf_file(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "one" / "tiny.gguf")
    assert open_model(str(path.parent)).root == path
    make_tiny_gguf(tmp_path / "one" / "other.gguf")
    with pytest.raises(ModelError, match=r"name one: other\.gguf, tiny\.gguf"):
        open_model(str(path.parent))


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json and no \.gguf file"):
        open_model(str(tmp_path / "empty"))
    with pytest.raises(ModelError, match="no such file or folder"):
        open_model(str(tmp_path / "nothing" / "here"))
    folder = make_tiny(tmp_path / "tiny")
    with pytest.raises(ModelError, match="give its folder"):
        open_model(str(folder / "model.safetensors"))
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(ModelError, match=r"symbolic link to .*gone\.gguf"):
        open_model(str(tmp_path / "link.gguf"))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "\x00'])
def test_a_broken_config(tmp_path: Path, text: str) -> None:
    folder = make_tiny(tmp_path / "tiny")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(str(folder))


def test_no_tokenizer_json(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no tokenizer\.json \(only tokenizer\.model\).*save_pretrained"):
        open_model(str(folder))


def test_another_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    other = make_tiny(tmp_path / "other")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<|endoftext|>", "chat_template": "other"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    for path in (other, other / "tokenizer.json"):
        files = open_model(str(folder), tokenizer=str(path))
        assert files.tokenizer.json_path == other / "tokenizer.json"
        assert files.chat_templates == {"default": "other"}
        assert files.eos_token_ids == {0, 2}
    gguf = make_tiny_gguf(tmp_path / "tiny.gguf")
    files = open_model(str(gguf), tokenizer=str(other))
    assert (files.kind, files.tokenizer.kind, files.eos_token_ids) == ("gguf", "tokenizer_json", {0, 2})
    assert open_model(str(folder), tokenizer=str(gguf)).tokenizer.kind == "gguf"
    with pytest.raises(ModelError, match=r"model\.tokenizer: .*no such file"):
        open_model(str(folder), tokenizer=str(tmp_path / "no" / "such" / "place"))


def test_a_revision_of_what_is_not_on_a_hub_is_refused(tmp_path: Path) -> None:
    for path in (str(make_tiny(tmp_path / "tiny")), "fake://hash"):
        with pytest.raises(ModelError, match=r"model.revision 'main' goes with a hub id"):
            open_model(path, revision="main")


def test_a_fake_model_takes_a_real_tokenizer_and_its_end(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    files = open_model("fake://hash?vocab=600", tokenizer=str(folder))
    assert files.tokenizer == open_model(str(folder)).tokenizer
    assert files.eos_token_ids == {files.config["eos_token_id"]}
    assert files.eos_token_ids <= open_model(str(folder)).eos_token_ids


def test_fake_models() -> None:
    files = open_model("fake://hash?vocab=300&max_model_len=64&eos_rate=0.5&word=x")
    assert (files.kind, files.max_model_len, files.tokenizer.kind) == ("fake", 64, "fake")
    assert files.config["fake_kind"] == "hash"
    assert files.config["vocab_size"] == 300
    assert files.config["eos_rate"] == 0.5
    assert files.config["word"] == "x"
    assert files.eos_token_ids == {EOS_TOKEN_ID}
    assert files.tokenizer.config["bos_token_id"] == BOS_TOKEN_ID
    assert files.model_hash() != open_model("fake://hash?vocab=301&max_model_len=64").model_hash()
    with pytest.raises(ModelError, match="vocab_size must be an integer of at least"):
        open_model("fake://hash?vocab=many")


HUB = "import sys; from batchinfer.modelfiles import open_model; print(open_model(sys.argv[1]).root)"


def run_hub(home: Path, repo: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", HUB, repo], env=env, capture_output=True, text=True, check=False)


def test_a_hub_id_without_a_network(tmp_path: Path) -> None:
    """A cached model opens; one that isn't there says what to do."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--some--model"
    snapshot = repo / "snapshots" / commit
    make_tiny(snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    found = run_hub(tmp_path, "some/model")
    assert found.stdout.strip() == str(snapshot), found.stderr
    lost = run_hub(tmp_path, "some/other")
    assert "ModelError: some/other: no such folder here, not in the local hub cache" in lost.stderr
    assert "hf download some/other" in lost.stderr
    shutil.rmtree(snapshot)
    (snapshot / "onnx").mkdir(parents=True)
    bare = run_hub(tmp_path, "some/model")
    assert "this hub repository has no config.json" in bare.stderr


def test_opening_needs_no_torch(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    gguf = make_tiny_gguf(tmp_path / "tiny.gguf")
    program = (
        "import sys; from batchinfer.modelfiles import open_model\n"
        f"for p in ({str(folder)!r}, {str(gguf)!r}, 'fake://hash'): open_model(p).model_hash()\n"
        "assert not {'torch', 'numpy', 'gguf', 'huggingface_hub', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
