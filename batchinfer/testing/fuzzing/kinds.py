"""The kinds of cases by name."""

from __future__ import annotations

from batchinfer.testing.fuzzing import job_files, jsonl, tables, templates
from batchinfer.testing.fuzzing.case import Maker

KINDS: dict[str, Maker] = {
    "jsonl": jsonl.make,
    "parquet": tables.make_parquet,
    "arrow": tables.make_arrow,
    "jobfile": job_files.make,
    "template": templates.make,
}
