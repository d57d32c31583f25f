"""Hashes say whether two models or tokenizers are the same, wherever they lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from batchinfer.errors import ModelError
from batchinfer.modelfiles import hashes, open_model
from batchinfer.testing.tiny import make_tiny
from batchinfer.testing.tiny_gguf import make_tiny_gguf


def test_equal_models_in_different_places(tmp_path: Path) -> None:
    a, b = make_tiny(tmp_path / "a"), make_tiny(tmp_path / "b" / "c")
    assert open_model(str(a)).model_hash() == open_model(str(b)).model_hash()
    assert open_model(str(a)).tokenizer_hash() == open_model(str(b)).tokenizer_hash()
    config = json.loads((b / "config.json").read_text())
    (b / "config.json").write_text(json.dumps({"transformers_version": "9", **dict(reversed(config.items()))}))
    assert open_model(str(a)).model_hash() == open_model(str(b)).model_hash()


def test_what_changes_a_models_hash(tmp_path: Path) -> None:
    base = open_model(str(make_tiny(tmp_path / "base"))).model_hash()
    others = {
        open_model(str(make_tiny(tmp_path / "seed", seed=1))).model_hash(),
        open_model(str(make_tiny(tmp_path / "theta", rope_theta=5.0))).model_hash(),
        open_model(str(make_tiny_gguf(tmp_path / "tiny.gguf"))).model_hash(),
        open_model(str(make_tiny_gguf(tmp_path / "tiny2.gguf", seed=2))).model_hash(),
    }
    assert len(others) == 4
    assert base not in others


def test_one_changed_byte(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    before = open_model(str(folder)).model_hash()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert open_model(str(folder)).model_hash() != before


def test_chat_templates_are_not_part_of_the_tokenizers_hash(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    before = open_model(str(folder)).tokenizer_hash()
    (folder / "chat_template.jinja").write_text("other")
    assert open_model(str(folder)).tokenizer_hash() == before
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert open_model(str(folder)).tokenizer_hash() != before


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "WHOLE_FILE_LIMIT_BYTES", 100_000)
    monkeypatch.setattr(hashes, "HEAD_BYTES", 1_000)
    monkeypatch.setattr(hashes, "SAMPLE_BYTES", 100)
    size = 200_000
    path = tmp_path / "large"
    original = bytes(range(256)) * (size // 256)

    def digest(changed: int | None) -> bytes:
        data = bytearray(original)
        if changed is not None:
            data[changed] ^= 1
        path.write_bytes(data)
        return hashes.file_digest(path)

    base = digest(None)
    assert digest(500) != base  # head
    assert digest(len(original) - 1) != base  # the last sample ends at the file's end
    path.write_bytes(original + b"\0")
    assert hashes.file_digest(path) != base  # size


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    files = open_model(str(folder))
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match=r"model\.safetensors: can't be read"):
        files.model_hash()
