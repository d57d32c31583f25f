"""Opens a model folder in Hugging Face form: config.json, generation_config.json, tokenizer files, safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.modelfiles.files import ModelFiles, TokenizerFiles
from batchinfer.modelfiles.safetensors_header import read_checkpoint

ADDITIONAL_TEMPLATES = ("additional_chat_templates", "chat_templates")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError says which file is not one."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object is expected, found {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def open_folder(folder: Path, *, name: str | None = None) -> ModelFiles:
    """Opens a folder with config.json."""
    config = read_json(folder / "config.json")
    config.pop("rope_dimension_count", None)  # GGUF's: transformers reads no such key, and would rotate whole heads
    generation_config = read_json_if_there(folder / "generation_config.json")
    tokenizer, chat_templates = open_tokenizer_folder(folder)
    weight_files, tensors = read_checkpoint(folder)
    return ModelFiles(
        name=name or folder.resolve().name,
        kind="hf",
        root=folder,
        config=config,
        generation_config=generation_config,
        tokenizer=tokenizer,
        chat_templates=chat_templates,
        weight_files=weight_files,
        tensors=tensors,
        eos_token_ids=union_of_eos(folder, config, generation_config, tokenizer_eos(tokenizer)),
    )


def open_tokenizer_folder(folder: Path) -> tuple[TokenizerFiles, dict[str, str]]:
    """Tokenizer and chat templates of a folder. Raises ModelError where it has no tokenizer.json."""
    json_path = folder / "tokenizer.json"
    if not json_path.exists():
        found = [n for n in ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json") if (folder / n).exists()]
        raise ModelError(
            f"{folder}: no tokenizer.json"
            + (f" (only {', '.join(found)})" if found else "")
            + "; save it once with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...)), "
            "or name another place under model.tokenizer"
        )
    config = read_json_if_there(folder / "tokenizer_config.json")
    for key, value in read_json_if_there(folder / "special_tokens_map.json").items():
        config.setdefault(key, value)
    chat_templates = read_chat_templates(folder, config.pop("chat_template", None))
    return TokenizerFiles(kind="tokenizer_json", json_path=json_path, config=config), chat_templates


def read_chat_templates(folder: Path, in_config: Any) -> dict[str, str]:
    """Chat templates from every form of storage; a file of their own wins over tokenizer_config.json.

    in_config   tokenizer_config.json's `chat_template`: text, or a list of {"name", "template"}
    """
    templates: dict[str, str] = {}
    if isinstance(in_config, str):
        templates["default"] = in_config
    elif isinstance(in_config, list):
        for entry in in_config:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("template"), str):
                raise ModelError(
                    f"{folder / 'tokenizer_config.json'}: chat_template must be text or a list of name and template"
                )
            templates[str(entry.get("name", "default"))] = entry["template"]
    elif in_config is not None:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be text or a list, "
            f"found {type(in_config).__name__}"
        )
    as_json = read_json_if_there(folder / "chat_template.json").get("chat_template")
    if isinstance(as_json, str):
        templates["default"] = as_json
    paths = [folder / "chat_template.jinja"]
    for sub in ADDITIONAL_TEMPLATES:
        paths += sorted((folder / sub).glob("*.jinja"))
    for path in paths:
        if path.is_file():
            name = "default" if path.name == "chat_template.jinja" else path.stem
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelError(f"{path}: can't be read as UTF-8 text: {error}") from error
    return templates


def token_ids(value: Any, *, source: str) -> frozenset[int]:
    """eos_token_id as configs have it: null, a number, or a list of numbers."""
    if value is None:
        return frozenset()
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ModelError(f"{source}: eos_token_id is {value!r}; a token id or a list of token ids is expected")
    # Some configs carry -1 for "none".
    return frozenset(v for v in values if v >= 0)


def union_of_eos(
    root: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any], more: Iterable[int]
) -> frozenset[int]:
    return (
        token_ids(config.get("eos_token_id"), source=f"{root / 'config.json'}")
        | token_ids(generation_config.get("eos_token_id"), source=f"{root / 'generation_config.json'}")
        | frozenset(more)
    )


def tokenizer_eos(tokenizer: TokenizerFiles) -> frozenset[int]:
    """The id of tokenizer_config.json's `eos_token`, looked up without loading a tokenizer."""
    token = tokenizer.config.get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str) or tokenizer.json_path is None:
        return frozenset()
    for token_id, entry in dict(tokenizer.config.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, Mapping) and entry.get("content") == text:
            return frozenset({int(token_id)})
    stored = read_json(tokenizer.json_path)
    for entry in stored.get("added_tokens") or []:
        if entry.get("content") == text:
            return frozenset({int(entry["id"])})
    vocab = (stored.get("model") or {}).get("vocab")
    if isinstance(vocab, dict) and text in vocab:
        return frozenset({int(vocab[text])})
    return frozenset()
