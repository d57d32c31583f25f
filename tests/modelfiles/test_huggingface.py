"""End tokens from all sources, chat templates in every form of storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ModelError
from batchinfer.modelfiles import open_model
from batchinfer.testing.tiny import CHAT_TEMPLATE, make_tiny


def edit(path: Path, **values: Any) -> None:
    """Sets keys of a JSON file; None takes a key out."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    for key, value in values.items():
        if value is None:
            stored.pop(key, None)
        else:
            stored[key] = value
    path.write_text(json.dumps(stored))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny")


def test_end_tokens_are_the_union_of_all_sources(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=2)
    edit(folder / "generation_config.json", eos_token_id=[2, 7, 9])
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    assert open_model(str(folder)).eos_token_ids == {0, 2, 7, 9}


@pytest.mark.parametrize("in_config", [None, -1, [1, 5]])
def test_end_tokens_of_the_config_alone(folder: Path, in_config: Any) -> None:
    edit(folder / "config.json", eos_token_id=in_config)
    (folder / "generation_config.json").unlink()
    edit(folder / "tokenizer_config.json", eos_token=None)
    expected = set(in_config) if isinstance(in_config, list) else set()
    assert open_model(str(folder)).eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", [2, "3"], True, {"id": 2}])
def test_end_tokens_of_the_wrong_type(folder: Path, value: Any) -> None:
    edit(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        open_model(str(folder))


def test_the_tokenizers_end_token_wherever_it_is_written(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    for settings, expected in (
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False}}, {2}),
        ({"eos_token": "<|end|>", "added_tokens_decoder": {"77": {"content": "<|end|>"}}}, {77}),
        ({"eos_token": "a"}, {vocabulary["a"]}),
        ({"eos_token": "<|not there|>"}, set()),
    ):
        edit(folder / "tokenizer_config.json", added_tokens_decoder=None)
        edit(folder / "tokenizer_config.json", **settings)
        assert open_model(str(folder)).eos_token_ids == expected
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "special_tokens_map.json", eos_token="<|im_start|>")
    assert open_model(str(folder)).eos_token_ids == {1}


def test_one_template(folder: Path) -> None:
    assert open_model(str(folder)).chat_templates == {"default": CHAT_TEMPLATE}


def test_no_template(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert open_model(str(folder)).chat_templates == {}


def test_named_templates(folder: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert open_model(str(folder)).chat_templates == {"default": "A", "tool_use": "B"}


def test_template_files_win(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from a file é", encoding="utf-8")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "rag.jinja").write_text("RAG")
    assert open_model(str(folder)).chat_templates == {"default": "from a file é", "rag": "RAG"}


def test_a_template_as_json(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    edit(folder / "chat_template.json", chat_template="J")
    assert open_model(str(folder)).chat_templates == {"default": "J"}


@pytest.mark.parametrize("value", [3, [{"name": "x"}], ["x"]])
def test_a_template_of_the_wrong_type(folder: Path, value: Any) -> None:
    edit(folder / "tokenizer_config.json", chat_template=value)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template must be text or a list"):
        open_model(str(folder))


def test_a_template_that_is_not_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: can't be read as UTF-8"):
        open_model(str(folder))


def test_generation_config(folder: Path) -> None:
    edit(folder / "generation_config.json", temperature=0.1, top_k=50)
    assert open_model(str(folder)).generation_config["temperature"] == 0.1
    (folder / "generation_config.json").unlink()
    assert open_model(str(folder)).generation_config == {}
