"""A row's conversation: checked and made plain for chat templates.

Responsible for: what a `messages` value may look like, null fields, parts, tools. Not for: templates.
Raises `fields.InvalidPrompt` with what is wrong and where.
"""

from __future__ import annotations

import json
from typing import Any

from batchinfer.text.fields import InvalidPrompt
from batchinfer.text.values import to_native, type_name, without_nulls

# Names that data uses for an assistant's reasoning, the standard one first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def checked_messages(value: Any, column: str, *, takes_parts: bool) -> list[dict[str, Any]]:
    """Messages with a text role each; content is text, or for templates that take them a list of text parts.

    A null field is one that this message lacks. Null content is right only where an assistant message has something
    else to say (tool calls).
    """
    value = to_native(value)
    if not isinstance(value, list):
        raise InvalidPrompt(f"column {column!r} is {type_name(value)}, not a list of messages")
    if not value:
        raise InvalidPrompt(f"column {column!r} is an empty list: there is no message to answer")
    return [_checked_message(item, f"column {column!r}, message {n}", takes_parts) for n, item in enumerate(value)]


def checked_tools(value: Any, column: str) -> list[Any] | None:
    """Tool descriptions: a list of structs, or JSON text of one. Null and the empty list are no tools."""
    value = to_native(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidPrompt(f"column {column!r} (tools) is text but not JSON: {error}") from error
    else:
        value = without_nulls(value)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise InvalidPrompt(f"column {column!r} (tools) is {type_name(value)}, not a list of structs")
    return value


def _checked_message(item: Any, where: str, takes_parts: bool) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidPrompt(f"{where} is {type_name(item)}, not a struct with role and content")
    message = {key: without_nulls(value) for key, value in item.items() if value is not None and key != "content"}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPrompt(f"{where} has no role (a text such as 'user'), but {type_name(role)}")
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        # As apply_chat_template does: templates ask for one of two names.
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    content = item.get("content")
    if isinstance(content, str):
        message["content"] = content
    elif content is None:
        if not (role == "assistant" and message.get("tool_calls")):
            raise InvalidPrompt(f"{where} ({role}): content is null")
        message["content"] = None
    elif isinstance(content, list):
        message["content"] = _checked_parts(content, f"{where} ({role})", takes_parts)
    else:
        raise InvalidPrompt(f"{where} ({role}): content is {type_name(content)}, not text")
    return message


def _checked_parts(parts: list[Any], where: str, takes_parts: bool) -> Any:
    """Parts as they are, or joined by line breaks for a template that knows text only."""
    texts, kept = [], []
    for n, part in enumerate(parts):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise InvalidPrompt(f"{where}: content part {n} is {type_name(part)}, not a struct")
        part = without_nulls(part)
        kind = part.get("type", "text")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidPrompt(f"{where}: content part {n} is of type {kind!r}; only text parts are supported")
        texts.append(part["text"])
        kept.append({**part, "type": "text"})
    return kept if takes_parts else "\n".join(texts)
