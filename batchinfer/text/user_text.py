"""`UserText`: a string with broken-up control tokens that a template can look into as if they were whole.

Only rows that spell control tokens meet it. A template that asks `'</think>' in content`, or splits there, gets the
answer for the user's own text; whatever it makes of the string, the sentinels stay in, since they are in the
characters themselves. So an operation that is not listed here can at worst miss a match, never let one through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex


class UserText(str):
    _break: Callable[[str], str]

    @classmethod
    def of(cls, broken: str, break_up: Callable[[str], str]) -> UserText:
        """`broken` is `break_up(the user's text)`; needles are broken up in the same way before they are sought."""
        text = cls(broken)
        text._break = break_up
        return text

    def _wrap(self, text: str) -> UserText:
        return UserText.of(text, self._break)

    def _needle(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._needle(item) for item in value)
        return self._break(value) if isinstance(value, str) and not isinstance(value, UserText) else value

    def __contains__(self, value: Any) -> bool:
        return str.__contains__(self, self._needle(value))

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, self._needle(other)) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __getitem__(self, key: SupportsIndex | slice) -> UserText:
        return self._wrap(str.__getitem__(self, key))

    def startswith(self, prefix: Any, *span: Any) -> bool:
        return str.startswith(self, self._needle(prefix), *span)

    def endswith(self, suffix: Any, *span: Any) -> bool:
        return str.endswith(self, self._needle(suffix), *span)

    def find(self, sub: str, *span: Any) -> int:
        return str.find(self, self._needle(sub), *span)

    def rfind(self, sub: str, *span: Any) -> int:
        return str.rfind(self, self._needle(sub), *span)

    def index(self, sub: str, *span: Any) -> int:
        return str.index(self, self._needle(sub), *span)

    def rindex(self, sub: str, *span: Any) -> int:
        return str.rindex(self, self._needle(sub), *span)

    def count(self, sub: str, *span: Any) -> int:
        return str.count(self, self._needle(sub), *span)

    def replace(self, old: str, new: str, *count: Any) -> UserText:
        return self._wrap(str.replace(self, self._needle(old), new, *count))

    def removeprefix(self, prefix: str) -> UserText:
        return self._wrap(str.removeprefix(self, self._needle(prefix)))

    def removesuffix(self, suffix: str) -> UserText:
        return self._wrap(str.removesuffix(self, self._needle(suffix)))

    def strip(self, chars: str | None = None) -> UserText:
        return self._wrap(str.strip(self, chars))

    def lstrip(self, chars: str | None = None) -> UserText:
        return self._wrap(str.lstrip(self, chars))

    def rstrip(self, chars: str | None = None) -> UserText:
        return self._wrap(str.rstrip(self, chars))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return [self._wrap(part) for part in str.split(self, self._needle(sep), maxsplit)]

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return [self._wrap(part) for part in str.rsplit(self, self._needle(sep), maxsplit)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        head, found, tail = str.partition(self, self._needle(sep))
        return self._wrap(head), self._wrap(found), self._wrap(tail)

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        head, found, tail = str.rpartition(self, self._needle(sep))
        return self._wrap(head), self._wrap(found), self._wrap(tail)
