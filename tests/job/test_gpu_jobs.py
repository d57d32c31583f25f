"""Jobs with engine.device cuda: what is frozen, who may go on with them, what is refused. No GPU is needed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from batchinfer_kernels import gpus

from batchinfer.arithmetic import Machine, this_machine
from batchinfer.cost import find_device
from batchinfer.errors import ConfigError, ResumeRefused
from batchinfer.job.manifest import freeze_job, load_manifest
from batchinfer.job.plan_report import plan_report
from batchinfer.job.report import summarize
from batchinfer.job.resolve import resolve_job
from batchinfer.testing.tiny import make_tiny
from batchinfer.testing.tiny_quantized import quantize_folder
from tests.fake_gpus import H200S

CPU = Machine(vector_level="avx512", product_level="avx512_bf16")
H200 = replace(CPU, triton_on_gpu=None, gpu_level="sm_90", gpu_name="NVIDIA H200")
A100 = replace(H200, gpu_level="sm_80", gpu_name="NVIDIA A100-SXM4-80GB")
NONE = replace(CPU, triton_on_gpu=None, gpu_obstacle="this machine has no NVIDIA driver")
CUDA = "engine.device=cuda"
KEYS = ("engine.device", "engine.instruction_level", "engine.kernels", "model.dtype", "model.kv_cache_dtype")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def job(shop, model):
    """job(machine, "engine.device=cuda", ...): the job resolved for a machine."""
    shop.write("a.parquet", {"prompt": ["a"]})

    def make(machine: Machine, *overrides: str, **options):
        return resolve_job(shop.spec(*overrides, model={"path": str(model)}), machine=machine, **options)

    return make


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_gpu_is_frozen_with_all_that_decides_bytes(job, model, tmp_path, dtype):
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"torch_dtype": dtype, "dtype": dtype}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    first = freeze_job(job(H200, CUDA, f"model.path={tmp_path / 'model'}"))
    assert [first.semantic[key] for key in KEYS] == ["cuda", "sm_90", "triton", dtype, dtype]
    assert first.sources["engine.device"] == "user"
    assert first.sources["engine.instruction_level"] == "auto: NVIDIA H200"
    assert first.sources["model.dtype"] == f"auto: the checkpoint's {dtype}"
    config = load_manifest(first.layout).engine_config
    assert (config.device, config.instruction_level, config.kernels) == ("cuda", "sm_90", "triton")
    assert first.facts["gpu"] == "NVIDIA H200"
    assert summarize(first).arithmetic.startswith(f"{dtype}, KV cache {dtype}, triton kernels")
    elsewhere = replace(first, semantic={**first.semantic, "engine.instruction_level": "sm_80"})
    assert elsewhere.fingerprint != first.fingerprint


def test_a_job_on_the_cpu_is_what_it_was(job):
    """Jobs that were begun before there were any on GPUs go on: the same keys, and the same values."""
    for spec in ((), ("engine.device=cpu",), ("engine.device=auto",)):
        found = job(H200, *spec)
        engine = {key: value for key, value in found.semantic.items() if key.startswith("engine.")}
        assert engine == {
            "engine.kernels": "native",
            "engine.instruction_level": "avx512_bf16",
            "engine.max_model_len": found.max_model_len,
            "engine.device": "cpu",
            "engine.split_size": 256,
            "engine.deterministic": True,
            "engine.tensor_parallel_size": 1,
            "engine.block_size": 16,
        }
        assert found.sources["engine.device"] == ("user" if spec else "default")
        assert found.sources["engine.instruction_level"] == "auto: this CPU"
        assert "gpu" not in found.facts


def test_a_manifest_of_a_version_without_the_newer_keys_is_gone_on_with(job):
    first = freeze_job(job(H200))
    data = json.loads(first.layout.manifest.read_bytes())
    for key in ("cuda_graphs", "async_scheduling", "gpu_memory_utilization"):
        del data["spec"]["engine"][key]
    first.layout.manifest.write_text(json.dumps(data))
    old = load_manifest(first.layout)
    assert (old.fingerprint, old.engine_config) == (data["fingerprint"], first.engine_config)
    assert freeze_job(job(H200)).fingerprint == data["fingerprint"]


def test_gpus_are_looked_at_for_jobs_on_them_alone(job, shop, model, monkeypatch):
    def look():
        raise AssertionError("nobody asked")

    monkeypatch.setattr(gpus, "installed", look)
    job(None)
    monkeypatch.setattr(gpus, "installed", lambda: H200S)
    monkeypatch.setattr(gpus, "torch_obstacle", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = job(None, CUDA, "engine.kernels=cpu")
    assert found.semantic["engine.instruction_level"] == "sm_90, NVIDIA H200"


def test_the_same_architecture_goes_on_and_another_is_refused_with_the_reason(job):
    first = freeze_job(job(H200, CUDA))
    again = job(replace(H200, gpu_name="NVIDIA H100 80GB HBM3"), CUDA)
    assert again.semantic == first.semantic
    with pytest.raises(ResumeRefused) as caught:
        job(A100, CUDA)
    said = str(caught.value)
    assert 'engine.instruction_level: "sm_90" -> "sm_80" (auto: NVIDIA A100-SXM4-80GB)' in said
    assert "The job was begun on GPUs of sm_90; this machine's (NVIDIA A100-SXM4-80GB) are sm_80" in said
    assert said.count(" -> ") == 1


@pytest.mark.parametrize(("begun", "then"), [((CUDA,), ()), ((), (CUDA,))])
def test_a_job_does_not_change_between_cpu_and_gpu(job, begun, then):
    freeze_job(job(H200, *begun))
    with pytest.raises(ResumeRefused, match=r"engine\.device"):
        job(H200, *then)


@pytest.mark.parametrize(
    ("machine", "options", "says"),
    [
        (NONE, (), "engine.device is cuda, and this machine has no NVIDIA driver"),
        (replace(H200, torch_on_gpu="torch 2 is a build without CUDA"), (), "torch 2 is a build without CUDA"),
        (
            replace(H200, triton_on_gpu="the package triton is not installed"),
            (),
            "triton is not installed.*kernels cpu",
        ),
        (H200, ("engine.kernels=native",), "engine.kernels native is for CPUs"),
        (H200, ("engine.kernels=triton", "model.dtype=float32"), "do not fit a GPU's shared memory"),
    ],
)
def test_what_can_not_run_is_refused_before_anything_is_written(job, shop, machine, options, says):
    with pytest.raises(ConfigError, match=says):
        job(machine, CUDA, *options)
    assert not shop.output.exists()


def test_without_triton_torch_alone_can_be_asked_for(job):
    found = job(replace(H200, triton_on_gpu="the package triton is not installed"), CUDA, "engine.kernels=cpu")
    assert [found.semantic[key] for key in KEYS[:3]] == ["cuda", "sm_90, NVIDIA H200", "cpu"]


def test_with_torch_alone_another_model_of_the_architecture_is_refused(job):
    first = freeze_job(job(H200, CUDA, "engine.kernels=cpu"))
    with pytest.raises(ResumeRefused, match=r"\(NVIDIA H100 PCIe\) are sm_90, NVIDIA H100 PCIe"):
        job(replace(H200, gpu_name="NVIDIA H100 PCIe"), CUDA, "engine.kernels=cpu")
    for machine in (NONE, replace(H200, torch_on_gpu="no CUDA")):
        assert job(machine, CUDA, "engine.kernels=cpu", only_look=True).semantic == first.semantic


def test_how_a_gpu_is_used_changes_no_bytes_and_may_change(job):
    first = freeze_job(job(H200, CUDA))
    config = first.engine_config
    assert (config.cuda_graphs, config.async_scheduling, config.gpu_memory_utilization) == ("auto", "auto", 0.9)
    changed = ("engine.cuda_graphs=false", "engine.async_scheduling=false", "engine.gpu_memory_utilization=0.5")
    again = job(H200, CUDA, *changed)
    assert again.fingerprint == first.fingerprint
    config = again.engine_config
    assert (config.cuda_graphs, config.async_scheduling, config.gpu_memory_utilization) == (False, False, 0.5)
    for wrong in (
        "engine.cuda_graphs=2",
        "engine.async_scheduling=2",
        "engine.gpu_memory_utilization=0",
        "engine.gpu_memory_utilization=1.5",
    ):
        with pytest.raises(ConfigError, match=rf"{wrong.partition('=')[0]} must be"):
            job(H200, CUDA, wrong)


def test_a_fake_model_needs_neither_torch_nor_triton(job):
    machine = replace(H200, torch_on_gpu="no CUDA", triton_on_gpu="no triton")
    assert job(machine, CUDA, "model.path=fake://hash").semantic["engine.device"] == "cuda"
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        job(NONE, CUDA, "model.path=fake://hash")


def test_a_machine_without_gpus_can_look_at_a_job(job):
    """`plan` on a login node."""
    looked = job(NONE, CUDA, only_look=True)
    assert looked.semantic["engine.kernels"] == "triton" and looked.semantic["engine.instruction_level"] is None
    assert looked.arithmetic.degraded is not None and "no NVIDIA driver" in looked.arithmetic.degraded
    first = freeze_job(job(H200, CUDA))
    assert job(NONE, CUDA, only_look=True).semantic == first.semantic


def test_a_plan_predicts_for_the_gpu_and_not_for_the_cpu(job):
    report = plan_report(job(H200, CUDA))
    assert report.predicted_s is None and "plan --device DEVICE" in report.prediction
    assert report.on_device is not None and report.on_device.device == "H200"
    assert report.on_device.weights in ("bfloat16", "float16")
    assert plan_report(job(replace(H200, gpu_name="NVIDIA X1"), CUDA)).on_device is None
    assert plan_report(job(H200)).on_device is None and plan_report(job(H200)).predicted_s is not None


def test_a_plan_says_why_a_gpu_could_not_have_the_job(job, tmp_path):
    """Which the CPU can: that of the arithmetic of its own is no reason to refuse the plan."""
    model = make_tiny(tmp_path / "model", "deepseek-v2", qk_rope_head_dim=16)
    found = job(CPU, f"model.path={model}", "model.dtype=bfloat16", "model.kv_cache_dtype=float16")
    report = plan_report(found, device=find_device("H100"))
    assert report.predicted_s is not None and report.on_device is None
    assert report.off_device is not None and report.off_device.startswith(
        "no prediction: model.kv_cache_dtype float16: with engine.kernels triton the cache of latent attention"
    )


def test_a_plan_counts_the_scales_of_a_checkpoint(job, model, tmp_path):
    def weight_bytes(name):
        shutil.copytree(model, tmp_path / name)
        quantize_folder(tmp_path / name, name)
        report = plan_report(job(H200, CUDA, f"model.path={tmp_path / name}"))
        assert report.on_device is not None
        return report.on_device.weight_bytes

    assert weight_bytes("fp8-blocks") == weight_bytes("fp8-group") < weight_bytes("fp8-channel")
    assert weight_bytes("gptq") > weight_bytes("gptq-v2")  # in groups, and by output


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (H200S, ("sm_90", "NVIDIA H200", None, None)),
        (
            (H200S[0], replace(H200S[1], capability=80)),
            (None, None, "sm_90 (NVIDIA H200) and sm_80 (NVIDIA H200)", None),
        ),
        ((replace(H200S[0], capability=75),), ("sm_75", "NVIDIA H200", None, "need sm_80 or later")),
    ],
)
def test_a_machine_of_gpus(there, expected, monkeypatch):
    monkeypatch.setattr(gpus, "installed", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = this_machine(look_at_gpus=True)
    level, name, obstacle, triton = expected
    assert (found.gpu_level, found.gpu_name) == (level, name)
    assert (found.gpu_obstacle is None) == (obstacle is None) and (obstacle or "") in (found.gpu_obstacle or "")
    assert triton is None or triton in (found.triton_on_gpu or "") or "not installed" in (found.triton_on_gpu or "")
    assert this_machine().gpu_level is None
