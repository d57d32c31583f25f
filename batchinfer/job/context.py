"""A job's opened things in one process: tokenizer, prompt renderer, input dataset, output layout.

Built once per process and job, since planning and commit tasks of one job run one after the other. Not for
deciding anything: all of it follows from the ResolvedJob.
"""

from __future__ import annotations

import difflib
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from batchinfer.data.dataset import InputDataset
from batchinfer.data.layout import OutputLayout, output_schema
from batchinfer.errors import InputError
from batchinfer.job.manifest import ResolvedJob
from batchinfer.modelfiles import ModelFiles, open_model
from batchinfer.text import PromptRenderer, PromptSpec, SamplingColumns, Tokenizer, load_tokenizer

_KEPT = 2
_lock = threading.RLock()
_open: OrderedDict[tuple[Any, ...], JobContext] = OrderedDict()
_lately: deque[tuple[ResolvedJob, JobContext]] = deque(maxlen=_KEPT)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """See the module. `hash_columns` are those whose values the content hash covers: what prompts are made of."""

    dataset: InputDataset
    output: OutputLayout
    tokenizer: Tokenizer
    renderer: PromptRenderer
    sampling: SamplingColumns
    hash_columns: tuple[str, ...]


def open_context(job: ResolvedJob) -> JobContext:
    """The job's context, built at the first call in this process."""
    with _lock:
        for known, kept in _lately:  # by identity: the key below looks at every input file
            if known is job:
                return kept
    with _lock:
        context = _open.pop(_key(job), None)
        if context is None:
            spec = job.spec.model
            files = open_model(spec.path, revision=spec.revision, tokenizer=spec.tokenizer)
            dataset = InputDataset.from_description(job.input, storage_options=job.spec.input.storage_options)
            context = make_context(job, files, dataset)
        keep_context(job, context)
        _lately.append((job, context))
        return context


def keep_context(job: ResolvedJob, context: JobContext) -> None:
    """For `open_context`, also of an equal job read from a file."""
    with _lock:
        _open[_key(job)] = context
        while len(_open) > _KEPT:
            _open.popitem(last=False)


def _key(job: ResolvedJob) -> tuple[Any, ...]:
    read = hash(tuple((file["uri"], file["fingerprint"], file["num_rows"]) for file in job.input["files"]))
    return (str(job.layout.output), job.fingerprint, job.spec.model.path, str(job.spec.input), read)


def make_context(job: ResolvedJob, files: ModelFiles, dataset: InputDataset) -> JobContext:
    """Raises ConfigError, ModelError or InputError where template, columns or output names can't work."""
    tokenizer = load_tokenizer(files.tokenizer)
    renderer = PromptRenderer(prompt_spec(job), tokenizer, files.chat_templates)
    sampling = SamplingColumns(job.semantic["input.sampling_columns"], job.sampling)
    columns = tuple(dict.fromkeys([*renderer.columns(dataset.schema.names), *sampling.columns()]))
    _check_columns(job, dataset, columns)
    output = output_schema(
        dataset.schema,
        job.semantic["output.columns"],
        job.semantic["output.prefix"],
        lists=job.sampling.n > 1 or "n" in job.semantic["input.sampling_columns"],
        token_ids=job.semantic["output.token_ids"],
        logprobs=job.sampling.logprobs is not None,
    )
    return JobContext(
        dataset=dataset,
        output=output,
        tokenizer=tokenizer,
        renderer=renderer,
        sampling=sampling,
        hash_columns=columns,
    )


def _check_columns(job: ResolvedJob, dataset: InputDataset, columns: tuple[str, ...]) -> None:
    """Every column that the job names is there; the message says which key names it."""
    frozen = job.semantic
    keys: dict[str, str] = dict.fromkeys(columns, "input")
    for key in ("prompt", "messages"):
        if frozen[f"input.{key}"] is not None:
            keys = dict.fromkeys(columns, f"input.{key}")
    for key in ("prompt_column", "messages_column", "tools_column"):
        if frozen[f"input.{key}"] is not None:
            keys[frozen[f"input.{key}"]] = f"input.{key}"
    for name, column in frozen["input.sampling_columns"].items():
        keys[column] = f"input.sampling_columns.{name}"
    if job.spec.input.id_column is not None:
        keys.setdefault(job.spec.input.id_column, "input.id_column")
    for column, key in keys.items():
        try:
            dataset.check_columns([column])
        except InputError as error:
            close = difflib.get_close_matches(column, dataset.schema.names, n=1)
            raise InputError(f"{key}: {error}" + (f"; did you mean {close[0]!r}?" if close else "")) from None


def prompt_spec(job: ResolvedJob) -> PromptSpec:
    """How rows become prompts, from the frozen settings."""
    frozen = job.semantic
    return PromptSpec(
        template=frozen["input.prompt"],
        prompt_column=frozen["input.prompt_column"],
        messages_column=frozen["input.messages_column"],
        messages=frozen["input.messages"],
        chat_template=frozen["input.chat_template"],
        chat_template_kwargs=frozen["input.chat_template_kwargs"],
        tools_column=frozen["input.tools_column"],
        control_tokens=frozen["input.control_tokens"],
        now=frozen["input.now"],
    )
