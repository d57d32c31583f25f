"""JobSpec: what the user asked for, checked and frozen. Facts resolved from it are `job.manifest.ResolvedJob`.

Responsible for: the keys of a job file, their types and limits, and messages that say what, where and how to mend.
Every problem of a job is reported in one ConfigError. None (or "auto") means that the user left it to be resolved.
Relative paths are relative to the job file's folder. Not for reading YAML (`job.job_file`), nor for the words of the
messages (`job.spec_problems`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from batchinfer.errors import ConfigError
from batchinfer.job.job_file import JobSource, KeyPath, read_job_file, with_overrides
from batchinfer.job.spec_problems import explain, line_of, meaning_problems
from batchinfer.types.request import SAMPLING_FIELDS

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

MAX_PROBLEMS_TOLD = 30
MAX_PROBLEM_CHARS = 800
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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of what is not quantized; auto: float32 on a CPU, the checkpoint's own on a GPU"
    )
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = Field(
        "auto",
        description="applied while loading, to any stored type. int8: weights by output, activations by token and "
        "group, with v finer and the head in bfloat16; on a GPU activations by token, and only the head is left out. "
        "fp8: on a GPU, likewise. auto: as the checkpoint is stored (GPTQ, AWQ, FP8, W8A8), else int8 on a CPU with "
        "AVX-512 VNNI unless a dtype is given, else none",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = Field(
        "auto", description="auto: int8 with quantization int8 on native kernels, else the dtype"
    )


class InputSpec(_Section):
    """The dataset, and how a row becomes a prompt: exactly one of prompt, prompt_column, messages_column, messages."""

    path: Annotated[str, Field(min_length=1, description="file, glob, folder, fsspec URL, dataset folder or hub id")]
    format: Literal["auto", "parquet", "jsonl", "arrow", "openai"] = "auto"
    limit: Annotated[int, Field(ge=0)] | None = Field(None, description="only the first N rows")
    window_rows: PositiveInt | None = Field(
        None,
        description="about so many rows (at most a quarter more) are planned and run together, and stand in a part; "
        "default: 16,384 at first, then up to 262,144. Fewer: less disk and memory, fewer prefixes in common",
    )
    storage_options: dict[str, JsonValue] = Field(default_factory=dict, description="handed to fsspec")
    prompt: str | None = Field(None, description="template over the columns: 'Question: {question}'")
    prompt_column: str | None = None
    messages_column: str | None = None
    messages: list[dict[str, JsonValue]] | None = Field(None, description="messages whose texts are templates")
    id_column: str | None = None
    chat_template: str | None = Field(None, description="a template's name in the model, or its text")
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
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

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="cuda: each worker's engine has one of the machine's NVIDIA GPUs, within CUDA_VISIBLE_DEVICES. "
        "auto: the CPU",
    )
    deterministic: bool = True
    cuda_graphs: Literal["auto"] | bool = Field(
        "auto", description="launch steps without prompts as CUDA graphs; auto: on GPUs, with Triton's kernels"
    )
    async_scheduling: Literal["auto"] | bool = Field(
        "auto",
        description="plan and launch a step while the GPU is at work on the one before; auto: on GPUs, with Triton's"
        " kernels",
    )
    tensor_parallel_size: PositiveInt = 1
    max_model_len: Annotated[int, Field(ge=2, description="tokens of prompt and completion together")] | None = None
    max_num_seqs: AutoInt = "auto"
    max_num_batched_tokens: AutoInt = "auto"
    kv_cache_memory: ByteSize = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Field(gt=0, le=1, description="of a GPU's memory: weights, KV cache and all, where kv_cache_memory is auto"),
    ] = 0.9
    enable_prefix_caching: bool = True
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    split_size: Annotated[int, Field(ge=16, description="a multiple of block_size")] = 256
    kernels: Literal["auto", "native", "cpu", "triton"] = Field(
        "auto",
        description="native: C, compiled on first use, for CPUs with AVX-512 VNNI; triton: for NVIDIA GPUs; cpu: torch "
        "on either. auto: native where it can be had, triton on GPUs",
    )
    num_threads: PositiveInt | None = Field(
        None, description="CPU threads of each engine; default: a fair share, at most 8 beside a GPU"
    )


class ClusterSpec(_Section):
    """Where the workers run."""

    kind: Literal["local", "slurm", "scheduler"] = "local"
    workers: PositiveInt = Field(
        1, description="each a process with an engine; default: 1, with engine.device cuda one for each visible GPU"
    )
    worker_timeout_s: PositiveInt = Field(300, description="give up when there was no worker for so long")
    hang_timeout_s: PositiveInt = Field(
        600, description="a worker or engine that shows no life for so long (three times that to load) is ended"
    )
    takeover_timeout_s: Annotated[int, Field(ge=2)] = Field(
        30, description="a driver that shows no life for so long may be succeeded by another one"
    )


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
        data = {key: _paths_as_text(value) for key, value in data.items()}
        source = JobSource(data=data, base=Path(base) if base is not None else Path.cwd())
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
    for name, field in JobSpec.model_fields.items():
        if name in data and data[name] is None and not field.is_required():
            del data[name]  # a section's name with nothing under it
    spec: JobSpec | None = None
    wrong: dict[KeyPath, str] = {}
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        wrong = explain(error, source, known_keys())
    problems += wrong.values()
    problems += meaning_problems(data, source, wrong)
    if spec is not None and not problems:
        problems += _prompt_problems(spec.input, source)
    if problems or spec is None:
        ordered = sorted(dict.fromkeys(problems), key=line_of)
        head = f"{source.label}: " if len(ordered) > 1 else ""
        head += f"{len(ordered)} problems in the job\n  " if len(ordered) > 1 else ""
        told = [_bounded(problem) for problem in ordered[:MAX_PROBLEMS_TOLD]]
        if len(ordered) > len(told):
            told.append(f"and {len(ordered) - len(told)} more")
        raise ConfigError(head + "\n  ".join(told))
    return _absolute(spec, source.base)


def _bounded(problem: str) -> str:
    """Without the middle of what is too long to read: a key or value of the user's may be of any length."""
    if len(problem) <= MAX_PROBLEM_CHARS:
        return problem
    half = MAX_PROBLEM_CHARS // 2
    return f"{problem[:half]} … {problem[-half:]}"


def _paths_as_text(section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    return {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in section.items()}


def _prompt_problems(section: InputSpec, source: JobSource) -> list[str]:
    """Templates that can't be read, options that do not go together: by the text room's own rules."""
    from batchinfer.text import PromptSpec  # not at the top: it loads tokenizers, which a broken job file never needs

    try:
        PromptSpec(
            template=section.prompt,
            prompt_column=section.prompt_column,
            messages_column=section.messages_column,
            messages=section.messages,
            chat_template=section.chat_template,
            chat_template_kwargs=section.chat_template_kwargs,
            tools_column=section.tools_column,
            control_tokens=section.control_tokens,
        )
    except ConfigError as error:
        key = re.match(r"input\.(\w+)", str(error))
        return [f"{source.place(('input', key[1]) if key else ('input',))}: {error}"]
    return []


def known_keys() -> dict[str, list[str]]:
    """The keys of each section; "" is the top level."""
    sections = {"": list(JobSpec.model_fields)}
    for name, field in JobSpec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections[name] = list(field.annotation.model_fields)
    return sections


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?(::[\w.\[\]%:-]+)?")  # owner/name:config::split


def _absolute(spec: JobSpec, base: Path) -> JobSpec:
    """Relative paths become absolute from the job's folder; URLs stay; a hub id stays where no such path exists."""

    def local(text: str) -> str:
        if "://" in text:
            return text
        # Links stay: their names end as the file's format asks, what they point to may not (a hub's cache).
        return os.path.abspath(base / os.path.expanduser(text))  # noqa: PTH100, PTH111

    def local_or_hub(text: str, hub_id: re.Pattern[str] = _HUB_ID) -> str:
        there = Path(local(text)).exists() or Path(local(text.partition("::")[0])).exists()
        if "://" in text or there:
            return local(text)
        looks_local = text.endswith((".gguf", ".parquet", ".jsonl", ".json", ".gz", ".zst", ".arrow"))
        return text if hub_id.fullmatch(text) and not looks_local else local(text)

    model = spec.model.model_copy(
        update={
            "path": local_or_hub(spec.model.path),
            "tokenizer": local_or_hub(spec.model.tokenizer) if spec.model.tokenizer else None,
        }
    )
    return spec.model_copy(
        update={
            "model": model,
            "input": spec.input.model_copy(update={"path": local_or_hub(spec.input.path, _DATASET_ID)}),
            "output": spec.output.model_copy(update={"path": local(spec.output.path)}),
        }
    )
