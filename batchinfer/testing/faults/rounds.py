"""A round of the campaign: a job is disturbed, resumed until it is done, and compared with an undisturbed run.

What is counted is drawn in `Verdict`. Which faults there are, and what each does, is in `kinds`.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from batchinfer.cluster.lifecycle import in_thread
from batchinfer.cluster.trace import VARIABLE
from batchinfer.data.fs import is_temp
from batchinfer.data.parts import read_footer
from batchinfer.job.driver_lock import last_driver, lock_store
from batchinfer.job.layout import JobLayout
from batchinfer.job.manifest import load_manifest
from batchinfer.job.verify import verify_job
from batchinfer.testing.faults import inside
from batchinfer.testing.faults.jobs import RETRY_MODEL_LEN, CampaignJob
from batchinfer.testing.faults.processes import Processes, awake, send, wait_for
from batchinfer.testing.faults.readers import PlainReader, read_output

FINISHED = (0, 3)
# Call sites that change files and are met when rows are in flight at a stop: an undisturbed run does not show them.
SITES_AT_A_STOP = frozenset(f"{call} data.partials.write_partials" for call in ("mkdir", "fsync", "link", "unlink"))
MAX_STARTS = 12
LEAVE_S = 15.0  # how long processes may take to be gone after a job's end
Identity = tuple[str, int]
_EPOCH = re.compile(r"-e(\d{6,})(?=[-.]|$)")


class Hang(Exception):
    """The round's time is over."""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What a round showed. All counts but `starts`, `runs` and `looks` should be 0, and `problems` empty.

    again   rows that an engine was to run though they were durable before that lease; those excepted whose results a
            fault has destroyed
    sites   where file faults were to happen, and which
    runs    rows that engines were given; looks: how often the plain reader has looked
    """

    number: int
    job: int
    faults: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    different: int = 0
    again: int = 0
    hangs: int = 0
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    runs: int = 0
    looks: int = 0
    seconds: float = 0.0
    folder: str = ""

    @property
    def ok(self) -> bool:
        return not (self.lost or self.doubled or self.different or self.again or self.hangs or self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """An undisturbed run: its rows, hashes in the footers of parts, exit code, and the call sites that change files,
    with those of a stop."""

    table: pa.Table
    hashes: dict[str, tuple[str, ...]]
    code: int
    sites: frozenset[str]


def run_calm(job: CampaignJob, folder: Path, *, retried: bool) -> Calm:
    """Runs the job in `folder` without a disturbance, then a retry with longer limits if `retried`."""
    folder.mkdir()
    output = folder / "out"
    path = job.write(folder / "job.yaml", output, calm=True)
    processes = Processes(str(folder), folder / "log.txt")
    record = folder / "sites"
    more = inside.environment(record, {"record": str(record)})
    code = processes.start("submit", str(path), more=more).wait(timeout=300)
    if retried:
        code = processes.start(*retry_command(path), more=more).wait(timeout=300)
    if code not in FINISHED:
        raise RuntimeError(f"the undisturbed run of the job in {job.folder} ended with exit code {code}: {folder}")
    sites = frozenset(line for path in record.glob("*.txt") for line in path.read_text().splitlines())
    return Calm(table=read_output(output), hashes=part_hashes(output), code=code, sites=sites | SITES_AT_A_STOP)


def retry_command(path: Path) -> tuple[str, ...]:
    return ("retry", str(path), "--class", "prompt_too_long", "--set", f"engine.max_model_len={RETRY_MODEL_LEN}")


def part_hashes(output: Path) -> dict[str, tuple[str, ...]]:
    footers = {path.name: read_footer(path) for path in sorted(output.glob("part-*.parquet"))}
    return {
        name: tuple(footer[key] for key in ("input_hash", "carried_hash", "result_hash"))
        for name, footer in footers.items()
    }


class Round:
    """A job under faults. What `kinds` calls is public."""

    def __init__(
        self,
        number: int,
        job: CampaignJob,
        job_seed: int,
        folder: Path,
        *,
        draw: random.Random,
        limit_s: float,
        next_site: Callable[[], str],
        small_disk: bool = False,
    ) -> None:
        """`next_site`: call sites of file faults, in turn; `small_disk`: one that can be filled."""
        folder.mkdir()
        self.draw = draw
        self.job = job
        self.folder = folder
        self.disk = SmallDisk(folder / "disk") if small_disk else None
        self.output = folder / "disk" / "out" if small_disk else folder / "out"
        self.layout = JobLayout(self.output)
        self.verdict = Verdict(number=number, job=job_seed, folder=str(folder))
        self.path = job.write(folder / "job.yaml", self.output)
        self.command: tuple[str, ...] = ("submit", str(self.path))
        self.processes = Processes(str(folder), folder / "log.txt")
        self.processes.log.touch()
        self.driver: subprocess.Popen[bytes] | None = None
        self.traces = [folder / "trace-1.jsonl"]
        self.retried = False
        self.environment: dict[str, str] = {}
        self.next_site = next_site
        self.reader = PlainReader(self.output)
        self._deadline = awake() + limit_s
        self._begin = awake()

    # What faults use ---------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Path:
        return self.traces[-1]

    @property
    def work(self) -> Path:
        """Where windows, prepared rows and segments lie now."""
        return (self.layout.for_retry(1) if self.retried else self.layout).work

    def start(self, log: Path | None = None) -> subprocess.Popen[bytes]:
        """The command, as another driver beside those that there are. Counts as a start."""
        self.verdict.starts += 1
        return self.processes.start(*self.command, log=log, more={VARIABLE: str(self.trace), **self.environment})

    @staticmethod
    def of_retry(site: str) -> bool:
        """Whether a call site is met by retries alone."""
        return " job.retry." in site

    def arm(self, plan: dict[str, object]) -> None:
        """From now on, processes that are started do harm to files as `inside` says."""
        self.environment = inside.environment(self.folder / "file-faults", plan)

    def disarm(self) -> None:
        self.environment = {}

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        assert self.disk is not None
        with self.disk.full():
            yield

    def running(self) -> bool:
        """Makes sure that a driver runs; False if the job has ended."""
        if self.driver is None or self.driver.poll() not in (None, *FINISHED):
            self.driver = self.start()
        return self.driver.poll() is None

    def wait(self, condition: object, timeout_s: float = 1e9) -> bool:
        """Waits for a condition (a callable); False after `timeout_s`. Raises Hang at the round's end."""
        assert callable(condition)
        left = self._deadline - awake()
        if wait_for(condition, min(left, timeout_s)):
            return True
        if awake() >= self._deadline:
            raise Hang
        return False

    def expire(self) -> None:
        """Its time is over, now."""
        self._deadline = -1.0

    def wait_exit(self, driver: subprocess.Popen[bytes], timeout_s: float = 1e9) -> int | None:
        self.wait(lambda: driver.poll() is not None, timeout_s)
        return driver.poll()

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def pause(self) -> bool:
        """Lets the job run up to a random moment; False if it is over by then."""
        if not self.running():
            return False
        driver = self.driver
        assert driver is not None
        moment = self.draw.random()
        if moment < 0.3:
            self.wait(lambda: driver.poll() is not None, self.draw.uniform(0.0, 2.5))
        elif moment < 0.6 and self.job.several_windows:
            for _ in range(self.draw.choice([1, 2, 4])):
                names = self._window_names()
                self.wait(lambda names=names: driver.poll() is not None or self._window_names() != names)
            self.wait(lambda: driver.poll() is not None, self.draw.choice([0.0, self.draw.uniform(0.0, 0.2)]))
        else:
            seen = self.num_published() + self.draw.choice([0, 0, 1, 3])
            self.wait(lambda: driver.poll() is not None or self.num_published() > seen)
            self.wait(lambda: driver.poll() is not None, self.draw.uniform(0.0, 0.5))
        return driver.poll() is None

    def _window_names(self) -> frozenset[str]:
        """Changes as a window's planning begins and ends, and as its deletion does."""
        return frozenset(path.name for kind in ("windows", "prepared") for path in (self.work / kind).glob("w*"))

    def num_published(self) -> int:
        return self.trace.read_bytes().count(b'"published"') if self.trace.exists() else 0

    def kill(self, driver: subprocess.Popen[bytes]) -> None:
        """`kill -9` of a driver, whose workers and engines then have to go by themselves, but for those that stand
        still, and what is theirs."""
        below = {process.pid for process in self.processes.below(driver.pid)}
        for process in self.processes.find():
            if process.state == "T" and process.pid != driver.pid:
                below -= {theirs.pid for theirs in self.processes.below(process.pid)}
        driver.kill()
        driver.wait()
        left = self.processes.wait_until_gone(sorted(below), LEAVE_S)
        if left:
            self.problem(f"processes {left} outlive their driver")

    def finish(self, *, wake: bool = True) -> None:
        """Resumes the command until it is done."""
        for process in self.processes.find() if wake else ():
            send(process.pid, signal.SIGCONT)
        for _ in range(MAX_STARTS):
            if self.driver is None:
                self.driver = self.start()
            code = self.wait_exit(self.driver)
            if code in FINISHED:
                return
            if code not in (1, 75, -signal.SIGKILL, -signal.SIGTERM):
                self.problem(f"exit code {code}")
                return
            self.driver = None
        self.problem(f"not done after {MAX_STARTS} starts")

    def begin_retry(self) -> None:
        """From now on the command is a retry of rows that were too long."""
        self.command = retry_command(self.path)
        self.retried = True
        self.driver = None
        self.traces.append(self.folder / "trace-2.jsonl")

    def window_of(self, chunk: int) -> int:
        """Of the job itself, which must have been frozen."""
        job = load_manifest(self.layout)
        assert job is not None
        return next(w.window for w in job.windows() if any(c.chunk == chunk for c in w.chunks))

    def destroyed(self, window: int | None, rows: Iterable[tuple[int, int]] | None) -> None:
        """Notes that results of a window (all, or those of rows) are gone by a fault: they may be run again."""
        event = {"event": "destroyed", "window": window, "rows": None if rows is None else [list(row) for row in rows]}
        with self.trace.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def problem(self, text: str) -> None:
        self.verdict.problems.append(text)

    # The verdict -------------------------------------------------------------------------------------------------

    def judge(self, calm: Calm) -> Verdict:
        """To be called when the job is done. Nothing of it may be left running."""
        verdict = self.verdict
        left = self.processes.wait_until_gone([process.pid for process in self.processes.find()], LEAVE_S)
        if left:
            self.problem(f"processes left: {left}")
        self.reader.look()
        self.reader.close()
        verdict.looks = self.reader.looks
        verdict.problems += self.reader.problems
        if self.driver is not None and self.driver.returncode != calm.code:
            self.problem(f"exit code {self.driver.returncode}, undisturbed {calm.code}")
        self._verify()
        said = (self.folder / "log.txt").read_text()
        for words in ("Traceback", "This is not expected"):
            if words in said:
                self.problem(f"{words!r} on the terminal")
        self._compare(calm)
        for trace in self.traces:
            again, runs = rows_run_again(trace)
            verdict.again += len(again)
            verdict.runs += runs
        self._look_for_leftovers(calm.code)
        verdict.seconds = awake() - self._begin
        return verdict

    def _verify(self) -> None:
        job = load_manifest(self.layout)
        if job is None:
            self.problem("no manifest")
            return
        self.verdict.problems += [f"verify: {text}" for text in verify_job(job).problems]

    def _compare(self, calm: Calm) -> None:
        try:
            table = read_output(self.output)
        except (OSError, pa.ArrowException) as error:
            self.problem(f"the output can't be read: {error}")
            return
        table, undisturbed = _without_causes_of_death(table), _without_causes_of_death(calm.table)
        wanted, found = _identities(undisturbed), _identities(table)
        counts = Counter(found)
        self.verdict.lost = len(set(wanted) - counts.keys())
        self.verdict.doubled = sum(count - 1 for count in counts.values())
        if table.equals(undisturbed):
            if undisturbed is calm.table and part_hashes(self.output) != calm.hashes:
                self.problem("equal rows, but other hashes in the parts' footers")
            return
        rows = dict(zip(found, table.to_pylist(), strict=True))
        before = dict(zip(wanted, undisturbed.to_pylist(), strict=True))
        self.verdict.different = sum(key in rows and rows[key] != row for key, row in before.items())
        if not (self.verdict.lost or self.verdict.doubled or self.verdict.different):
            self.problem(f"equal values in other columns: {table.schema} instead of {calm.table.schema}")

    def close(self) -> None:
        """Ends what is left of it."""
        self.processes.end_all()
        self.reader.close()
        if self.disk is not None:
            self.disk.close(keep=not self.verdict.ok)

    def _look_for_leftovers(self, code: int) -> None:
        """Windows have gone with their last part. What processes of an earlier driver wrote after the job's end, and
        what killed ones were writing, goes with the next command, which says the same as the last."""
        lying = self._lying()
        driver = last_driver(lock_store(self.output))
        epoch = 0 if driver is None else driver.epoch
        # One that wakes makes the folder of its window before it sees that there is nothing to put into it.
        woken = any("zombie" in fault for fault in self.verdict.faults)
        if left := [path for path in lying if not (_may_lie(path, epoch) or (woken and path.is_dir()))]:
            self.problem(f"{len(left)} files left, as {self._named(left)}")
        if not lying:
            return
        # A retry does not look after the job's own files, nor a submit after a retry's.
        for command in dict.fromkeys([self.command, ("submit", str(self.path))]):
            self.command = command
            if (found := self.wait_exit(self.start())) != code:
                self.problem(f"once more after the end, {command[0]} ends with exit code {found} instead of {code}")
        if lying := self._lying():
            self.problem(f"{len(lying)} files left by the next command too, as {self._named(lying)}")

    def _lying(self) -> list[Path]:
        works = [self.layout.work, *self.layout.retries.glob("r*")]
        folders = [work / name for work in works for name in ("windows", "prepared", "segments")]
        return sorted(path for folder in (*folders, self.layout.state / "tmp") for path in folder.rglob("*"))

    def _named(self, paths: list[Path]) -> list[str]:
        return [str(path.relative_to(self.output)) for path in paths[:3]]


class SmallDisk:
    """A file system of its own, in memory, that can be filled. Where none can be mounted, `available` is False."""

    SIZE = "32m"

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self.SIZE}", "tmpfs", place], check=True)

    @staticmethod
    def available(scratch: Path) -> bool:
        try:
            SmallDisk(scratch).close(keep=False)
        except (OSError, subprocess.CalledProcessError):
            return False
        return True

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Nothing more fits, and what becomes free meanwhile is taken up as well."""
        filler = self.place / "filler"
        stop = threading.Event()

        def fill() -> None:
            with filler.open("ab", buffering=0) as file:
                while not stop.is_set():
                    for size in (1 << 20, 4_096):
                        with contextlib.suppress(OSError):
                            while file.write(bytes(size)) == size:
                                pass
                    stop.wait(0.02)

        filling = in_thread("filler", fill)
        try:
            yield
        finally:
            stop.set()
            filling.join()
            filler.unlink()

    def close(self, *, keep: bool) -> None:
        if keep:
            shutil.copytree(self.place, self.place.with_name("disk-as-it-was"))
        subprocess.run(["umount", "--lazy", self.place], check=True)


def _may_lie(path: Path, epoch: int) -> bool:
    """Whether what lies there after the end may be from before the driver of `epoch`, or half written by a killed
    process. Folders are judged by what is in them."""
    if path.parent.name == "tmp" or is_temp(path.name) or (path.is_dir() and any(path.iterdir())):
        return True
    epochs = [int(found) for name in (path.name, path.parent.name) for found in _EPOCH.findall(name)]
    if path.parent.name == "windows" and path.suffix == ".json":  # its epoch stands in it
        with contextlib.suppress(OSError, ValueError, KeyError):
            epochs.append(json.loads(path.read_bytes())["epoch"])
    return bool(epochs) and min(epochs) < epoch


def _without_causes_of_death(table: pa.Table) -> pa.Table:
    """An engine that runs a suspect alone may die of a fault of ours: then the row's message says by what."""
    errors = table["error"].to_pylist()
    if not any(error is not None and error["class"] == "engine_crash" for error in errors):
        return table
    for error in errors:
        if error is not None and error["class"] == "engine_crash":
            error["message"] = "died"
    place = table.schema.get_field_index("error")
    return table.set_column(place, table.field(place), pa.array(errors, table.field(place).type))


def _identities(table: pa.Table) -> list[Identity]:
    return list(zip(table["source_file"].to_pylist(), table["source_row"].to_pylist(), strict=True))


def rows_run_again(trace: Path) -> tuple[list[tuple[int, ...]], int]:
    """Rows that an engine was to run though a segment holding them was out before their lease; rows to run in all."""
    durable: dict[tuple[int, ...], float] = {}
    again: list[tuple[int, ...]] = []
    runs = 0
    for line in trace.read_text().splitlines() if trace.exists() else ():
        event = json.loads(line)
        window = event["window"]
        match event["event"]:
            case "published":
                for row in event["rows"]:
                    durable.setdefault((window, *row), event["time"])
            case "lease":
                rows = [(window, *row) for row in event["rows"]]
                runs += len(rows)
                again += [row for row in rows if durable.get(row, 1e99) < event["leased_at"]]
            case "destroyed" if event["rows"] is None:
                durable = {row: when for row, when in durable.items() if window is not None and row[0] != window}
            case "destroyed":
                for row in event["rows"]:
                    durable.pop((window, *row), None)
    return again, runs
