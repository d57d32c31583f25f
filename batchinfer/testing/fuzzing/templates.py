"""Chat templates and conversations: templates that reach out, run for ever or grow, messages that are none."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from batchinfer.testing.fuzzing.case import INPUT_FOLDER, NASTY_TEXTS, Case, job_text, mutated
from batchinfer.testing.fuzzing.expected import CHATS, SLOW

PLAIN = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_GOOD = (
    PLAIN,
    "{{ bos_token }}{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>{% endif %}[{{ m.role|upper }}]"
    "{{ m.content|trim }}{% endfor %}",
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/...') }}{% endif %}[{{ m.content }}]{% endfor %}",
    "{% macro show(m) %}{{ m.role ~ ':' ~ m.content }}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ show(m) }}{% endfor %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% generation %}!{% endgeneration %}{% endfor %}",
    "{{ strftime_now('%d %b %Y') }}{{ messages|tojson }}{% for m in messages %}{{ m|items|list }}{% endfor %}",
)
# What somebody has tried against a sandbox. What gets out prints the canary, or the insides of Python.
_ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ (messages|attr('__class__')) }}",
    "{{ messages['__class__'] }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [messages]|map('attr', '__class__')|list }}",
    "{{ [messages]|groupby('__class__') }}",
    "{{ [messages]|sort(attribute='__class__') }}",
    "{{ [messages]|sum(attribute='__class__') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format_map({'0': messages}) }}",
    "{{ '%s'|format(messages.append) }}",
    "{{ cycler.__init__.__globals__.os.environ['BATCHINFER_CANARY'] }}",
    "{{ lipsum.__globals__['os'].environ.BATCHINFER_CANARY }}",
    "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ tojson.__globals__ }}",
    "{{ request.application.__globals__ }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].pop('role') }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends 'base' %}",
    "{{ self }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ loop }}",
    "{% for m in messages %}{{ loop }}{{ loop.__class__ }}{% endfor %}",
    "{{ range }}{{ dict }}{{ cycler }}{{ joiner() }}{{ namespace() }}",
    "{{ messages.append }}{{ messages|list|first }}{{ messages.__len__ }}",
    "{% macro m() %}{% endmacro %}{{ m }}{{ m.__call__ }}{{ caller }}",
    "{{ messages|map('upper') }}{{ messages|select }}{{ {}.items() }}{{ {}.keys }}",
    "{{ ''|attr('format')|attr('__globals__') }}",
    "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "{{ ('x'|safe).__class__ }}{{ ('x'|escape).__html_format__ }}{{ ('%s'|safe) % messages }}",
    "{{ ('{0.__class__}'|safe).format(messages) }}",
    "{{ debug() }}{% debug %}",
    "{{ context }}{{ environment }}{{ template }}{{ __name__ }}",
)
_ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for m in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ range(99999999999) }}",
    "{{ range(10)|list * 99999999 }}",
    "{% set ns = namespace(s='x') %}{% for i in range(200) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x') %}{% for i in range(200) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(200) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "{% set ns = namespace(n=2) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace(n=2) %}{% for i in range(99) %}{% set ns.n = ns.n ** ns.n %}{% endfor %}{{ ns.n }}",
    "{{ 'x'.center(9999999999) }}{{ '%99999999999d' % 1 }}{{ '{:>9999999999}'.format(1) }}",
    "{{ 2 ** 2 ** 2 ** 2 ** 2 ** 2 }}",
    "{{ 9 ** 9 ** 9 }}{{ 9.0 ** 999 }}{{ 1 // 0 }}{{ 1 % 0 }}{{ 0 ** -1 }}",
    "{{ ('x' * 10000000)|wordwrap(1) }}",
    "{{ ('x ' * 5000000)|title|wordcount }}",
    "{% set x %}{% for i in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endset %}"
    "{% for i in range(999) %}{{ x }}{% endfor %}",
    "{{ {}.fromkeys(range(99999), 'x' * 9999)|tojson }}",
    "{{ 'x'|indent(99999999) }}{{ 'x'|tojson(indent=9999999) }}",
    "{{ 'a'.join(range(99999)|map('string')|list * 500) }}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{{ " + " + ".join(["1"] * 5000) + " }}",
    "{{ " + "[" * 150 + "]" * 150 + " }}",
    "{% if 1 %}" * 150 + "{% endif %}" * 150,
    "{{ 1" + "|string" * 3000 + " }}",
)
# Something long or many-fold, handed to something that Jinja or Python offers.
_BIG = (
    "'x' * 4000000",
    "' ' * 4000000",
    "'<' * 2000000",
    "'<!--' * 1000000",
    "'<!---->' * 500000",
    "'<a' * 1000000",
    "'x.com ' * 500000",
    "'www.' * 1000000",
    "'(' * 2000000",
    "'a@' * 1000000",
    "'http://' * 400000",
    "'a\\n' * 1000000",
    "'&amp;' * 500000",
    "'1' * 4000000",
    "'\\u00df' * 2000000",
    "range(99999)|list",
    "(range(99999)|map('string')|list)",
    "([[1]] * 1000000)",
    "deep.s",
    "[deep.s, deep.s]",
    "{'a': deep.s}",
    "deep.t",
    "[deep.t, deep.t]",
    "wide.s",
)
_DEEP = (
    "{% set deep = namespace(s=[1], t=(1,)) %}{% set twin = namespace(s=[1], t=(1,)) %}{% set wide = namespace(s=[]) %}"
    "{% for i in range(45) %}{% set deep.s = [deep.s, deep.s] %}{% set twin.s = [twin.s, twin.s] %}"
    "{% set deep.t = (deep.t, deep.t) %}{% set twin.t = (twin.t, twin.t) %}{% endfor %}"
    "{% for i in range(3000) %}{% set wide.s = [wide.s] %}{% endfor %}"
)
_FILTERS = (
    "abs|batch(3)|list|length",
    "capitalize|length",
    "center(99)|length",
    "count",
    "default('x')|length",
    "dictsort|length",
    "escape|length",
    "filesizeformat",
    "first",
    "float",
    "forceescape|length",
    "format(1)|length",
    "groupby(0)|list|length",
    "indent|length",
    "int",
    "items|list|length",
    "join('ab')|length",
    "join|length",
    "last|length",
    "length",
    "list|length",
    "lower|length",
    "map('upper')|list|length",
    "map('length')|list|length",
    "map('string')|join|length",
    "max|length",
    "min|length",
    "pprint|length",
    "reject('in', 'abc')|list|length",
    "rejectattr('a')|list|length",
    "replace('x', 'yy')|length",
    "replace('', 'y')|length",
    "reverse|list|length",
    "round",
    "safe|length",
    "select('eq', 1)|list|length",
    "select('in', [1])|list|length",
    "slice(7)|list|length",
    "sort|length",
    "sort(reverse=true, case_sensitive=true)|length",
    "string|length",
    "striptags|length",
    "sum",
    "sum(start=[])|length",
    "title|length",
    "tojson|length",
    "trim|length",
    "truncate(99999)|length",
    "unique|list|length",
    "upper|length",
    "urlencode|length",
    "urlize|length",
    "urlize(9)|length",
    "wordcount",
    "wordwrap(1)|length",
    "wordwrap(5, wrapstring='abc')|length",
    "xmlattr|length",
    "selectattr('a', 'eq', 1)|list|length",
    "map(attribute='a.b.c')|list|length",
)
_USES = (
    *(f"{{{{ ({{big}})|{name} }}}}" for name in _FILTERS),
    "{{ ({big}) == ({big}) }}",
    "{{ deep.s == twin.s }}",
    "{{ deep.t == twin.t }}",
    "{{ deep.s < twin.s }}",
    "{{ deep.s in [twin.s] }}",
    "{{ [deep.s].index(twin.s) }}",
    "{{ [deep.s].count(twin.s) }}",
    "{{ {deep.t: 1} }}",
    "{{ {}[deep.t] }}",
    "{{ deep.s is eq twin.s }}",
    "{{ [deep.s]|select('eq', twin.s)|list|length }}",
    "{{ [deep.s, twin.s]|sort|length }}",
    "{{ [deep.s, twin.s]|max|length }}",
    "{{ ({big})[0] }}{{ ({big})[::-1]|length }}",
    "{{ 'ab' in ({big}) }}",
    "{{ ({big}).split()|length }}{{ ({big}).split('x')|length }}",
    "{{ ({big}).splitlines()|length }}",
    "{{ ({big}).replace('x', 'xx').replace('x', 'xx').replace('x', 'xx')|length }}",
    "{{ ({big}).count('x') }}{{ ({big}).index('y') }}",
    "{{ ({big}).translate({120: 'yyyyyyyyyy'})|length }}",
    "{{ ({big}).encode()|length }}{{ ({big}).title().casefold().swapcase()|length }}",
    "{{ ({big}).expandtabs(9999)|length }}",
    "{{ '{}{}{}{}'.format({big}, {big}, {big}, {big})|length }}",
    "{{ '%s%s' % ({big}, {big}) }}",
    "{% for x in ({big}) %}{% if x == 1 %}{% endif %}{% endfor %}",
    "{% for a, b in ({big})|dictsort %}{% endfor %}",
    "{% set x, y = ({big}) %}",
    "{{ dict(a={big})|length }}{{ dict(({big}))|length }}",
    "{{ ({big})|string|int }}",
    "{{ raise_exception({big}) }}",
    "{% filter upper %}{{ {big} }}{% endfilter %}",
    "{{ ({big}).__mul__(99) }}",
    "{{ namespace({big}) }}",
    "{{ cycler({big}).next() }}",
    "{{ strftime_now({big})|length }}",
    "{{ ({big}) ~ ({big}) ~ ({big}) }}",
    "{{ [1, 2]|join({big}) }}",
    "{{ not ({big}) }}{{ ({big}) is sameas 1 }}{{ ({big}) is in ({big}) }}",
)
_ROLES = ("user", "assistant", "system", "tool", "human", "", "USER", "developer", "<|im_start|>", None, 5, ["user"])


def make(rng: Random) -> Case:
    """One template over 8 good conversations and a few hostile ones."""
    source, note, slow = _source(rng)
    lines: list[bytes] = [_line([{"role": "user", "content": f"good row {i}"}]) for i in range(2 if slow else 8)]
    for _ in range(0 if slow else rng.randint(1, 4)):
        at = rng.randrange(len(lines) + 1)
        lines.insert(at, _line(_messages(rng)))
    # What is slow is not rendered a second time for comparison (`expected`).
    name = SLOW if slow else CHATS
    job = job_text(input={"messages_column": "messages", "chat_template": source})
    completions: dict[str, dict[int, str]] = {}
    if source == PLAIN:
        good = {n: json.loads(line)["messages"] for n, line in enumerate(lines)}
        completions[CHATS] = {
            n: f"<user>{messages[0]['content']};<assistant>"
            for n, messages in good.items()
            if isinstance(messages, list) and len(messages) == 1 and _is_good(messages[0])
        }
    return Case(
        kind="template",
        what=note,
        job=job,
        files={f"{INPUT_FOLDER}/{name}": b"\n".join(lines) + b"\n"},
        rows={name: len(lines)},
        completions=completions,
        refusable=source != PLAIN,
    )


def _is_good(message: Any) -> bool:
    return isinstance(message, dict) and str(message.get("content")).startswith("good row")


def _line(messages: Any) -> bytes:
    return json.dumps({"messages": messages}).encode()


def _source(rng: Random) -> tuple[str, str, bool]:
    """(template, note, whether a row may take seconds)."""
    match rng.randrange(10):
        case 0:
            return PLAIN, "the plain template", False
        case 1 | 2:
            base = rng.choice(_GOOD)
            return mutated(rng, base.encode()).decode("utf-8", "replace"), "a good template with bytes changed", False
        case 3 | 4:
            pieces = [rng.choice(_ESCAPES), rng.choice((PLAIN, ""))]
            rng.shuffle(pieces)
            return "".join(pieces) + "\n", f"an escape: {pieces}"[:200], False
        case 5:
            piece = rng.choice(_ENDLESS)
            return piece + "\n", f"endless: {piece[:100]}", True
        case 6 | 7:
            use = rng.choice(_USES).replace("{big}", rng.choice(_BIG))
            return (_DEEP if "deep" in use or "wide" in use else "") + use + "\n", f"big: {use[:160]}", True
        case 8:
            return rng.choice(_GOOD), "a good template", False
        case _:
            return _made(rng) + "\n", "a template made of pieces", False


_ATOMS = (
    "messages",
    "m",
    "x",
    "loop",
    "loop.index",
    "tools",
    "bos_token",
    "nosuch",
    "nosuch.a",
    "1",
    "0",
    "1.5",
    "''",
    "'a'",
    "none",
    "true",
    "[]",
    "{}",
    "messages[0]",
    "messages[-1].content",
    "m.role",
    "m['content']",
    "f",
    "range(3)",
    "namespace(a=1)",
    "strftime_now('%Y')",
    "documents",
    "self",
    "caller",
    "varargs",
    "loop.cycle",
)
_CALLS = ("strip()", "split()", "items()", "get(1)", "a", "content", "format(1)", "append(1)")


def _made(rng: Random, depth: int = 0) -> str:
    """A random template: not sensible, mostly valid."""
    out = []
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(6 if depth < 3 else 2):
            case 0:
                out.append(rng.choice(("text", "\n", "  ", "{# c #}", "}}", "{{ '{{' }}", "é🙂")))
            case 1:
                out.append("{{ " + _expression(rng) + " }}")
            case 2:
                out.append("{% if " + _expression(rng) + " %}" + _made(rng, depth + 1) + "{% else %}x{% endif %}")
            case 3:
                loop = rng.choice(("", " recursive", " if m"))
                out.append("{% for m in " + _expression(rng) + loop + " %}" + _made(rng, depth + 1) + "{% endfor %}")
            case 4:
                out.append("{% set x = " + _expression(rng) + " %}")
            case _:
                out.append("{% macro f(m) %}" + _made(rng, depth + 1) + "{% endmacro %}{{ f(1) }}")
    return "".join(out)


def _expression(rng: Random, depth: int = 0) -> str:
    if depth > 3 or rng.random() < 0.4:
        return rng.choice(_ATOMS)
    a, b = _expression(rng, depth + 1), _expression(rng, depth + 1)
    operator = rng.choice(("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is", "not in", "|"))
    match rng.randrange(5):
        case 0:
            name = rng.choice(
                ("length", "trim", "tojson", "list", "first", "join", "map('upper')", "int", "upper", "items")
            )
            return f"({a})|{name}"
        case 1:
            return f"({a})[{b}]"
        case 2:
            return f"({a}).{rng.choice(_CALLS)}"
        case 3:
            return f"[{a}, {b}]"
        case _:
            return f"(({a}) {operator} ({b}))"


def _messages(rng: Random) -> Any:
    """A conversation that is none, or an odd one."""
    match rng.randrange(8):
        case 0:
            return rng.choice((None, [], {}, "text", 5, [None], ["text"], [[]], [{}]))
        case 1:
            return [{"role": rng.choice(_ROLES), "content": "x"}]
        case 2:
            return [{"role": "user", "content": _content(rng)}]
        case 3:
            return [
                {"role": role, "content": "x"} for role in rng.choices(("user", "assistant", "system", "tool"), k=4)
            ]
        case 4:
            return [
                {"role": "assistant", "content": None, "tool_calls": rng.choice(([], [{}], "x", [{"function": {}}]))}
            ]
        case 5:
            return [{"content": "no role"}]
        case 6:
            return [{"role": "user"}]
        case _:
            return [
                {"role": "user", "content": rng.choice(NASTY_TEXTS)},
                {"role": "assistant", "content": "x", "more": [1]},
            ]


def _content(rng: Random) -> Any:
    return rng.choice(
        (
            None,
            5,
            "",
            True,
            {},
            [],
            [None],
            ["a", "b"],
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            [{"type": "image", "url": "x"}],
            [{"type": "text"}],
            [{"text": 5}],
            [[]],
            *NASTY_TEXTS,
        )
    )
