"""Rows to prompts and ids."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.errors import ConfigError, ModelError
from batchinfer.modelfiles import ModelFiles
from batchinfer.testing.small_tokenizers import CHATML, CORPUS, NASTY, byte_level, save
from batchinfer.text import (
    PreparedRow,
    PromptRenderer,
    PromptSpec,
    RenderedPrompt,
    Tokenizer,
    load_tokenizer,
    prepare_rows,
)
from batchinfer.text.fields import FieldTemplate
from batchinfer.types.rows import ErrorClass, RowError

PARTS_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)


def render(tokenizer: Tokenizer, row: dict[str, Any], jinja: str = CHATML, **spec: Any) -> RenderedPrompt | RowError:
    return PromptRenderer(PromptSpec(**spec), tokenizer, {"default": jinja}).render(row)


def text_of(tokenizer: Tokenizer, row: dict[str, Any], jinja: str = CHATML, **spec: Any) -> str:
    prompt = render(tokenizer, row, jinja, **spec)
    assert isinstance(prompt, RenderedPrompt), prompt
    return prompt.text


def error_of(tokenizer: Tokenizer, row: dict[str, Any], jinja: str = CHATML, **spec: Any) -> str:
    error = render(tokenizer, row, jinja, **spec)
    assert isinstance(error, RowError), error
    assert error.error_class is ErrorClass.INVALID_PROMPT
    return error.message


def outcomes(tokenizer: Tokenizer, values: list[Any], **spec: Any) -> list[PreparedRow | RowError]:
    renderer = PromptRenderer(PromptSpec(**(spec or {"prompt_column": "prompt"})), tokenizer, {"default": CHATML})
    return prepare_rows(renderer, tokenizer, [{"prompt": value, "m": value} for value in values])


# --- null, NaN, empty, blank, not text


GOOD = ["hi", "   ", "\n", "nan", "null", "None"]
BAD: list[tuple[Any, str]] = [
    (None, "null"),
    (math.nan, "NaN"),
    (np.float64("nan"), "NaN"),
    (123, "a number"),
    (np.int8(3), "a number"),
    (True, "a boolean"),
    (b"bytes", "bytes"),
    ([], "a list"),
    (np.array(["a"]), "a list"),
    ({"a": 1}, "a struct"),
]


@pytest.mark.parametrize("name", ["chatml", "llama_like"])
def test_values_of_a_prompt_column(request: pytest.FixtureRequest, name: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    got = outcomes(tokenizer, [*GOOD, "", *(value for value, _ in BAD)])
    for value, outcome in zip(GOOD, got, strict=False):
        assert outcome == PreparedRow(tokenizer.encode(value))
        assert isinstance(outcome, PreparedRow)
        assert tokenizer.decode(outcome.token_ids) == value  # blanks are sent as they are
    empty = got[len(GOOD)]
    if name == "llama_like":
        assert empty == PreparedRow([tokenizer.bos_token_id or 0])
    else:
        assert isinstance(empty, RowError) and empty.error_class is ErrorClass.INVALID_PROMPT
        assert "empty" in empty.message
    for (_, kind), outcome in zip(BAD, got[len(GOOD) + 1 :], strict=True):
        assert isinstance(outcome, RowError) and outcome.error_class is ErrorClass.INVALID_PROMPT
        assert "'prompt'" in outcome.message and kind in outcome.message


def test_a_batch_of_empty_prompts_only(chatml: Tokenizer) -> None:
    assert [type(outcome) for outcome in outcomes(chatml, ["", ""])] == [RowError, RowError]
    assert outcomes(chatml, []) == []


def test_values_of_a_messages_column(chatml: Tokenizer) -> None:
    good = [{"role": "user", "content": ""}]
    bad = [None, [], [{"role": "user", "content": None}], [{"role": "user"}], "text", 3, [None], [{"content": "x"}]]
    bad += [[{"role": None, "content": "x"}], [{"role": "user", "content": 5}], math.nan]
    got = outcomes(chatml, [good, *bad], messages_column="m")
    assert isinstance(got[0], PreparedRow)
    for outcome in got[1:]:
        assert isinstance(outcome, RowError) and outcome.error_class is ErrorClass.INVALID_PROMPT
        assert "'m'" in outcome.message


def test_null_content_beside_tool_calls(chatml: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]
    row = {"m": [{"role": "assistant", "content": None, "tool_calls": calls, "name": None}]}
    text = text_of(chatml, row, template, messages_column="m")
    assert text == 'assistant:None[{"function": {"name": "f", "arguments": {"a": 1}}}]'


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_has_the_names_that_templates_ask_for(chatml: Tokenizer, name: str) -> None:
    row = {"m": [{"role": "assistant", "content": "a", name: "why"}]}
    assert (
        text_of(chatml, row, "{{ messages[0].reasoning_content + messages[0].thinking }}", messages_column="m")
        == "whywhy"
    )


def test_struct_fields_that_are_null_are_not_defined(chatml: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.name is defined }}{% endfor %}"
    rows = pa.array([[{"role": "user", "content": "a", "name": None}], [{"role": "user", "content": "b", "name": "n"}]])
    texts = [text_of(chatml, {"m": value}, template, messages_column="m") for value in rows.to_pylist()]
    assert texts == ["aFalse", "bTrue"]


# --- values from pandas and numpy


def test_numpy_values_become_plain(chatml: Tokenizer) -> None:
    row = {
        "m": np.array([{"role": "user", "content": np.str_("a")}, {"role": "user", "content": "b"}], dtype=object),
        "t": np.array([{"name": "f", "strict": np.bool_(True), "n": np.int8(3), "x": None}], dtype=object),
    }
    template = (
        "{% if messages and tools %}{{ messages[0].content + messages[1].content }}{{ tools | tojson }}{% endif %}"
    )
    text = text_of(chatml, row, template, messages_column="m", tools_column="t")
    assert text == 'ab[{"name": "f", "strict": true, "n": 3}]'


def test_arrow_scalars_and_maps(chatml: Tokenizer) -> None:
    assert text_of(chatml, {"p": pa.scalar("text")}, prompt_column="p") == "text"
    assert text_of(chatml, {"p": pa.scalar(5, pa.int8())}, template="{p}!") == "5!"


@pytest.mark.parametrize("tools", [None, [], "[]", "null"])
def test_no_tools(chatml: Tokenizer, tools: Any) -> None:
    row = {"m": [{"role": "user", "content": "a"}], "t": tools}
    assert text_of(chatml, row, "{{ tools is none }}", messages_column="m", tools_column="t") == "True"


@pytest.mark.parametrize("tools", [3, "{", "5", ["x"], {"name": "f"}])
def test_wrong_tools(chatml: Tokenizer, tools: Any) -> None:
    row = {"m": [{"role": "user", "content": "a"}], "t": tools}
    assert "'t' (tools)" in error_of(chatml, row, messages_column="m", tools_column="t")


# --- prompt templates


def test_template_fields(chatml: Tokenizer) -> None:
    row = {
        "q": "why?",
        "meta": {"hint": "because", "deep": {"n": 3}},
        "n": 1.5,
        "flag": True,
        "l": [1, "é"],
        "a.b": "dot",
    }
    cases = {
        "Question: {q}\nAnswer:": "Question: why?\nAnswer:",
        "{{{q}}} {{x}}": "{why?} {x}",
        "{meta.hint}/{meta.deep.n}": "because/3",
        "{n} {flag} {l} {meta.deep}": '1.5 True [1, "é"] {"n": 3}',
        "{a.b} { q }": "dot why?",
        "no field": "no field",
    }
    for template, expected in cases.items():
        assert text_of(chatml, row, template=template) == expected


@pytest.mark.parametrize("template", ["{q!r}", "{q:.2f}", "{}", "{ }", "{q", "q}", "a } b", "{a{b}}"])
def test_wrong_templates_are_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"input\.prompt"):
        PromptSpec(template=template)


def test_columns_that_prompts_need() -> None:
    spec = PromptSpec(template="{q} {meta.hint} {a.b} {{no}}")
    assert spec.columns() == ("a", "meta", "q")
    assert spec.columns(["q", "meta", "a.b"]) == ("a.b", "meta", "q")
    assert PromptSpec(prompt_column="a.b").columns() == ("a.b",)
    assert PromptSpec(messages_column="m", tools_column="t").columns() == ("m", "t")
    messages = [{"role": "system", "content": "You are {who}"}, {"role": "user", "content": "{q.text}"}]
    assert PromptSpec(messages=messages).columns() == ("q", "who")


@pytest.mark.parametrize("value", [None, math.nan, b"x"])
def test_a_field_without_a_value_is_an_error_row_that_names_it(chatml: Tokenizer, value: Any) -> None:
    assert "'q'" in error_of(chatml, {"q": value}, template="Say {q}")
    assert "'s.q'" in error_of(chatml, {"s": {"q": value}}, template="Say {s.q}")
    assert "'q'" in error_of(chatml, {"q": value}, messages=[{"role": "user", "content": "Say {q}"}])


def test_a_struct_that_is_null_or_lacks_a_field(chatml: Tokenizer) -> None:
    assert "'s' is null" in error_of(chatml, {"s": None}, template="{s.q}!")
    assert "no field 'q'" in error_of(chatml, {"s": {}}, template="{s.q}!")
    assert "no column 'q'" in error_of(chatml, {}, template="{q}!")
    for spec in ({"prompt_column": "q"}, {"messages_column": "q"}, {"template": "{q}"}):
        assert "no column 'q'" in error_of(chatml, {}, **spec)


def test_messages_with_templates(chatml: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be {tone}."}, {"role": "user", "content": "{q} {{}}"}]
    text = text_of(chatml, {"tone": "kind", "q": "Who?"}, messages=messages)
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWho? {}<|im_end|>")


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"template": "a", "prompt_column": "b"},
        {"prompt_column": "b", "messages_column": "m"},
        {"prompt_column": "b", "chat_template": "default"},
        {"template": "a", "tools_column": "t"},
        {"messages": [{"role": "user"}]},
        {"messages": ["user"]},
        {"messages": [{"role": "user", "content": "{x"}]},
        {"messages_column": "m", "now": "yesterday"},
    ],
)
def test_specs_that_contradict_themselves(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"input\.|exactly one|ISO 8601"):
        PromptSpec(**spec)


def test_a_spec_travels() -> None:
    spec = PromptSpec(messages=[{"role": "user", "content": "{q}"}], chat_template_kwargs={"enable_thinking": False})
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_many_fields_parse_once() -> None:
    template = FieldTemplate("{a}" * 3 + "x", "here")
    assert template.sole_column is None
    assert template.render({"a": "1"}) == "111x"


# --- content parts


def test_parts_for_a_template_that_knows_text_only(chatml: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]
    row = {"m": [{"role": "user", "content": parts}]}
    assert "user\na\nb<|im_end|>" in text_of(chatml, row, messages_column="m")
    assert text_of(chatml, row, PARTS_TEMPLATE, messages_column="m") == "<a><b>"
    row["m"][0]["content"] = [{"type": "image", "image": "x.png"}]
    assert "part 0 is of type 'image'" in error_of(chatml, row, messages_column="m")


# --- BOS


def dump(tokenizer: Tokenizer, row: dict[str, Any], jinja: str, **spec: Any) -> list[int]:
    renderer = PromptRenderer(PromptSpec(**spec), tokenizer, {"default": jinja})
    outcome = prepare_rows(renderer, tokenizer, [row])[0]
    assert isinstance(outcome, PreparedRow), outcome
    return outcome.token_ids


INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


@pytest.fixture
def oracle(tmp_path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_level(special=("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>", eos="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    "template", [INST, INST.removeprefix("{{ bos_token }}"), INST.replace("{{ bos_token }}", "<s>")]
)
def test_ids_equal_apply_chat_template(llama_like: Tokenizer, oracle: Any, template: str) -> None:
    for text in [*NASTY, *CORPUS]:
        if any(marker in text for marker in llama_like.control.texts):
            continue
        messages = [{"role": "user", "content": text}]
        ids = dump(llama_like, {"m": messages}, template, messages_column="m")
        expected = oracle.apply_chat_template(messages, chat_template=template, tokenize=True, return_dict=False)
        assert ids == expected
        assert ids.count(llama_like.bos_token_id or 0) == ("bos" in template or "<s>" in template)


def test_bos_of_other_prompts(llama_like: Tokenizer) -> None:
    bos, eos = llama_like.bos_token_id, llama_like.eos_token_id
    rendered = "<s>[INST] fox [/INST]"
    finished = dump(llama_like, {"p": rendered}, INST, prompt_column="p")
    assert finished == dump(llama_like, {"m": [{"role": "user", "content": "fox"}]}, INST, messages_column="m")
    assert finished.count(bos or 0) == 1
    for spec in ({"prompt_column": "p"}, {"template": "{p}"}, {"template": "{p}!"}):
        ids = dump(llama_like, {"p": "fox"}, INST, **spec)
        assert ids[0] == bos and ids.count(bos or 0) == 1 and eos not in ids
    # "<s>" as a value is text, so the real one goes before it
    ids = dump(llama_like, {"p": "<s>"}, INST, template="{p} fox")
    assert ids[0] == bos and ids.count(bos or 0) == 1 and llama_like.decode(ids) == "<s> fox"


def test_demo_ids_equal_apply_chat_template(demo: Tokenizer, demo_files: ModelFiles, demo_oracle: Any) -> None:
    renderer = PromptRenderer(PromptSpec(messages_column="m"), demo, demo_files.chat_templates)
    rows = [{"m": [{"role": "user", "content": text}]} for text in [*NASTY, *CORPUS] if "<|" not in text]
    rows += [{"m": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]} for text in CORPUS]
    for row, outcome in zip(rows, prepare_rows(renderer, demo, rows), strict=True):
        expected = demo_oracle.apply_chat_template(row["m"], add_generation_prompt=True, return_dict=False)
        assert outcome == PreparedRow(expected)


# --- over-long prompts, surrogates


def test_over_long_prompts_are_error_rows(chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = PromptRenderer(PromptSpec(prompt_column="p"), chatml)
    word = chatml.encode(" the")
    assert len(word) == 1
    rows: list[dict[str, Any]] = [{"p": " the" * n} for n in (510, 511, 512, 50_000)] + [{"p": "fox"}]
    rows.insert(2, {"p": "the quick " * 3_000_000})
    got = prepare_rows(renderer, chatml, rows, max_model_len=512)
    assert [type(outcome) for outcome in got] == [PreparedRow] * 2 + [RowError] * 3 + [PreparedRow]
    for outcome, tokens in zip(got[2:5], ["about", "512", "50,000"], strict=True):
        assert isinstance(outcome, RowError) and outcome.error_class is ErrorClass.PROMPT_TOO_LONG
        assert tokens in outcome.message and "max_model_len is 512" in outcome.message
    # a long text that does fit is encoded in one piece
    roomy = prepare_rows(renderer, chatml, [{"p": " the" * 100_000}], max_model_len=100_001)
    assert roomy == [PreparedRow(word * 100_000)]
    monkeypatch.setattr("batchinfer.text.prepare._CHARS_PER_TOKEN", 1)
    assert prepare_rows(renderer, chatml, [{"p": " the" * 100_000}], max_model_len=100_001) == roomy
    chat = PromptRenderer(PromptSpec(messages=[{"role": "user", "content": "{p}"}]), chatml, {"default": CHATML})
    assert isinstance(prepare_rows(chat, chatml, rows[:1], max_model_len=512)[0], RowError)


def test_surrogates_and_noncharacters_in_rows(chatml: Tokenizer) -> None:
    values = ["\ud83d\ude00", "a\udc80b", "\x00", "\ufffe", "\ufdd0 <|im_end|>", "\ufdef<|im_end|>"]
    # U+FDEF is what control tokens are renamed with: beside one, it is replaced
    shown = ["😀", "a\ufffdb", "\x00", "\ufffe", "\ufdd0 <|im_end|>", "\ufffd<|im_end|>"]
    for spec in ({"template": "{prompt}!"}, {"messages": [{"role": "user", "content": "{prompt}!"}]}):
        for outcome, text in zip(outcomes(chatml, values, **spec), shown, strict=True):
            assert isinstance(outcome, PreparedRow)
            assert text + "!" in chatml.decode(outcome.token_ids, skip_special_tokens=False)


def test_one_renderer_for_several_threads(chatml: Tokenizer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    renderer = PromptRenderer(PromptSpec(messages=[{"role": "user", "content": "{q}"}]), chatml, {"default": CHATML})
    rows = [{"q": f"{text} {n}"} for n, text in enumerate([*NASTY, *CORPUS] * 5)]
    expected = prepare_rows(renderer, chatml, rows)
    with ThreadPoolExecutor(8) as pool:
        assert all(got == expected for got in pool.map(lambda _: prepare_rows(renderer, chatml, rows), range(8)))


def test_loading_without_a_template(llama_like: Tokenizer) -> None:
    with pytest.raises(ModelError, match=r"no chat template.*input\.chat_template"):
        PromptRenderer(PromptSpec(messages_column="m"), llama_like, {})
    PromptRenderer(PromptSpec(prompt_column="m"), llama_like, {})


def test_save_is_what_load_reads(tmp_path: Path) -> None:
    files = save(byte_level(), tmp_path, eos_token={"content": "<|im_end|>"})
    assert load_tokenizer(files).named == {"eos_token": "<|im_end|>"}
