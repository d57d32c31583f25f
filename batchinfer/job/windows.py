"""Cutting the input into chunks (one part each) and windows (planned, run and committed together).

A pure function of the input's description: never of the worker count, free memory or time, so that a resumed job
cuts exactly as before. Files added by --extend form a new generation: its chunks and windows come after all
earlier ones, whose numbers stay. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchinfer.job.layout import part_name

FIRST_WINDOW_ROWS = 16_384
MAX_WINDOW_ROWS = 262_144
MAX_WINDOW_TEXT_BYTES = 128 * 2**20
MAX_WINDOW_CHUNKS = 4_096  # many tiny files: bounds a window's bookkeeping
MAX_CHUNK_ROWS = 65_536
MAX_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShape:
    """What cutting needs to know of an input file.

    num_bytes    uncompressed size of all columns, an estimate: bounds a part
    text_bytes   same of the columns that prompts are made of: bounds a window
    generation   0 for the files of the first submit, +1 with each --extend
    """

    index: int
    num_rows: int
    num_bytes: int = 0
    text_bytes: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows `start .. stop` of input file `file`: exactly the rows of one part.

    chunk      number of the chunk in the job
    in_file    number of the chunk in its file
    """

    chunk: int
    file: int
    in_file: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def part(self) -> str:
        return part_name(self.file, self.in_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive chunks. Disk and memory hold a few windows at a time, never the whole job."""

    window: int
    chunks: tuple[Chunk, ...]

    @property
    def num_rows(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)


def cut_windows(files: Sequence[FileShape], max_rows: int | None = None) -> tuple[Window, ...]:
    """All windows of the job. Every row is in exactly one chunk and every chunk in exactly one window.

    The first window holds about 16,384 rows, each next one twice as many up to 262,144 rows or 128 MiB of text,
    at least one row; with `max_rows` about so many at most. A chunk never crosses a file or a window; a file without
    rows gets one empty chunk, so that its part says that it was read. Where less than a quarter of the room would be
    left over in a file, it is taken along rather than left as a sliver.
    """
    most = MAX_WINDOW_ROWS if max_rows is None else min(max_rows, MAX_WINDOW_ROWS)
    windows: list[Window] = []
    current: list[Chunk] = []
    rows, text, next_chunk = 0, 0.0, 0

    def close() -> None:
        nonlocal current, rows, text
        if current:
            windows.append(Window(window=len(windows), chunks=tuple(current)))
        current, rows, text = [], 0, 0.0

    for generation in sorted({shape.generation for shape in files}):
        for shape in sorted((s for s in files if s.generation == generation), key=lambda s: s.index):
            start, in_file = 0, 0
            while start < shape.num_rows or in_file == 0:
                limit = min(FIRST_WINDOW_ROWS << min(len(windows), 16), most)
                left = shape.num_rows - start
                room = min(limit - rows, _rows_within(MAX_WINDOW_TEXT_BYTES - text, shape.text_bytes, shape.num_rows))
                if (current and room < min(left, max(1, limit // 16))) or len(current) >= MAX_WINDOW_CHUNKS:
                    close()
                    continue
                chunk_limit = min(
                    MAX_CHUNK_ROWS, max(1, _rows_within(MAX_CHUNK_BYTES, shape.num_bytes, shape.num_rows))
                )
                take = left if left <= min(room + room // 4, chunk_limit) else min(max(room, 1), chunk_limit, left)
                current.append(
                    Chunk(chunk=next_chunk, file=shape.index, in_file=in_file, start=start, stop=start + take)
                )
                next_chunk += 1
                in_file += 1
                start += take
                rows += take
                text += take * shape.text_bytes / max(shape.num_rows, 1)
        close()
    return tuple(windows)


def _rows_within(room_bytes: float, total_bytes: int, num_rows: int) -> int:
    """How many rows of average size fit into `room_bytes`."""
    if total_bytes <= 0 or num_rows <= 0:
        return MAX_WINDOW_ROWS
    return max(0, int(room_bytes * num_rows / total_bytes))


def retry_windows(
    windows: Sequence[Window], rows: Mapping[int, Sequence[int]], max_rows: int | None = None
) -> tuple[Window, ...]:
    """The chunks that own rows to be retried, unchanged, in windows of about 262,144 such rows, or `max_rows`."""
    most = MAX_WINDOW_ROWS if max_rows is None else min(max_rows, MAX_WINDOW_ROWS)
    found: list[Window] = []
    current: list[Chunk] = []
    count = 0
    for chunk in (chunk for window in windows for chunk in window.chunks if rows.get(chunk.chunk)):
        current.append(chunk)
        count += len(rows[chunk.chunk])
        if count >= most or len(current) >= MAX_WINDOW_CHUNKS:
            found.append(Window(window=len(found), chunks=tuple(current)))
            current, count = [], 0
    if current:
        found.append(Window(window=len(found), chunks=tuple(current)))
    return tuple(found)
