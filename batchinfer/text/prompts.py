"""From a row to its prompt: `PromptSpec` (what the job says), `PromptRenderer` (doing it).

Responsible for: the four sources of prompts, choosing the chat template, whose control tokens count, whether BOS is
the tokenizer's business. Not for: ids and per-row settings (`prepare`), Jinja (`chat_template`), reading rows.

Control tokens (setting `control_tokens`). "auto", the default, is one law: what the job's author wrote is parsed,
what a row's values hold is text. Chat templates and the literal text of a prompt template produce control tokens;
values put into them never do, whatever they spell, in user, tool and assistant turns alike, and they decode to the
same text. A `prompt_column` (and a prompt template that is nothing but one column, which is the same thing) says
that the column holds finished prompts, perhaps rendered by a chat template already: parsed. "text": values are text
there, too. "parse": everything is parsed, as `apply_chat_template(tokenize=True)` does; only for data one trusts.

BOS: a chat template writes its own or none, nothing is added. Other prompts get what the tokenizer puts before a
text, unless they begin with it already. An EOS is never added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from batchinfer.errors import ConfigError, ModelError
from batchinfer.text.chat_template import ChatTemplate
from batchinfer.text.control_tokens import SENTINELS
from batchinfer.text.fields import FieldTemplate, InvalidPrompt, lookup
from batchinfer.text.messages import checked_messages, checked_tools
from batchinfer.text.tokenizer import Tokenizer
from batchinfer.text.user_text import UserText
from batchinfer.text.values import to_native, type_name
from batchinfer.types.rows import ErrorClass, RowError

ControlPolicy = Literal["auto", "text", "parse"]
_SOURCES = ("template", "prompt_column", "messages_column", "messages")
_IN_JOB_FILE = {"template": "prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """What the job says about prompts. Raises ConfigError where it contradicts itself.

    template         prompt template over columns (`fields`)
    messages         messages whose texts are prompt templates
    chat_template    name of one of the model's templates, or a template's text; None: the model's own
    now              ISO 8601 moment that `strftime_now` shows; None: it shows nothing (`chat_template`)
    """

    template: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools_column: str | None = None
    control_tokens: ControlPolicy = "auto"
    now: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            names = [f"input.{_IN_JOB_FILE.get(name, name)}" for name in given or _SOURCES]
            said = f"{' and '.join(names)} are given" if given else "none is given"
            raise ConfigError(
                "exactly one of input.prompt, prompt_column, messages_column and messages says what a prompt is; "
                f"{said}"
            )
        if not self.is_chat:
            for name in ("chat_template", "tools_column"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"input.{name} needs input.messages_column or input.messages; "
                        f"input.{_IN_JOB_FILE.get(given[0], given[0])} does not go through a chat template"
                    )
        taken = sorted({"messages", "tools"} & set(self.chat_template_kwargs))
        if taken:
            raise ConfigError(
                f"input.chat_template_kwargs sets {' and '.join(taken)}, which come from the rows; remove them"
            )
        if self.control_tokens not in ("auto", "text", "parse"):
            raise ConfigError(f"input.control_tokens must be auto, text or parse, got {self.control_tokens!r}")
        if self.now is not None:
            try:
                datetime.fromisoformat(self.now)
            except ValueError as error:
                raise ConfigError(f"the moment for strftime_now must be ISO 8601, got {self.now!r}") from error
        if self.template is not None:
            FieldTemplate(self.template, "input.prompt")
        if self.messages is not None:
            _message_templates(self.messages)

    @property
    def is_chat(self) -> bool:
        return self.messages_column is not None or self.messages is not None

    def columns(self, available: Collection[str] | None = None) -> tuple[str, ...]:
        """Input columns that prompts need, sorted. With the input's own columns, "a.b" is a column of that name where
        there is one, else field b of column a."""
        own = (self.prompt_column, self.messages_column, self.tools_column)
        names: set[str] = {name for name in own if name is not None}
        for template in self._templates():
            names |= template.columns(available)
        return tuple(sorted(names))

    def fields(self) -> tuple[str, ...]:
        """The names in templates as they are written there: columns, or "a.b" for field b of column a."""
        return tuple(dict.fromkeys(name for template in self._templates() for name in template.names))

    def _templates(self) -> Iterator[FieldTemplate]:
        if self.template is not None:
            yield FieldTemplate(self.template, "input.prompt")
        for message in _message_templates(self.messages or ()):
            yield from (part for part in message.values() if isinstance(part, FieldTemplate))


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text.

    add_special_tokens   whether the tokenizer's BOS goes before it
    masked               the text for `Tokenizer.encode_masked_batch`, or None: encode `text` with all it spells
    """

    text: str
    add_special_tokens: bool
    masked: str | None = None


class PromptRenderer:
    """Renders rows by a spec. Raises ModelError or ConfigError where no row could be rendered.

    chat_templates   the model's, by name ("default", "tool_use", ...)
    tokenizer        as an attribute: the one that `RenderedPrompt.masked` is for
    """

    def __init__(self, spec: PromptSpec, tokenizer: Tokenizer, chat_templates: Mapping[str, str] | None = None) -> None:
        self.spec = spec
        self._render: Callable[[Mapping[str, Any]], RenderedPrompt | RowError]
        self._column = spec.prompt_column
        self._template: FieldTemplate | None = None
        self._messages: list[dict[str, Any]] = []
        self._chat: ChatTemplate | None = None
        self._chat_with_tools: ChatTemplate | None = None
        finished = False
        if spec.template is not None:
            self._template = FieldTemplate(spec.template, "input.prompt")
            self._column = self._template.sole_column
        if spec.is_chat:
            self._chat, self._chat_with_tools = self._chosen(chat_templates or {}, tokenizer)
            self._messages = _message_templates(spec.messages or ())
            self._render = self._render_chat
        elif self._column is not None:
            self._render, finished = self._render_column, True
        else:
            self._render = self._render_template
        sources = [chat.source for chat in (self._chat, self._chat_with_tools) if chat is not None]
        self.tokenizer = tokenizer.for_template("\n".join(sources))
        self._control = self.tokenizer.control
        policy = ("parse" if finished else "text") if spec.control_tokens == "auto" else spec.control_tokens
        self._values_are_text = policy == "text" and bool(self._control.texts)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chosen chat template, for the job's manifest (`.name`, `.source`)."""
        return self._chat

    def columns(self, available: Collection[str] | None = None) -> tuple[str, ...]:
        return self.spec.columns(available)

    def render_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[RenderedPrompt | RowError]:
        """One outcome a row; a row's trouble is its own."""
        return [self.render(row) for row in rows]

    def render(self, row: Mapping[str, Any]) -> RenderedPrompt | RowError:
        try:
            return self._render(row)
        except InvalidPrompt as error:
            return RowError(ErrorClass.INVALID_PROMPT, str(error))

    def _render_column(self, row: Mapping[str, Any]) -> RenderedPrompt:
        assert self._column is not None
        if self._column in row:
            text = row[self._column]
        elif self.spec.prompt_column is None:
            text = lookup(row, self._column)
        else:
            raise InvalidPrompt(f"the row has no column {self._column!r}")
        if type(text) is not str:
            text = to_native(text)
            if not isinstance(text, str):
                raise InvalidPrompt(f"column {self._column!r} is {type_name(text)}, not text")
        if self._values_are_text and (self._control.always_mask or self._control.concerns(text)):
            sentinel = _sentinel((text,))
            return RenderedPrompt(text, True, self._control.mask(self._control.break_up(text, sentinel), sentinel))
        return RenderedPrompt(text, True)

    def _render_template(self, row: Mapping[str, Any]) -> RenderedPrompt:
        template, control = self._template, self._control
        assert template is not None
        if not self._values_are_text:
            return RenderedPrompt(template.render(row), True)
        concerned = control.always_mask

        def look(value: str) -> str:
            nonlocal concerned
            concerned = concerned or control.concerns(value)
            return value

        text = template.render(row, look)
        if not concerned:
            return RenderedPrompt(text, True)
        sentinel = _sentinel((text,))
        broken = template.render(row, lambda value: control.break_up(value, sentinel))
        return RenderedPrompt(text, True, control.mask(broken, sentinel))

    def _render_chat(self, row: Mapping[str, Any]) -> RenderedPrompt | RowError:
        spec, control = self.spec, self._control
        assert self._chat is not None
        tools = None
        if spec.tools_column is not None:
            if spec.tools_column not in row:
                raise InvalidPrompt(f"the row has no column {spec.tools_column!r}")
            tools = checked_tools(row[spec.tools_column], spec.tools_column)
        chat = self._chat_with_tools if tools and self._chat_with_tools else self._chat
        messages: list[dict[str, Any]]
        if spec.messages_column is not None:
            if spec.messages_column not in row:
                raise InvalidPrompt(f"the row has no column {spec.messages_column!r}")
            column = spec.messages_column
            messages = checked_messages(row[column], column, takes_parts=chat.takes_parts)
        else:
            messages = [
                {key: part.render(row) if isinstance(part, FieldTemplate) else part for key, part in message.items()}
                for message in self._messages
            ]
        texts = list(_texts((messages, tools)))
        size = sum(map(len, texts))
        if not self._values_are_text or not (control.always_mask or any(map(control.concerns, texts))):
            text = chat.render(messages, tools, input_chars=size)
            return text if isinstance(text, RowError) else RenderedPrompt(text, False)
        sentinel = _sentinel(texts)

        def break_needle(needle: str) -> str:
            return control.break_whole(needle, sentinel)

        def protect(value: str) -> str:
            return UserText.of(control.break_up(value, sentinel), break_needle) if control.concerns(value) else value

        text = chat.render(_mapped(messages, protect), _mapped(tools, protect), input_chars=size)
        if isinstance(text, RowError):
            return RowError(text.error_class, text.message.replace(sentinel, ""))
        return RenderedPrompt(text.replace(sentinel, ""), False, control.mask(text, sentinel))

    def _chosen(self, templates: Mapping[str, str], tokenizer: Tokenizer) -> tuple[ChatTemplate, ChatTemplate | None]:
        """The chat template, and the one for rows with tools where the model has one of its own."""
        chosen = self.spec.chat_template
        if chosen is not None and ("{" in chosen or "\n" in chosen):
            return self._compiled(chosen, "input.chat_template", tokenizer), None
        there = f" (it has: {', '.join(sorted(templates))})" if templates else ""
        if chosen is not None:
            if chosen not in templates:
                raise ConfigError(
                    f"input.chat_template: the model has no chat template called {chosen!r}{there}; give "
                    f"{'one of these names' if there else 'no name'}, or a template's text"
                )
            return self._compiled(templates[chosen], chosen, tokenizer), None
        if "default" not in templates:
            raise ModelError(
                f"the model has no {'default ' if templates else ''}chat template{there}, which messages need; "
                "give input.chat_template (a name or a template's text), or use input.prompt or prompt_column"
            )
        default = self._compiled(templates["default"], "default", tokenizer)
        if self.spec.tools_column is not None and "tool_use" in templates:
            return default, self._compiled(templates["tool_use"], "tool_use", tokenizer)
        return default, None

    def _compiled(self, source: str, name: str, tokenizer: Tokenizer) -> ChatTemplate:
        return ChatTemplate(
            source,
            name=name,
            special_tokens=tokenizer.named,
            variables=self.spec.chat_template_kwargs,
            now=self.spec.now,
        )


def _message_templates(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the job file with their texts parsed. Raises ConfigError."""
    if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigError("input.messages must be a list of {role: ..., content: ...}")
    parsed = []
    for n, message in enumerate(messages):
        if not (isinstance(message.get("role"), str) and message["role"] and isinstance(message.get("content"), str)):
            raise ConfigError(f"input.messages[{n}] needs a role and a content, both texts")
        parsed.append(
            {
                key: FieldTemplate(value, f"input.messages[{n}].{key}")
                if key != "role" and isinstance(value, str)
                else value
                for key, value in message.items()
            }
        )
    return parsed


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value


def _sentinel(texts: Collection[str]) -> str:
    """A noncharacter that none of the texts holds; where they hold all, the last, which is then lost from them."""
    free = (char for char in SENTINELS if not any(char in text for text in texts))
    return next(free, SENTINELS[-1])
