"""Random jobs for the fake model: inputs in every format, duplicate prompts and ids, rows that fail, several samples,
one window or several.

A job is a function of its seed. What it should give is found by running it undisturbed (`rounds`).
"""

from __future__ import annotations

import datetime
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MAX_MODEL_LEN = 256  # tokens; a retry with RETRY_MODEL_LEN cures the rows that are longer
RETRY_MODEL_LEN = 512
NAN_MARK, CRASH_MARK = "~", "`"  # what rows hold that fail in the engine, and rows that kill it
RUN_S = 2.0  # what a disturbed run's steps should take without a disturbance
_FORMATS = ("parquet", "jsonl", "arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignJob:
    """A job's input and settings. `retryable`: some of its rows are cured by a retry with RETRY_MODEL_LEN."""

    folder: Path
    settings: dict[str, Any]
    num_rows: int
    step_delay_ms: float
    retryable: bool
    several_windows: bool = False
    model: str | None = None

    def write(self, path: Path, output: Path, *, calm: bool = False) -> Path:
        """Writes a job file with this output folder. `calm`: with an engine that does not wait in its steps."""
        delay = 0 if calm else self.step_delay_ms
        fake = f"fake://hash?vocab=512&max_model_len={RETRY_MODEL_LEN}&step_delay_ms={delay:g}"
        fake += f"&nan_token={ord(NAN_MARK)}&crash_token={ord(CRASH_MARK)}&eos_rate=0.02"
        data = {
            **self.settings,
            "model": {"path": self.model or fake},
            "output": {"path": str(output), "token_ids": True},
        }
        path.write_text(json.dumps(data, indent=1))
        return path


def make_job(
    folder: Path, seed: int, *, rows: int | None = None, model: str | None = None, run_s: float = RUN_S
) -> CampaignJob:
    """Writes the input of the job with this seed into `folder`, which must be new.

    rows    instead of a random number of them; model: a model's path instead of the fake model; run_s: what its steps
            are to take, in seconds
    """
    draw = random.Random(seed)
    num_rows = rows or draw.choice([draw.randrange(20, 60), draw.randrange(60, 160), draw.randrange(160, 320)])
    crashes = model is None and draw.random() < 0.08
    columns = _columns(draw, num_rows, 1 if crashes else 0)
    format_ = draw.choice(_FORMATS)
    # More than eight chunks are planned and committed by Dask tasks, fewer by the driver itself.
    num_files = min(num_rows, draw.choice([1, 2, 5, 12]))
    source = folder / "input"
    source.mkdir(parents=True)
    cuts = sorted(draw.sample(range(1, num_rows), num_files - 1))
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, num_rows], strict=True)):
        _write_file(source / f"rows-{number:02d}", format_, columns.slice(start, stop - start))
    workers = draw.choice([1, 2, 2])
    num_seqs = draw.choice([4, 8, 16])
    n = draw.choice([1, 1, 2])
    windows = draw.choice([1, 1, 4, 9])  # more than may be open at once: one is deleted while another is planned
    more: dict[str, float] = draw.choice([{}, {"top_p": 0.9}, {"logprobs": 2}])
    settings = {
        "name": f"campaign-{seed}",
        "input": {
            "path": str(source),
            "format": draw.choice(["auto", format_]),
            "prompt": "{text}",
            "id_column": draw.choice([None, "id"]),
            "sampling_columns": {"max_tokens": "limit", "temperature": "heat"},
            **({"window_rows": max(3, num_rows // windows)} if windows > 1 else {}),
        },
        "sampling": {"n": n, "seed": draw.randrange(1 << 31), **more},
        "engine": {"max_num_seqs": num_seqs, "max_model_len": MAX_MODEL_LEN},
        "cluster": {"workers": workers, "hang_timeout_s": 4, "takeover_timeout_s": 2},
    }
    steps = n * sum(columns["limit"].to_pylist()) / (workers * num_seqs)
    return CampaignJob(
        folder=folder,
        settings=settings,
        num_rows=num_rows,
        step_delay_ms=round(min(100.0, max(2.0, 1000 * run_s / steps)), 1),
        retryable=any(text is not None and len(text) > MAX_MODEL_LEN for text in columns["text"].to_pylist()),
        several_windows=windows > 1,
        model=model,
    )


def _columns(draw: random.Random, num_rows: int, num_crashes: int) -> pa.Table:
    heads = [" ".join(f"word{draw.randrange(40)}" for _ in range(draw.randrange(2, 20))) for _ in range(6)]
    texts: list[str | None] = []
    for i in range(num_rows):
        kind = draw.random()
        if kind < 0.03:
            texts.append(None)
        elif kind < 0.05:
            texts.append("long " * 3_000)
        elif kind < 0.08:
            texts.append(f"rather long {i} " + "x" * draw.randrange(MAX_MODEL_LEN, RETRY_MODEL_LEN - 60))
        elif kind < 0.10:
            texts.append(f"not a number {NAN_MARK} {i}")
        elif kind < 0.25 and texts:
            texts.append(draw.choice(texts))
        else:
            texts.append(f"{draw.choice(heads)[:150]} row {i}")
    for i in draw.sample(range(num_rows), num_crashes):
        texts[i] = f"deadly {CRASH_MARK} {i}"
    ids = [draw.choice([None, i // 2, (1 << 53) + i, -i]) for i in range(num_rows)]
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "text": pa.array(texts, pa.string()),
            "limit": pa.array([draw.randrange(3, 24) for _ in range(num_rows)], pa.int32()),
            "heat": pa.array([draw.choice([0.0, 0.0, 0.8]) for _ in range(num_rows)], pa.float64()),
            "tags": pa.array([[f"t{i}"] * (i % 3) if i % 5 else None for i in range(num_rows)], pa.list_(pa.string())),
        }
    )


def _write_file(path: Path, format_: str, table: pa.Table) -> None:
    if format_ == "jsonl":
        lines = (json.dumps(row, ensure_ascii=False) for row in table.to_pylist())
        path.with_suffix(".jsonl").write_text("".join(line + "\n" for line in lines))
        return
    # Types that JSON does not have.
    moments = [datetime.datetime(2000, 1, 1) + datetime.timedelta(seconds=i) for i in range(len(table))]
    table = table.append_column("when", pa.array(moments, pa.timestamp("ns", "UTC")))
    if format_ == "parquet":
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=50)
    else:
        with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
