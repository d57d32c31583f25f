"""The bytes of each token, so that decoding is joining bytes: `TokenBytes`.

Responsible for: byte-level BPE and SentencePiece-like decoders told token by token, and the decoding rule (bytes of
all tokens joined, read as UTF-8, U+FFFD for each invalid part). Not for: stop strings (`stop_strings`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
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


class _Pieces(dict[int, bytes]):
    """By token id; what is asked for is worked out then, since a vocabulary is large, and few of it are in use."""

    def __init__(self, piece_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = piece = self._piece_of(token_id)
        return piece


class TokenBytes:
    """Bytes by token id.

    piece_of            bytes of any id; of one that is no token's, none
    strip_first_space   one space at the start of a text is the tokenizer's own and not shown (SentencePiece)
    """

    def __init__(
        self,
        piece_of: Callable[[int], bytes],
        *,
        strip_first_space: bool = False,
        special: frozenset[int] = frozenset(),
    ) -> None:
        self.strip_first_space = strip_first_space
        self.special = special
        self._all = _Pieces(piece_of)
        self._visible = _Pieces(lambda token_id: b"" if token_id in special else self._all[token_id])

    def with_special(self, special: frozenset[int]) -> TokenBytes:
        return TokenBytes(self._all.__getitem__, strip_first_space=self.strip_first_space, special=special)

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> bytes:
        return (self._visible if skip_special_tokens else self._all)[token_id]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        pieces = self._visible if skip_special_tokens else self._all
        text = b"".join([pieces[i] for i in ids]).decode("utf-8", "replace")
        return text[1:] if self.strip_first_space and text.startswith(" ") else text


def byte_level_pieces() -> Callable[[str, bool], bytes]:
    """Bytes of a byte-level token; of one that is stored as text, where a character of it stands for no byte."""
    to_byte = {ord(char): byte for byte, char in byte_alphabet().items()}

    def piece_of(token: str, may_be_text: bool) -> bytes:
        if may_be_text and not all(ord(char) in to_byte for char in token):
            return token.encode("utf-8", "replace")
        try:
            return token.translate(to_byte).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode("utf-8", "replace")

    return piece_of


def sentencepiece_pieces(space: str, *, byte_fallback: bool) -> Callable[[str], bytes]:
    """Bytes of a token in which `space`, if it is not empty, stands for one; with byte_fallback, <0x0A> is a byte."""

    def piece_of(token: str) -> bytes:
        byte = _BYTE_TOKEN.match(token) if byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        return (token.replace(space, " ") if space else token).encode("utf-8", "replace")

    return piece_of


def token_bytes(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> TokenBytes | None:
    """Those of a tokenizer, or None where its decoder is of another kind (then the library decodes)."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]

    def token_of(token_id: int) -> str:
        return (tokenizer.id_to_token(token_id) if 0 <= token_id < vocab_size else None) or ""

    if kinds == ["ByteLevel"]:
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        byte_level = byte_level_pieces()
        return TokenBytes(lambda token_id: byte_level(token_of(token_id), token_id in added))
    found = _sentencepiece_rule(steps)
    if found is None:
        return None
    piece_of, strip = found
    return TokenBytes(lambda token_id: piece_of(token_of(token_id)), strip_first_space=strip)


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _sentencepiece_rule(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], bool] | None:
    """(bytes of a token, whether a text's first space is stripped) of Replace / ByteFallback / Fuse / Strip in the one
    order that exists in the wild, or Metaspace alone."""
    kinds = [step["type"] for step in steps]
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    strip, space = False, ""
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
    return sentencepiece_pieces(space, byte_fallback="ByteFallback" in kinds), strip
