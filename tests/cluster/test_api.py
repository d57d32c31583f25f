"""The Python API, from a script without a main guard: what users write."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.cluster.conftest import FAST, JobFolder

SCRIPT = """
import json
from pathlib import Path
import datasets
import batchinfer
from batchinfer.errors import ConfigError, FailureLimitReached

datasets.disable_progress_bars()
features = datasets.Features(
    {"text": datasets.Value("large_string"), "n": datasets.Value("int8"), "kind": datasets.ClassLabel(names=["x", "y"])}
)
columns = {"text": [f"row {i}" for i in range(12)], "n": list(range(12)), "kind": [0, 1] * 6}
rows = datasets.Dataset.from_dict(columns, features=features)
out = batchinfer.map(rows, {"model": {"path": "fake://echo"}, "input": {"prompt": "{text}"}}, output="mapped")
again = batchinfer.map(rows, {"model": {"path": "fake://echo"}, "input": {"prompt": "{text}"}}, output="mapped")
Path("jobs").mkdir()
job = {"model": {"path": "fake://echo"}, "input": {"prompt": "{text}"}, "output": {"path": "own"}}
Path("jobs/map.yaml").write_text(json.dumps(job))
batchinfer.map(rows, "jobs/map.yaml", output=Path("here"))
batchinfer.map(rows, "jobs/map.yaml")
none = batchinfer.map(rows.select([]), {"model": {"path": "fake://echo"}, "input": {"prompt": "{text}"}})
result = batchinfer.submit("job.yaml")
errors = []
memory = {"model": {"path": "fake://echo"}, "input": {"path": "memory://x", "prompt": "x"}, "output": {"path": "o"}}
for job, kind in (({"model": {}}, ConfigError), ("none.yaml", ConfigError), (None, ConfigError), (memory, ConfigError)):
    try:
        batchinfer.submit(job)
    except kind as error:
        errors.append(error.exit_code)
try:
    batchinfer.map([1, 2], "job.yaml")
except ConfigError as error:
    errors.append(str(error))
print(json.dumps({
    "completions": out["completion"][:], "n": out["n"][:], "same": out.to_dict() == again.to_dict(),
    "code": result.exit_code, "rows": result.report.rows_done, "failed": dict(result.report.failed), "errors": errors,
    "features": all(features[name] == out.features[name] == none.features[name] for name in features),
    "none": [none.num_rows, none.features == out.features],
}))
"""


def test_map_and_submit(folder: JobFolder) -> None:
    folder.input({"text": ["a", None, "c"]})
    folder.job(FAST)
    script = folder.root / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder.root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["completions"] == [f"row {i}" for i in range(12)] and said["n"] == list(range(12))
    assert said["same"]
    # A path in Python's words starts from where Python runs, one in a job file's from there.
    for place in ("here", "jobs/own"):
        assert list((folder.root / place).glob("part-*.parquet"))
    assert (said["code"], said["rows"], said["failed"]) == (3, 3, {"invalid_prompt": 1})
    assert said["errors"][:4] == [2, 2, 2, 2] and "datasets.Dataset" in said["errors"][4]
    assert said["features"], "the dataset's own features come back"
    assert said["none"] == [0, True]


RELATIVE = """
import datasets
import batchinfer

datasets.disable_progress_bars()
rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
print(len(batchinfer.map(rows, "elsewhere/job.yaml")))
"""


def test_map_with_a_job_file_in_another_folder(folder: JobFolder) -> None:
    """Its relative paths start from its own folder, as in `submit`."""
    (folder.root / "elsewhere").mkdir()
    text = "model: {path: 'fake://hash'}\ninput: {prompt_column: text}\noutput: {path: result}\n"
    (folder.root / "elsewhere" / "job.yaml").write_text(text)
    script = folder.root / "script.py"
    script.write_text(RELATIVE)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder.root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "2"
    assert list((folder.root / "elsewhere" / "result").glob("part-*.parquet"))


AGAIN = """
import json
import shutil
import batchinfer
import pyarrow.dataset as ds

said = []
for prompt in ("first {text}", "second {text}", "third {text}"):
    job = {
        "model": {"path": "fake://echo"},
        "input": {"path": "in", "prompt": prompt},
        "output": {"path": "out"},
        "sampling": {"max_tokens": 100},
    }
    if prompt.startswith("third"):
        shutil.rmtree("out")
    batchinfer.submit(job, fresh=not prompt.startswith("third"))
    said.append(ds.dataset("out", format="parquet").to_table()["completion"].to_pylist())
print(json.dumps(said))
"""


def test_jobs_after_each_other_in_one_process_are_jobs_of_their_own(folder: JobFolder) -> None:
    """Over the same output, whose epochs begin anew once it is moved aside or deleted."""
    folder.input({"text": ["a", "b"]})
    script = folder.root / "script.py"
    script.write_text(AGAIN)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder.root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == [[f"{word} a", f"{word} b"] for word in ("first", "second", "third")]
