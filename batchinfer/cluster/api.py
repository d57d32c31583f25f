"""The Python API of whole jobs: `batchinfer.submit`, `batchinfer.map`. Same driver as the command line's."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchinfer.cluster.submit import JobResult, Listener, run_job
from batchinfer.cluster.warm import local_workers
from batchinfer.errors import ConfigError
from batchinfer.job.context import open_context
from batchinfer.job.layout import JobLayout
from batchinfer.job.manifest import load_manifest
from batchinfer.job.spec import JobSpec

Job = JobSpec | Mapping[str, Any] | str | Path


def submit(job: Job, *, fresh: bool = False, extend: bool = False, listener: Listener | None = None) -> JobResult:
    """Runs a job to its end, or goes on with it.

    job   a JobSpec, its dict form, or the path of a job file

    Raises what the command line would exit with: ConfigError (2), FailureLimitReached (4), Interrupted (75),
    BatchinferError (1). Error rows raise nothing: see `result.report` and `result.exit_code`.
    """
    spec = as_spec(job)
    with local_workers(spec, start=not fresh) as workers:
        return run_job(spec, workers, fresh=fresh, extend=extend, listener=listener)


def map(dataset: Any, job: Job, *, output: str | Path | None = None, listener: Listener | None = None) -> Any:
    """Runs a Hugging Face dataset through a job: the same rows, in the same order, with the output columns.

    dataset  a `datasets.Dataset`, and such a one comes back
    job      as in `submit`, without `input.path`; `output.path` may be left out too
    output   where the result is kept, so that a call with the same dataset goes on after an interruption, from the
             current directory if it is no whole path; default: the job's output.path (from the job file's folder),
             else a temporary folder that lives as long as this process
    """
    kind = type(dataset)
    if kind.__name__ != "Dataset" or not kind.__module__.startswith("datasets."):
        raise ConfigError(
            f"batchinfer.map takes a datasets.Dataset, got {kind.__name__}; "
            "take one split of a DatasetDict, or submit a job over files"
        )
    data, base = _as_dict(job)
    sections = {name: data.get(name) or {} for name in ("input", "output")}
    if not all(isinstance(section, Mapping) for section in sections.values()):
        JobSpec.from_dict(data)  # says what is wrong with them
    given = Path.cwd() / output if output else sections["output"].get("path")
    folder = base / given if given else Path(_scratch()) / "output"
    # Beside the output, under a name by content: the same dataset finds its own input again, and a resume works.
    source = folder.parent / f".{folder.name}.input-{dataset._fingerprint}.parquet"
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        part = source.with_suffix(".tmp")
        dataset.to_parquet(str(part))
        part.rename(source)
    data["input"] = {**sections["input"], "path": str(source), "format": "parquet"}
    data["output"] = {**sections["output"], "path": str(folder)}
    spec = JobSpec.from_dict(data, base=base)
    result = submit(spec, listener=listener)
    features = _features(result.output, dataset)
    if not dataset.num_rows:
        return kind.from_dict({name: [] for name in features}, features=features)
    paths = [str(path) for path in sorted(folder.glob("part-*.parquet"))]
    return kind.from_parquet(paths, features=features)


def _features(output: Path, dataset: Any) -> Any:
    """Those of the output's columns; what the dataset knows of its own ones (names of classes, say) is kept."""
    job = load_manifest(JobLayout(output))
    assert job is not None
    features = type(dataset.features).from_arrow_schema(open_context(job).output.schema)
    features.update({name: own for name, own in dataset.features.items() if name in features})
    return features


def as_spec(job: Job) -> JobSpec:
    if isinstance(job, JobSpec):
        return job
    if isinstance(job, Mapping):
        return JobSpec.from_dict(job)
    return JobSpec.from_yaml(_checked_path(job))


def _as_dict(job: Job) -> tuple[dict[str, Any], Path]:
    """The job as written, and the folder that its relative paths start from."""
    if isinstance(job, JobSpec):
        return job.model_dump(exclude_unset=True), Path.cwd()
    if isinstance(job, Mapping):
        return dict(job), Path.cwd()
    from batchinfer.job.job_file import read_job_file

    source = read_job_file(_checked_path(job))
    return dict(source.data), source.base


def _checked_path(job: Any) -> str | Path:
    if not isinstance(job, (str, Path)):
        raise ConfigError(f"a job is a JobSpec, its dict form or the path of a job file, got {type(job).__name__}")
    return job


_scratch_folder: tempfile.TemporaryDirectory[str] | None = None


def _scratch() -> str:
    global _scratch_folder
    if _scratch_folder is None:
        _scratch_folder = tempfile.TemporaryDirectory(prefix="batchinfer-map-")
    return tempfile.mkdtemp(dir=_scratch_folder.name)
