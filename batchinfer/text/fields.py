"""The language of prompt templates: "Question: {question}\\nHint: {meta.hint}" -> text.

`{column}` puts a column's value in, `{a.b}` field b of struct a (a column named "a.b" comes first), `{{` and `}}`
are braces. Nothing else: conversions (`!r`) and formats (`:.2f`) are refused. Strings go in as they are, numbers,
booleans, dates as Python prints them, lists and structs as JSON; a null or NaN makes the row an error row.
Not for: Jinja (`chat_template`), nor which columns exist (`prompts`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from batchinfer.errors import ConfigError
from batchinfer.text.values import to_native, type_name

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


class InvalidPrompt(Exception):
    """Inside this room only: the row's values make no prompt. Becomes a RowError of class INVALID_PROMPT."""


class FieldTemplate:
    """A parsed template. Raises ConfigError where it can't be parsed; `where` names it in messages."""

    def __init__(self, text: Any, where: str) -> None:
        if not isinstance(text, str):
            raise ConfigError(f"{where} must be a text, got {type_name(text)}")
        self.text = text
        self.literals: list[str] = [""]  # one more than names
        self.names: list[str] = []
        end = 0
        for match in _PIECE.finditer(text):
            self.literals[-1] += text[end : match.start()]
            end = match.end()
            if match[1] is not None:
                self.names.append(_checked_name(match[1], where))
                self.literals.append("")
            elif match[0] in ("{{", "}}"):
                self.literals[-1] += match[0][0]
            else:
                raise ConfigError(
                    f"{where}: a single {match[0]!r} at character {match.start() + 1} of {text!r}; write "
                    f"{match[0] * 2} for a brace, {{column}} for a column"
                )
        self.literals[-1] += text[end:]

    def columns(self, available: Collection[str] | None = None) -> set[str]:
        """Input columns that it needs; with `available`, "a.b" is itself where there is such a column."""
        return {name if available is not None and name in available else name.split(".")[0] for name in self.names}

    @property
    def sole_column(self) -> str | None:
        """The column's name where the template is nothing but one column."""
        return self.names[0] if len(self.names) == 1 and not any(self.literals) else None

    def render(self, row: Mapping[str, Any], protect: Callable[[str], str] | None = None) -> str:
        """`protect` is applied to each value's text. Raises InvalidPrompt."""
        parts = [self.literals[0]]
        for name, literal in zip(self.names, self.literals[1:], strict=True):
            value = row[name] if name in row else lookup(row, name)
            text = value if type(value) is str else _as_text(value, name)
            parts.append(text if protect is None else protect(text))
            parts.append(literal)
        return "".join(parts)


def lookup(row: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name. Raises InvalidPrompt where a struct on the way is null or lacks the field."""
    if name in row:
        return row[name]
    head, *path = name.split(".")
    if head not in row:
        raise InvalidPrompt(f"the row has no column {head!r}")
    value = to_native(row[head])
    for n, key in enumerate(path):
        if not isinstance(value, dict):
            raise InvalidPrompt(f"column {name!r}: {'.'.join([head, *path[:n]])!r} is {type_name(value)}, not a struct")
        if key not in value:
            raise InvalidPrompt(f"column {name!r}: the struct {'.'.join([head, *path[:n]])!r} has no field {key!r}")
        value = value[key]
    return value


def _as_text(value: Any, name: str) -> str:
    value = to_native(value)
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bytes) or value != value:
        raise InvalidPrompt(f"column {name!r} is {type_name(value)}")
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _checked_name(name: str, where: str) -> str:
    if not name.strip():
        raise ConfigError(f"{where}: {{}} names no column; write {{column}}, or {{{{}}}} for the braces themselves")
    if "!" in name or ":" in name:
        raise ConfigError(
            f"{where}: {{{name}}} asks for a conversion or format, which prompt templates do not have; write "
            "{column} only (and {{ }} for braces that are part of the prompt)"
        )
    return name.strip()
