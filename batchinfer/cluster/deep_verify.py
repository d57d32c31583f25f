"""`verify --deep`: completed rows run again by the engine that the manifest froze, and compared byte for byte.

Which rows follows from the job and the number asked for alone. One engine, in this process; nothing is written. Not
for what can be proved without running (`job.verify`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from batchinfer.arithmetic import Machine, no_gpu, resolve_arithmetic, this_machine, why_no_gpu
from batchinfer.data.cursors import close_cursors
from batchinfer.data.parts import failed_rows, read_footer, read_part_results
from batchinfer.data.segments import ResultRow, results_table
from batchinfer.engine import Engine, load_engine
from batchinfer.errors import ConfigError, ModelError
from batchinfer.job.context import open_context
from batchinfer.job.manifest import FORMAT, ResolvedJob
from batchinfer.job.planner import iter_prepared_batches
from batchinfer.job.report import job_chunks
from batchinfer.job.resolve import library_versions
from batchinfer.job.windows import Chunk
from batchinfer.modelfiles import open_model
from batchinfer.types.request import Request

SAMPLE_ROWS = 100
# Results of a row, as in RESULT_SCHEMA, as far as the job's output has them.
_COMPARED = ("completion", "finish_reason", "completion_tokens", "token_ids", "logprobs", "prompt_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepReport:
    """rows_run: rows of the sample; differing: one sentence for each that came out otherwise; left_out: parts whose
    rows were partly run again by a retry under other settings."""

    rows_run: int
    differing: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.differing


def verify_deep(job: ResolvedJob, sample: int = SAMPLE_ROWS, *, machine: Machine | None = None) -> DeepReport:
    """Runs up to `sample` completed rows again. The output is one that `verify_job` finds nothing wrong with.

    Raises ConfigError or ModelError where the same bytes can't be expected here: the model is gone or another one,
    this machine or this installation computes otherwise.
    """
    on_gpu = job.semantic["engine.device"] == "cuda"
    refuse_other_arithmetic(job, machine or this_machine(look_at_gpus=on_gpu))
    left_out: list[str] = []
    chosen = _choose(job, sample, left_out)
    engine = load_engine(job.engine_config)
    differing: list[str] = []
    try:
        for chunk, rows in chosen:
            where = f"{chunk.part}, row"
            for row, what in _compare(job, chunk, rows, engine):
                differing.append(f"{where} {row} of {job.file_name(chunk.file)}: {what}")
    finally:
        engine.close()
        close_cursors()
    return DeepReport(
        rows_run=sum(len(rows) for _, rows in chosen), differing=tuple(differing), left_out=tuple(left_out)
    )


def refuse_other_arithmetic(job: ResolvedJob, machine: Machine) -> None:
    """Raises unless this machine computes with the model what the job has computed."""
    spec, frozen = job.spec.model, job.semantic
    files = open_model(spec.path, revision=spec.revision, tokenizer=spec.tokenizer)
    found: dict[str, Any] = {"model.hash": files.model_hash(), "model.tokenizer_hash": files.tokenizer_hash()}
    if changed := [key for key, value in found.items() if frozen[key] != value]:
        raise ModelError(
            f"{spec.path} is not the model that the job was run with ({' and '.join(changed)} differ): its rows can't "
            "be run again. Put the old files back"
        )
    was = job.arithmetic
    # What was chosen for a machine is asked for by name, so that it is refused where it can't be had.
    kernels = "auto" if was.kernels == "fake" else was.kernels
    options = {"quantization": was.quantization, "kv_cache_dtype": was.kv_cache_dtype, "kernels": kernels}
    device = frozen["engine.device"]
    try:
        if device == "cuda" and (reason := why_no_gpu(files, machine)) is not None:
            raise no_gpu(reason)
        now = resolve_arithmetic(files, machine, dtype=spec.dtype, device=device, **options)
    except ConfigError as error:
        raise ConfigError(f"the job's arithmetic ({was}) can't be had on this machine: {error}") from None
    names = ("dtype", "quantization", "kv_cache_dtype", "kernels", "instruction_level")
    differs = [
        f"{name} was {getattr(was, name)}, here it is {getattr(now, name)}"
        for name in names
        if getattr(was, name) != getattr(now, name)
    ]
    differs += [
        f"{library} was {frozen[f'versions.{library}']}, here it is {version}"
        for library, version in library_versions().items()
        if frozen[f"versions.{library}"] != version
    ]
    was_numbers = {key: number for key, number in frozen.items() if key.startswith(FORMAT)}
    now_numbers = {f"{FORMAT}{name}": number for name, number in now.format_numbers.items()}
    differs += [
        f"{key} was {was_numbers.get(key)}, here it is {now_numbers.get(key)}"
        for key in sorted(was_numbers.keys() | now_numbers.keys())
        if was_numbers.get(key) != now_numbers.get(key)
    ]
    if differs:
        raise ConfigError(
            f"the same bytes can't be expected here: {'; '.join(differs)}. Run `batchinfer verify --deep` on a machine "
            "and installation like those that ran the job"
        )


def _choose(job: ResolvedJob, sample: int, left_out: list[str]) -> list[tuple[Chunk, list[int]]]:
    """Completed rows by chunk, spread over all parts."""
    chunks: list[tuple[Chunk, int]] = []
    for chunk in job_chunks(job):
        footer = read_footer(job.layout.output / chunk.part)
        if any(entry["settings"] for entry in footer["retries"]):
            left_out.append(f"{chunk.part}: some of its rows were run again under other settings")
            continue
        chunks.append((chunk, chunk.num_rows - sum(footer["failed"].values())))
    total = sum(count for _, count in chunks)
    places = sorted(Random(job.fingerprint).sample(range(total), min(sample, total)))
    chosen = []
    first = 0
    for chunk, count in chunks:
        own = [place - first for place in places if first <= place < first + count]
        first += count
        if own:
            failed = {row for row, _ in failed_rows(job.layout.output / chunk.part)}
            completed = [row for row in range(chunk.start, chunk.stop) if row not in failed]
            chosen.append((chunk, [completed[place] for place in own]))
    return chosen


def _compare(job: ResolvedJob, chunk: Chunk, rows: Sequence[int], engine: Engine) -> Iterator[tuple[int, str]]:
    """(row, what is different) of those that differ."""
    results = {result.row: result for result in _run(job, chunk, rows, engine)}
    again = results_table([results[row] for row in rows]).to_pylist()
    table = read_part_results(job.layout.output / chunk.part, chunk.chunk)
    kept = table.take([row - chunk.start for row in rows]).to_pylist()
    compared = [plain for plain, _ in open_context(job).output.result_columns if plain in _COMPARED]
    for row, old, new in zip(rows, kept, again, strict=True):
        if new["error_class"] is not None:
            yield row, f"it has a completion, and now ends as {new['error_class']}: {new['error_message']}"
            continue
        names = [name for name in compared if old[name] != new[name]]
        if names:
            shown = "; ".join(f"{name} is {_short(old[name])}, now {_short(new[name])}" for name in names[:2])
            yield row, shown + (f"; and {', '.join(names[2:])}" if names[2:] else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _run(job: ResolvedJob, chunk: Chunk, rows: Sequence[int], engine: Engine) -> Iterator[ResultRow]:
    """Outcomes, in any order."""
    requests: dict[int, int] = {}
    for batch in iter_prepared_batches(job, open_context(job), chunk, rows=rows):
        for row, error in batch.errors.items():
            yield ResultRow(chunk=chunk.chunk, row=row, error=error)
        prepared = batch.prepared
        for i, row in enumerate(prepared.rows.tolist()):
            sampling = job.sampling_of(prepared.params_of(i))
            requests[len(requests)] = row
            engine.add_request(
                Request(
                    request_id=len(requests) - 1,
                    prompt_token_ids=prepared.token_ids(i).tolist(),
                    sampling=sampling,
                    stream_key=job.stream_key(chunk.file, row, sampling.seed),
                    eos_token_ids=job.eos_token_ids,
                )
            )
    while engine.has_unfinished():
        for output in engine.step():
            yield ResultRow.of(chunk.chunk, requests[output.request_id], output)
