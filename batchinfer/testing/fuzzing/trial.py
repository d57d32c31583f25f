"""One case, run in this process the way a job runs, and judged.

Read, resolved, frozen, planned, answered by a fake model's engine, committed, resolved again (as a resume does) and
verified. What is judged: that nothing but a BatchinferError comes out, what its message says, that rows in equal rows
out, in order, that good rows have their bytes. Not here: processes and their time limits (`children`).
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.arithmetic import Machine, this_machine
from batchinfer.cluster.leased_rows import open_lease
from batchinfer.cluster.row_feed import RowFeed
from batchinfer.data.cursors import close_cursors
from batchinfer.data.segments import compact_unit
from batchinfer.engine import load_engine
from batchinfer.errors import BatchinferError
from batchinfer.job.commit import commit_chunk
from batchinfer.job.manifest import ResolvedJob, freeze_job
from batchinfer.job.planner import prepare_chunk
from batchinfer.job.report import job_chunks
from batchinfer.job.resolve import remove_temporary_caches, resolve_job
from batchinfer.job.spec import JobSpec
from batchinfer.job.units import cut_units
from batchinfer.job.verify import verify_job
from batchinfer.testing.fuzzing.case import INPUT_FOLDER, Case
from batchinfer.testing.fuzzing.expected import expected_chats
from batchinfer.types.rows import ErrorClass

OUTCOMES = ("completed", "error rows", "refused", "fault")
MOST_SAMPLES = 64  # what a job file may ask for in a trial
MAX_MESSAGE_CHARS = 6_000
# A message names what it is about: a file, a key of the job, a column, a template, an argument.
_ABOUT = re.compile(
    r"job\.yaml|--set|rows-\d|chat template|column|"
    r"\b(input|output|sampling|engine|model|cluster|failure|name)\b(\.\w+)?"
)
_INSIDES = re.compile(r"Traceback|object at 0x|<class '|File \"|pydantic|\.py:\d")
CANARY = "canary-7f3a91"  # what only a template that has left its sandbox can print


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """outcome: one of OUTCOMES; detail: the message, or what is wrong."""

    outcome: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome != "fault"


class _Fault(Exception):
    """What a trial found wrong."""


def try_case(case: Case, folder: Path) -> Verdict:
    """Runs the case in an empty folder. Whatever comes out of the product becomes a verdict."""
    start = time.monotonic()
    try:
        outcome, detail = _try(case, folder)
    except _Fault as fault:
        outcome, detail = "fault", str(fault)
    finally:
        close_cursors()
        remove_temporary_caches()
    return Verdict(outcome=outcome, detail=detail, seconds=round(time.monotonic() - start, 3))


def _try(case: Case, folder: Path) -> tuple[str, str]:
    path = case.write(folder)
    try:
        spec = JobSpec.from_yaml(path, overrides=case.overrides)
        if not _stays_inside(spec, folder):
            return "completed", "a job elsewhere: only its file was read"
        machine = _machine()
        job = freeze_job(resolve_job(spec, machine=machine))
        run_here(job)
    except BatchinferError as error:
        _judge_message(str(error), case)
        if not case.refusable:
            raise _Fault(f"good rows are lost, the job is refused: {error}") from None
        return "refused", str(error)
    except Exception as error:
        raise _Fault(_told(error)) from error
    rows = _judge_output(case, job)
    try:
        again = freeze_job(resolve_job(spec, machine=machine))
        report = verify_job(again)
    except Exception as error:
        raise _Fault(f"the finished job can't be opened again: {_told(error)}") from error
    if not report.ok:
        raise _Fault(f"verify finds {report.problems[0]}")
    failed = sum(row["error"] is not None for row in rows)
    return ("error rows" if failed else "completed"), f"{len(rows)} rows, {failed} of them with errors"


@functools.cache
def _machine() -> Machine:
    return this_machine()


def _told(error: Exception) -> str:
    """The exception and where it came from."""
    at = error.__traceback__
    places = []
    while at is not None:
        places.append(f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}")
        at = at.tb_next
    return f"{type(error).__name__}: {str(error)[:500]} ({' < '.join(reversed(places[-6:]))})"


def _stays_inside(spec: JobSpec, folder: Path) -> bool:
    """A changed job file must not read or write elsewhere, nor fetch models, nor ask for more than fits here."""
    asked = spec.sampling.n
    return (
        spec.model.path.startswith("fake://")
        and (spec.model.tokenizer is None or Path(spec.model.tokenizer).is_relative_to(folder))
        and spec.input.path == str(folder / INPUT_FOLDER)
        and spec.output.path == str(folder / "out")
        and (asked is None or asked <= MOST_SAMPLES)
    )


def run_here(job: ResolvedJob) -> None:
    """Plans, answers and commits every window of a frozen job, in this process."""
    for window in job.windows():
        summaries = [prepare_chunk(job, window.window, chunk, epoch=1) for chunk in window.chunks]
        plan = cut_units(job, window.window, summaries, epoch=1)
        feed = RowFeed(load_engine(job.engine_config), job, epoch=1, report=lambda message: None)
        try:
            for unit in plan.units:
                lease = open_lease(
                    job.layout,
                    lease=unit.unit,
                    window=window.window,
                    unit=unit.unit,
                    epoch=plan.epoch,
                    start=0,
                    stop=unit.num_rows,
                    fingerprint=job.fingerprint,
                )
                feed.add(lease)
                while feed.busy:
                    feed.step()
        finally:
            feed.close()
        for unit in plan.units:
            segments = job.layout.segments(window.window).glob(f"u{unit.unit:05d}-*.arrow")
            compact_unit(segments, job.layout.unit_results(window.window, unit.unit))
        for chunk in window.chunks:
            commit_chunk(job, plan, chunk, epoch=1)


def _judge_message(message: str, case: Case) -> None:
    if not message.strip():
        raise _Fault("refused without a word")
    if found := _INSIDES.search(message):
        raise _Fault(f"the message shows the program's insides ({found[0]}): {message[:500]}")
    if len(message) > MAX_MESSAGE_CHARS:
        raise _Fault(f"a message of {len(message)} characters: {message[:200]}")
    if CANARY in message:
        raise _Fault(f"out of the sandbox: {message[:500]}")
    names = [name.rpartition("/")[2] for name in case.files]
    if not (_ABOUT.search(message) or any(name in message for name in names)):
        raise _Fault(f"the message names neither file nor key: {message[:500]}")


def _judge_output(case: Case, job: ResolvedJob) -> list[dict[str, Any]]:
    """The output's rows, after a look at each."""
    prefix = job.spec.output.prefix
    rows: list[dict[str, Any]] = []
    columns = ("source_file", "source_row", "completion", "finish_reason", "error")
    chats = expected_chats(case, job)
    for chunk in job_chunks(job):
        table = pq.read_table(job.layout.output / chunk.part, use_threads=False)
        own = table.select([prefix + column for column in columns]).rename_columns(list(columns)).to_pylist()
        name = job.file_name(chunk.file)
        if [(row["source_file"], row["source_row"]) for row in own] != [
            (name, row) for row in range(chunk.start, chunk.stop)
        ]:
            raise _Fault(f"{chunk.part}: rows are lost, doubled or out of order")
        for row in own:
            _judge_row(row, case, chats)
        _judge_carried(table, chunk.start, case.carried.get(name, {}))
        rows += own
    for name, count in case.rows.items():
        found = sum(row["source_file"] == name for row in rows)
        if found != count:
            raise _Fault(f"{name} has {count} rows, the output {found}")
    return rows


def _judge_row(row: Mapping[str, Any], case: Case, chats: Mapping[tuple[str, int], str | None]) -> None:
    where, completion = (row["source_file"], row["source_row"]), row["completion"]
    if row["error"] is not None:
        message, kind = row["error"]["message"], row["error"]["class"]
        if kind not in set(ErrorClass) or kind == ErrorClass.INTERNAL or not message:
            raise _Fault(f"{where}: an error row of class {kind} that says {message!r}")
        if (found := _INSIDES.search(message)) and case.kind != "template":
            raise _Fault(f"{where}: the message shows the program's insides ({found[0]}): {message[:300]}")
        if completion is not None:
            raise _Fault(f"{where}: a completion beside an error")
        if CANARY in message:
            raise _Fault(f"{where}: out of the sandbox: {message[:300]}")
    elif completion is None:
        raise _Fault(f"{where}: neither a completion nor an error")
    elif CANARY in str(completion):
        raise _Fault(f"{where}: out of the sandbox: {str(completion)[:300]}")
    wanted = case.completions.get(where[0], {}).get(where[1])
    if wanted is not None and completion != wanted:
        raise _Fault(
            f"{where}: a good row should have {wanted[:200]!r}, and has {str(completion)[:200]!r}, {row['error']}"
        )
    # A value that is not of its column's type is an error of its row, whatever a template would make of it.
    invalid = row["error"] is not None and row["error"]["class"] == ErrorClass.INVALID_ROW
    if where in chats and completion != chats[where] and (not invalid or "good row" in str(chats[where])):
        raise _Fault(
            f"{where}: rendered alone {str(chats[where])[:200]!r}, here {str(completion)[:200]!r}, {row['error']}"
        )


def _judge_carried(table: pa.Table, start: int, carried: Mapping[int, Mapping[str, str]]) -> None:
    for row, values in carried.items():
        for column, wanted in values.items():
            if start <= row < start + table.num_rows:
                found = text_of(table[column][row - start])
                if found == "None" and pa.types.is_floating(table[column].type) and _beyond_floats(wanted):
                    continue  # an integer, and floats in another file: the log tells of it
                if found == "None" and _is_in_nanoseconds(table[column].type) and _beyond_nanoseconds(wanted):
                    continue  # a time in larger units, and nanoseconds in another file: the same
                if pa.types.is_decimal(table[column].type) and _same_number(found, wanted):
                    continue  # an integer, and decimals in another file
                if found not in (wanted, f"{wanted}.0"):
                    raise _Fault(f"row {row}: column {column!r} was {wanted[:200]}, and is {found[:200]}")


def _beyond_floats(text: str) -> bool:
    return text.lstrip("-").isdigit() and int(float(text)) != int(text)


def _is_in_nanoseconds(kind: pa.DataType) -> bool:
    return (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and str(kind.unit) == "ns"


def _beyond_nanoseconds(text: str) -> bool:
    """Of a moment: 64 bits hold those of the years 1678 to 2261."""
    return text == "beyond Python" or (text[:4].isdigit() and not 1678 <= int(text[:4]) <= 2261)


def _same_number(found: str, wanted: str) -> bool:
    try:
        return Decimal(found) == Decimal(wanted)
    except InvalidOperation:
        return False


def text_of(value: pa.Scalar) -> str:
    """A value as text that is equal for equal values; all times that Python can't hold look alike."""
    try:
        return str(_plain(value.as_py()))
    except (ValueError, OverflowError):
        return "beyond Python"


def _plain(value: Any) -> Any:
    """Times as text: for some units pyarrow gives pandas' own kind, once pandas is there. UUIDs as the bytes that they
    become beside another file's bytes."""
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else value
