"""Synthetic files for `fake://` models, whose runner needs no weights (runner/fake.py says what it computes).

`fake://hash?vocab=512&max_model_len=2048`: `vocab` and `max_model_len` become vocab_size and
max_position_embeddings, the word after `//` becomes `fake_kind`, every other parameter is kept as it is, as a
number where it reads as one. The tokenizer is bytes: ids 0..255, then BOS and EOS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from batchinfer.errors import ModelError
from batchinfer.modelfiles.files import ModelFiles, TokenizerFiles

SCHEME = "fake://"
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257
MIN_VOCAB = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def open_fake(url: str) -> ModelFiles:
    parts = urlsplit(url)
    config: dict[str, Any] = {
        "architectures": ["FakeForCausalLM"],
        "model_type": "fake",
        "fake_kind": parts.netloc or "hash",
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
    }
    renamed = {"vocab": "vocab_size", "max_model_len": "max_position_embeddings"}
    for key, text in parse_qsl(parts.query, keep_blank_values=True):
        config[renamed.get(key, key)] = _number_or_text(text)
    for key, least in (("vocab_size", MIN_VOCAB), ("max_position_embeddings", 2)):
        if not isinstance(config[key], int) or config[key] < least:
            raise ModelError(f"model.path {url}: {key} must be an integer of at least {least}, got {config[key]!r}")
    return ModelFiles(
        name=url,
        kind="fake",
        root=Path(url),
        config=config,
        tokenizer=TokenizerFiles(
            kind="fake",
            config={
                "vocab_size": config["vocab_size"],
                "bos_token_id": config["bos_token_id"],
                "eos_token_id": config["eos_token_id"],
            },
        ),
        chat_templates={"default": CHAT_TEMPLATE},
        eos_token_ids=frozenset({config["eos_token_id"]}),
    )


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
