"""Partial results: what was written is read, the longest of several; what can't be believed is left out, and told."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batchinfer.data.partials import (
    PARTIAL_SCHEMA,
    PartialRow,
    _checksum,
    longest_rows,
    prompt_key,
    read_partials,
    write_partials,
)
from batchinfer.types.request import PartialOutput, TokenLogprobs

JOB = "a fingerprint"
PROMPT = prompt_key(np.arange(5, dtype=np.int32), None)


def partial(row: int, *samples: int, num_top: int | None = None, chunk: int = 3) -> PartialRow:
    """A row with so many tokens by sample, which are the same however many there are."""
    outputs = []
    for place, length in enumerate(samples):
        draw = random.Random(f"{row} {place}")
        tokens = tuple(draw.randrange(1 << 17) for _ in range(length))
        entries = None
        if num_top is not None:
            entries = tuple(
                TokenLogprobs(token, -token / 7, 1 + at % 3, tuple((token + k, -k / 3) for k in range(num_top)))
                for at, token in enumerate(tokens)
            )
        outputs.append(PartialOutput(tokens, entries))
    return PartialRow(chunk=chunk, row=row, prompt=PROMPT, outputs=tuple(outputs))


def outputs_of(*rows: PartialRow) -> dict[object, object]:
    return {(row.chunk, row.row, row.prompt): row.outputs for row in rows}


@pytest.mark.parametrize("num_top", [None, 0, 2, 20])
def test_what_is_written_is_read_to_the_bit(tmp_path: Path, num_top: int | None) -> None:
    rows = [partial(1, 7, num_top=num_top), partial(1 << 35, 0, 5, 1), partial(2, 3, 0, num_top=num_top, chunk=0)]
    path = write_partials(tmp_path, 12, 3, 5, rows, fingerprint=JOB)
    assert path.name.startswith("partial-u00012-e000003-l000005-") and [*tmp_path.iterdir()] == [path]
    assert read_partials(tmp_path, 12, fingerprint=JOB) == outputs_of(*rows)
    assert read_partials(tmp_path, 1, fingerprint=JOB) == {}
    assert read_partials(tmp_path / "nowhere", 12, fingerprint=JOB) == {}
    # Written again, by the same hand or another one's: nothing changes.
    assert write_partials(tmp_path, 12, 3, 5, rows, fingerprint=JOB) == path and [*tmp_path.iterdir()] == [path]


def test_of_each_sample_the_longest_counts_whoever_wrote_it(tmp_path: Path) -> None:
    write_partials(tmp_path, 0, 1, 1, [partial(1, 9, 2, num_top=1), partial(2, 4)], fingerprint=JOB)
    write_partials(tmp_path, 0, 2, 1, [partial(1, 8, 6, num_top=1), partial(3, 1)], fingerprint=JOB)
    write_partials(tmp_path, 0, 2, 7, [partial(1, 3, 1, num_top=1), partial(2, 5)], fingerprint=JOB)
    longest = outputs_of(partial(1, 9, 6, num_top=1), partial(2, 5), partial(3, 1))
    assert read_partials(tmp_path, 0, fingerprint=JOB) == longest


def test_a_row_with_another_prompt_is_another_row(tmp_path: Path) -> None:
    tokens = np.arange(5, dtype=np.int32)
    keys = {prompt_key(tokens, None), prompt_key(tokens, '{"n": 2}'), prompt_key(tokens[:4], None), PROMPT}
    assert len(keys) == 3
    write_partials(tmp_path, 0, 1, 1, [partial(1, 9)], fingerprint=JOB)
    assert (3, 1, prompt_key(tokens[:4], None)) not in read_partials(tmp_path, 0, fingerprint=JOB)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def published(path: Path, table: pa.Table) -> None:
    """With a name that fits what is in it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    path.with_name(f"{path.stem.rpartition('-')[0]}-{_checksum(data)}.arrow").write_bytes(data)
    path.unlink()


def other_columns(path: Path) -> None:
    published(path, pa.table({"chunk": [1], "row": [2]}))


def samples_missing(path: Path) -> None:
    with pa.ipc.open_file(pa.OSFile(str(path))) as reader:
        published(path, reader.read_all().slice(1))


def logprobs_missing(path: Path) -> None:
    with pa.ipc.open_file(pa.OSFile(str(path))) as reader:
        table = reader.read_all()
    place = PARTIAL_SCHEMA.get_field_index("logprobs")
    empty = pa.array([[] for _ in range(len(table))], PARTIAL_SCHEMA.field(place).type)
    published(path, table.set_column(place, PARTIAL_SCHEMA.field(place), empty))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def instead_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def no_arrow_file(path: Path) -> None:
    data = b"something else"
    path.with_name(f"{path.stem.rpartition('-')[0]}-{_checksum(data)}.arrow").write_bytes(data)
    path.unlink()


DAMAGES = [flip, cut, lambda path: os.truncate(path, 0), lambda path: os.truncate(path, path.stat().st_size - 1)]
DAMAGES += [other_columns, samples_missing, logprobs_missing, no_arrow_file, instead_a_folder]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_as_it_was_written_is_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    good = partial(1, 5, num_top=1)
    write_partials(tmp_path, 0, 1, 1, [good], fingerprint=JOB)
    damage(write_partials(tmp_path, 0, 1, 2, [partial(2, 9, 4, num_top=1)], fingerprint=JOB))
    with caplog.at_level(logging.INFO):
        assert read_partials(tmp_path, 0, fingerprint=JOB) == outputs_of(good)
    assert len(caplog.records) == 1 and "their rows begin anew" in caplog.text


def test_results_of_other_settings_are_left_out_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_partials(tmp_path, 0, 1, 1, [partial(1, 5)], fingerprint="of another model")
    assert read_partials(tmp_path, 0, fingerprint=JOB) == {}
    assert len(caplog.records) == 1 and "of another job" in caplog.text


def test_the_longest_rows_are_kept_as_far_as_they_fit() -> None:
    rows = [partial(row, length) for row, length in enumerate([3, 0, 8, 1, 5])]
    assert [row.row for row in longest_rows(rows)] == [2, 4, 0, 3]
    assert [row.row for row in longest_rows(rows, 13)] == [2, 4]
    assert [row.row for row in longest_rows(rows, 7)] == [4, 3]
    assert partial(1, 4, 2, num_top=3).num_values == 6 + 6 * 9
