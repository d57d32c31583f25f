"""Encoding by remembered words: `WordEncoder`, several times faster than asking the library for each text.

In byte-level BPE a text is cut into words by a regular expression, and a word's ids depend on nothing else. So words
are remembered, and the library is asked once for each new one. The same regular expression is run by Python's `re`
over characters of which both engines are known to think alike (`_KNOWN_CHARS`: Latin, Greek, Cyrillic, common
punctuation); texts with other characters, and tokenizers with other parts, go to the library whole.

Responsible for: knowing when that is exactly right. Ids equal the library's, or the text is handed back.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import tokenizers

# ByteLevel's own expression (GPT-2's), in the order that Python is fastest with: what begins with a letter, a space
# before one, or an apostrophe matches one alternative only. It leaves no character out. The second cuts single
# digits out first: a digit is a word, and ends what stands before it as the text's end does.
_BYTE_LEVEL_REGEX = r" ?\p{L}+|'(?:s|t|re|ve|m|ll|d)| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS_REGEX = r" ?\p{L}+|'(?:s|t|re|ve|m|ll|d)|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_KNOWN_RANGES: tuple[tuple[int, int], ...] = (
    (0x00, 0x17E),
    (0x180, 0x24F),
    (0x384, 0x3FF),
    (0x400, 0x481),
    (0x48A, 0x4FF),
    (0x2010, 0x2027),
)
_KNOWN_RANGES += ((0x2030, 0x205E), (0x20A0, 0x20BF), (0x2122, 0x2122), (0x2190, 0x21FF))
_MAX_WORDS = 1 << 17
_MAX_WORD_CHARS = 48
_MAX_PARTS = 256


@lru_cache(maxsize=1)
def _known_chars() -> str:
    chars = (chr(code) for first, last in _KNOWN_RANGES for code in range(first, last + 1))
    # Unassigned characters are for later versions of Unicode to define; some normalize to others.
    return "".join(c for c in chars if unicodedata.category(c) != "Cn" and unicodedata.normalize("NFC", c) == c)


class WordEncoder:
    """`encode` gives a text's ids, or None where only the library can tell."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, pattern: str, added: dict[str, int]) -> None:
        known = "".join(map(re.escape, _known_chars()))
        self._unknown = re.compile(f"[^{known}]")
        self._find_words = re.compile(pattern).findall
        self._tokenizer = tokenizer
        self._words: dict[str, tuple[int, ...]] = {}  # tuples of numbers cost the garbage collector nothing
        self._parts: dict[str, list[int]] = {}  # the first texts seen between added tokens: a chat template's own
        self._added = added
        self._added_first_chars = tuple({text[0] for text in added})
        longest_first = sorted(added, key=lambda text: (-len(text), text))
        self._split_added = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split if added else None

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> WordEncoder | None:
        """For byte-level BPE with parts that are known here, else None."""
        # Asked part by part: the whole in JSON would hold the vocabulary, and take longer than all the rest.
        model = tokenizer.model
        if not isinstance(model, tokenizers.models.BPE) or model.dropout or model.byte_fallback:
            return None
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        if _state(tokenizer.normalizer) not in (None, {"type": "NFC"}):
            return None
        added = tokenizer.get_added_tokens_decoder()
        pattern = _word_pattern(_state(tokenizer.pre_tokenizer))
        if pattern is None:
            return None
        if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
            return None
        return cls(tokenizer, pattern, {token.content: i for i, token in added.items() if token.content})

    def encode(self, text: str) -> list[int] | None:
        if not text.isascii() and self._unknown.search(text) is not None:
            return None
        if self._split_added is not None:
            for char in self._added_first_chars:
                if char in text:
                    return self._encode_with_added(text)
        return self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int] | None:
        words = self._find_words(text)
        if len("".join(words)) != len(text):  # the expression left something out
            return None
        try:
            return list(chain.from_iterable(map(self._words.__getitem__, words)))
        except KeyError:
            return self._encode_new(words)

    def _encode_new(self, words: list[str]) -> list[int]:
        """Asks the library for the words that are not known. Another thread may empty the dict at any time."""
        ids = {word: self._words.get(word) for word in words}
        new = [word for word, known in ids.items() if known is None]
        learned = {
            word: tuple(encoding.ids)
            for word, encoding in zip(
                new, self._tokenizer.encode_batch_fast(new, add_special_tokens=False), strict=True
            )
        }
        if len(self._words) + len(learned) > _MAX_WORDS:
            self._words.clear()
        if len(learned) <= _MAX_WORDS:
            self._words.update((word, known) for word, known in learned.items() if len(word) <= _MAX_WORD_CHARS)
        return list(chain.from_iterable(learned.get(word) or ids[word] or () for word in words))

    def _encode_with_added(self, text: str) -> list[int] | None:
        assert self._split_added is not None
        ids: list[int] = []
        for n, part in enumerate(self._split_added(text)):
            if n & 1:
                ids.append(self._added[part])
            elif part:
                plain = self._parts.get(part) or self._encode_plain(part)
                if plain is None:
                    return None
                ids += plain
                if len(self._parts) < _MAX_PARTS:
                    self._parts[part] = plain
        return ids


def _state(part: Any) -> Any:
    """A part of a tokenizer as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _word_pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The pre-tokenizer as one regular expression for Python's `re`, or None."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    digits = steps[0] == {"type": "Digits", "individual_digits": True}
    steps = steps[1:] if digits else steps
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    own_regex = steps[-1].get("use_regex", True)
    if len(steps) == 1 and own_regex:
        return _translated(_DIGITS_REGEX if digits else _BYTE_LEVEL_REGEX)
    if len(steps) == 2 and not own_regex and steps[0]["type"] == "Split" and not digits:
        split = steps[0]
        regex = split["pattern"].get("Regex")
        if regex is None or split["behavior"] != "Isolated" or split["invert"]:
            return None
        return _translated(regex)
    return None


def _translated(regex: str) -> str | None:
    """`regex` for Python: Unicode categories and white space spelled out over the known characters."""
    space = "".join(f"\\u{ord(c):04x}" for c in "\t\n\v\f\r \x85\xa0")
    number = _characters("N")
    if re.search(r"\\(?!p\{[A-Z][a-z]?\}|[sSrnt/.|()?*+'\[\]{}-])", regex):
        return None
    pieces: list[str] = []
    in_class = False
    for token in re.findall(r"\\p\{\w+\}|\\.|.", regex, re.DOTALL):
        if token == "[":
            in_class = True
        elif token == "]":
            in_class = False
        if token.startswith(r"\p{") or token == r"\s":
            chars = space if token == r"\s" else number if token == r"\p{N}" else _characters(token[3:-1])
            if not chars and not in_class:
                return None
            pieces.append(chars if in_class else f"[{chars}]")
        elif token == r"\S":
            if in_class:
                return None
            pieces.append(f"[^{space}]")
        else:
            pieces.append(token)
    pattern = "".join(pieces)
    try:
        compiled = re.compile(pattern)
    except re.error:
        return None
    # findall gives whole matches only where there is no capturing group
    return pattern if compiled.groups == 0 else None


def _characters(category: str) -> str:
    """Known characters of a Unicode category, as the inside of a character class."""
    codes = [ord(c) for c in _known_chars() if unicodedata.category(c).startswith(category)]
    ranges: list[list[int]] = []
    for code in sorted(codes):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in ranges)


def encode_all(
    encoder: WordEncoder, texts: Sequence[str], library: Callable[[list[str]], list[list[int]]]
) -> list[list[int]]:
    """Each text's ids; those that the encoder hands back are asked of the library together."""
    encode = encoder.encode
    found = [encode(text) for text in texts]
    missing = [n for n, ids in enumerate(found) if ids is None]
    if missing:
        for n, ids in zip(missing, library([texts[n] for n in missing]), strict=True):
            found[n] = ids
    return found  # type: ignore[return-value]
