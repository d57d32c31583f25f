"""How a model computes is chosen for a machine at the first submit; who goes on computes the same way or is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.arithmetic import Machine
from batchinfer.errors import ConfigError, ResumeRefused
from batchinfer.job.manifest import freeze_job, load_manifest
from batchinfer.job.report import summarize
from batchinfer.job.resolve import resolve_job
from batchinfer.testing.tiny import make_tiny

SUITED = Machine(vector_level="avx512", product_level="avx512_bf16")
WITHOUT_BF16 = Machine(vector_level="avx512", product_level="avx512_vnni")
NO_COMPILER = Machine(vector_level="avx512", product_level="avx512_bf16", obstacle="no C compiler", mend="install gcc")
OLDER = Machine(vector_level="avx2", product_level="avx2", obstacle="this processor lacks avx512f")
KEYS = ("model.quantization", "model.kv_cache_dtype", "engine.kernels", "engine.instruction_level")
INT8 = ("int8", "int8", "native", "avx512_bf16")
PLAIN = ("none", "float32", "cpu", "avx512")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def job(shop, model):
    """job(machine, "model.dtype=float32", ...): the job resolved for a machine."""
    shop.write("a.parquet", {"prompt": ["a"]})

    def make(machine: Machine, *overrides: str):
        return resolve_job(shop.spec(*overrides, model={"path": str(model)}), machine=machine)

    return make


def frozen(job) -> tuple[str, ...]:
    return tuple(job.semantic[key] for key in KEYS)


def test_it_is_chosen_at_the_first_submit_and_handed_to_the_engine(job):
    first = freeze_job(job(SUITED))
    assert frozen(first) == INT8
    assert first.sources["model.quantization"] == "auto: this CPU has AVX-512 VNNI"
    config = load_manifest(first.layout).engine_config
    assert (config.quantization, config.kv_cache_dtype, config.kernels, config.instruction_level) == INT8
    said = summarize(first).arithmetic
    assert said == "int8, KV cache int8, native kernels (auto: this CPU has AVX-512 VNNI)"


def test_what_the_user_says_is_taken(job):
    assert frozen(job(SUITED, "model.quantization=none", "engine.kernels=cpu")) == PLAIN
    assert frozen(job(SUITED, "model.dtype=bfloat16"))[:3] == ("none", "bfloat16", "native")
    assert job(SUITED, "engine.kernels=cpu").sources["engine.kernels"] == "user"
    with pytest.raises(ConfigError, match=r"no C compiler; install gcc"):
        job(NO_COMPILER, "engine.kernels=native")


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        (OLDER, ("engine.instruction_level", "engine.kernels", "model.kv_cache_dtype", "model.quantization")),
        (NO_COMPILER, ("engine.instruction_level", "engine.kernels", "model.kv_cache_dtype", "model.quantization")),
        (WITHOUT_BF16, ("engine.instruction_level",)),
    ],
)
def test_another_machine_goes_on_only_if_it_computes_the_same(job, machine, named):
    first = freeze_job(job(SUITED))
    assert frozen(job(SUITED)) == frozen(first)
    with pytest.raises(ResumeRefused) as caught:
        job(machine)
    lines = [line.strip() for line in str(caught.value).splitlines() if " -> " in line]
    assert tuple(line.partition(":")[0] for line in lines) == named
    if machine.obstacle is not None:
        assert machine.obstacle in str(caught.value), "the reason is told"
    if machine.mend is not None:
        assert f"To go on here, {machine.mend}" in str(caught.value), "and what helps"


def test_a_better_machine_goes_on_as_the_job_began(job):
    """A compiler was installed, the processor is newer: what was begun in float32 through torch stays so."""
    first = freeze_job(job(NO_COMPILER))
    assert frozen(first) == PLAIN
    for machine in (SUITED, WITHOUT_BF16, NO_COMPILER):
        again = job(machine)
        assert frozen(again) == PLAIN
        assert again.sources["engine.kernels"] == first.sources["engine.kernels"]


def test_a_job_goes_on_with_the_kv_cache_that_auto_was_then(job):
    """It was bfloat16 before it was int8."""
    now = job(SUITED)
    kv_cache = {"model.kv_cache_dtype": "bfloat16"}
    first = freeze_job(replace(now, semantic={**now.semantic, **kv_cache}))
    assert first.sources["model.kv_cache_dtype"] == "auto: with int8"
    again = job(SUITED)
    assert frozen(now) == INT8 and frozen(again) == frozen(first) == ("int8", "bfloat16", *INT8[2:])
    assert again.sources["model.kv_cache_dtype"] == "auto: with int8"
    assert freeze_job(again).engine_config.kv_cache_dtype == "bfloat16"
    with pytest.raises(ResumeRefused, match=r'model\.kv_cache_dtype: "bfloat16" -> "int8"'):
        job(SUITED, "model.kv_cache_dtype=int8")


def test_what_the_user_changes_is_refused(job):
    freeze_job(job(SUITED))
    with pytest.raises(ResumeRefused, match=r'model\.quantization: "int8" -> "none"'):
        job(SUITED, "model.quantization=none")
    with pytest.raises(ResumeRefused, match=r'engine\.kernels: "native" -> "cpu"'):
        job(SUITED, "engine.kernels=cpu")
    with pytest.raises(ResumeRefused, match=r"engine\.block_size: 16 -> 32"):
        job(SUITED, "engine.block_size=32")


def test_a_slower_path_is_told_with_how_to_mend_it(job):
    assert job(SUITED).arithmetic.degraded is None
    assert job(OLDER).arithmetic.degraded is None
    said = job(NO_COMPILER).arithmetic.degraded
    assert said is not None and "no C compiler" in said and said.endswith("install gcc")


def test_a_retry_computes_as_its_job_did(shop, job, model):
    freeze_job(job(SUITED))
    spec = shop.spec("sampling.max_tokens=9", model={"path": str(model)})
    again = resolve_job(spec, retry=True, machine=SUITED)
    assert again.overrides == {"sampling.max_tokens": 9}
    with pytest.raises(ResumeRefused, match=r"engine\.kernels"):
        resolve_job(spec, retry=True, machine=OLDER)
