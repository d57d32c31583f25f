"""`verify --deep`: rows run again have the same bytes, a changed one is found, another model or machine is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.arithmetic import this_machine
from batchinfer.cli.texts import deep_text
from batchinfer.cluster import deep_verify
from batchinfer.cluster.deep_verify import verify_deep
from batchinfer.data.parts import FOOTER_KEY
from batchinfer.data.values import ValueHasher
from batchinfer.errors import ConfigError, ModelError
from batchinfer.job.manifest import ResolvedJob, freeze_job
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import JobSpec
from batchinfer.job.verify import verify_job
from batchinfer.testing.fuzzing.trial import run_here
from batchinfer.testing.tiny import make_tiny
from tests.cluster.conftest import JobFolder

FAKE = "fake://hash?max_model_len=128&eos_rate=0.05"


def finished(root: Path, model: str, **sampling: Any) -> ResolvedJob:
    """A job over 40 rows, of which two are error rows; every third has a temperature of its own."""
    texts = [None if i in (7, 30) else f"{'a shared beginning of ' * (i % 2)}row {i}" for i in range(40)]
    heats = [0.9 if i % 3 == 0 else None for i in range(40)]
    (root / "in").mkdir(parents=True)
    pq.write_table(pa.table({"text": texts, "heat": heats}), root / "in" / "rows.parquet")
    spec = JobSpec.from_dict(
        {
            "model": {"path": model},
            "input": {"path": "in", "prompt": "{text}", "sampling_columns": {"temperature": "heat"}},
            "output": {"path": "out", "token_ids": True},
            "sampling": {"max_tokens": 12, "seed": 5, **sampling},
        },
        base=root,
    )
    job = freeze_job(resolve_job(spec))
    run_here(job)
    return job


def change(job: ResolvedJob, row: int, completion: Any) -> None:
    """Puts another completion into the only part, with its checksum mended."""
    path = job.layout.output / "part-00000-00000.parquet"
    table = pq.read_table(path)
    metadata = pq.read_metadata(path).metadata
    values = table["completion"].to_pylist()
    values[row] = completion
    place = table.schema.get_field_index("completion")
    table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    footer = json.loads(metadata[FOOTER_KEY])
    hasher = ValueHasher(table.schema.names[table.schema.names.index("source_file") :])
    for batch in table.to_batches():
        hasher.update(batch)
    footer["result_hash"] = hasher.hexdigest()
    pq.write_table(table.replace_schema_metadata({FOOTER_KEY: json.dumps(footer).encode()}), path)


@pytest.mark.parametrize("sampling", [{}, {"n": 3, "logprobs": 2}, {"stop": ["a", "Q", "zz"], "min_tokens": 2}])
def test_rows_run_again_have_the_same_bytes(sampling: dict[str, Any], tmp_path: Path) -> None:
    job = finished(tmp_path, FAKE, **sampling)
    report = verify_deep(job, 1000)
    assert report.ok, report
    assert report.rows_run == 38
    assert deep_text(report) == "Run again: 38 completed rows, with the same bytes."


def test_a_changed_row_with_mended_checksums_is_found_by_name(tmp_path: Path) -> None:
    job = finished(tmp_path, FAKE)
    change(job, 9, "another completion")
    assert verify_job(job).ok
    report = verify_deep(job, 1000)
    assert len(report.differing) == 1
    assert "NOT reproduced" in deep_text(report)
    assert "part-00000-00000.parquet, row 9 of rows.parquet: completion is ['another completion']" in deep_text(report)


@pytest.mark.parametrize("n", [1, 2])
def test_a_completion_that_was_taken_away_is_found(n: int, tmp_path: Path) -> None:
    job = finished(tmp_path, FAKE, n=n)
    change(job, 9, None)
    assert verify_job(job).ok
    (found,) = verify_deep(job, 1000).differing
    assert "row 9 of rows.parquet: completion is " in found


def test_where_no_row_is_completed_nothing_is_claimed(tmp_path: Path) -> None:
    job = finished(tmp_path, "fake://hash?max_model_len=4")  # all are too long
    report = verify_deep(job)
    assert report.rows_run == 0
    assert "with the same bytes" not in deep_text(report)


def test_the_sample_is_always_the_same_and_of_completed_rows(tmp_path: Path) -> None:
    job = finished(tmp_path, FAKE)
    first, again, more = (deep_verify._choose(job, size, []) for size in (9, 9, 1000))
    assert first == again
    assert sum(len(rows) for _, rows in first) == 9
    assert {7, 30}.isdisjoint(row for _, rows in more for row in rows)


def test_a_real_model_gives_the_same_bytes_and_is_known_by_its_hash(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model")
    job = finished(tmp_path / "job", str(model), n=2, logprobs=1, ignore_eos=True)
    assert verify_deep(job, 12).ok
    change(job, 4, ["x", "y"])
    assert [text for text in verify_deep(job, 1000).differing if "row 4 of" in text]
    other = make_tiny(tmp_path / "other", seed=1)
    (model / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"is not the model .*model\.hash differ"):
        verify_deep(job, 12)
    for path in model.iterdir():
        path.unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        verify_deep(job, 12)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("versions.torch", r"torch was 0\.0, here it is "),
        ("engine.instruction_level", r"instruction_level was 0\.0"),
        ("engine.kernels", "can't be had on this machine"),
        ("numeric_format.int8", r"numeric_format\.int8 was 0\.0, here it is None"),
    ],
)
def test_another_installation_or_machine_is_refused(key: str, says: str, tmp_path: Path) -> None:
    job = finished(tmp_path, FAKE)
    frozen = replace(job, semantic={**job.semantic, key: "0.0"})
    with pytest.raises(ConfigError, match=says):
        deep_verify.refuse_other_arithmetic(frozen, this_machine())


def test_the_command(folder: JobFolder) -> None:
    folder.input(20)
    folder.job()
    folder.run()
    said = folder.run("verify", "job.yaml", "--deep", "--sample", "5")
    assert "Proved: " in said
    assert "Run again: 5 completed rows, with the same bytes." in said
    assert "give --deep" in folder.run("verify", "job.yaml", "--sample", "5", code=2)
