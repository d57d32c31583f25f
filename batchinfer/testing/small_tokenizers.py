"""Small tokenizers made on the spot, and texts that are hard on them. For tests; imported by no room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from batchinfer.modelfiles import TokenizerFiles

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, while 12 other dogs look on.",
    "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))  # 3",
    "Grüße aus Köln: größer, schöner, kälter — “naïve café”, 50 €.",
    "Вот так вот: да гледам ќе идев. Ещё раз.",
    "質問に答えてください。日本語の文章です。",
    "🙂🙂 and 👨‍👩‍👧‍👦 family",
] * 4

NASTY = [
    "",
    " ",
    "\n",
    "\n\n\n",
    "  leading",
    "trailing  ",
    " double  spaces   and\t tabs ",
    "x  1 and    2\n\n3. point\r\n\r\n4",
    "I'm you're WE'LL I'S don't 'tis",
    "12345 1,000.50 ½ ² Ⅷ ٣",
    "e\u0301 é \u00e9 ﬁ Å \u212b",
    "🙂🙂👨‍👩‍👧‍👦",
    "да гледам ќе идев",
    "漢字かな交じり文 한국어 العربية हिन्दी",
    "\u0000\u0001\u001f\u007f\u0085\u00a0\u2003\u200b\ufeff\ufffe\ufffd",
    "a" + "\u0301" * 300,
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_start|><|im_end|><|endoftext|>",
    "<|im_star|> < |im_end|> <|im_end |>",
    "snake_case CamelCase __dunder__ a.b/c\\d",
    "aaaa" * 200,
    "\u017fpecial 'ſ K 'K",
    "nan null None true",
]


def byte_level(
    *,
    special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    added: tuple[str, ...] = (),
    bos: str | None = None,
    eos: str | None = None,
    vocab_size: int = 700,
) -> tokenizers.Tokenizer:
    """A small byte-level BPE tokenizer; `bos` and `eos` are put on by its post-processor."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    if bos or eos:
        pieces = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(pieces),
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text],
        )
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: Path, **config: Any) -> TokenizerFiles:
    """What a model folder with this tokenizer and tokenizer_config.json gives."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TokenizerFiles(kind="tokenizer_json", json_path=path, config=config)


def sentencepiece_metadata(processor: Any, **more: Any) -> dict[str, Any]:
    """A SentencePiece model as `tokenizer.ggml.*` metadata."""
    ids = range(processor.get_piece_size())

    def kind(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        if processor.is_control(i):
            return 3
        return 6 if processor.is_byte(i) else 1

    return {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }
