"""JobSpec: what the user asked for, checked and frozen. Facts resolved from it are `job.manifest.ResolvedJob`.

Responsible for: the keys of a job file, their types and limits, and messages that say what, where and how to mend.
Every problem of a job is reported in one ConfigError. None (or "auto") means that the user left it to be resolved.
Relative paths are relative to the job file's folder. Not for reading YAML (`job.job_file`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from batchinfer.errors import ConfigError
from batchinfer.job.job_file import JobSource, KeyPath, read_job_file, with_overrides
from batchinfer.types.request import SAMPLING_FIELDS, SamplingParams

__all__ = [
    "ClusterSpec",
    "EngineSpec",
    "FailureSpec",
    "InputSpec",
    "JobSpec",
    "ModelSpec",
    "OutputSpec",
    "SamplingSpec",
]

_BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _parse_bytes(value: Any) -> Any:
    if isinstance(value, str) and value != "auto":
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        if not match or match[2] not in _BYTE_UNITS:
            raise ValueError("must be a number of bytes, a size such as 4GiB, or auto")
        return int(float(match[1]) * _BYTE_UNITS[match[2]])
    return value


PositiveInt = Annotated[int, Field(ge=1)]
AutoInt = Literal["auto"] | PositiveInt
ByteSize = Annotated[Literal["auto"] | PositiveInt, BeforeValidator(_parse_bytes, json_schema_input_type=int | str)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelSpec(_Section):
    """The model and how its weights are held."""

    path: Annotated[str, Field(min_length=1, description="Hugging Face folder, .gguf file, hub id or fake://...")]
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    tokenizer: str | None = Field(None, description="default: beside or inside the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = Field("auto", description="auto: as stored")
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"


class InputSpec(_Section):
    """The dataset, and how a row becomes a prompt: exactly one of prompt, prompt_column, messages_column, messages."""

    path: Annotated[str, Field(min_length=1, description="file, glob, folder, fsspec URL, dataset folder or hub id")]
    format: Literal["auto", "parquet", "jsonl", "arrow", "openai"] = "auto"
    limit: Annotated[int, Field(ge=0)] | None = Field(None, description="only the first N rows")
    storage_options: dict[str, Any] = Field(default_factory=dict, description="handed to fsspec")
    prompt: str | None = Field(None, description="template over the columns: 'Question: {question}'")
    prompt_column: str | None = None
    messages_column: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, description="messages whose texts are templates")
    id_column: str | None = None
    chat_template: str | None = Field(None, description="a template's name in the model, or its text")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools_column: str | None = None
    sampling_columns: dict[str, str] = Field(default_factory=dict, description="per-row settings: {max_tokens: col}")
    control_tokens: Literal["auto", "text", "parse"] = Field(
        "auto",
        description="control tokens that a row's own text spells: text, parsed as control tokens, or (auto) text "
        "unless the column holds the whole prompt",
    )


class OutputSpec(_Section):
    """Where the completions go and which columns stand beside them."""

    path: Annotated[str, Field(min_length=1)]
    format: Literal["parquet", "jsonl", "openai"] = "parquet"
    columns: Literal["all"] | list[str] = Field("all", description="input columns to carry along")
    prefix: str = Field("", description="put before the output columns' names")
    token_ids: bool = Field(False, description="add the column token_ids")


class SamplingSpec(_Section):
    """How tokens are chosen and when to stop. What is left out comes from the model's generation_config."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = Field(None, description="drawn at the first submit when left out, and kept")
    max_tokens: int | None = Field(None, description="left out: up to the end of the context")
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = Field(None, description="adds the column logprobs")
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None

    def given(self) -> dict[str, Any]:
        """The settings that the user gave."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return {name: value for name, value in values.items() if value is not None}


class EngineSpec(_Section):
    """Options of each worker's engine; names follow vLLM."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = True
    tensor_parallel_size: PositiveInt = 1
    max_model_len: PositiveInt | None = None
    max_num_seqs: AutoInt = "auto"
    max_num_batched_tokens: AutoInt = "auto"
    kv_cache_memory: ByteSize = "auto"
    enable_prefix_caching: bool = True
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    split_size: Annotated[int, Field(ge=16)] = 256
    num_threads: PositiveInt | None = Field(None, description="CPU threads of each engine; default: a fair share")


class ClusterSpec(_Section):
    """Where the workers run."""

    kind: Literal["local", "slurm", "scheduler"] = "local"
    workers: PositiveInt = 1


class FailureSpec(_Section):
    """When to give up."""

    max_failed_rows: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        "auto", description="auto: stop when 100 rows, and half of those finished, have failed"
    )
    on_too_long: Literal["error", "truncate"] = "error"


class JobSpec(_Section):
    """A job as the user wrote it: see the sections. Make one with `from_yaml` or `from_dict`."""

    name: str = Field("job", description="default: the job file's name")
    model: ModelSpec
    input: InputSpec
    output: OutputSpec
    sampling: SamplingSpec = SamplingSpec.model_validate({})
    engine: EngineSpec = EngineSpec.model_validate({})
    cluster: ClusterSpec = ClusterSpec.model_validate({})
    failure: FailureSpec = FailureSpec.model_validate({})

    @classmethod
    def from_yaml(cls, path: str | Path, *, overrides: Iterable[str] = ()) -> JobSpec:
        """Reads a job file. `overrides` are "a.b=value" texts. Raises ConfigError naming every problem."""
        return spec_from_source(read_job_file(path, overrides=overrides))

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, base: str | Path | None = None, overrides: Iterable[str] = ()
    ) -> JobSpec:
        """Same from a dict; relative paths are relative to `base` (default: the current folder)."""
        source = JobSource(data=dict(data), base=Path(base) if base is not None else Path.cwd())
        return spec_from_source(with_overrides(source, overrides))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of a job file, for editors."""
        schema = cls.model_json_schema()
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        schema["title"] = "batchinfer job"
        prompt_sources = ("prompt", "prompt_column", "messages_column", "messages")
        schema["$defs"]["InputSpec"]["oneOf"] = [{"required": [name]} for name in prompt_sources]
        return schema


def spec_from_source(source: JobSource) -> JobSpec:
    """Checks a job and resolves its relative paths. Raises one ConfigError with all problems."""
    problems = list(source.problems)
    data = dict(source.data)
    data.setdefault("name", source.default_name)
    spec: JobSpec | None = None
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        problems += _explain(error, source)
    problems += _meaning_problems(data, source)
    if problems or spec is None:
        ordered = sorted(dict.fromkeys(problems), key=_line_of)
        head = f"{source.label}: " if len(ordered) > 1 else ""
        head += f"{len(ordered)} problems in the job\n  " if len(ordered) > 1 else ""
        raise ConfigError(head + "\n  ".join(ordered))
    return _absolute(spec, source.base)


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


def _meaning_problems(data: Mapping[str, Any], source: JobSource) -> list[str]:
    """What types alone can't say. Looks at raw data, so that it reports beside type problems."""

    def section(name: str) -> Mapping[str, Any]:
        value = data.get(name)
        return value if isinstance(value, Mapping) else {}

    problems = []
    for path, values, instead in _PLANNED_VALUES:
        value = section(str(path[0])).get(str(path[1]))
        if value in values and not isinstance(value, bool):
            problems.append(f"{source.place(path)}: {_dotted(path)}: {value} is planned and not there yet; {instead}")
    parallel = section("engine").get("tensor_parallel_size", 1)
    if isinstance(parallel, int) and parallel > 1:
        at = source.place(("engine", "tensor_parallel_size"))
        problems.append(
            f"{at}: engine.tensor_parallel_size: {parallel} is planned and not there yet; use 1 and cluster.workers"
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


def _explain(error: ValidationError, source: JobSource) -> list[str]:
    """pydantic's list of errors, one message per key."""
    by_path: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        path = tuple(part for part in item["loc"] if _is_key(part, item["loc"]))
        by_path.setdefault(path, []).append(item)
    return [_message(path, items, source) for path, items in by_path.items()]


def _is_key(part: str | int, loc: tuple[str | int, ...]) -> bool:
    """Whether a part of pydantic's location is the user's key, not the tag of a union's member."""
    tags = ("int", "str", "literal['", "list[", "constrained-", "function-", "float", "bool", "[key]")
    index = loc.index(part)
    return not (isinstance(part, str) and index >= 2 and part.startswith(tags))


def _message(path: KeyPath, items: list[Any], source: JobSource) -> str:
    at = source.place(path)
    key = _dotted(path)
    kind = items[0]["type"]
    if kind == "extra_forbidden":
        name = str(path[-1])
        if name in _PLANNED_KEYS:
            return f"{at}: {key}: {_PLANNED_KEYS[name]}: planned and not there yet; remove the key"
        return f"{at}: unknown key {key}{_suggest(path)}"
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


def _suggest(path: KeyPath) -> str:
    name = str(path[-1])
    sections = {key: field.annotation for key, field in JobSpec.model_fields.items()}
    here = JobSpec if len(path) == 1 else sections.get(str(path[0]))
    names: list[str] = []
    if isinstance(here, type) and issubclass(here, BaseModel):
        names = list(here.model_fields)
    elsewhere = [
        f"{section}.{match}"
        for section, model in sections.items()
        if isinstance(model, type) and issubclass(model, BaseModel)
        for match in difflib.get_close_matches(name, list(model.model_fields), n=1, cutoff=0.85)
    ]
    exact = [key for key in elsewhere if key.endswith(f".{name}")]
    close = _did_you_mean(name, names)
    if exact or (elsewhere and not close):
        return f"; did you mean {(exact or elsewhere)[0]}?"
    if close:
        return close
    return f"; keys here: {', '.join(names)}" if names else ""


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _line_of(message: str) -> tuple[int, int]:
    match = re.match(r"[^\n]*?:(\d+): ", message)
    return (0, int(match[1])) if match else (1, 0)


def _dotted(path: KeyPath) -> str:
    return "".join(
        f"[{part}]" if isinstance(part, int) else (f".{part}" if index else part) for index, part in enumerate(path)
    )


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def _absolute(spec: JobSpec, base: Path) -> JobSpec:
    """Relative paths become absolute from the job's folder; URLs stay; a hub id stays where no such path exists."""

    def local(text: str) -> str:
        if "://" in text:
            return text
        return str((base / Path(text).expanduser()).resolve())

    def local_or_hub(text: str) -> str:
        if "://" in text or (base / Path(text).expanduser()).exists():
            return local(text)
        looks_local = text.endswith((".gguf", ".parquet", ".jsonl", ".json", ".gz", ".zst", ".arrow"))
        return text if _HUB_ID.fullmatch(text) and not looks_local else local(text)

    model = spec.model.model_copy(
        update={
            "path": local_or_hub(spec.model.path),
            "tokenizer": local_or_hub(spec.model.tokenizer) if spec.model.tokenizer else None,
        }
    )
    return spec.model_copy(
        update={
            "model": model,
            "input": spec.input.model_copy(update={"path": local_or_hub(spec.input.path)}),
            "output": spec.output.model_copy(update={"path": local(spec.output.path)}),
        }
    )
