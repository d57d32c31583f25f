"""A plain reader beside the job: opens the output folder again and again, and keeps what it finds wrong.

What must hold at any moment: every file that a reader takes for data is a whole part of whole rows, in order, and no
row stands in two of them. DuckDB, whose globs take other names than those of others, is asked too, where it is there.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from batchinfer.cluster.lifecycle import in_thread

LOOK_EVERY_S = 0.2
ASK_DUCKDB_EVERY = 5  # looks
_DOUBLED = """
    SELECT source_file, source_row FROM read_parquet($parts, union_by_name = true)
    GROUP BY ALL HAVING count(*) > 1 LIMIT 3
"""


class PlainReader:
    """`spoiled`: files that a fault has cut short, by inode: they are not held against the job."""

    def __init__(self, output: Path) -> None:
        self.problems: list[str] = []
        self.looks = 0
        self.spoiled: set[int] = set()
        self._output = output
        self._has_duckdb = importlib.util.find_spec("duckdb") is not None
        self._known: dict[tuple[str, int, int], tuple[str, int, int]] = {}  # by name, inode, time: what a file holds
        self._stop = threading.Event()
        self._thread = in_thread("plain-reader", self._read)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        if not self._output.is_dir():
            return
        self.looks += 1
        if self._has_duckdb and self.looks % ASK_DUCKDB_EVERY == 1:
            self.problems += self.ask_duckdb()
        ranges = []
        for path in sorted(self._output.glob("[!._]*.parquet")):
            try:
                stat = path.stat()
                key = (path.name, stat.st_ino, stat.st_mtime_ns)
                if key not in self._known:
                    self._known[key] = self._rows_of(path)
                ranges.append((*self._known[key], path.name))
            except FileNotFoundError:
                continue  # moved aside, since it was cut short
            except (OSError, pa.ArrowException, ValueError) as error:
                if stat.st_ino not in self.spoiled:
                    self.problems.append(f"a reader found {path.name} broken: {error}")
                    self.spoiled.add(stat.st_ino)
        ranges.sort()
        for (file, _, stop, name), (other, start, _, second) in itertools.pairwise(ranges):
            if file == other and start < stop:
                self.problems.append(f"a reader found rows of {name} again in {second}")

    def ask_duckdb(self) -> list[str]:
        """Its own glob is taken. It may fail where a part was cut short by a fault or was moved aside meanwhile, but
        may not give a row twice."""
        import duckdb

        if not any(self._output.glob("*.parquet")):
            return []
        with duckdb.connect(config={"threads": 1}) as connection:
            try:
                found = connection.execute(_DOUBLED, {"parts": f"{self._output}/*.parquet"}).fetchall()
            except duckdb.Error as error:
                gone = any(words in str(error) for words in ("No such file", "No files found"))
                return [] if gone or self.spoiled else [f"DuckDB can't read the parts: {error}"]
        return [f"DuckDB found row {row} of {file} twice" for file, row in found]

    @staticmethod
    def _rows_of(path: Path) -> tuple[str, int, int]:
        table = pq.read_table(path)
        files, rows = set(table["source_file"].to_pylist()), table["source_row"].to_pylist()
        if not rows or len(files) != 1 or rows != list(range(rows[0], rows[0] + len(rows))):
            raise ValueError(f"its rows are {rows[:5]}… of {sorted(files)}")
        return files.pop(), rows[0], rows[-1] + 1


def read_output(output: Path) -> pa.Table:
    """All rows, in order of their identity."""
    table = ds.dataset(output, format="parquet").to_table()
    return table.sort_by([("source_file", "ascending"), ("source_row", "ascending")]).replace_schema_metadata(None)
