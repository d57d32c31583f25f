"""Generated ids to text, token by token, up to a stop string: `SequenceDecoder`.

Rules: a match may begin and end anywhere, across tokens and characters, in generated text only. The match that is
complete first, character by character, ends the text (of several that end at the same character, the longest), so
the outcome depends neither on the order of the list nor on where tokens end. A match that is complete before
`min_tokens` tokens does not count. The text ends before the match, or right after it with
`include_stop_str_in_output`; token ids, also those that make up what was cut, stay with the caller. The text is
always a beginning of `Tokenizer.decode` of all ids, so a sequence that ends inside a character ends in one U+FFFD.
A stop string that is the text of a special token also matches that token while special tokens are hidden.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Sequence

from batchinfer.errors import ConfigError
from batchinfer.text.tokenizer import Tokenizer

_MAX_HELD_TOKENS = 32


@functools.lru_cache(maxsize=1024)
def _any_of(stops: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, stops)))


class SequenceDecoder:
    """One generated sequence. `push` each token id; the first stop string found is returned and ends it.

    For each token the work is bounded by the token's own text and the longest stop string.
    """

    __slots__ = (
        "_cut",
        "_decoder",
        "_floor",
        "_held",
        "_ids",
        "_include",
        "_length",
        "_longest",
        "_min_tokens",
        "_num_tokens",
        "_parts",
        "_pending_strip",
        "_skip_special",
        "_special_stops",
        "_stops",
        "_suffix",
        "_tail",
        "_tokenizer",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        if any(not text for text in stop):
            raise ConfigError("sampling.stop must be a list of non-empty strings")
        self._tokenizer = tokenizer
        self._stops = tuple(stop)
        self._include = include_stop_str_in_output
        self._skip_special = skip_special_tokens
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._stops), default=0)
        self._special_stops = tokenizer.special_texts(self._stops) if skip_special_tokens else {}
        self._ids: list[int] = []  # only where the tokenizer has no byte table
        self._num_tokens = 0
        self._parts: list[str] = []
        self._length = 0  # characters in `_parts`
        self._tail = ""  # the last `_longest - 1` of them
        self._floor = 0  # matches that end at or before this character do not count
        self._cut: int | None = None
        self._suffix = ""
        self.stop_reason: str | None = None
        pieces = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if pieces is not None else None
        self._pending_strip = pieces is not None and pieces.strip_first_space
        self._held = ("", 0)  # text already given out of `_ids`' window, and the window's start

    def push(self, token_id: int) -> str | None:
        """Adds a token. Returns the stop string that is now matched, or None. Not to be called after a match."""
        assert self.stop_reason is None, "the sequence has ended at a stop string"
        self._num_tokens += 1
        counts = self._num_tokens >= self._min_tokens
        if counts and token_id in self._special_stops:
            self._add(self._flush())
            return self._end(self._special_stops[token_id], self._length, hidden=True)
        text = self._text_of(token_id)
        if not text:
            return None
        window, start = self._tail + text, self._length - len(self._tail)
        self._add(text)
        if not self._stops:
            return None
        if not counts:
            self._floor = self._length
            return None
        if _any_of(self._stops).search(window) is None:
            return None
        best: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            at = window.find(stop, max(0, self._floor + 1 - start - len(stop)))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        return self._end(best[2], start + (best[0] if self._include else best[1]), hidden=False)

    def finish(self) -> str:
        """The text: up to the stop string if there was one, else of all tokens."""
        if self._cut is None:
            self._add(self._flush())
            return "".join(self._parts)
        return "".join(self._parts)[: self._cut] + self._suffix

    @property
    def text(self) -> str:
        """What stands so far, without an incomplete character at the end."""
        whole = "".join(self._parts)
        return whole if self._cut is None else whole[: self._cut] + self._suffix

    def _end(self, stop: str, cut: int, *, hidden: bool) -> str:
        self.stop_reason, self._cut = stop, cut
        self._suffix = stop if hidden and self._include else ""
        return stop

    def _add(self, text: str) -> None:
        if not text:
            return
        self._parts.append(text)
        self._length += len(text)
        if self._longest > 1:
            self._tail = (self._tail + text)[-(self._longest - 1) :]

    def _text_of(self, token_id: int) -> str:
        pieces = self._tokenizer.token_bytes
        if self._decoder is None or pieces is None:
            return self._text_by_library(token_id)
        text = self._decoder.decode(pieces.piece(token_id, skip_special_tokens=self._skip_special))
        return self._strip_first(text) if self._pending_strip else text

    def _strip_first(self, text: str) -> str:
        if not text:
            return text
        self._pending_strip = False
        return text.removeprefix(" ")

    def _flush(self) -> str:
        if self._decoder is not None:
            text = self._decoder.decode(b"", True)
            return self._strip_first(text) if self._pending_strip else text
        given, start = self._held
        whole = self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip_special)
        self._held = (whole, start)
        return whole[len(given) :]

    def _text_by_library(self, token_id: int) -> str:
        """Decoders of other kinds: a window of ids is decoded anew; it moves on when its text is settled."""
        self._ids.append(token_id)
        given, start = self._held
        whole = self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip_special)
        if whole.endswith("\ufffd") and len(self._ids) - start < _MAX_HELD_TOKENS:
            return ""
        new = whole[len(given) :] if whole.startswith(given) else ""
        if len(self._ids) - start >= _MAX_HELD_TOKENS:
            # The window's second half stays as context for the spaces that decoders put between words.
            start += _MAX_HELD_TOKENS // 2
            whole = self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip_special)
        self._held = (whole if whole.startswith(given) or start else given, start)
        return new
