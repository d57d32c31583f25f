"""One engine for each GPU: how many workers there are, which GPU each has and keeps, what is refused. No GPU is
needed: nvidia-smi is a script, models are fake, and Triton's kernels run in its interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batchinfer_kernels import gpus
from batchinfer_kernels.gpus import Gpu, Installed

from batchinfer.arithmetic import this_machine
from batchinfer.cluster import engine_gpus
from batchinfer.cluster.deep_verify import refuse_other_arithmetic
from batchinfer.cluster.engine_host import EngineHost
from batchinfer.cluster.local import LocalWorkers
from batchinfer.cluster.warm import early_worker, fair_threads, fit, num_cores
from batchinfer.errors import ConfigError
from batchinfer.job.layout import JobLayout
from batchinfer.job.manifest import load_manifest
from batchinfer.job.spec import JobSpec
from batchinfer.testing.tiny import make_tiny
from tests.cluster.conftest import FAST, SLOW, JobFolder
from tests.fake_gpus import H200S, UUIDS, machine_of

FOUND = tuple(Gpu(handle=gpu.uuid, name=gpu.name, capability=gpu.capability) for gpu in H200S)
EIGHT = tuple(replace(H200S[0], uuid=f"GPU-{i}") for i in range(8))


def spec_of(root: Path, **sections: Any) -> JobSpec:
    data: dict[str, Any] = {
        "model": {"path": FAST},
        "input": {"path": "in", "prompt": "x"},
        "output": {"path": "out"},
        "engine": {"device": "cuda"},
    }
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section
    return JobSpec.from_dict(data, base=root)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[LocalWorkers]:
    made = LocalWorkers(num_workers=1, num_threads=1, preload=(), scratch=tmp_path, began=time.time())
    yield made
    made.close()


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "installed", lambda: EIGHT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def visible_to(pid: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of a process as it was started."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries).get("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("eight")
def test_as_many_workers_as_gpus_and_a_gpu_for_each(workers: LocalWorkers, tmp_path: Path) -> None:
    fit(workers, spec_of(tmp_path), start=False)
    assert workers.num_workers == 8 and list(workers.gpus) == [f"GPU-{i}" for i in range(8)]
    assert workers.num_threads == min(8, fair_threads(8))
    fit(workers, spec_of(tmp_path, cluster={"workers": 1}), start=False)
    assert list(workers.gpus) == ["GPU-0"] and workers.num_threads == min(8, num_cores())
    fit(workers, spec_of(tmp_path, cluster={"workers": 3}, engine={"num_threads": 5}), start=False)
    assert list(workers.gpus) == ["GPU-0", "GPU-1", "GPU-2"] and workers.num_threads == 5


@pytest.mark.usefixtures("eight")
def test_only_what_is_visible_counts(workers: LocalWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-2")
    fit(workers, spec_of(tmp_path), start=False)
    assert list(workers.gpus) == ["5", "GPU-2"]
    with pytest.raises(ConfigError, match=r"workers is 3, .* shows \(CUDA_VISIBLE_DEVICES is '5,GPU-2'\) 2; give at"):
        fit(workers, spec_of(tmp_path, cluster={"workers": 3}), start=False)


@pytest.mark.usefixtures("eight")
def test_more_workers_than_gpus_are_refused(workers: LocalWorkers, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.workers is 9, .* this machine has 8; give at most that, or leave"):
        fit(workers, spec_of(tmp_path, cluster={"workers": 9}), start=False)
    fit(workers, spec_of(tmp_path, cluster={"workers": 9}, engine={"device": "cpu"}), start=False)
    assert workers.num_workers == 9 and not workers.gpus


def test_a_job_on_the_cpu_looks_for_none(
    workers: LocalWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "installed", lambda: pytest.fail("nobody asked"))
    fit(workers, spec_of(tmp_path, engine={"device": "auto"}), start=False)
    assert workers.num_workers == 1 and workers.num_threads == num_cores() and not workers.gpus


@pytest.mark.parametrize(("text", "starts"), [("engine: {device: cuda}", False), ("engine: {device: cpu}", True)])
def test_no_engine_warms_up_before_its_gpu_is_known(tmp_path: Path, text: str, starts: bool) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"model: {{path: {FAST}}}\n{text}\n")
    with early_worker(str(job), ()) as workers:
        assert bool(workers._children) == starts
    with early_worker(str(job), ("engine.device=cuda",)) as workers:
        assert not workers._children


def test_an_engine_that_is_started_again_has_the_same_gpu(tmp_path: Path) -> None:
    host = EngineHost(name="w1", num_threads=1, preload=[], log=tmp_path / "early.log", gpu=UUIDS[1])
    try:
        for _ in range(2):
            host.start()
            assert host.process is not None and visible_to(host.process.pid) == UUIDS[1]
            host.kill()
            host.process.wait()
    finally:
        host.kill()


@pytest.mark.parametrize(
    ("there", "variables", "expected"),
    [
        (H200S[:1], {}, UUIDS[0]),
        (H200S, {"CUDA_VISIBLE_DEVICES": "1", "SLURM_LOCALID": "3"}, "1"),
        (H200S, {"SLURM_LOCALID": "1"}, UUIDS[1]),
        (H200S, {"CUDA_VISIBLE_DEVICES": "1,0", "SLURM_LOCALID": "1"}, "0"),
        (H200S, {"SLURM_LOCALID": "2"}, "sees 2 GPUs, and it is number 2 of its node"),
        (H200S, {}, "sees 2 GPUs, and no SLURM_LOCALID says"),
        (H200S, {"CUDA_VISIBLE_DEVICES": ""}, "shows none of this machine's 2 GPUs"),
    ],
)
def test_a_worker_that_others_have_started(
    there: tuple[Installed, ...], variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "installed", lambda: there)
    if " " in expected:
        with pytest.raises(ConfigError, match=expected):
            engine_gpus.gpu_of_worker(variables)
    else:
        assert engine_gpus.gpu_of_worker(variables) == expected


def engines(folder: JobFolder, driver: subprocess.Popen[str]) -> dict[int, str | None]:
    """The GPU of each engine process."""
    found = {}
    for pid in folder.of_kind(driver, "batchinfer.cluster.engine_process"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found[pid] = visible_to(pid)
    return found


def test_a_job_runs_an_engine_on_each_gpu_and_keeps_them_there(folder: JobFolder) -> None:
    folder.input(160)
    folder.job(SLOW, engine={"device": "cuda", "max_num_seqs": 4})
    driver = folder.start(env=machine_of(folder.root / "bin", H200S))
    folder.wait_for(lambda: set(engines(folder, driver).values()) == set(UUIDS))
    before = engines(folder, driver)
    assert len(before) == 2
    folder.wait_for(folder.segments)
    killed = next(pid for pid, gpu in before.items() if gpu == UUIDS[1])
    os.kill(killed, signal.SIGKILL)
    folder.wait_for(lambda: len(engines(folder, driver)) == 2 and killed not in engines(folder, driver))
    assert sorted(map(str, engines(folder, driver).values())) == sorted(UUIDS)
    out, error = driver.communicate(timeout=120)
    assert driver.returncode == 0, out + error + folder.logs()
    assert f"GPUs: w0 {UUIDS[0]}, w1 {UUIDS[1]}" in (folder.state / "log.txt").read_text()
    job = load_manifest(JobLayout(folder.out))
    assert job is not None and job.semantic["engine.device"] == "cuda" and job.facts["gpu"] == "NVIDIA H200"
    machine = replace(this_machine(), gpu_obstacle="this machine has no GPU")
    with pytest.raises(
        ConfigError, match=r"can't be had on this machine: engine\.device is cuda, and this machine has"
    ):
        refuse_other_arithmetic(job, machine)


def test_without_a_gpu_one_message_says_what_to_do(folder: JobFolder) -> None:
    folder.input(4)
    folder.job(engine={"device": "cuda"})
    bare = machine_of(folder.root / "bin", ())
    said = folder.run(code=2, env=bare)
    assert "engine.device is cuda, and nvidia-smi fails: No devices were found" in said
    assert "set engine.device to cpu" in said and len(said.splitlines()) == 1
    assert not folder.out.exists()
    looked = folder.run("plan", "job.yaml", env=bare)
    assert "Note: this machine can't run the job" in looked and "one for each GPU of the machine" in looked
    said = folder.run("submit", "job.yaml", "--set", "cluster.workers=3", code=2, env=machine_of(folder.root, H200S))
    assert "cluster.workers is 3" in said and "this machine has 2" in said and not folder.out.exists()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.skipif(gpus.torch_obstacle() is None, reason="torch can use a GPU")
def test_a_torch_without_cuda_is_refused_before_the_start(folder: JobFolder, model: Path) -> None:
    folder.input(4)
    folder.job(str(model), engine={"device": "cuda"})
    said = folder.run(code=2, env=machine_of(folder.root / "bin", H200S))
    assert "is a build without CUDA (pip install torch from PyPI" in said and not folder.out.exists()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_job_on_tritons_kernels_in_the_interpreter(folder: JobFolder, model: Path) -> None:
    """The same tokens as plain torch gives."""
    folder.input({"text": ["one", "a longer prompt of some words"]})
    options = {"max_tokens": 2, "ignore_eos": True}
    folder.job(str(model), sampling=options, engine={"kernels": "triton", "max_model_len": 64})
    assert "float32, KV cache float32, triton kernels" in folder.run(env=os.environ | {"TRITON_INTERPRET": "1"})
    on_triton = folder.rows()
    folder.run("submit", "job.yaml", "--set", "output.path=torch", "--set", "engine.kernels=cpu")
    folder.out = folder.root / "torch"
    assert folder.rows() == on_triton
