"""How a model computes is chosen for a machine at the first submit; who goes on computes the same way or is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from batchinfer_kernels import numeric_formats

from batchinfer.arithmetic import DTYPES, KERNELS, KV_CACHE_DTYPES, PLANNED, QUANTIZATIONS, Machine
from batchinfer.errors import ConfigError, ResumeRefused
from batchinfer.job.manifest import FORMAT, freeze_job, load_manifest
from batchinfer.job.report import summarize
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import ModelSpec
from batchinfer.job.status import read_status
from batchinfer.job.verify import verify_job
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
    then = {**now.semantic, "model.kv_cache_dtype": "bfloat16"}
    then.pop(f"{FORMAT}int8_attention", None)
    first = freeze_job(replace(now, semantic=then))
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


FLOATS = ("model.quantization=none", "model.kv_cache_dtype=bfloat16")
INT8_CACHE = ("model.quantization=none", "model.kv_cache_dtype=int8")


def numbers(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    """The version of batchinfer is one that has these numbers, and first ones of all else."""
    first = dict.fromkeys(numeric_formats.NUMBERS, numeric_formats.FIRST)
    monkeypatch.setattr(numeric_formats, "NUMBERS", first | changed)


def other_number(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Another version computes otherwise in this format."""
    today = numeric_formats.NUMBERS
    monkeypatch.setattr(numeric_formats, "NUMBERS", {**today, name: today[name] + 1})


def written_before_numbers(job):
    """The job as a version froze it that recorded none."""
    semantic = {key: value for key, value in job.semantic.items() if not key.startswith(FORMAT)}
    return freeze_job(replace(job, semantic=semantic))


def files_of(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("overrides", [(), FLOATS, INT8_CACHE, ("engine.kernels=cpu",)])
def test_a_job_goes_on_where_formats_compute_as_they_did(job, overrides):
    first = freeze_job(job(SUITED, *overrides))
    again = freeze_job(job(SUITED, *overrides))
    assert again.semantic == load_manifest(first.layout).semantic == first.semantic


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ((), "int8"),
        ((), "float32"),
        ((), "int8_kv_cache"),
        ((), "int8_attention"),
        (INT8_CACHE, "int8_attention"),
        (FLOATS, "bfloat16"),
        (("engine.kernels=cpu", "model.quantization=int8"), "int8"),
    ],
)
def test_a_format_in_use_that_computes_otherwise_is_refused(job, shop, model, monkeypatch, overrides, name):
    freeze_job(job(SUITED, *overrides))
    before = files_of(shop.root)
    other_number(monkeypatch, name)
    with pytest.raises(ResumeRefused) as caught:
        job(SUITED, *overrides)
    head, line, mend = str(caught.value).splitlines()
    assert head.startswith(str(shop.output)) and "another version of batchinfer began it" in head
    assert line.strip().startswith(f"numeric_format.{name}: ")
    assert mend.startswith("End the job with that version, or start over with --fresh (")
    assert files_of(shop.root) == before, "nothing is changed"
    with pytest.raises(ResumeRefused, match=rf"numeric_format\.{name}: "):
        resolve_job(shop.spec(*overrides, model={"path": str(model)}), retry=True, machine=SUITED)


def test_a_job_that_was_begun_by_a_later_version_is_refused(job, monkeypatch):
    numbers(monkeypatch, int8=3)
    freeze_job(job(SUITED))
    numbers(monkeypatch, int8=2)
    with pytest.raises(ResumeRefused, match=r"numeric_format\.int8: 3 -> 2"):
        job(SUITED)


def test_a_number_that_nobody_knows_is_no_reason_to_go_on(job):
    now = job(SUITED, *FLOATS)
    freeze_job(replace(now, semantic={**now.semantic, f"{FORMAT}int9": 2}))
    with pytest.raises(ResumeRefused, match=r"numeric_format\.int9: 2 -> null"):
        job(SUITED, *FLOATS)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [((), "bfloat16"), ((), "w8a8"), (FLOATS, "int8"), (FLOATS, "int8_attention"), (INT8_CACHE, "int8")],
)
def test_a_format_that_the_job_does_not_use_may_change(job, monkeypatch, overrides, name):
    first = freeze_job(job(SUITED, *overrides))
    other_number(monkeypatch, name)
    assert freeze_job(job(SUITED, *overrides)).fingerprint == first.fingerprint


def test_a_setting_that_the_user_changes_is_told_without_numbers(job, monkeypatch):
    freeze_job(job(SUITED))
    with pytest.raises(ResumeRefused, match=r"Undo the change to go on") as caught:
        job(SUITED, *FLOATS)
    assert FORMAT not in str(caught.value)
    numbers(monkeypatch, float32=2)
    with pytest.raises(ResumeRefused, match=r"Undo the change to go on") as caught:
        job(SUITED, *FLOATS)
    assert f"{FORMAT}float32: null -> 2" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), ["int8", "int8_attention"]),
        (("engine.kernels=cpu", "model.quantization=int8"), ["int8"]),
        (INT8_CACHE, ["int8_attention"]),
        (FLOATS, []),
        (("engine.kernels=cpu",), []),
        (("engine.kernels=cpu", *INT8_CACHE), []),
    ],
)
def test_a_manifest_without_numbers_goes_on_where_nothing_it_uses_has_changed(job, monkeypatch, overrides, named):
    """It stands for the first numbers."""
    numbers(monkeypatch, int8=2, int8_attention=2)
    first = written_before_numbers(job(SUITED, *overrides))
    if not named:
        again = freeze_job(job(SUITED, *overrides))
        assert again.fingerprint == first.fingerprint, "its parts are still its own"
        return
    with pytest.raises(ResumeRefused, match="End the job with that version") as caught:
        job(SUITED, *overrides)
    lines = [line.strip() for line in str(caught.value).splitlines() if " -> " in line]
    assert [line.partition(": null -> ")[0] for line in lines] == [f"{FORMAT}{name}" for name in named]


def test_what_such_a_job_has_written_can_be_verified_and_read(job, shop):
    first = written_before_numbers(job(SUITED))
    shop.run(first, answer=lambda text, file, row: "said")
    with pytest.raises(ResumeRefused):
        job(SUITED)
    assert verify_job(load_manifest(first.layout)).ok
    assert read_status(first.layout.output).rows_done == 1
    assert [row["completion"] for row in shop.read()] == ["said"]


def test_whatever_a_job_can_compute_in_has_a_number():
    """A new scheme, or cache, can't come without one."""
    found = {
        name
        for dtype in DTYPES
        for quantization in QUANTIZATIONS
        for cache in KV_CACHE_DTYPES
        for kernels in KERNELS
        for name in numeric_formats.used(dtype=dtype, quantization=quantization, kv_cache_dtype=cache, kernels=kernels)
    }
    assert found == numeric_formats.NUMBERS.keys()
    assert all(number >= numeric_formats.FIRST for number in numeric_formats.NUMBERS.values())
    for key, known in (("quantization", QUANTIZATIONS), ("kv_cache_dtype", KV_CACHE_DTYPES), ("dtype", DTYPES)):
        written = get_args(ModelSpec.model_fields[key].annotation)
        assert set(written) <= {"auto", *known, *PLANNED.get(key, ())}, key


def test_a_fake_model_computes_in_no_format(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    assert not resolve_job(shop.spec("model.quantization=int8")).arithmetic.formats
