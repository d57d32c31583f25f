"""The bytes of each token, so that decoding is joining bytes: `TokenBytes`.

Responsible for: byte-level BPE and SentencePiece-like decoders told token by token, and the decoding rule (bytes of
all tokens joined, read as UTF-8, U+FFFD for each invalid part). Not for: stop strings (`stop_strings`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    rest = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(0x100 + n) for n, byte in enumerate(rest)})
    return table


class TokenBytes:
    """Bytes by token id.

    strip_first_space   one space at the start of a text is the tokenizer's own and not shown (SentencePiece)
    """

    def __init__(
        self, pieces: Sequence[bytes], *, strip_first_space: bool = False, special: frozenset[int] = frozenset()
    ) -> None:
        self.strip_first_space = strip_first_space
        self.special = special
        self.all = list(pieces)
        self.visible = [b"" if i in special else piece for i, piece in enumerate(self.all)]

    def with_special(self, special: frozenset[int]) -> TokenBytes:
        return TokenBytes(self.all, strip_first_space=self.strip_first_space, special=special)

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        pieces = self.visible if skip_special_tokens else self.all
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        pieces = self.visible if skip_special_tokens else self.all
        try:
            data = b"".join([pieces[i] for i in ids])
        except IndexError:  # ids of a model's padding rows
            data = b"".join([self.piece(i, skip_special_tokens=skip_special_tokens) for i in ids])
        text = data.decode("utf-8", "replace")
        return text[1:] if self.strip_first_space and text.startswith(" ") else text


def token_bytes(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> TokenBytes | None:
    """The table of a tokenizer, or None where its decoder is of another kind (then the library decodes)."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    pieces = [b""] * vocab_size
    if kinds == ["ByteLevel"]:
        to_byte = {ord(char): byte for byte, char in byte_alphabet().items()}
        for token, i in vocab.items():
            if all(ord(char) in to_byte for char in token) if i in added else True:
                try:
                    pieces[i] = token.translate(to_byte).encode("latin-1")
                except UnicodeEncodeError:
                    pieces[i] = token.encode("utf-8", "replace")
            else:
                pieces[i] = token.encode("utf-8", "replace")
        return TokenBytes(pieces)
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece_bytes(steps, vocab, pieces)
    return None


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _sentencepiece_bytes(steps: list[dict[str, Any]], vocab: dict[str, int], pieces: list[bytes]) -> TokenBytes | None:
    """Replace / ByteFallback / Fuse / Strip in the one order that exists in the wild, or Metaspace alone."""
    kinds = [step["type"] for step in steps]
    strip, space, byte_fallback = False, "", "ByteFallback" in kinds
    if kinds == ["Metaspace"]:
        space, strip = steps[0]["replacement"], steps[0].get("prepend_scheme", "always") != "never"
    else:
        for step in steps:
            if step["type"] == "Metaspace":
                return None
            if step["type"] == "Replace":
                if step["pattern"] != {"String": "▁"} or step["content"] != " ":
                    return None
                space = "▁"
            if step["type"] == "Strip":
                if step["content"] != " " or step["stop"] != 0 or step["start"] > 1:
                    return None
                strip = step["start"] == 1
    for token, i in vocab.items():
        byte = _BYTE_TOKEN.match(token) if byte_fallback else None
        if byte:
            pieces[i] = bytes([int(byte[1], 16)])
        else:
            pieces[i] = (token.replace(space, " ") if space else token).encode("utf-8", "replace")
    return TokenBytes(pieces, strip_first_space=strip)
