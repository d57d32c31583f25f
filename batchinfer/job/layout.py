"""Where a job's files lie: the parts in the output folder, everything else under `__batchinfer/` in it.

    OUT/part-00000-00000.parquet          the output: input file number, chunk number in that file
    OUT/__batchinfer/manifest.json         the resolved job, written once (`job.manifest`)
    OUT/__batchinfer/runs/e000001.json     the job as run under a driver's epoch
    OUT/__batchinfer/driver/               who drives (`job.driver_lock`)
    OUT/__batchinfer/windows/w0000.json    a planned window's units (`job.units`)
    OUT/__batchinfer/prepared/w0000-e000001/{c000005-<hash>,u00012}.arrow   prepared rows, by chunk, then by unit
    OUT/__batchinfer/segments/w0000/       results: engine segments, compacted units, errors found while planning,
                                           partial results of rows in flight at a stop (`data.partials`)
    OUT/__batchinfer/retries/r0001/        a retry: retry.json and windows/ prepared/ segments/ of its own
    OUT/__batchinfer/timings.json          how the last run's time went (`cluster.timings`)
    OUT/__batchinfer/{status.json,log.txt,tmp/,input/}

Names only; nothing here touches the output folder. Standard library only.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from batchinfer.data.writers import writer_mark

STATE_FOLDER = "__batchinfer"
_SERIAL = itertools.count()
_PART_NAME = re.compile(r"part-(\d{5,})-(\d{5,})\.parquet")


def part_name(file: int, chunk_in_file: int) -> str:
    """Name of the part that holds a chunk: `file` is the input file's number, never its name."""
    return f"part-{file:05d}-{chunk_in_file:05d}.parquet"


def is_part_name(name: str) -> bool:
    return _PART_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class JobLayout:
    """Paths of one job. `retry` is None for the job itself, else the number of the retry whose state this is."""

    output: Path
    retry: int | None = None

    @property
    def state(self) -> Path:
        return self.output / STATE_FOLDER

    @property
    def manifest(self) -> Path:
        return self.state / "manifest.json"

    @property
    def status(self) -> Path:
        return self.state / "status.json"

    @property
    def timings(self) -> Path:
        return self.state / "timings.json"

    @property
    def log(self) -> Path:
        return self.state / "log.txt"

    @property
    def driver(self) -> Path:
        return self.state / "driver"

    @property
    def input_cache(self) -> Path:
        return self.state / "input"

    @property
    def retries(self) -> Path:
        return self.state / "retries"

    @property
    def work(self) -> Path:
        """The folder of windows, prepared rows and segments: the job's own, or the retry's."""
        return self.state if self.retry is None else self.retries / f"r{self.retry:04d}"

    def for_retry(self, number: int) -> JobLayout:
        return JobLayout(self.output, number)

    def key(self, path: Path) -> str:
        """A path as the key of a Store whose root is the output folder."""
        return path.relative_to(self.output).as_posix()

    @property
    def retry_plan(self) -> Path:
        """What a retry runs again (`job.retry`)."""
        return self.work / "retry.json"

    def run(self, epoch: int) -> Path:
        return self.work / "runs" / f"e{epoch:06d}.json"

    def window(self, window: int) -> Path:
        return self.work / "windows" / f"w{window:04d}.json"

    def prepared(self, window: int, epoch: int) -> Path:
        return self.work / "prepared" / f"w{window:04d}-e{epoch:06d}"

    def prepared_chunk(self, window: int, epoch: int, chunk: int, content_hash: str) -> Path:
        """Named by what was read, so that an attempt that read other values can't pass for this one."""
        return self.prepared(window, epoch) / f"c{chunk:06d}-{content_hash[:12]}.arrow"

    def prepared_unit(self, window: int, epoch: int, unit: int) -> Path:
        return self.prepared(window, epoch) / f"u{unit:05d}.arrow"

    def segments(self, window: int) -> Path:
        return self.work / "segments" / f"w{window:04d}"

    def plan_segment(self, window: int, epoch: int, chunk: int) -> Path:
        """Errors that planning found in a chunk; they count as done."""
        return self.segments(window) / f"plan-c{chunk:06d}-e{epoch:06d}.arrow"

    def unit_results(self, window: int, unit: int) -> Path:
        """A finished unit's compacted results: sorted by (chunk, row), one record batch per chunk."""
        return self.segments(window) / f"u{unit:05d}.arrow"

    def replacement(self, part: str, epoch: int) -> Path:
        """Where the driver of an epoch writes what is to replace a part: under tmp/, as `temporary`."""
        return self.temporary(f"e{epoch:06d}-{part}")

    def temporary(self, name: str) -> Path:
        """A path under tmp/ that no other process, thread or call uses: it names its writer, and a serial number."""
        return self.state / "tmp" / f"{writer_mark()}~{next(_SERIAL)}~{name}"
