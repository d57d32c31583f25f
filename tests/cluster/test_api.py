"""The Python API, from a script without a main guard: what users write."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.cluster.conftest import FAST, JobFolder

SCRIPT = """
import json
import datasets
import batchinfer
from batchinfer.errors import ConfigError, FailureLimitReached

datasets.disable_progress_bars()
rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(12)], "n": list(range(12))})
out = batchinfer.map(rows, {"model": {"path": "fake://echo"}, "input": {"prompt": "{text}"}}, output="mapped")
again = batchinfer.map(rows, {"model": {"path": "fake://echo"}, "input": {"prompt": "{text}"}}, output="mapped")
result = batchinfer.submit("job.yaml")
errors = []
for job, kind in (({"model": {}}, ConfigError), ("none.yaml", ConfigError)):
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
    assert (said["code"], said["rows"], said["failed"]) == (3, 3, {"invalid_prompt": 1})
    assert said["errors"][:2] == [2, 2] and "datasets.Dataset" in said["errors"][2]
