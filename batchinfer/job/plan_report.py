"""What `batchinfer plan` tells before anything is paid for: every row rendered and tokenized, no model loaded.

Responsible for: bad rows with examples, token histogram, shared prefixes, KV memory, a predicted time and the simple
model behind it, the first prompt as the model will see it. Bounded memory: one window at a time (`survey_window`,
small results that `merge_surveys` adds up, so that a cluster can share the work).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from batchinfer.arithmetic import Arithmetic, resolve_arithmetic, this_machine
from batchinfer.cost import Device, JobTokens, ModelShape, Prediction, find_device, predict
from batchinfer.data.cursors import close_cursors
from batchinfer.data.prepared import PreparedRows
from batchinfer.errors import ConfigError
from batchinfer.job.context import JobContext, open_context
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.planner import iter_prepared_batches
from batchinfer.job.token_order import Ints, RaggedTokens, neighbour_lcp, sort_rows
from batchinfer.job.units import num_duplicates, output_tokens
from batchinfer.job.windows import Window
from batchinfer.modelfiles import ModelFiles, open_model
from batchinfer.modelfiles.stored_quantization import BLOCK, stored_quantization
from batchinfer.text import prepare_rows
from batchinfer.types.rows import RowError

EXAMPLES = 3
# Of the machine's measured rate of float32 products, what a whole engine is taken to reach: in floating point, and in
# int8 on native kernels.
EFFICIENCY = 0.4
INT8_EFFICIENCY = 2.0
_NOT_HERE = "no prediction for the CPU: the job runs on GPUs; plan --device DEVICE predicts for one"
_NO_SHAPE = "no prediction: the model's config does not say how large its layers are"


@dataclass(frozen=True, slots=True)
class BadRow:
    file: str
    row: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What some rows need.

    histogram        rows by prompt length: bucket b counts lengths of 2**(b-1)+1 .. 2**b tokens
    shared_tokens    prompt tokens that stand in a prefix of another row: computed once
    output_tokens    assumed: each row's max_tokens, at most 256 a sample
    longest_tokens   of one row: prompt and the most it may generate
    clamped_rows     rows whose max_tokens does not fit into the context behind the prompt
    """

    rows: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, tuple[BadRow, ...]] = field(default_factory=dict)
    prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    histogram: Mapping[int, int] = field(default_factory=dict)
    shared_tokens: int = 0
    duplicate_rows: int = 0
    output_tokens: int = 0
    longest_tokens: int = 0
    clamped_rows: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.shared_tokens

    @property
    def rows_failed(self) -> int:
        return sum(self.failed.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """See the module. `settings`: (key, value, where it came from) of everything that was resolved.

    kv_bytes_per_token   None where the model's config does not say
    predicted_s          on this machine's CPU; None where it can't be predicted; `prediction` states how it was
    on_device            on the device that was asked for, else the one GPU that a worker of the job has; None where
                         there is none, or where `off_device` says why not
    first_prompt         the first good row's prompt as text; None where no row is good
    """

    survey: Survey
    settings: tuple[tuple[str, Any, str], ...]
    kv_bytes_per_token: int | None
    predicted_s: float | None
    prediction: str
    on_device: Prediction | None
    off_device: str | None
    first_prompt: str | None
    first_row: tuple[str, int] | None
    first_prompt_tokens: int

    @property
    def kv_bytes_longest(self) -> int | None:
        """KV memory of the longest row alone: a pool must hold at least that."""
        return None if self.kv_bytes_per_token is None else self.kv_bytes_per_token * self.survey.longest_tokens


def plan_report(
    job: ResolvedJob, *, device: Device | None = None, on_window: Callable[[Survey], None] | None = None
) -> PlanReport:
    """Looks at every row in this process. `device`: what to predict for, beside this machine. `on_window` is told the
    sums so far after each window."""
    survey = Survey()
    for window in job.windows():
        survey = merge_surveys([survey, survey_window(job, window)])
        if on_window is not None:
            on_window(survey)
    report = finish_report(job, survey, device)
    close_cursors()
    return report


def survey_window(job: ResolvedJob, window: Window) -> Survey:
    """Prepares a window's rows in memory and forgets them."""
    context = open_context(job)
    pieces: list[PreparedRows] = []
    failed: Counter[str] = Counter()
    examples: dict[str, list[BadRow]] = {}
    for chunk in window.chunks:
        name = job.file_name(chunk.file)
        for batch in iter_prepared_batches(job, context, chunk):
            pieces.append(batch.prepared)
            for row, error in batch.errors.items():
                failed[str(error.error_class)] += 1
                seen = examples.setdefault(str(error.error_class), [])
                if len(seen) < EXAMPLES:
                    seen.append(BadRow(name, row, error.message))
    rows = PreparedRows.concat(pieces)
    tokens = RaggedTokens(rows.tokens, rows.offsets)
    order = sort_rows(tokens)
    lcp = neighbour_lcp(tokens, order)
    lengths = tokens.lengths
    output = output_tokens(job, rows)
    buckets = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    wanted = _wanted_tokens(job, rows)
    counts = np.bincount(buckets) if len(buckets) else np.zeros(0, dtype=np.int64)
    return Survey(
        rows=len(rows) + sum(failed.values()),
        failed=dict(sorted(failed.items())),
        examples={name: tuple(seen) for name, seen in sorted(examples.items())},
        prompt_tokens=int(lengths.sum()),
        max_prompt_tokens=int(lengths.max()) if len(rows) else 0,
        histogram={bucket: int(count) for bucket, count in enumerate(counts) if count},
        shared_tokens=int(lcp.sum()),
        duplicate_rows=num_duplicates(lcp, lengths[order]),
        output_tokens=int(output.sum()),
        longest_tokens=int(np.minimum(wanted, job.max_model_len).max()) if len(rows) else 0,
        clamped_rows=int(np.count_nonzero(wanted > job.max_model_len)),
    )


def merge_surveys(surveys: Iterable[Survey]) -> Survey:
    surveys = list(surveys)
    failed: Counter[str] = Counter()
    histogram: Counter[int] = Counter()
    examples: dict[str, tuple[BadRow, ...]] = {}
    for survey in surveys:
        failed.update(survey.failed)
        histogram.update(survey.histogram)
        for name, seen in survey.examples.items():
            examples[name] = (*examples.get(name, ()), *seen)[:EXAMPLES]
    return Survey(
        rows=sum(s.rows for s in surveys),
        failed=dict(sorted(failed.items())),
        examples=dict(sorted(examples.items())),
        prompt_tokens=sum(s.prompt_tokens for s in surveys),
        max_prompt_tokens=max((s.max_prompt_tokens for s in surveys), default=0),
        histogram=dict(sorted(histogram.items())),
        shared_tokens=sum(s.shared_tokens for s in surveys),
        duplicate_rows=sum(s.duplicate_rows for s in surveys),
        output_tokens=sum(s.output_tokens for s in surveys),
        longest_tokens=max((s.longest_tokens for s in surveys), default=0),
        clamped_rows=sum(s.clamped_rows for s in surveys),
    )


def finish_report(job: ResolvedJob, survey: Survey, device: Device | None = None) -> PlanReport:
    spec = job.spec.model
    files = open_model(spec.path, revision=spec.revision, tokenizer=spec.tokenizer)
    context = open_context(job)
    first = _first_prompt(job, context)
    shape = ModelShape.from_config(files.config)
    if job.semantic["engine.device"] == "cuda":
        predicted_s, prediction = None, _NOT_HERE
        device = device or find_device(job.facts.get("gpu") or "")
    else:
        predicted_s, prediction = _predict(shape, survey, job.arithmetic)
    on_device, off_device = (None, None) if device is None else _predict_on(device, job, files, shape, survey)
    return PlanReport(
        survey=survey,
        settings=tuple((key, job.semantic[key], job.sources.get(key, "")) for key in sorted(job.semantic)),
        kv_bytes_per_token=None if shape is None else shape.kv_bytes_per_token(job.arithmetic.kv_cache_dtype),
        predicted_s=predicted_s,
        prediction=prediction,
        on_device=on_device,
        off_device=off_device,
        first_prompt=None if first is None else first[0],
        first_row=None if first is None else first[1:3],
        first_prompt_tokens=0 if first is None else first[3],
    )


def measured_flops(seconds: float = 0.05) -> float:
    """Floating-point operations per second of one core in float32 products, by doing some.

    They are so small that the library does not spread them over threads: that would measure who else is at work here.
    """
    a = np.ones((64, 64), dtype=np.float32)
    result = a @ a
    best, end = float("inf"), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        np.matmul(a, a, out=result)
        best = min(best, time.perf_counter() - begin)
    return 2 * 64**3 / best


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _predict(shape: ModelShape | None, survey: Survey, arithmetic: Arithmetic) -> tuple[float | None, str]:
    if shape is None:
        return None, _NO_SHAPE
    layers, head = shape.active_weights, shape.head_weights
    cores = _num_cores()
    fast = arithmetic.quantization == "int8" and arithmetic.kernels == "native"
    efficiency = INT8_EFFICIENCY if fast else EFFICIENCY
    rate = measured_flops() * cores * efficiency
    operations = 2 * layers * (survey.computed_tokens + survey.output_tokens) + 2 * head * survey.output_tokens
    return operations / rate, (
        f"two operations per weight and token: {survey.computed_tokens:,} prompt tokens to compute and "
        f"{survey.output_tokens:,} output tokens (each row's max_tokens, at most 256 a sample; rows that stop earlier "
        f"make it shorter), at {rate / 1e9:.0f} billion a second ({efficiency:.0%} of the rate of float32 products "
        f"measured here on {cores} cores)"
    )


def _predict_on(
    device: Device, job: ResolvedJob, files: ModelFiles, shape: ModelShape | None, survey: Survey
) -> tuple[Prediction | None, str | None]:
    """In the arithmetic that a GPU would have: what the job leaves open is another one than here."""
    rows = survey.rows - survey.rows_failed
    if shape is None or not rows:
        return None, _NO_SHAPE if shape is None else "no prediction: there is no good row"
    model = job.spec.model
    try:
        arithmetic = resolve_arithmetic(
            files,
            replace(this_machine(), triton_on_gpu=None),
            dtype=model.dtype,
            quantization=model.quantization,
            kv_cache_dtype=model.kv_cache_dtype,
            device="cuda",
        )
    except ConfigError as error:  # the job may well run where it is planned
        return None, f"no prediction: {error}"
    found = predict(
        shape,
        device,
        weights=arithmetic.weights,
        kv_cache_dtype=arithmetic.kv_cache_dtype,
        group=_group(files),
        job=JobTokens(
            rows=rows,
            prompt_tokens=survey.prompt_tokens,
            shared_tokens=survey.shared_tokens,
            output_tokens=survey.output_tokens,
        ),
    )
    return found, f"no prediction: {device} can't hold the model and a row" if found is None else None


def _group(files: ModelFiles) -> int:
    """How many of a quantized checkpoint's weights share a scale; 0 where all of an output do."""
    stored = stored_quantization(files.config)
    if stored is None:
        return 0
    return BLOCK * BLOCK if stored.blocks else max(0, stored.group)


def _wanted_tokens(job: ResolvedJob, rows: PreparedRows) -> Ints:
    """[n]: each row's prompt and max_tokens together; without a max_tokens, all of the context."""
    most = [job.sampling.max_tokens] * len(rows)
    if rows.params is not None:
        for i, params in enumerate(rows.params_list()):
            if params is not None:
                most[i] = job.sampling_of(params).max_tokens
    unlimited = np.array([m is None for m in most], dtype=bool)
    return np.where(unlimited, job.max_model_len, rows.lengths + np.array([m or 0 for m in most], dtype=np.int64))


def _first_prompt(job: ResolvedJob, context: JobContext) -> tuple[str, str, int, int] | None:
    """(text, file, row, tokens) of the first row that will run, looking at no more than a few thousand."""
    for window in job.windows()[:1]:
        for chunk in window.chunks[:16]:
            for batch in context.dataset.read(chunk.file, chunk.start, chunk.stop, context.hash_columns):
                for row, values in enumerate(batch.to_rows(), start=batch.start):
                    prompt = context.renderer.render(values) if row not in batch.errors else None
                    if prompt is None or isinstance(prompt, RowError):
                        continue
                    outcome = prepare_rows(
                        context.renderer,
                        context.tokenizer,
                        [values],
                        sampling=context.sampling,
                        max_model_len=job.max_model_len,
                    )[0]
                    if not isinstance(outcome, RowError):
                        return prompt.text, job.file_name(chunk.file), row, len(outcome.token_ids)
                break
    return None
