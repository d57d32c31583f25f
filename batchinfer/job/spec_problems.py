"""What is wrong with a job, in words: what, where (file and line), how to mend it.

Responsible for: pydantic's errors as messages with suggestions, what types alone can't say (sources of prompts, ranges
of sampling settings), refusing by name what is planned and not there yet. Not for the keys themselves (`job.spec`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from batchinfer.config import EngineConfig
from batchinfer.errors import ConfigError
from batchinfer.job.job_file import JobSource, KeyPath, dotted
from batchinfer.types.request import SAMPLING_FIELDS, SamplingParams

# What the field's users may write and what is planned but not there yet: refused by name, with what to do instead.
_PLANNED_KEYS: dict[str, str] = {
    "lora": "LoRA adapters",
    "adapters": "LoRA adapters",
    "lora_modules": "LoRA adapters",
    "enable_lora": "LoRA adapters",
    "embeddings": "embedding models",
    "pooling": "embedding models",
    "task": "tasks other than text generation",
    "images": "image inputs",
    "images_column": "image inputs",
    "image_column": "image inputs",
    "audio_column": "audio inputs",
    "guided_decoding": "structured output",
    "structured_outputs": "structured output",
    "guided_json": "structured output",
    "json_schema": "structured output",
    "response_format": "structured output",
    "grammar": "structured output",
    "speculative_config": "speculative decoding",
    "speculative_model": "speculative decoding",
    "num_speculative_tokens": "speculative decoding",
    "pipeline_parallel_size": "pipeline parallelism",
    "expert_parallel_size": "expert parallelism",
    "data_parallel_size": "data parallelism inside an engine (use cluster.workers)",
    "best_of": "best_of (use sampling.n)",
    "use_beam_search": "beam search",
    "schema": "a given input schema",
}
_PLANNED_VALUES: tuple[tuple[KeyPath, tuple[Any, ...], str], ...] = (
    (("input", "format"), ("openai",), "use parquet, jsonl or arrow with messages_column"),
    (("output", "format"), ("jsonl", "openai"), "use parquet"),
    (("cluster", "kind"), ("slurm", "scheduler"), "use local"),
    (("model", "quantization"), ("int4",), "use auto, int8, fp8 or none"),
    (("model", "kv_cache_dtype"), ("fp8",), "use auto, int8, bfloat16, float16 or float32"),
    (("failure", "on_too_long"), ("truncate",), "use error; such rows become error rows"),
)
_PATHS: frozenset[KeyPath] = frozenset(
    {("model", "path"), ("model", "tokenizer"), ("input", "path"), ("output", "path")}
)
_PROMPT_SOURCES = ("prompt", "prompt_column", "messages_column", "messages")


def meaning_problems(data: Mapping[str, Any], source: JobSource, wrong: Collection[KeyPath]) -> list[str]:
    """What types alone can't say. Looks at raw data, so that it reports beside type problems (`wrong`: their keys)."""

    def section(name: str) -> Mapping[str, Any]:
        value = data.get(name)
        return value if isinstance(value, Mapping) else {}

    problems = _text_problems(data, (), source)
    for path, values, instead in _PLANNED_VALUES:
        value = section(str(path[0])).get(str(path[1]))
        if value in values and not isinstance(value, bool):
            problems.append(f"{source.place(path)}: {dotted(path)}: {value} is planned and not there yet; {instead}")
    parallel = section("engine").get("tensor_parallel_size", 1)
    if isinstance(parallel, int) and parallel > 1:
        at = source.place(("engine", "tensor_parallel_size"))
        problems.append(
            f"{at}: engine.tensor_parallel_size: {parallel} is planned and not there yet; use 1 and cluster.workers"
        )
    problems += _block_problems(section("engine"), source, wrong)
    if section("sampling").get("prompt_logprobs") is not None:
        at = source.place(("sampling", "prompt_logprobs"))
        problems.append(
            f"{at}: sampling.prompt_logprobs: a column for them is planned and not there yet; remove the key "
            "(batchinfer.LLM has them)"
        )
    if isinstance(data.get("input"), Mapping):
        problems += _input_problems(section("input"), source)
    typed = {key: value for key, value in section("sampling").items() if all(p[:2] != ("sampling", key) for p in wrong)}
    return problems + _sampling_problems(typed, source)


def _block_problems(section: Mapping[str, Any], source: JobSource, wrong: Collection[KeyPath]) -> list[str]:
    """Sizes of blocks and splits that do not go together, by the rule of EngineConfig."""
    given = {name: section[name] for name in ("split_size", "block_size") if name in section}
    if any(("engine", name) in wrong for name in given):
        return []
    try:
        EngineConfig(model="", **given)
    except ConfigError as error:
        return [f"{source.place(('engine', next(iter(given))))}: {error}"]
    return []


def _sampling_problems(section: Mapping[str, Any], source: JobSource) -> list[str]:
    """Values out of range, by the rules of SamplingParams, one setting at a time."""
    problems = []
    good = {}
    for name, value in section.items():
        if name not in SAMPLING_FIELDS or value is None:
            continue
        try:
            SamplingParams(**{name: value, **_room_for(name, value)})
            good[name] = value
        except ConfigError as error:
            text = str(error).partition(", got")[0]
            problems.append(f"{source.place(('sampling', name))}: {text}, got {_short(value)}")
    if not problems and {"min_tokens", "max_tokens"} <= good.keys():
        try:
            SamplingParams(min_tokens=good["min_tokens"], max_tokens=good["max_tokens"])
        except ConfigError as error:
            problems.append(f"{source.place(('sampling', 'min_tokens'))}: {error}")
    return problems


def _room_for(name: str, value: Any) -> dict[str, Any]:
    return {"max_tokens": value} if name == "min_tokens" and isinstance(value, int) and value > 0 else {}


def _text_problems(value: Any, path: KeyPath, source: JobSource) -> list[str]:
    """Text that no file can hold, and paths that no file system can."""
    if isinstance(value, Mapping):
        return [problem for key, item in value.items() for problem in _text_problems(item, (*path, key), source)]
    if isinstance(value, list):
        return [problem for i, item in enumerate(value) for problem in _text_problems(item, (*path, i), source)]
    if not isinstance(value, str):
        return []
    why = ""
    if any("\ud800" <= char <= "\udfff" for char in value):
        why = "holds half a character (a lone surrogate); write the whole character"
    elif path in _PATHS and "\0" in value:
        why = "holds a zero byte, which no path can"
    elif path in _PATHS and "://" not in value and max(len(step.encode()) for step in value.split("/")) > 255:
        why = "is no path: a name in it is longer than 255 bytes"
    return [f"{source.place(path)}: {dotted(path)} {why}"] if why else []


def _input_problems(section: Mapping[str, Any], source: JobSource) -> list[str]:
    problems = []
    given = [name for name in _PROMPT_SOURCES if section.get(name) is not None]
    if len(given) != 1:
        at = source.place(("input", given[1])) if given else source.place(("input",))
        found = f"found {' and '.join(given)}" if given else "found none"
        problems.append(f"{at}: input needs exactly one of {', '.join(_PROMPT_SOURCES)}: {found}")
    if section.get("messages") == []:
        problems.append(f"{source.place(('input', 'messages'))}: input.messages is empty; give at least one message")
    columns = section.get("sampling_columns")
    if isinstance(columns, Mapping):
        for name in columns:
            if name not in SAMPLING_FIELDS:
                at = source.place(("input", "sampling_columns", name))
                close = _did_you_mean(str(name), SAMPLING_FIELDS)
                problems.append(
                    f"{at}: input.sampling_columns.{name}: no such sampling setting{close}; write {{setting: column}}"
                )
            elif name in ("logprobs", "prompt_logprobs"):
                at = source.place(("input", "sampling_columns", name))
                problems.append(f"{at}: input.sampling_columns.{name}: set sampling.{name} for the whole job instead")
    return problems


def explain(error: ValidationError, source: JobSource, keys: Mapping[str, list[str]]) -> dict[KeyPath, str]:
    """pydantic's list of errors, one message per key."""
    by_path: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        loc = item["loc"]
        path = tuple(part for index, part in enumerate(loc) if index < 2 or not _is_tag(part))
        by_path.setdefault(path, []).append(item)
    # Of a value that may be one thing or a list, an item of the list says more than "or one thing".
    deepest = {path for path in by_path if not any(other != path and other[: len(path)] == path for other in by_path)}
    return {path: _message(path, by_path[path], source, keys) for path in by_path if path in deepest}


def _is_tag(part: str | int) -> bool:
    """Whether a part of pydantic's location names the member of a union, not a key of the user's."""
    tags = ("int", "str", "literal['", "list[", "constrained-", "function-", "float", "bool", "[key]")
    return isinstance(part, str) and part.startswith(tags)


_WORDS = {
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "string_too_short": "text that is not empty",
}


def _message(path: KeyPath, items: list[Any], source: JobSource, keys: Mapping[str, list[str]]) -> str:
    at = source.place(path)
    key = dotted(path)
    kind = items[0]["type"]
    if kind == "invalid_key":
        return f"{at}: the key {path[-1]!r} is not text; no key of a job file is a number"
    if kind == "extra_forbidden":
        name = str(path[-1])
        if name in _PLANNED_KEYS:
            return f"{at}: {key}: {_PLANNED_KEYS[name]}: planned and not there yet; remove the key"
        return f"{at}: unknown key {key}{_suggest(path, keys)}"
    if kind == "missing":
        what = "section" if len(path) == 1 else "key"
        return f"{at}: the {what} {key} is missing; add it"
    value = items[0]["input"]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{at}: {key} must be a section of key: value lines, got {_short(value)}"
    wants = [_wanted(path, item) for item in items]
    return f"{at}: {key} must be {' or '.join(dict.fromkeys(wants))}, got {_short(value)}"


def _wanted(path: KeyPath, item: Mapping[str, Any]) -> str:
    context = item.get("ctx", {})
    match item["type"]:
        case "literal_error":
            absent = next((values for known, values, _ in _PLANNED_VALUES if known == path), ())
            there = [name for name in re.findall(r"'([^']+)'", context["expected"]) if name not in absent]
            return " or ".join(filter(None, (", ".join(there[:-1]), there[-1])))
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "invalid-json-value":
            return "plain data (text, numbers, true, false, null, lists, mappings)"
    text = re.sub(r"^(Input should be|Value error,)\s*(must be\s+)?", "", str(item["msg"]))
    return _WORDS.get(item["type"], text)


def _suggest(path: KeyPath, keys: Mapping[str, list[str]]) -> str:
    name = str(path[-1])
    here = keys.get("" if len(path) == 1 else str(path[0]), [])
    elsewhere = [
        f"{section}.{match}"
        for section, names in keys.items()
        if section
        for match in difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    ]
    exact = [key for key in elsewhere if key.endswith(f".{name}")]
    close = _did_you_mean(name, here)
    if exact or (elsewhere and not close):
        return f"; did you mean {(exact or elsewhere)[0]}?"
    if close:
        return close
    return f"; keys here: {', '.join(here)}" if here else ""


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def line_of(message: str) -> tuple[int, int]:
    match = re.match(r"[^\n]*?:(\d+): ", message)
    return (0, int(match[1])) if match else (1, 0)
