"""Memory of planning and commit does not grow with the dataset: later windows add nothing to the first ones."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

CODE = """
import json, resource, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from conftest import Workshop
from batchinfer.job import windows
from batchinfer.job.manifest import freeze_job
from batchinfer.job.resolve import resolve_job
windows.FIRST_WINDOW_ROWS = windows.MAX_WINDOW_ROWS = 20_000
shop = Workshop.__new__(Workshop)
shop.root, shop.input, shop.output, shop.ran = Path({root!r}), Path({root!r}) / "in", Path({root!r}) / "out", []
job = freeze_job(resolve_job(shop.spec()))
peaks = []
for window in job.windows():
    shop.run(job, windows=[window])
    shop.ran.clear()
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(json.dumps(peaks))
"""


@pytest.mark.slow
def test_flat_over_windows_and_wide_columns_stay_out_of_planning(shop):
    rng = np.random.default_rng(0)
    count, width = 120_000, 1_000
    wide = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), count, [None, pa.py_buffer(rng.bytes(count * width))])
    prompts = [f"row {i}: {'abc def ' * (i % 12)}" for i in range(count)]
    shop.write("a.parquet", {"prompt": prompts, "wide": wide}, row_group_size=30_000)
    code = CODE.format(tests=str(__file__).rpartition("/")[0], root=str(shop.root))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    peaks = json.loads(done.stdout)
    assert len(peaks) >= 6
    assert peaks[-1] < 700, peaks
    assert peaks[-1] < peaks[1] * 1.25 + 20, peaks
