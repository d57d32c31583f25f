"""Whole jobs on machines that differ in what they can compute with: what is run, what is refused, and what is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from batchinfer_kernels.native import library, outlook

from batchinfer.data.parts import read_footer
from batchinfer.testing.tiny import make_tiny
from tests.cluster.conftest import JobFolder

pytestmark = pytest.mark.skipif(outlook.obstacle() is not None, reason="no native kernels here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def job(folder: JobFolder, model: Path) -> JobFolder:
    folder.input(6)
    folder.job(str(model), sampling={"ignore_eos": True})
    return folder


def machine(folder: JobFolder, compiler: str | None) -> dict[str, Any]:
    """Options of a command on a machine with an empty cache and this compiler (a shell script), or with none."""
    path = folder.root / "bin"
    path.mkdir(exist_ok=True)
    if compiler is not None:
        (path / "gcc").write_text(f"#!/bin/sh\n{compiler}\n")
        (path / "gcc").chmod(0o755)
    cache = folder.root / "cache"
    return {"env": os.environ | {"PATH": str(path), "XDG_CACHE_HOME": str(cache)}}


def settings(folder: JobFolder) -> dict[str, Any]:
    [part] = folder.out.glob("part-*.parquet")
    found: dict[str, Any] = read_footer(part)["settings"]
    return found


def test_int8_is_chosen_said_and_written_down(job: JobFolder) -> None:
    assert "int8  (auto: this CPU has AVX-512 VNNI)" in job.run("plan", "job.yaml")
    said = job.run()
    assert "int8, KV cache int8, native kernels (auto: this CPU has AVX-512 VNNI)" in said
    assert "Note" not in said
    found = settings(job)
    assert (found["model.quantization"], found["model.kv_cache_dtype"]) == ("int8", "int8")
    assert (found["engine.kernels"], found["engine.instruction_level"][:7]) == ("native", "avx512_")


def test_without_a_compiler_a_job_runs_slower_and_says_so(job: JobFolder) -> None:
    bare = machine(job, None)
    for said in (job.run("plan", "job.yaml", **bare), job.run(**bare)):
        assert said.count("no C compiler was found") >= 1 and "apt-get install gcc" in said
    assert settings(job)["model.quantization"] == "none"
    assert settings(job)["engine.kernels"] == "cpu"
    # It goes on as it began where there is a compiler, and a job that began with one is refused where there is none.
    assert "finished already" in job.run()
    job.run("submit", "job.yaml", "--set", "output.path=other")
    refused = job.run("submit", "job.yaml", "--set", "output.path=other", code=2, **bare)
    assert 'engine.kernels: "native" -> "cpu"' in refused and "no C compiler was found" in refused


def test_a_worker_that_can_not_have_the_kernels_is_refused_with_the_reason(job: JobFolder) -> None:
    """The compiler can make the trial, and no more: known only when an engine is built."""
    broken = machine(job, 'case "$*" in *trial.*) exit 0;; esac; echo "error: out of order"; exit 1')
    said = job.run(code=2, **broken)
    assert "engine.kernels native can't be used here" in said and "error: out of order" in said
    assert "set engine.kernels to cpu" in said
    again = job.run("submit", "job.yaml", "--fresh", "--set", "engine.kernels=cpu", **broken)
    assert "float32, KV cache float32, cpu kernels" in again
    assert not list((job.root / "cache").rglob(library.FILE_PATTERN))
