"""What is wrong with a job, in words: what, where (file and line), how to mend it.

Responsible for: pydantic's errors as messages with suggestions, what types alone can't say (sources of prompts, ranges
of sampling settings), refusing by name what is planned and not there yet. Not for the keys themselves (`job.spec`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

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
    (("model", "quantization"), ("int8", "int4", "fp8"), "use auto (as stored) or none"),
    (("model", "kv_cache_dtype"), ("int8", "fp8"), "use auto"),
    (("engine", "device"), ("cuda",), "use auto or cpu"),
    (("failure", "on_too_long"), ("truncate",), "use error; such rows become error rows"),
)
_PROMPT_SOURCES = ("prompt", "prompt_column", "messages_column", "messages")


def meaning_problems(data: Mapping[str, Any], source: JobSource) -> list[str]:
    """What types alone can't say. Looks at raw data, so that it reports beside type problems."""

    def section(name: str) -> Mapping[str, Any]:
        value = data.get(name)
        return value if isinstance(value, Mapping) else {}

    problems = []
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
    if section("sampling").get("prompt_logprobs") is not None:
        at = source.place(("sampling", "prompt_logprobs"))
        problems.append(
            f"{at}: sampling.prompt_logprobs: a column for them is planned and not there yet; remove the key "
            "(batchinfer.LLM has them)"
        )
    if isinstance(data.get("input"), Mapping):
        problems += _input_problems(section("input"), source)
    return problems + _sampling_problems(section("sampling"), source)


def _sampling_problems(section: Mapping[str, Any], source: JobSource) -> list[str]:
    """Values out of range, by the rules of SamplingParams, one setting at a time."""
    problems = []
    good = {}
    for name, value in section.items():
        if name not in SAMPLING_FIELDS or value is None:
            continue
        try:
            SamplingParams(**{name: value, **({"max_tokens": value} if name == "min_tokens" and value else {})})
            good[name] = value
        except ConfigError as error:
            if isinstance(value, (int, float, list)) or (name == "stop" and value == ""):  # else the types say it
                problems.append(
                    f"{source.place(('sampling', name))}: {str(error).partition(', got')[0]}, got {_short(value)}"
                )
        except (TypeError, AttributeError):
            pass  # a wrong type: said by the type check
    if not problems and {"min_tokens", "max_tokens"} <= good.keys():
        try:
            SamplingParams(min_tokens=good["min_tokens"], max_tokens=good["max_tokens"])
        except ConfigError as error:
            problems.append(f"{source.place(('sampling', 'min_tokens'))}: {error}")
    return problems


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


def explain(error: ValidationError, source: JobSource, keys: Mapping[str, list[str]]) -> list[str]:
    """pydantic's list of errors, one message per key."""
    by_path: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        path = tuple(part for part in item["loc"] if _is_key(part, item["loc"]))
        by_path.setdefault(path, []).append(item)
    return [_message(path, items, source, keys) for path, items in by_path.items()]


def _is_key(part: str | int, loc: tuple[str | int, ...]) -> bool:
    """Whether a part of pydantic's location is the user's key, not the tag of a union's member."""
    tags = ("int", "str", "literal['", "list[", "constrained-", "function-", "float", "bool", "[key]")
    index = loc.index(part)
    return not (isinstance(part, str) and index >= 2 and part.startswith(tags))


def _message(path: KeyPath, items: list[Any], source: JobSource, keys: Mapping[str, list[str]]) -> str:
    at = source.place(path)
    key = dotted(path)
    kind = items[0]["type"]
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
    wants = []
    for item in items:
        text = re.sub(r"^(Input should be|Value error,)\s*", "", str(item["msg"]))
        text = re.sub(r"^must be\s+", "", text)
        wants.append(re.sub(r"^(a )?valid (\w+)$", r"a valid \2", text))
    return f"{at}: {key} must be {' or '.join(dict.fromkeys(wants))}, got {_short(value)}"


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
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def line_of(message: str) -> tuple[int, int]:
    match = re.match(r"[^\n]*?:(\d+): ", message)
    return (0, int(match[1])) if match else (1, 0)
