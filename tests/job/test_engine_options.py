"""What an engine would refuse when it loads, a job is refused for before anything is written: each option of `engine`.

Reading weights is not needed to know it; what only the machine knows (free memory, GPUs) is not told here.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batchinfer_kernels.determinism import prepare

from batchinfer.arithmetic import Machine, this_machine
from batchinfer.config import EngineConfig
from batchinfer.engine import load_engine
from batchinfer.errors import ConfigError
from batchinfer.job.manifest import ResolvedJob
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import EngineSpec
from batchinfer.testing.tiny import make_tiny
from batchinfer.testing.tiny_quantized import quantize_folder

prepare()

H200 = Machine(
    vector_level="avx512",
    product_level="avx512_bf16",
    triton_on_gpu=None,
    gpu_level="sm_90",
    gpu_name="NVIDIA H200",
)
POOL = {"kv_cache_memory": 16 << 20}
# Values of each option, beside which the others are left out.
VALUES: dict[str, tuple[Any, ...]] = {
    "device": ("cpu",),
    "deterministic": (False,),
    "cuda_graphs": (True, False),
    "async_scheduling": (True, False),
    "tensor_parallel_size": (2,),
    "max_model_len": (2, 512, 513),
    "max_num_seqs": (1, 5000),
    "max_num_batched_tokens": (1, 100_000),
    "kv_cache_memory": (1, 16 << 20),
    "gpu_memory_utilization": (0.01, 1.0),
    "enable_prefix_caching": (False,),
    "block_size": (1, 48, 255, 256),
    "split_size": (16, 24, 250, 4096),
    "kernels": ("native", "cpu", "triton"),
    "num_threads": (1, 100),
}
MakeJob = Callable[..., ResolvedJob]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    made: dict[str, Path] = {}

    def path(family: str = "llama", **overrides: Any) -> str:
        key = f"{family}-{overrides}"
        if key not in made:
            made[key] = make_tiny(tmp_path_factory.mktemp("model") / family, family, **overrides)
        return str(made[key])

    return path


@pytest.fixture
def job(shop: Any) -> MakeJob:
    """job(machine, model=path, engine={...}): the job resolved for a machine, None for this one."""
    shop.write("a.parquet", {"prompt": ["a"]})

    def make(machine: Machine | None, model: str | dict[str, Any], **engine: Any) -> ResolvedJob:
        section = {"path": model} if isinstance(model, str) else model
        return resolve_job(shop.spec(model=section, engine=engine), machine=machine)

    return make


def refused(make: Callable[[], Any]) -> str | None:
    try:
        made = make()
    except ConfigError as error:
        return str(error)
    if not isinstance(made, ResolvedJob):
        made.close()
    return None


@pytest.mark.parametrize("option", EngineSpec.model_fields)
def test_what_the_engine_refuses_the_job_is_refused_for(
    tiny: Callable[..., str], job: MakeJob, shop: Any, option: str
) -> None:
    model = tiny()
    for value in VALUES[option]:
        options = POOL | {option: value}
        late = refused(lambda options=options: load_engine(EngineConfig(model=model, **options)))  # type: ignore[misc]
        early = refused(lambda options=options: job(None, model, **options))  # type: ignore[misc]
        assert (early is None) == (late is None), (value, early, late)
        assert not shop.output.exists()


@pytest.mark.parametrize("stored", [None, "gptq-order", "fp8-channel"])
@pytest.mark.parametrize("family", ["llama", "deepseek-v2", "qwen3-moe"])
def test_options_together_are_refused_in_the_same_words(
    tiny: Callable[..., str], job: MakeJob, tmp_path: Path, family: str, stored: str | None
) -> None:
    """Of the model and of its engine, a few dozen of all there are."""
    path = tiny(family)
    if stored is not None:
        shutil.copytree(path, tmp_path / "model")
        quantize_folder(tmp_path / "model", stored)
        path = str(tmp_path / "model")
    rng, outcomes = random.Random(f"{family} {stored}"), set()
    for _ in range(40):
        model: dict[str, Any] = {
            "dtype": rng.choice(("auto", "auto", "float32", "bfloat16")),
            "quantization": rng.choice(("auto", "auto", "none", "int8", "fp8")),
            "kv_cache_dtype": rng.choice(("auto", "auto", "float32", "bfloat16", "int8")),
        }
        block_size = rng.choice((8, 48))
        engine: dict[str, Any] = {
            "kernels": rng.choice(("auto", "auto", "native", "cpu")),
            "block_size": block_size,
            "split_size": 8 * block_size,
            "kv_cache_memory": rng.choice((1 << 15, 1 << 20)),
            "max_model_len": rng.choice((20, 100)),
            rng.choice(("cuda_graphs", "async_scheduling")): rng.choice(("auto", "auto", "auto", True)),
        }
        late = refused(lambda: load_engine(EngineConfig(model=path, num_threads=1, **model, **engine)))  # noqa: B023
        early = refused(lambda: job(None, {"path": path, **model}, **engine))  # noqa: B023
        assert early == late, (model, engine)
        outcomes.add(early is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize("option", ["cuda_graphs", "async_scheduling"])
@pytest.mark.parametrize(
    ("machine", "options", "kernels"),
    [
        (replace(H200, obstacle="no compiler"), {}, "cpu"),
        (H200, {}, "native"),
        (H200, {"device": "cuda", "kernels": "cpu"}, "cpu"),
        (H200, {"device": "cuda"}, None),
        (replace(H200, triton_on_cpu=None), {"kernels": "triton"}, None),
    ],
)
def test_options_of_triton_s_kernels(
    tiny: Callable[..., str], job: MakeJob, option: str, machine: Machine, options: dict[str, Any], kernels: str | None
) -> None:
    for value in ("auto", False):
        job(machine, tiny(), **{option: value}, **options)
    found = refused(lambda: job(machine, tiny(), **{option: True}, **options))
    if kernels is None:
        assert found is None
    else:
        assert found == f"engine.{option}: true needs engine.kernels triton, here they are {kernels}; leave it out"


@pytest.mark.parametrize("option", ["cuda_graphs", "async_scheduling"])
def test_a_fake_model_has_no_kernels(job: MakeJob, option: str) -> None:
    options: dict[str, Any] = {option: True}
    messages = {
        refused(lambda: job(None, "fake://hash", **options)),
        refused(lambda: load_engine(EngineConfig(model="fake://hash", **options))),
    }
    assert messages == {f"engine.{option}: true needs engine.kernels triton, here they are fake; leave it out"}


@pytest.mark.parametrize(
    ("family", "overrides", "dtype"),
    [
        ("llama", {}, "float32"),
        ("smollm", {}, "int8"),
        ("mistral", {"sliding_window": 16}, "bfloat16"),
        ("qwen3-moe", {}, "int8"),
        ("deepseek-v2", {}, "float32"),
        ("deepseek-v3", {}, "bfloat16"),
    ],
)
def test_a_pool_that_holds_one_sequence_and_not_a_byte_less(
    tiny: Callable[..., str], job: MakeJob, family: str, overrides: dict[str, Any], dtype: str
) -> None:
    """To the byte as the engine, whose cache it is, also where a sequence ends within a block."""
    path, sizes = tiny(family, **overrides), {"block_size": 32, "max_model_len": 33}
    model = {"path": path, "quantization": "none", "kv_cache_dtype": dtype}

    def load(kv_cache_memory: int) -> Any:
        options: dict[str, Any] = {"quantization": "none", "kv_cache_dtype": dtype, "num_threads": 1, **sizes}
        return load_engine(EngineConfig(model=path, kv_cache_memory=kv_cache_memory, **options))

    probe = load(1 << 22)
    block_bytes = int(probe.facts["kv_cache_bytes"][0]) // int(probe.facts["num_blocks"][0])
    probe.close()
    least = 2 * block_bytes
    assert refused(lambda: job(this_machine(), model, kv_cache_memory=least, **sizes)) is None
    early = refused(lambda: job(this_machine(), model, kv_cache_memory=least - 1, **sizes))
    assert early is not None and early == refused(lambda: load(least - 1))
    assert "(engine.kv_cache_memory) can't hold one sequence of engine.max_model_len 33 tokens" in early
    assert "lower engine.max_model_len or raise engine.kv_cache_memory" in early


def test_blocks_that_an_int8_cache_of_triton_s_kernels_can_not_be_in(tiny: Callable[..., str], job: MakeJob) -> None:
    model = {"path": tiny("llama", head_dim=26), "kv_cache_dtype": "int8"}
    for block_size, device, says in ((7, "cuda", "multiple of 2 tokens, not of 7"), (6, "cuda", ""), (7, "cpu", "")):
        sizes = {"block_size": block_size, "split_size": 2 * 16 * block_size}
        found = refused(lambda device=device, sizes=sizes: job(H200, model, device=device, **sizes))  # type: ignore[misc]
        assert (found or "").endswith(says) and (found is None) == (says == "")
        assert found is None or found.startswith("engine.block_size 7 does not go with engine.kernels triton: ")
