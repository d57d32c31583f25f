"""Going on with a job: what may differ, what is refused and how it is said, --extend, --fresh, other checks."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.data.parts import read_footer
from batchinfer.errors import ConfigError, InputError, ModelError, ResumeRefused
from batchinfer.job import windows as windows_module
from batchinfer.job.manifest import freeze_job, load_manifest, move_aside
from batchinfer.job.resolve import resolve_job
from batchinfer.job.verify import verify_job
from batchinfer.testing.tiny import make_tiny


@pytest.fixture
def half_done(shop, monkeypatch):
    """Four files of 25 rows; two windows of two are committed, as after a kill."""
    monkeypatch.setattr(windows_module, "FIRST_WINDOW_ROWS", 25)
    monkeypatch.setattr(windows_module, "MAX_WINDOW_ROWS", 25)
    for n in range(4):
        shop.write(f"f{n}.parquet", {"prompt": [f"{n}-{i}" for i in range(25)]})
    job = freeze_job(resolve_job(shop.spec(sampling={"temperature": 0.0})))
    shop.run(job, windows=job.windows()[:2])
    assert len(shop.parts()) == 2
    return shop


def refused(shop, **sections) -> str:
    before = {path.name: path.read_bytes() for path in shop.parts()}
    manifest = (shop.output / "__batchinfer/manifest.json").read_bytes()
    with pytest.raises(ResumeRefused) as caught:
        resolve_job(shop.spec(**sections))
    assert {path.name: path.read_bytes() for path in shop.parts()} == before
    assert (shop.output / "__batchinfer/manifest.json").read_bytes() == manifest
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_unchanged_job_goes_on_and_runs_only_what_is_left(half_done):
    shop = half_done
    shop.ran.clear()
    job = shop.submit(sampling={"temperature": 0.0}, epoch=2)
    assert sorted(shop.ran) == [(f"f{n}.parquet", i) for n in (2, 3) for i in range(25)]
    assert verify_job(job).ok
    assert [row["completion"] for row in shop.read()] == [f"echo {n}-{i}" for n in range(4) for i in range(25)]


def test_rows_inserted_at_the_top(half_done):
    half_done.write("f2.parquet", {"prompt": [f"new {i}" for i in range(5)] + [f"2-{i}" for i in range(25)]})
    message = refused(half_done)
    assert "input file f2.parquet changed (25 rows before, 30 now)" in message
    assert "--fresh" in message


def test_renamed_files(half_done):
    (half_done.input / "f0.parquet").rename(half_done.input / "z0.parquet")
    message = refused(half_done)
    assert "input file f0.parquet is now called z0.parquet" in message
    assert "new input file" not in message and "is gone" not in message


def test_deleted_file(half_done):
    (half_done.input / "f3.parquet").unlink()
    assert "input file f3.parquet is gone" in refused(half_done)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature: 0.0 -> 0.7"),
        ({"sampling": {"max_tokens": 9}}, "sampling.max_tokens: 8 -> 9"),
        ({"sampling": {"stop": ["x"]}}, 'sampling.stop: [] -> ["x"]'),
        ({"sampling": {"seed": 3}}, "seed: "),
        ({"model": {"path": "fake://hash?max_model_len=256&vocab=600"}}, "model.hash: "),
        ({"engine": {"max_model_len": 128}}, "engine.max_model_len: 256 -> 128"),
        ({"engine": {"split_size": 128}}, "engine.split_size: 256 -> 128"),
        ({"input": {"prompt_column": None, "prompt": "Q {prompt}"}}, 'input.prompt: null -> "Q {prompt}"'),
        ({"output": {"token_ids": True}}, "output.token_ids: false -> true"),
        ({"input": {"limit": 60}}, "f2.parquet gave 25 rows before, 10 now"),
        ({"input": {"window_rows": 10}}, "input.window_rows: null -> 10"),
    ],
)
def test_changed_settings_are_refused_by_name(half_done, sections, named):
    assert named in refused(half_done, **sections)


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: edit(m / "config.json", rope_theta=9000.0), "model.hash: "),
        (lambda m: make_tiny(m, seed=1), "model.hash: "),
        (lambda m: (m / "chat_template.jinja").write_text("{{ messages[0].content }}"), "model.chat_template_hash: "),
        (lambda m: edit(m / "tokenizer_config.json", bos_token=None), "model.tokenizer_hash: "),
        (lambda m: edit(m / "generation_config.json", eos_token_id=[2, 7]), "model.eos_token_ids: [2] -> [2, 7]"),
        (
            lambda m: edit(m / "generation_config.json", repetition_penalty=1.1),
            "sampling.repetition_penalty: 1.0 -> 1.1",
        ),
    ],
)
def test_a_model_whose_files_changed_is_refused_by_what_changed(shop, change, named):
    """The path is the same: what lies there decides."""
    shop.write("a.parquet", {"m": pa.array([[{"role": "user", "content": "x"}]])})
    model = make_tiny(shop.root / "model")
    sections = {"model": {"path": str(model)}, "input": {"prompt_column": None, "messages_column": "m"}}
    freeze_job(resolve_job(shop.spec(**sections)))
    resolve_job(shop.spec(**sections))
    change(model)
    assert named in refused(shop, **sections)


def test_all_changes_are_listed_at_once(half_done):
    (half_done.input / "f3.parquet").unlink()
    message = refused(half_done, sampling={"temperature": 0.7, "top_p": 0.5})
    for part in ("sampling.temperature: 0.0 -> 0.7", "sampling.top_p: 1.0 -> 0.5", "f3.parquet is gone"):
        assert part in message


def test_what_changes_no_bytes_may_change(half_done):
    job = half_done.submit(
        epoch=2,
        engine={"max_num_seqs": 3, "max_num_batched_tokens": 64, "enable_prefix_caching": False, "num_threads": 1},
        cluster={"workers": 4},
        failure={"max_failed_rows": 5},
    )
    assert job.engine_config.max_num_seqs == 3
    assert verify_job(job).ok


def test_the_drawn_seed_is_kept(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    first = freeze_job(resolve_job(shop.spec()))
    assert first.sources["seed"] == "drawn"
    assert resolve_job(shop.spec()).seed == first.seed
    assert resolve_job(shop.spec(), ignore_existing=True).seed != first.seed


def test_moved_input_and_output_folders_go_on(half_done, tmp_path):
    half_done.input.rename(tmp_path / "elsewhere")
    half_done.output.rename(tmp_path / "out2")
    job = resolve_job(half_done.spec(input={"path": "elsewhere"}, output={"path": "out2"}))
    half_done.run(job, epoch=2)
    assert verify_job(job).ok


def test_new_files_need_extend_and_get_numbers_after_the_old(half_done):
    shop = half_done
    shop.submit(epoch=2)
    old = {path.name: path.read_bytes() for path in shop.parts()}
    shop.write("a_first.parquet", {"prompt": [f"new {i}" for i in range(30)]})
    message = refused(shop)
    assert "new input file a_first.parquet (30 rows)" in message and "--extend" in message
    shop.ran.clear()
    job = shop.submit(extend=True, epoch=3)
    assert {path.name: path.read_bytes() for path in shop.parts() if path.name in old} == old
    assert sorted(shop.ran) == [("a_first.parquet", i) for i in range(30)]
    assert [path.name for path in shop.parts()][4:] == ["part-00004-00000.parquet"]
    assert verify_job(job).ok
    assert load_manifest(job.layout).generations == (0, 0, 0, 0, 1)
    # From then on it is the job: the same command finds nothing changed.
    again = resolve_job(shop.spec())
    assert again.file_name(4) == "a_first.parquet" and again.generations == (0, 0, 0, 0, 1)
    shop.write("b.parquet", {"prompt": ["more"]})
    job = shop.submit(extend=True, epoch=4)
    assert job.generations == (0, 0, 0, 0, 1, 2)
    assert verify_job(job).ok


def test_extend_still_refuses_changes_and_needs_a_job(half_done, tmp_path):
    half_done.write("f1.parquet", {"prompt": ["other"]})
    half_done.write("g.parquet", {"prompt": ["new"]})
    with pytest.raises(ResumeRefused, match=r"f1\.parquet changed"):
        resolve_job(half_done.spec(), extend=True)
    with pytest.raises(ConfigError, match="no job to extend"):
        resolve_job(half_done.spec(output={"path": "elsewhere"}), extend=True)


def test_fresh_moves_aside_and_deletes_nothing(half_done):
    shop = half_done
    files = sorted(path.name for path in shop.output.rglob("*") if path.is_file())
    spec = shop.spec(sampling={"temperature": 0.9})
    job = resolve_job(spec, ignore_existing=True)
    target = move_aside(job.layout)
    assert target.parent == shop.output.parent and target.name.startswith("out.before-")
    assert sorted(path.name for path in target.rglob("*") if path.is_file()) == files
    shop.run(freeze_job(job))
    assert verify_job(job).ok
    second = move_aside(job.layout)
    assert second is not None and second != target
    assert move_aside(job.layout) is None


def test_freezing_twice_compares(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    one = resolve_job(shop.spec(sampling={"seed": 1}))
    two = resolve_job(shop.spec(sampling={"seed": 2}))
    freeze_job(one)
    late = resolve_job(shop.spec(), ignore_existing=True)  # looked before the first one wrote, say
    assert late.seed != 1 and freeze_job(late).seed == 1
    assert freeze_job(one).seed == 1
    with pytest.raises(ResumeRefused, match="seed: 1 -> 2"):
        freeze_job(two)


def test_unreadable_manifest_is_said_so(half_done):
    half_done.output.joinpath("__batchinfer/manifest.json").write_text("{")
    with pytest.raises(ResumeRefused, match="another version of batchinfer or is damaged"):
        resolve_job(half_done.spec())


def test_a_job_of_an_earlier_version_is_refused_until_it_starts_over(half_done):
    """Its manifest does not say which kernels made the rows that are there."""
    path = half_done.output / "__batchinfer/manifest.json"
    old = json.loads(path.read_text())
    old["format"] = 1
    for key in ("engine.kernels", "engine.block_size"):
        del old["semantic"][key], old["sources"][key]
    path.write_text(json.dumps(old))
    with pytest.raises(ResumeRefused, match=r"format 1, this version reads 2.*another version of batchinfer.*--fresh"):
        resolve_job(half_done.spec())
    resolve_job(half_done.spec(), ignore_existing=True)


@pytest.mark.parametrize(
    ("columns", "sections", "error", "named"),
    [
        ({"q": ["a"]}, {}, InputError, "input.prompt_column: "),
        ({"prompts": ["a"]}, {}, InputError, "no column 'prompt'; its columns are: prompts; did you mean 'prompts'?"),
        ({"q": ["a"]}, {"input": {"prompt_column": None, "prompt": "{x}"}}, InputError, "input.prompt: "),
        ({"prompt": ["a"]}, {"input": {"sampling_columns": {"seed": "s"}}}, InputError, "no column 's'"),
        ({"prompt": ["a"]}, {"input": {"id_column": "id"}}, InputError, "no column 'id'"),
        ({"prompt": ["a"]}, {"output": {"columns": ["x"]}}, InputError, "'x'"),
        ({"prompt": [1, 2]}, {}, InputError, "column 'prompt' is int64 in a.parquet"),
        ({"prompt": ["a"], "completion": ["b"]}, {}, InputError, "completion"),
        ({"prompt": ["a"], "Error": ["b"]}, {}, InputError, "'Error'"),
        ({"prompt": ["a"]}, {"model": {"path": "/no/such/model"}}, ModelError, "no such"),
        ({"prompt": ["a"]}, {"engine": {"max_model_len": 9999}}, ConfigError, "has 256 positions"),
        ({"prompt": ["a"]}, {"sampling": {"max_tokens": None, "min_tokens": 256}}, ConfigError, "more than 255"),
        ({"prompt": ["a"]}, {"sampling": {"logit_bias": {512: 1.0}}}, ConfigError, "not in the model's vocabulary"),
        ({"prompt": ["a"]}, {"sampling": {"stop_token_ids": [99999]}}, ConfigError, "not in the model's vocabulary"),
        ({"prompt": ["a"]}, {"input": {"path": "nothing"}}, InputError, "nothing"),
        ({"prompt": ["a"]}, {"output": {"path": "s3://b/o"}}, ConfigError, "s3://"),
        ({"prompt": ["a"]}, {"output": {"path": "in"}}, ConfigError, "would be taken for input"),
        ({"prompt": ["a"]}, {"output": {"path": "in/deeper/out"}}, ConfigError, "would be taken for input"),
        (
            {"prompt": ["a"]},
            {"input": {"path": "in/*.parquet"}, "output": {"path": "in"}},
            ConfigError,
            "taken for input",
        ),
    ],
)
def test_what_can_not_run_is_refused_before_anything_is_written(shop, columns, sections, error, named):
    shop.write("a.parquet", columns)
    with pytest.raises(error) as caught:
        resolve_job(shop.spec(**sections))
    assert named in str(caught.value)
    assert caught.value.exit_code == 2
    assert not shop.output.exists()
    assert [path.name for path in shop.input.iterdir()] == ["a.parquet"]


def test_incompatible_schemas_are_refused_up_front(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    shop.write("b.parquet", {"prompt": [1]})
    with pytest.raises(InputError, match=r"'prompt'.*b\.parquet"):
        resolve_job(shop.spec())


def test_files_of_different_schemas_make_one_output_schema(shop):
    shop.write("f1.parquet", {"prompt": ["a"], "system": pa.nulls(1)})
    shop.write("f2.parquet", {"prompt": ["b"], "system": ["s"]})
    shop.write("f3.parquet", {"src": ["x"], "prompt": pa.array(["c"], pa.large_string())})
    shop.write("f4.parquet", {"prompt": pa.array(["d"]).dictionary_encode(), "n": pa.array([1], pa.int32())})
    shop.write("f5.parquet", {"prompt": ["e"], "n": pa.array([2**40], pa.int64())})
    job = shop.submit()
    assert verify_job(job).ok
    import pyarrow.parquet as pq

    assert len({str(pq.read_schema(path)) for path in shop.parts()}) == 1
    assert [row["completion"] for row in shop.read()] == [f"echo {c}" for c in "abcde"]
    assert [row["n"] for row in shop.read()] == [None, None, None, 1, 2**40]


def test_own_output_is_input_again_with_a_prefix(shop):
    shop.write("a.parquet", {"prompt": ["a", "b"]})
    shop.submit()
    with pytest.raises(InputError, match=r"output\.prefix"):
        resolve_job(shop.spec(input={"path": "out"}, output={"path": "out2"}))
    job = resolve_job(
        shop.spec(input={"path": "out", "prompt_column": "completion"}, output={"path": "out2", "prefix": "second_"})
    )
    shop.run(freeze_job(job))
    assert verify_job(job).ok
    import pyarrow.parquet as pq

    (part,) = (shop.root / "out2").glob("part-*.parquet")
    rows = pq.read_table(part).to_pylist()
    assert [row["second_completion"] for row in rows] == ["echo echo a", "echo echo b"]
    assert [row["completion"] for row in rows] == ["echo a", "echo b"]
    assert read_footer(part)["prefix"] == "second_"
