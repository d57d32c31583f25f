"""Chat templates: what they say, where they are, and their bounds."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from batchinfer.errors import ConfigError, ModelError
from batchinfer.testing.small_tokenizers import CHATML
from batchinfer.text import ChatTemplate, PromptRenderer, PromptSpec, RenderedPrompt, Tokenizer, template_limits
from batchinfer.types.rows import ErrorClass, RowError

MISTRAL_LIKE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA_LIKE = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"<{n}>"} for n, role in enumerate(roles)]


def render(source: str, messages: Any = (), **options: Any) -> str:
    text = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, **options).render(messages)
    assert isinstance(text, str), text
    return text


def refusal(
    source: str, messages: Any = (), error_class: ErrorClass = ErrorClass.TEMPLATE_ERROR, **options: Any
) -> str:
    error = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, **options).render(messages)
    assert isinstance(error, RowError), f"{error!r:.100}"
    assert error.error_class is error_class
    return error.message


# --- what a template refuses


@pytest.mark.parametrize(
    ("source", "roles", "message"),
    [
        (MISTRAL_LIKE, ["user", "user"], "Conversation roles must alternate"),
        (MISTRAL_LIKE, ["system", "user"], "Conversation roles must alternate"),
        (MISTRAL_LIKE, ["assistant"], "Conversation roles must alternate"),
        (MISTRAL_LIKE, ["user", "human"], "Only user and assistant roles"),
        (MISTRAL_LIKE, ["user", "assistant", "user", "tool"], "Only user and assistant roles"),
        (GEMMA_LIKE, ["system", "user"], "System role not supported"),
    ],
)
def test_a_row_that_a_template_refuses_says_why(source: str, roles: list[str], message: str) -> None:
    assert message in refusal(source, turns(*roles))


def test_only_the_bad_rows_are_errors(chatml: Tokenizer) -> None:
    renderer = PromptRenderer(PromptSpec(messages_column="m"), chatml, {"default": MISTRAL_LIKE})
    rows = [{"m": turns(*roles)} for roles in (["user"], ["user", "user"], ["user", "assistant", "user"])]
    assert [type(outcome) for outcome in renderer.render_batch(rows)] == [RenderedPrompt, RowError, RenderedPrompt]


def test_errors_of_python_are_template_errors() -> None:
    for source in (
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
        "{{ 'a' + 1 }}",
        "{{ f() }}",
    ):
        assert refusal(source, turns("user"))


# --- Jinja as Hugging Face has it


def test_features_of_the_environment() -> None:
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"  # trim_blocks, lstrip_blocks
    assert render("{{ {'a': '<é>', 'b': [1, none]} | tojson }}") == '{"a": "<é>", "b": [1, null]}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}") == "13"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"
    assert (
        render("{% set ns = namespace(n=0) %}{% for x in [1, 2] %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}")
        == "3"
    )
    assert (
        render("{{ bos_token }}{{ add_generation_prompt }}{{ thinking }}", variables={"thinking": False})
        == "<s>TrueFalse"
    )
    assert render("{% for x in 'abc' %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}").endswith("3True3")
    assert render("{% for k, v in {'a': 1}.items() %}{{ k ~ '=' ~ v }}{% endfor %}") == "a=1"
    assert (
        render("{% for x in [3, 1] | sort %}{{ x }}{% endfor %}{% for x in [1] | map('string') %}{{ x }}{% endfor %}")
        == "131"
    )
    assert render("{% for x in range(5000) %}{% if loop.last %}{{ loop.index }}{% endif %}{% endfor %}") == "5000"
    assert render("{{ '%s-%d' % ('a', 1) }}{{ '{}+{}'.format(1, 2) }}{{ ', '.join(['a', 'b']) }}") == "a-11+2a, b"
    assert render("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}{{ m(2) }}") == "[1][2]"


@pytest.mark.parametrize("source", [CHATML, MISTRAL_LIKE, GEMMA_LIKE])
def test_text_equals_apply_chat_template(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "user", "content": " a\n<b> "},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "é"},
    ]
    theirs, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert [render(source, messages)] == list(theirs)


def test_the_clock_is_the_jobs() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}"
    assert render(source) == "26 Jul 2024"
    assert render(source, now="2025-01-31T12:00:00") == "31 Jan 2025"
    assert "strftime_now" in refusal("{{ strftime_now('%Y') }}")


def test_chance_is_refused() -> None:
    assert "random" in refusal("{{ [1, 2] | random }}")
    assert "lipsum" in refusal("{{ lipsum() }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    refusal(source, turns("user"))


# --- which template


def chosen(tokenizer: Tokenizer, templates: dict[str, str], **spec: Any) -> str:
    row = {"m": turns("user"), "t": spec.pop("tools", None)}
    prompt = PromptRenderer(PromptSpec(messages_column="m", **spec), tokenizer, templates).render(row)
    assert isinstance(prompt, RenderedPrompt), prompt
    return prompt.text


def test_named_templates(chatml: Tokenizer) -> None:
    templates = {"default": "D", "tool_use": "T", "rag": "R"}
    assert chosen(chatml, templates) == "D"
    assert chosen(chatml, templates, chat_template="rag") == "R"
    assert chosen(chatml, templates, chat_template="own: {{ messages[0].content }}") == "own: <0>"
    assert chosen(chatml, templates, tools_column="t", tools=[{"name": "f"}]) == "T"
    assert chosen(chatml, templates, tools_column="t") == "D"
    assert chosen(chatml, templates, chat_template="default", tools_column="t", tools=[{"name": "f"}]) == "D"
    with pytest.raises(ConfigError, match=r"'rug'.*default, rag, tool_use"):
        chosen(chatml, templates, chat_template="rug")
    with pytest.raises(ModelError, match="no default chat template"):
        chosen(chatml, {"rag": "R"})
    renderer = PromptRenderer(PromptSpec(messages_column="m", chat_template="rag"), chatml, templates)
    assert renderer.chat_template is not None
    assert (renderer.chat_template.name, renderer.chat_template.source) == ("rag", "R")


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 | nofilter }}", "{% if %}", "{{ 'a }}"])
def test_a_template_that_does_not_compile_is_refused_at_the_start(source: str) -> None:
    with pytest.raises(ModelError, match="chat template 'default'"):
        ChatTemplate(source)


def test_loops_over_content_take_parts() -> None:
    assert ChatTemplate("{% for m in messages %}{% for p in m['content'] %}{% endfor %}{% endfor %}").takes_parts
    assert ChatTemplate("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}").takes_parts
    assert not ChatTemplate(CHATML).takes_parts


# --- bounds

LONG = "{% for a in range(99999) %}"
ENDLESS = [
    f"{LONG * 3}{{{{ a }}}}{'{% endfor %}' * 3}",
    f"{LONG * 2}{'{% endfor %}' * 2}",
    "{% macro m(n) %}{{ m(n + 1) if n < 40 }}{{ m(n + 1) if n < 40 }}{% endmacro %}{{ m(0) }}",
    "{% for x in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    f"{LONG}{{% for x in messages | map(attribute='content') %}}{{% endfor %}}{LONG}{{% endfor %}}{{% endfor %}}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_templates_run_out_of_steps(source: str) -> None:
    start = time.monotonic()
    assert "steps" in refusal(source, turns("user"), ErrorClass.TEMPLATE_TIMEOUT, max_steps=20_000)
    assert time.monotonic() - start < 20


def test_slow_templates_run_out_of_time() -> None:
    source = f"{LONG}{{% set x = messages[0].content | upper | lower | list | length %}}{{% endfor %}}"
    messages = [{"role": "user", "content": "x" * 100_000}]
    assert "0.2 s" in refusal(source, messages, ErrorClass.TEMPLATE_TIMEOUT, max_cpu_s=0.2)


def test_time_limits_hold_in_any_thread() -> None:
    template = ChatTemplate(ENDLESS[0], max_steps=200_000)
    found: list[str | RowError] = []
    threads = [threading.Thread(target=lambda: found.append(template.render(turns("user")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [getattr(one, "error_class", one) for one in found] == [ErrorClass.TEMPLATE_TIMEOUT] * 3


def test_each_row_has_its_own_budget() -> None:
    template = ChatTemplate("{% for x in range(1000) %}{% endfor %}ok", max_steps=1500)
    assert [template.render([]) for _ in range(10)] == ["ok"] * 10


DOUBLING = (
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x }}"
)
BOMBS = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**10 }}",
    "{{ 10**(10**10) }}",
    "{{ range(10**9) | list }}",
    "{{ range(10**9) | length }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a' | indent(10**10) }}",
    "{{ 'a' | indent(width=10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('b' * 10000).join(['a'] * 100000) }}",
    "{{ ['a'] * 100000 | join('b' * 10000) }}",
    "{{ {'a': 1} | tojson(indent=10**9) }}",
    "{{ 'a'.encode() * 10**10 }}",
    "{{ 'a'.encode().ljust(10**10) }}",
    "{{ ('a' * 100000).encode().replace('a'.encode(), ('b' * 100000).encode()) }}",
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ ('a' * 1000000).translate({97: 'b' * 100000}) }}",
    "{{ '\\t'.expandtabs(tabsize=10**10) }}",
    "{{ ('b' * 100000).join('a' * 100000) }}",
    "{{ ('b' * 100000).join((['a'] * 100000) | map('upper')) }}",
    "{{ ('a' * 100000) | join('b' * 100000) }}",
    "{{ (['a'] * 100000) | map('upper') | join('b' * 100000) }}",
    *(
        DOUBLING.replace("EXPRESSION", expression)
        for expression in ("ns.x + ns.x", "ns.x ~ ns.x", "[ns.x, ns.x] | join", "''.join([ns.x, ns.x])", "[ns.x, ns.x]")
    ),
    DOUBLING.replace("EXPRESSION", "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson }}"),
    DOUBLING.replace("EXPRESSION", "'%s%s' % (ns.x, ns.x)"),
    DOUBLING.replace("EXPRESSION", "'{}{}'.format(ns.x, ns.x)"),
    DOUBLING.replace("EXPRESSION", "'%s%s' | format(ns.x, ns.x)"),
    DOUBLING.replace("EXPRESSION", "ns.x | replace('a', ns.x)"),
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set ns = namespace(n=10**90) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_memory_is_bounded(source: str) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    assert refusal(source, turns("user"))
    assert time.monotonic() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


HELD = "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = VALUE %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(99999) | map('center', 99999) | list | length }}",
        HELD.replace("VALUE", "[ns.x, [0] * 1000000]"),
        HELD.replace("VALUE", "ns.x + ['a'.ljust(99999)]"),
        "{% set a = 'a' * 1000000 %}" + HELD.replace("VALUE", "[ns.x, a ~ i]"),
    ],
)
def test_what_may_be_held_together_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "_MAX_MADE", 4)
    assert "bytes in all" in refusal(source)


NESTED = (
    "{% set a = namespace(s=[1], t=(1,)) %}{% set b = namespace(s=[1]) %}{% for i in range(45) %}"
    "{% set a.s = [a.s, a.s] %}{% set b.s = [b.s, b.s] %}{% endfor %}"
)
AT_ONCE = [
    "{{ ('a@' * 1000000) | sort | length }}",
    "{{ ('<!---->' * 500000) | striptags | length }}",
    "{{ ('www.' * 1000000) | urlize | length }}",
    "{{ ([1] * 3000000) | map('string') | unique | list | length }}",
    NESTED + "{{ a.s == b.s }}",
    NESTED + "{{ a.s in [b.s] }}",
    NESTED + "{{ a.s is eq b.s }}",
    NESTED + "{{ [a.s].index(b.s) }}",
    NESTED + "{{ [a.s, b.s] | sort | length }}",
    NESTED + "{{ a }}",
    NESTED + "{{ 'x' ~ a }}",
    NESTED + "{{ '%s' % a }}",
    NESTED + "{{ a | trim }}",
    NESTED + "{{ {'a': a.s}.values() }}",
    NESTED + "{{ [{'a': a.s}.items()] }}",
    NESTED + "{{ {'a': a.s}.items() == {'a': b.s}.items() }}",
    NESTED + "{{ {'a': a.s, 'b': b.s}.values() | sort }}",
    NESTED + "{{ [a, b] | sort(attribute='s') }}",
    NESTED + "{{ [a, b] | map(attribute='s') | max }}",
    NESTED + "{{ [a.s, b.s] | reverse | max }}",
    NESTED + "{% for i in range(2) %}{{ loop.changed(a.s if i else b.s) }}{% endfor %}",
    NESTED.replace("a.s = [a.s, a.s]", "a.t = (a.t, a.t)") + "{{ {a.t: 1} }}",
]


@pytest.mark.parametrize("source", AT_ONCE)
def test_what_one_filter_or_comparison_does_is_bounded(source: str) -> None:
    start = time.thread_time()
    error = ChatTemplate(source).render(turns("user"))
    assert isinstance(error, RowError)
    assert time.thread_time() - start < 15


@pytest.mark.parametrize(
    "expression",
    ["'a' ~ messages.index", "messages | map('upper')", "[messages.index]", "'%s' % messages.index", "messages.index"],
)
def test_addresses_of_objects_are_refused(expression: str) -> None:
    assert "never the same twice" in refusal(f"{{{{ {expression} }}}}", turns("user"))


def test_sets_are_refused() -> None:
    assert "its order" in refusal("{% for k in {'a': 1, 'b': 2}.keys() - ['a'] %}{{ k }}{% endfor %}")


def test_comparing_and_filtering_ordinary_values_is_as_ever() -> None:
    assert render("{{ 'x at 0x12' }}{{ (1, 2) == (1, 2) }}{{ [1, [2]] == [1, [2]] }}") == "x at 0x12TrueTrue"
    assert render("{% for a, b in [('x', 1)] %}{{ a }}{{ b }}{% endfor %}{% set c, d = 1, 2 %}{{ c + d }}") == "x13"
    assert render("{{ {'a': ' at 0x1'}.values() }}{{ 3 - 1 }}") == "dict_values([' at 0x1'])2"
    assert render("{{ {'b': 3, 'a': 4}.values() | max }}{{ '-'.join({'a': 1, 'b': 2}.keys()) }}") == "4a-b"
    assert render("{{ {'b': [1, 2]}.values() | map('join', '-') | join }}{{ '-'.join('abc') }}") == "1-2a-b-c"
    assert render("{{ [3, 1] | sort | join(',') }}{{ {'a': (1, 2)}['a'][1] }}{{ 'b' in ('a', 'b') }}") == "1,32True"


def test_large_rows_pass() -> None:
    content = "line\n" * 4_000_000
    text = ChatTemplate("{{ messages[0].content + '!' }}").render(
        [{"role": "user", "content": content}], input_chars=len(content)
    )
    assert text == content + "!"
