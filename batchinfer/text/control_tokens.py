"""Control tokens spelled in user text: `ControlTokens`.

What the job's author wrote (chat template, literal text of a prompt template, a finished prompt in `prompt_column`)
may produce control tokens; what a row's values contain is text (setting `control_tokens: text`, the default for
values put into a template). How:

1. `break_up`: in each value, a sentinel (a Unicode noncharacter) is put into every spelled control token, and after
   a value's end that could begin one. The rendered text then tells whose each control token is, whatever the
   template did to the value. Values without such text, nearly all, are left as they are.
2. `mask`: in the rendered text, control tokens that are whole are the template's own: they are renamed; then the
   sentinels go.
3. The text is encoded in one piece by a twin of the tokenizer whose control tokens carry the new names and the same
   ids (`without_control_tokens`). So text around control tokens is cut and merged exactly as always.

Control tokens are all tokens flagged special, and unflagged added tokens that look like a marker or that the chat
template writes. Other added tokens (runs of spaces, words added to a vocabulary) are text like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

SENTINELS = tuple(chr(code) for code in range(0xFDD0, 0xFDEF))
RENAMED = "\ufdef"
_MARKER = re.compile(
    r"<\|.*\|>|<｜.*｜>|\[/?[A-Z][A-Z_]*\]"
    r"|</?(?:think|thinking|reasoning|answer|tools?|tool_calls?|tool_responses?|tool_results?|functions?"
    r"|function_calls?|(?:start|end)_of_\w+|im_(?:start|end|sep)|s|bos|eos|pad|unk|mask)>",
    re.DOTALL,
)


def is_marker(token: str) -> bool:
    """Whether an added token that is not flagged special looks like one that structures a conversation."""
    return _MARKER.fullmatch(token) is not None


class ControlTokens:
    """The texts of a tokenizer's control tokens, and the search for them.

    always_mask   a normalizer could make a control token out of other characters (full-width ones, say), so
                  looking for its plain spelling is not enough: no text is known to be free of them
    """

    def __init__(self, texts: Iterable[str], *, always_mask: bool = False) -> None:
        self.texts = frozenset(text for text in texts if text)
        self.always_mask = always_mask and bool(self.texts)
        longest_first = sorted(self.texts, key=lambda text: (-len(text), text))
        self._first_chars = tuple(sorted({text[0] for text in self.texts}))
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        prefixes = sorted({text[:n] for text in self.texts for n in range(1, len(text))}, key=len, reverse=True)
        self._prefixes = frozenset(prefixes)
        self._longest_prefix = len(prefixes[0]) if prefixes else 0

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, special: frozenset[int] = frozenset()) -> ControlTokens:
        added = tokenizer.get_added_tokens_decoder()
        control = [t for i, t in added.items() if t.special or i in special or is_marker(t.content)]
        normalizing = tokenizer.normalizer is not None and any(token.normalized for token in control)
        return cls((token.content for token in control), always_mask=normalizing)

    def extended(self, texts: Iterable[str], *, normalizing: bool) -> ControlTokens:
        return ControlTokens({*self.texts, *texts}, always_mask=self.always_mask or normalizing)

    def concerns(self, text: str) -> bool:
        """Whether `text` spells a control token or ends in the beginning of one."""
        for char in self._first_chars:
            if char in text:
                return self._whole.search(text) is not None or self._ends_in_prefix(text)
        return False

    def break_up(self, text: str, sentinel: str) -> str:
        text = self.break_whole(text, sentinel)
        return text + sentinel if self._ends_in_prefix(text) else text

    def break_whole(self, text: str, sentinel: str) -> str:
        return self._whole.sub(lambda match: match[0][0] + sentinel + match[0][1:], text)

    def mask(self, text: str, sentinel: str) -> str:
        """Renames whole control tokens, then takes the sentinels out."""
        text = self.without_renamed(text)

        def renamed(match: re.Match[str]) -> str:
            # A token of one character can't be broken up inside: the sentinel stands behind it.
            broken = len(match[0]) == 1 and text.startswith(sentinel, match.end())
            return match[0] if broken else RENAMED + match[0]

        return self._whole.sub(renamed, text).replace(sentinel, "")

    @staticmethod
    def without_renamed(text: str) -> str:
        """A text that came with the noncharacter of the new names could spell one: it becomes U+FFFD."""
        return text.replace(RENAMED, "\ufffd")

    def _ends_in_prefix(self, text: str) -> bool:
        return any(text[-n:] in self._prefixes for n in range(1, min(self._longest_prefix, len(text)) + 1))


def without_control_tokens(tokenizer: tokenizers.Tokenizer, control: ControlTokens) -> tokenizers.Tokenizer:
    """A twin in which each control token has the name RENAMED + text, under the same id."""
    if not control.texts:
        return tokenizer
    state = json.loads(tokenizer.to_str())
    renamed = {text: RENAMED + text for text in control.texts}
    for token in state["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    _rename_in_model(state["model"], renamed)
    _rename_in_post_processor(state)
    twin = tokenizers.Tokenizer.from_str(json.dumps(state))
    for text, name in renamed.items():
        assert twin.token_to_id(name) == tokenizer.token_to_id(text), f"renaming {text!r} changed its id"
    return twin


def _rename_in_model(model: dict[str, Any], renamed: dict[str, str]) -> None:
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        for text in renamed.keys() & vocab.keys():
            vocab[renamed[text]] = vocab.pop(text)
    elif isinstance(vocab, list):  # Unigram: [piece, score] in the order of ids
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if "merges" in model:
        # A merge that makes (or uses) a control token would let it grow out of plain text.
        model["merges"] = [
            merge
            for merge in model["merges"]
            if not (parts := tuple(merge.split(" ") if isinstance(merge, str) else merge))
            or not ({*parts, "".join(parts)} & renamed.keys())
        ]


def _rename_in_post_processor(state: dict[str, Any]) -> None:
    # Only ids without special tokens are asked of the twin; the post-processor would name tokens it lacks.
    state["post_processor"] = None
