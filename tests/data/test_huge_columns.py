"""Columns of more than 2 GB in one row group or file are read in bounded batches, in every form of input."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.dataset import open_dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS, TIMES = 10_000, 20
TEXT = "0123456789 " * 1_000  # 11 KB: 2.2 GB in all
MOST = 700 << 20  # bytes of Arrow memory at any moment


def one_chunk(kind: str) -> pa.Array:
    texts = [f"{i:05d} {TEXT}" for i in range(ROWS)]
    if kind == "messages":
        return pa.array([[{"role": "user", "content": text}] for text in texts])
    return pa.array(texts, pa.string() if kind == "string" else pa.large_string())


def write(path: Path, form: str, kind: str) -> None:
    table = pa.table({"text": pa.chunked_array([one_chunk(kind)] * TIMES)})
    if form == "parquet":
        pq.write_table(table, path / "rows.parquet", row_group_size=ROWS * TIMES, use_dictionary=False)
        assert pq.read_metadata(path / "rows.parquet").num_row_groups == 1
    else:
        with pa.ipc.new_file(path / "rows.arrow", table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("kind", ["string", "large_string", "messages"])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_all_rows_come_in_order_and_in_little_memory(tmp_path: Path, form: str, kind: str) -> None:
    write(tmp_path, form, kind)
    before, most, seen = pa.total_allocated_bytes(), 0, 0
    for batch in open_dataset(str(tmp_path)).read(0):
        most = max(most, pa.total_allocated_bytes() - before)
        for row in batch.to_rows():
            text = row["text"][0]["content"] if kind == "messages" else row["text"]
            assert int(text[:5]) == seen % ROWS and len(text) == 6 + len(TEXT)
            seen += 1
    assert seen == ROWS * TIMES
    assert most < MOST
