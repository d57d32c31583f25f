"""Proof that the output holds each input row exactly once, in order, beside what was made for it.

Every part is read whole: its rows' identities, its checksums; every input row is read again and hashed. Bounded
memory; one chunk at a time, so that a cluster can share the work (`verify_chunk`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchinfer.data.cursors import close_cursors
from batchinfer.data.parts import BrokenPart, read_footer, verify_part
from batchinfer.data.values import ValueHasher
from batchinfer.errors import InputError
from batchinfer.job.commit import base_fingerprint
from batchinfer.job.context import JobContext, open_context
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.report import job_chunks
from batchinfer.job.windows import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was found. `problems` is empty where the output is proved; each names part and rows."""

    rows_expected: int
    rows_found: int
    rows_failed: int
    parts_expected: int
    parts_found: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkVerdict:
    """One part, checked. `num_rows` is None where there is no part."""

    chunk: int
    num_rows: int | None
    num_failed: int
    problems: tuple[str, ...]


def verify_job(job: ResolvedJob) -> VerifyReport:
    """Checks every chunk's part, and that no other parts lie in the folder."""
    verdicts = (verify_chunk(job, chunk) for chunk in job_chunks(job))
    report = collect_verdicts(job, verdicts)
    close_cursors()
    return report


def collect_verdicts(job: ResolvedJob, verdicts: Iterator[ChunkVerdict]) -> VerifyReport:
    chunks = list(job_chunks(job))
    expected = {chunk.part for chunk in chunks}
    found = {path.name for path in job.layout.output.iterdir() if _is_read_as_rows(path.name)}
    problems = [f"{name}: no chunk of this job; it would be read as rows" for name in sorted(found - expected)]
    rows = failed = parts = 0
    for verdict in verdicts:
        problems += verdict.problems
        if verdict.num_rows is not None:
            parts += 1
            rows += verdict.num_rows
            failed += verdict.num_failed
    wanted = sum(chunk.num_rows for chunk in chunks)
    if rows != wanted and not problems:
        problems.append(f"the output holds {rows} rows, the input {wanted}")
    return VerifyReport(
        rows_expected=wanted,
        rows_found=rows,
        rows_failed=failed,
        parts_expected=len(chunks),
        parts_found=parts,
        problems=tuple(problems),
    )


def _is_read_as_rows(name: str) -> bool:
    """Readers of the folder take every Parquet file that is not hidden."""
    return name.endswith(".parquet") and not name.startswith((".", "_"))


def verify_chunk(job: ResolvedJob, chunk: Chunk) -> ChunkVerdict:
    """Checks a chunk's part against itself and against the input."""
    path = job.layout.output / chunk.part
    where = f"{chunk.part} (rows {chunk.start} to {chunk.stop - 1} of {job.file_name(chunk.file)})"
    if not path.exists():
        missing = (f"{where}: not there; its rows have no output",)
        return ChunkVerdict(chunk=chunk.chunk, num_rows=None, num_failed=0, problems=missing)
    try:
        footer = read_footer(path)
    except BrokenPart as error:
        return ChunkVerdict(chunk=chunk.chunk, num_rows=None, num_failed=0, problems=(f"{where}: {error}",))
    lacking = [key for key in ("failed", "input_hash", "carried_hash", "prefix") if key not in footer]
    if lacking:
        missing = (f"{where}: its footer lacks {', '.join(lacking)}",)
        return ChunkVerdict(chunk=chunk.chunk, num_rows=int(footer["num_rows"]), num_failed=0, problems=missing)
    problems = []
    for key, wanted in (
        ("fingerprint", base_fingerprint(job)),
        ("chunk", chunk.chunk),
        ("source_file", job.file_name(chunk.file)),
        ("start", chunk.start),
        ("stop", chunk.stop),
        ("num_rows", chunk.num_rows),
    ):
        if footer.get(key) != wanted:
            problems.append(f"{where}: its {key} is {footer.get(key)!r}, the job's is {wanted!r}")
    problems += [f"{where}: {text}" for text in verify_part(path)]
    context = open_context(job)
    try:
        problems += [f"{where}: {text}" for text in _compare_input(context, chunk, footer)]
    except InputError as error:
        problems.append(f"{where}: {error}")
    return ChunkVerdict(
        chunk=chunk.chunk,
        num_rows=int(footer["num_rows"]),
        num_failed=sum(footer["failed"].values()),
        problems=tuple(problems),
    )


def _compare_input(context: JobContext, chunk: Chunk, footer: dict[str, object]) -> list[str]:
    output, dataset = context.output, context.dataset
    carried = output.input_columns
    prompts, columns = ValueHasher(context.hash_columns), ValueHasher(carried)
    needed = [*carried, *(name for name in context.hash_columns if name not in carried)]
    for batch in dataset.read(chunk.file, chunk.start, chunk.stop, needed):
        prompts.update(batch.table)
        columns.update(batch.table)
    problems = []
    if prompts.hexdigest() != footer["input_hash"]:
        problems.append("the input's prompt columns are not those that the results were made from")
    same_types = all(output.schema.field(name).type.equals(dataset.schema.field(name).type) for name in carried)
    # Where Parquet can't hold a type, values are stored in another, and hash differently.
    if same_types and columns.hexdigest() != footer["carried_hash"]:
        problems.append("the carried input columns are not the input's")
    return problems
