"""verify finds what is wrong and names it; status, from files alone; sums and exit codes."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.parts import FOOTER_KEY
from batchinfer.errors import ConfigError
from batchinfer.job import windows as windows_module
from batchinfer.job.driver_lock import DriverLock, DriverProcess, lock_store
from batchinfer.job.layout import JobLayout
from batchinfer.job.manifest import freeze_job, load_manifest
from batchinfer.job.report import summarize
from batchinfer.job.resolve import resolve_job
from batchinfer.job.status import JobStatus, read_status, write_status
from batchinfer.job.verify import verify_job


@pytest.fixture
def done(shop, monkeypatch):
    monkeypatch.setattr(windows_module, "MAX_CHUNK_ROWS", 5)
    shop.write("a.parquet", {"prompt": [f"p{i}" for i in range(13)], "id": list(range(13))})
    job = shop.submit()
    assert verify_job(job).ok
    return shop, job


def rewrite(path, change) -> None:
    """The part with its rows changed and its footer kept, as a careless tool would leave it."""
    footer = pq.read_metadata(path).metadata[FOOTER_KEY]
    table = change(pq.read_table(path))
    pq.write_table(table.replace_schema_metadata({FOOTER_KEY: footer}), path)


def problems(job) -> str:
    report = verify_job(job)
    assert not report.ok
    return "\n".join(report.problems)


def test_missing_part_names_its_rows(done):
    shop, job = done
    shop.parts()[1].unlink()
    text = problems(job)
    assert "part-00000-00001.parquet (rows 5 to 9 of a.parquet): not there" in text
    assert verify_job(job).rows_found == 8


def test_truncated_part(done):
    shop, job = done
    part = shop.parts()[2]
    part.write_bytes(part.read_bytes()[:-8])
    assert "part-00000-00002.parquet (rows 10 to 12 of a.parquet)" in problems(job)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.slice(0, 4), "part-00000-00000.parquet"),
        (lambda t: pa.concat_tables([t, t.slice(0, 1)]), "part-00000-00000.parquet"),
        (lambda t: t.take([1, 0, 2, 3, 4]), "out of place"),
        (lambda t: t.set_column(2, "source_file", pa.array(["b"] * 5)), "another source file"),
        (lambda t: t.set_column(4, "completion", pa.array(["x"] * 5)), "result columns do not match"),
        (lambda t: t.set_column(0, "prompt", pa.array(["x"] * 5)), "carried input columns"),
    ],
)
def test_changed_rows_are_found(done, change, named):
    shop, job = done
    rewrite(shop.parts()[0], change)
    text = problems(job)
    assert named in text and "rows 0 to 4 of a.parquet" in text
    assert "part-00000-00001" not in text


def test_swapped_parts(done):
    shop, job = done
    first, second = shop.parts()[:2]
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    text = problems(job)
    assert "its start is 5, the job's is 0" in text and "its start is 0, the job's is 5" in text


def test_foreign_part_in_the_folder(done):
    shop, job = done
    (shop.output / "part-00009-00000.parquet").write_bytes(shop.parts()[0].read_bytes())
    assert "part-00009-00000.parquet: no chunk of this job" in problems(job)


def test_input_that_changed_since(done):
    shop, job = done
    shop.write("a.parquet", {"prompt": [f"p{i}" if i != 7 else "other" for i in range(13)], "id": list(range(13))})
    text = problems(job)
    assert "rows 5 to 9 of a.parquet" in text and "prompt columns" in text


def test_other_settings_in_the_footer(done):
    shop, job = done
    path = shop.parts()[0]
    footer = json.loads(pq.read_metadata(path).metadata[FOOTER_KEY])
    table = pq.read_table(path)
    changed = json.dumps({**footer, "fingerprint": "0" * 64}).encode()
    pq.write_table(table.replace_schema_metadata({FOOTER_KEY: changed}), path)
    assert "its fingerprint is" in problems(job)


def test_status_from_parts_alone(done):
    shop, _ = done
    status = read_status(shop.output)
    assert (status.state, status.rows_done, status.rows_total, status.name) == ("finished", 13, 13, "test")
    shop.parts()[0].unlink()
    status = read_status(shop.output)
    assert (status.state, status.rows_done, status.parts_done, status.parts_total) == ("not_started", 8, 2, 3)


def test_status_of_a_folder_without_a_job(tmp_path):
    with pytest.raises(ConfigError, match="no batchinfer job here"):
        read_status(tmp_path)


def test_status_of_a_living_and_of_a_dead_driver(shop):
    layout = JobLayout(shop.output)
    write_status(layout, JobStatus(name="j", state="running", rows_total=10, rows_done=4, eta_s=9.0))
    lock = DriverLock.claim(lock_store(shop.output))
    status = read_status(shop.output)
    assert (status.state, status.rows_done, status.eta_s) == ("running", 4, 9.0)
    assert status.quiet_s < 60
    lock.release()
    status = read_status(shop.output)
    assert status.state == "interrupted" and "run the same command again" in status.message
    me = DriverProcess.current()
    DriverLock.claim(lock_store(shop.output), process=DriverProcess(me.host, me.pid, me.scope, "1"))
    assert read_status(shop.output).state == "interrupted"
    DriverLock.claim(lock_store(shop.output), process=DriverProcess("node7", 4, "x", "1"))
    assert read_status(shop.output).state == "running", "another host's process can't be judged from here"


def test_status_written_by_another_version_or_damaged(done):
    shop, job = done
    write_status(job.layout, JobStatus(name="j", state="finished", rows_total=13))
    data = json.loads(job.layout.status.read_text())
    job.layout.status.write_text(json.dumps({**data, "new_field": 1}))
    assert read_status(shop.output).name == "j"
    job.layout.status.write_text("{")
    assert read_status(shop.output).name == "test"


def test_sums_over_parts(shop):
    shop.write("a.parquet", {"prompt": ["abc", None, "de"]})
    job = freeze_job(resolve_job(shop.spec()))
    assert summarize(job).rows_done == 0 and not summarize(job).complete
    shop.run(job)
    report = summarize(job)
    assert (report.prompt_tokens, report.cached_tokens, report.computed_tokens) == (5, 2, 3)
    assert report.completion_tokens == 6 and report.failed == {"invalid_prompt": 1}
    assert report.finish_reasons == {"stop": 2}
    assert report.exit_code == 3 and report.num_bytes > 0


def test_any_file_that_readers_would_take_for_rows_is_named(done):
    shop, job = done
    for name in ("copy of part-00000-00000.parquet", "_hidden.parquet", "._x.parquet", "notes.txt"):
        (shop.output / name).write_bytes(shop.parts()[0].read_bytes())
    report = verify_job(job)
    assert len(report.problems) == 1 and "copy of part" in report.problems[0]


def test_a_footer_that_lacks_what_proves_the_part_is_a_problem_not_a_crash(done):
    shop, job = done
    path = shop.parts()[0]
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({FOOTER_KEY: json.dumps({"num_rows": table.num_rows})}), path)
    assert "lacks failed" in problems(job)


@pytest.mark.parametrize("claim", [b"", b"{", b"[]", b'{"process": 3}'])
def test_status_with_a_damaged_claim(shop, claim):
    shop.write("a.parquet", {"prompt": ["a"]})
    job = freeze_job(resolve_job(shop.spec()))
    DriverLock.claim(lock_store(shop.output))
    next(job.layout.driver.glob("*.json")).write_bytes(claim)
    write_status(job.layout, JobStatus(name="test", state="running", rows_total=1))
    assert read_status(shop.output).state == "running"


def test_an_output_that_was_moved_is_looked_at_where_it_is(done, tmp_path):
    shop, _ = done
    moved = JobLayout(tmp_path / "elsewhere")
    shop.output.rename(moved.output)
    assert verify_job(load_manifest(moved)).ok
    shop.output.mkdir()  # another's by now
    next(moved.output.glob("part-*")).unlink()
    assert "not there" in "\n".join(verify_job(load_manifest(moved)).problems)
    moved.status.unlink(missing_ok=True)
    assert read_status(moved.output).rows_done < 13
