"""Chat templates: `ChatTemplate`, Jinja as Hugging Face's `apply_chat_template` defines it.

Responsible for: compiling once, rendering a conversation, the names a template can use (messages, tools, documents,
add_generation_prompt, the special tokens, `raise_exception`, `strftime_now`, `tojson` without HTML escapes,
`{% generation %}`, `break` and `continue`). Not for: which template (`prompts`), bounds (`template_limits`).

`strftime_now` gives the moment `now` that the job froze, never the clock: a row's prompt must be the same at every
attempt. Without `now` it is undefined, which published templates test for (they fall back to a fixed date).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from batchinfer.errors import ModelError
from batchinfer.text.template_limits import MAX_CPU_S, MAX_STEPS, BoundedEnvironment, TemplateTimeout
from batchinfer.types.rows import ErrorClass, RowError

_MAX_MESSAGE_CHARS = 2000


class ChatTemplate:
    """A compiled template. Raises ModelError where it does not compile.

    special_tokens   texts by role ("bos_token": "<s>"), as variables
    variables        `chat_template_kwargs`
    now              ISO 8601 moment for `strftime_now`, or None
    takes_parts      whether it loops over a message's content, so that lists of parts can be handed to it
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "default",
        special_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: str | None = None,
        max_steps: int = MAX_STEPS,
        max_cpu_s: float = MAX_CPU_S,
    ) -> None:
        self.source, self.name = source, name
        self._environment = _environment(now)
        try:
            self._template = self._environment.from_string(source)
            tree = jinja2.Environment(extensions=[loopcontrols, _Generation]).parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template {name!r}: line {error.lineno}: {error.message}") from error
        except Exception as error:
            raise ModelError(f"chat template {name!r} does not compile: {error}") from error
        self.takes_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        self._base: dict[str, Any] = {
            "documents": None,
            "add_generation_prompt": True,
            **(special_tokens or {}),
            **(variables or {}),
        }
        self._max_steps, self._max_cpu_s = max_steps, max_cpu_s

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, input_chars: int = 0
    ) -> str | RowError:
        """The prompt, or why there is none: what the template itself said, or that it ran too long."""
        self._environment.start_row(input_chars=input_chars, steps=self._max_steps, cpu_s=self._max_cpu_s)
        try:
            context = self._template.new_context({**self._base, "messages": messages, "tools": tools})
            return self._environment.concat(self._template.root_render_func(context))
        except TemplateTimeout as error:
            return RowError(ErrorClass.TEMPLATE_TIMEOUT, f"chat template {self.name!r}: {error}")
        except jinja2.TemplateError as error:
            return self._refused(error.message or type(error).__name__)
        except Exception as error:  # any Python error can come out of a template's expressions
            return self._refused(f"{type(error).__name__}: {error}")

    def _refused(self, message: str) -> RowError:
        return RowError(ErrorClass.TEMPLATE_ERROR, f"chat template {self.name!r}: {message}"[:_MAX_MESSAGE_CHARS])


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own protocol)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _SafeNamespace(Namespace):
    """Jinja's `namespace()` without names that begin with an underscore, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateRuntimeError(f"a namespace can't hold {name!r}: names must not begin with an underscore")


def _environment(now: str | None) -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])

    def raise_exception(message: Any) -> None:
        environment.bounded_size(message)
        raise jinja2.TemplateError(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        environment.bounded_size(value)
        if isinstance(indent, int) and indent > 64:
            raise jinja2.TemplateRuntimeError("tojson: indent must be at most 64")
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = _SafeNamespace
    if now is not None:
        moment = datetime.fromisoformat(now)
        environment.globals["strftime_now"] = moment.strftime
    return environment


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and "content" in node.name
