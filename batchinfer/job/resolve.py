"""From what the user wrote to a ResolvedJob: reads the model's configs and the input's footers, writes nothing.

Every value gets a source: user, generation_config, model, drawn, default, or "auto: " and why. Where the
output folder holds a frozen job, that one is compared with and kept (`job.manifest`).
"""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import batchinfer
from batchinfer.arithmetic import (
    Arithmetic,
    Machine,
    check_block_size,
    no_gpu,
    resolve_arithmetic,
    this_machine,
    why_no_gpu,
)
from batchinfer.cost import ModelShape, check_pool
from batchinfer.data.dataset import InputDataset, Kind, open_dataset
from batchinfer.data.fs import check_output_path, is_foreign
from batchinfer.errors import ConfigError, InputError, ResumeRefused
from batchinfer.job.context import JobContext, keep_context, make_context
from batchinfer.job.layout import JobLayout
from batchinfer.job.manifest import (
    AUTO,
    FORMAT,
    ResolvedJob,
    differences,
    in_frozen_order,
    load_manifest,
    refusal,
    with_drawn,
)
from batchinfer.job.spec import InputSpec, JobSpec
from batchinfer.modelfiles import ModelFiles, open_model
from batchinfer.modelfiles.supported import check_supported
from batchinfer.types.request import SAMPLING_FIELDS, SamplingParams

# Settings that decide the output's columns: a part can't be half this, half that.
_SHAPES = ("sampling.n", "sampling.logprobs")
_SAMPLE_ROWS = 64
_NUMBERS = frozenset(field.name for field in fields(SamplingParams) if isinstance(field.default, (int, float))) - {
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
} | {"seed", "max_tokens"}


def resolve_job(
    spec: JobSpec,
    *,
    extend: bool = False,
    ignore_existing: bool = False,
    retry: bool = False,
    only_look: bool = False,
    machine: Machine | None = None,
    cache_dir: str | None = None,
) -> ResolvedJob:
    """Resolves a job; checks model, input columns, template and output columns without loading or writing.

    Where the output folder has a manifest: takes what is frozen there (the drawn seed, the order of files) and
    raises ResumeRefused with every difference in semantic settings, output columns or input. Files added beside
    unchanged ones are accepted with `extend`. `ignore_existing` (--fresh) looks at no manifest. With `retry`, limits
    and engine settings may differ from the frozen ones (they become the job's `overrides`).

    only_look   nothing will be run on this machine: that it has no GPU for the job is told, not refused
    machine     like those that will run the engines, which decides what is "auto" and fixes the bytes; None: this one
    cache_dir   where indexes of JSON Lines files are kept. None: with the frozen job; for a new one in a temporary
                folder, from where `freeze_job` takes them

    Raises ConfigError, InputError or ModelError where the job can't run.
    """
    layout = JobLayout(check_output_path(spec.output.path))
    frozen = None if ignore_existing else load_manifest(layout)
    if extend and frozen is None:
        raise ConfigError(f"--extend: {layout.output} holds no job to extend; submit without it")
    _refuse_unwritable_output(layout)
    _refuse_output_in_input(spec.input.path, layout)
    files = open_model(spec.model.path, revision=spec.model.revision, tokenizer=spec.model.tokenizer)
    check_supported(files)
    dataset = open_dataset(
        spec.input.path,
        format=spec.input.format,
        limit=spec.input.limit,
        storage_options=spec.input.storage_options,
        cache_dir=cache_dir or (str(layout.input_cache) if frozen is not None else _temporary_cache()),
        used_as=_used_as(spec.input),
    )
    machine = machine or this_machine(look_at_gpus=spec.engine.device == "cuda")
    arithmetic = _arithmetic(spec, files, machine, frozen, only_look)
    semantic, sources = _resolve_values(spec, files, arithmetic)
    job = ResolvedJob(
        spec=spec,
        semantic=json.loads(json.dumps(semantic)),
        sources=sources,
        input=dataset.describe(),
        generations=(0,) * len(dataset.files),
        text_bytes=(0,) * len(dataset.files),
        facts=_facts(spec, files, arithmetic, machine),
    )
    _check_engine(job, files)
    context = make_context(job, files, dataset)
    check_columns(job, context)
    template = context.renderer.chat_template
    semantic["model.chat_template_hash"] = None if template is None else _hash(template.source)
    sources["model.chat_template_hash"] = sources["input.chat_template"]
    job = replace(
        job,
        semantic=json.loads(json.dumps(semantic)),
        text_bytes=_text_bytes(dataset, context.hash_columns),
        facts={**job.facts, "chat_template": None if template is None else template.source},
    )
    if frozen is None:
        if not ignore_existing:
            _refuse_foreign_parts(layout)
        keep_context(job, context)
        return job
    job = with_drawn(frozen, job)
    if retry:
        job = _with_overrides(frozen, job)
    found = differences(frozen, job, extend=extend)
    if found:
        raise refusal(layout, found, _lack(frozen, job, machine))
    return in_frozen_order(frozen, job)


def _used_as(spec: InputSpec) -> dict[str, Kind]:
    """What the columns must hold that the job names, where that is one kind of value."""
    used: dict[str, Kind] = {column: "number" for name, column in spec.sampling_columns.items() if name in _NUMBERS}
    lists_and_maps: dict[str, Kind] = {"stop_token_ids": "numbers", "logit_bias": "object"}
    used |= {column: lists_and_maps[name] for name, column in spec.sampling_columns.items() if name in lists_and_maps}
    used |= {column: "objects" for column in (spec.messages_column, spec.tools_column) if column is not None}
    return used | ({} if spec.prompt_column is None else {spec.prompt_column: "text"})


def _refuse_output_in_input(path: str, layout: JobLayout) -> None:
    """Parts must not turn up as new input files when the job goes on."""
    base = path.partition("::")[0].removeprefix("file://")
    if "://" in base:
        return
    part = layout.output.resolve() / "part-00000-00000.parquet"
    source = Path(base)
    if source.is_dir():
        found = source.resolve() in part.parents
    elif source.exists():
        found = False
    else:
        steps = source.parts
        fixed = next((i for i, step in enumerate(steps) if any(char in step for char in "*?[")), len(steps))
        found = _matches((*Path(*steps[:fixed]).resolve().parts, *steps[fixed:]), part.parts)
    if found:
        raise ConfigError(
            f"output.path {layout.output} lies where input.path {path} looks for files: the output would be taken for "
            "input when the job goes on. Give a folder outside of it"
        )


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether a glob's steps match a path's: ** is any number of them."""
    if not pattern or not parts:
        return not parts and all(step == "**" for step in pattern)
    if pattern[0] == "**":
        return _matches(pattern[1:], parts) or _matches(pattern, parts[1:])
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(pattern[1:], parts[1:])


def _refuse_unwritable_output(layout: JobLayout) -> None:
    """The output's folder can be made and written to, or the reason why not; nothing is written here."""
    folder = layout.output
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    what = "it is" if folder == layout.output else f"{folder} is"
    if not folder.is_dir():
        kind = "a link to nowhere" if folder.is_symlink() and not folder.exists() else "a file"
        raise ConfigError(f"output.path {layout.output}: {what} {kind}, not a folder; give another output.path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output.path {layout.output}: {what} a folder that can't be written to; give another output.path"
        )


def _temporary_cache() -> str:
    """A folder of this process alone: nothing is written to the output before the job is known to be good."""
    folder = tempfile.mkdtemp(prefix="batchinfer-input-")
    _temporary_caches.append(folder)
    return folder


def remove_temporary_caches() -> None:
    """Leaves nothing in the temporary folder. For whoever ends the process without running exit handlers."""
    while _temporary_caches:
        shutil.rmtree(_temporary_caches.pop(), ignore_errors=True)


_temporary_caches: list[str] = []
atexit.register(remove_temporary_caches)


def _with_overrides(frozen: ResolvedJob, job: ResolvedJob) -> ResolvedJob:
    """Changed limits and engine settings become overrides; everything else is compared as ever."""
    changed = {
        key: value
        for key, value in job.semantic.items()
        if key.startswith(("sampling.", "engine."))
        and key not in _SHAPES
        and not job.sources[key].startswith(AUTO)
        and frozen.semantic.get(key) != value
    }
    return replace(job, semantic={**job.semantic, **{key: frozen.semantic[key] for key in changed}}, overrides=changed)


def _refuse_foreign_parts(layout: JobLayout) -> None:
    """A new job must not mix its parts with others that lie in its output folder."""
    if layout.output.is_dir():
        names = (path.name for path in layout.output.iterdir())
        parts = sorted(name for name in names if name.endswith(".parquet") and not is_foreign(name))
        if parts:
            raise ResumeRefused(
                f"{layout.output} holds {len(parts)} Parquet files ({parts[0]}, ...) and no manifest of a job: readers "
                "would mix them with this job's. Give another output.path, or move them aside with --fresh"
            )


def _resolve_values(spec: JobSpec, files: ModelFiles, arithmetic: Arithmetic) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(key: str, value: Any, source: str) -> None:
        values[key], sources[key] = value, source

    put("model.hash", files.model_hash(), "model")
    put("model.tokenizer_hash", files.tokenizer_hash(), "model")
    put("model.eos_token_ids", sorted(files.eos_token_ids), "model")
    for name, source in arithmetic.sources.items():
        section = "engine" if name in ("kernels", "instruction_level") else "model"
        put(f"{section}.{name}", getattr(arithmetic, name), source)
    for name, number in arithmetic.format_numbers.items():  # first numbers are not among the settings: older jobs
        put(f"{FORMAT}{name}", number, "default")  # have none, and go on where nothing they use has changed
    for name in ("prompt", "prompt_column", "messages_column", "messages", "tools_column", "chat_template_kwargs"):
        put(f"input.{name}", getattr(spec.input, name), _written(spec.input, name))
    put("input.control_tokens", spec.input.control_tokens, _written(spec.input, "control_tokens"))
    if spec.input.window_rows is not None:  # not among the settings of jobs that leave it out: older ones have none
        put("input.window_rows", spec.input.window_rows, "user")
    put("input.sampling_columns", dict(spec.input.sampling_columns), _written(spec.input, "sampling_columns"))
    put("input.chat_template", spec.input.chat_template, "user" if spec.input.chat_template else "model")
    put("input.now", datetime.now().astimezone().isoformat(timespec="seconds"), "drawn")
    sampling = resolve_sampling(spec, files)
    for name, (value, source) in sampling.items():
        put(f"sampling.{name}", value, source)
    if spec.sampling.seed is None:
        put("seed", secrets.randbelow(2**63), "drawn")
    else:
        put("seed", spec.sampling.seed, "user")
    put(*_max_model_len(spec, files))
    least, room = values["sampling.min_tokens"], values["engine.max_model_len"] - 1
    if least > room:
        raise ConfigError(
            f"sampling.min_tokens is {least}, and no row can have more than {room}: engine.max_model_len is {room + 1} "
            "and counts the prompt"
        )
    put("engine.device", _device(spec), _written(spec.engine, "device"))
    put("engine.split_size", spec.engine.split_size, _written(spec.engine, "split_size"))
    put("engine.deterministic", spec.engine.deterministic, _written(spec.engine, "deterministic"))
    put("engine.tensor_parallel_size", spec.engine.tensor_parallel_size, _written(spec.engine, "tensor_parallel_size"))
    put("engine.block_size", spec.engine.block_size, _written(spec.engine, "block_size"))
    for library, version in library_versions().items():
        put(f"versions.{library}", version, "default")
    put("output.columns", spec.output.columns, _written(spec.output, "columns"))
    put("output.prefix", spec.output.prefix, _written(spec.output, "prefix"))
    put("output.token_ids", spec.output.token_ids, _written(spec.output, "token_ids"))
    return values, sources


def _device(spec: JobSpec) -> str:
    return "cpu" if spec.engine.device == "auto" else spec.engine.device


def _arithmetic(
    spec: JobSpec, files: ModelFiles, machine: Machine, frozen: ResolvedJob | None, only_look: bool
) -> Arithmetic:
    """What was chosen at the first submit stays where it can be had here; else what is chosen here differs from it."""
    wanted = {name: getattr(spec.model, name) for name in ("quantization", "kv_cache_dtype")}
    wanted["kernels"] = spec.engine.kernels
    fixed = {"dtype": spec.model.dtype, "device": _device(spec)}
    if frozen is not None and frozen.semantic["engine.device"] != fixed["device"]:
        frozen = None
    lacking: ConfigError | None = None
    if fixed["device"] == "cuda" and (lacking := _no_gpu(spec, files, machine)) is not None:
        if not only_look:
            raise lacking
        level = None if frozen is None else frozen.arithmetic.instruction_level
        machine = replace(machine, gpu_level=level, gpu_name=None, triton_on_gpu=None)  # the level has the name
    found: Arithmetic | None = None
    if frozen is not None:
        chosen = frozen.arithmetic
        kept = {
            name: getattr(chosen, name)
            for name, value in wanted.items()
            if value == "auto" and chosen.sources[name].startswith(AUTO)
        }
        with contextlib.suppress(ConfigError):
            found = resolve_arithmetic(files, machine, **fixed, **(wanted | kept))
            found = replace(found, sources={**found.sources, **{name: chosen.sources[name] for name in kept}})
    found = found or resolve_arithmetic(files, machine, **fixed, **wanted)
    return found if lacking is None else replace(found, degraded=f"this machine can't run the job: {lacking}")


def _check_engine(job: ResolvedJob, files: ModelFiles) -> None:
    """Raises ConfigError where the job's engines would, when they load, for what is known now."""
    config, arithmetic = job.engine_config, job.arithmetic
    config.check_kernels(arithmetic.kernels)
    check_block_size(config.block_size, files, arithmetic)
    shape = ModelShape.from_config(files.config)
    if shape is None or config.kv_cache_memory == "auto":
        return
    block_bytes = config.block_size * shape.kv_bytes_per_token(arithmetic.kv_cache_dtype)
    check_pool(
        config.kv_cache_memory // block_bytes,
        "engine.kv_cache_memory",
        block_bytes=block_bytes,
        block_size=config.block_size,
        max_model_len=job.max_model_len,
    )


def _no_gpu(spec: JobSpec, files: ModelFiles, machine: Machine) -> ConfigError | None:
    """What keeps engines of this machine from running the job on its GPUs."""
    if (reason := why_no_gpu(files, machine)) is not None:
        return no_gpu(reason)
    if machine.triton_on_gpu is not None and spec.engine.kernels == "auto" and files.kind != "fake":
        return no_gpu(f"{machine.triton_on_gpu}; engine.kernels cpu is slower, and uses torch alone")
    return None


def _lack(frozen: ResolvedJob, job: ResolvedJob, machine: Machine) -> str | None:
    """What this machine lacks of what the job was begun with, or None."""
    if frozen.semantic["engine.device"] == job.semantic["engine.device"] == "cuda":
        was, now = frozen.arithmetic.instruction_level, job.arithmetic.instruction_level
        if was == now:
            return None
        return f"The job was begun on GPUs of {was}; this machine's ({machine.gpu_name}) are {now}"
    if frozen.arithmetic.kernels != "native" or job.arithmetic.kernels == "native" or machine.obstacle is None:
        return None
    mend = "" if machine.mend is None else f". To go on here, {machine.mend}"
    return f"The job was begun with native kernels, which can't be used on this machine: {machine.obstacle}{mend}"


def resolve_sampling(spec: JobSpec, files: ModelFiles) -> dict[str, tuple[Any, str]]:
    """Each sampling setting (but seed) and where it came from.

    The user's value, else what the model suggests (`ModelFiles.suggested_sampling`), else the neutral value. Unset
    temperature is 0: greedy.
    """
    given = spec.sampling.given()
    suggested = files.suggested_sampling
    neutral = {field.name: field.default for field in fields(SamplingParams)} | {"temperature": 0.0}
    found: dict[str, tuple[Any, str]] = {}
    for name in SAMPLING_FIELDS:
        if name == "seed":
            continue
        if name in given:
            found[name] = (given[name], "user")
        elif name in suggested:
            found[name] = (suggested[name], "generation_config")
        else:
            found[name] = (neutral[name], "default")
    stop = found["stop"][0]
    found["stop"] = ([stop] if isinstance(stop, str) else list(stop), found["stop"][1])
    try:
        SamplingParams(**{name: value for name, (value, _) in found.items()})
    except ConfigError as error:
        raise ConfigError(
            f"{error} (from the model's generation_config); give the setting in the job's sampling section"
        ) from None
    vocab = files.config.get("vocab_size")
    if isinstance(vocab, int):
        for name in ("stop_token_ids", "logit_bias"):
            beyond = [token for token in found[name][0] or () if int(token) >= vocab]
            if beyond:
                raise ConfigError(f"sampling.{name}: token {beyond[0]} is not in the model's vocabulary of {vocab}")
    return found


def _max_model_len(spec: JobSpec, files: ModelFiles) -> tuple[str, int, str]:
    limit = files.max_model_len
    wanted = spec.engine.max_model_len
    if wanted is None:
        return "engine.max_model_len", limit, "model"
    if wanted > limit:
        raise ConfigError(
            f"engine.max_model_len is {wanted}, but the model {files.name} has {limit} positions; give at most {limit}"
        )
    return "engine.max_model_len", wanted, "user"


def check_columns(job: ResolvedJob, context: JobContext) -> None:
    """The columns that prompts come from are of types that can work: said before the start, not row by row."""
    spec, dataset = job.spec.input, context.dataset
    for key, column, kinds, words in (
        ("prompt_column", spec.prompt_column, ("text",), "text"),
        ("messages_column", spec.messages_column, ("list of structs",), "lists of structs with role and content"),
        ("tools_column", spec.tools_column, ("list of structs", "text"), "lists of structs, or JSON text of them"),
    ):
        if column is not None and dataset.kind_of(column) not in (*kinds, "null", "mixed"):
            kind = dataset.schema.field(column).type
            where = ", ".join(file.name for file in dataset.files[:3])
            raise InputError(f"input.{key}: column {column!r} is {kind} in {where}; it must hold {words}")
    for name in context.renderer.spec.fields():
        try:
            dataset.check_field(name)
        except InputError as error:
            raise InputError(f"input.{'prompt' if spec.prompt is not None else 'messages'}: {error}") from None


def _text_bytes(dataset: InputDataset, columns: tuple[str, ...]) -> tuple[int, ...]:
    """Estimates how many bytes of each file the prompts' columns are, from the first rows of a few files."""
    share = 1.0
    whole = part = 0
    for file in [f for f in dataset.files if f.num_rows][:4]:
        for batch in dataset.read(file.index, 0, min(file.num_rows, _SAMPLE_ROWS)):
            whole += batch.table.nbytes
            part += batch.table.select(list(columns)).nbytes if columns else 0
            break
    if whole:
        # Twice the sample's share: later rows may be longer than the first.
        share = min(1.0, 2.0 * part / whole)
    return tuple(int(file.num_bytes * share) for file in dataset.files)


def _facts(spec: JobSpec, files: ModelFiles, arithmetic: Arithmetic, machine: Machine) -> dict[str, Any]:
    libraries = ("tokenizers", "jinja2", "numpy", "pyarrow")
    on_gpu = {"gpu": machine.gpu_name} if _device(spec) == "cuda" else {}
    return {
        "model": files.name,
        "model_path": spec.model.path,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libraries": {name: _version(name) for name in libraries},
        "degraded": arithmetic.degraded,
        **on_gpu,
    }


def _written(section: Any, key: str) -> str:
    return "user" if key in section.model_fields_set else "default"


def library_versions() -> dict[str, str | None]:
    """Of what decides bytes: another version may give others."""
    return {"batchinfer": batchinfer.__version__, "torch": _version("torch")}


@functools.cache
def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
