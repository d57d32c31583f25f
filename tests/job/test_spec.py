"""The job file: what is refused, in which words, and what is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.config import EngineConfig
from batchinfer.errors import ConfigError
from batchinfer.job.spec import EngineSpec, JobSpec, ModelSpec, SamplingSpec
from batchinfer.types.request import SAMPLING_FIELDS

GOOD = """\
name: gsm8k
model:
  path: model.gguf
input:
  path: data/*.parquet
  prompt: "Question: {question}\\nAnswer:"
output:
  path: out/gsm8k
sampling: {max_tokens: 256, temperature: 0.0, stop: ["###"]}
"""


def write(tmp_path, text, name="job.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def refused(tmp_path, text, *, overrides=()):
    with pytest.raises(ConfigError) as caught:
        JobSpec.from_yaml(write(tmp_path, text), overrides=overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_example_of_the_manual_with_paths_relative_to_the_file(tmp_path, monkeypatch):
    path = write(tmp_path, GOOD)
    monkeypatch.chdir("/")
    spec = JobSpec.from_yaml(path)
    assert spec.name == "gsm8k"
    assert spec.input.path == str(tmp_path / "data/*.parquet")
    assert spec.output.path == str(tmp_path / "out/gsm8k")
    assert spec.model.path == str(tmp_path / "model.gguf")
    assert spec.sampling.given() == {"max_tokens": 256, "temperature": 0.0, "stop": ["###"]}


def test_every_key_of_the_design_is_there(tmp_path):
    spec = JobSpec.from_yaml(
        write(
            tmp_path,
            """\
name: gsm8k
model: {path: m, revision: null, tokenizer: null, dtype: auto, quantization: auto, kv_cache_dtype: auto}
input:
  path: data/*.parquet
  format: auto
  limit: null
  storage_options: {}
  prompt: "{question}"
  id_column: null
  chat_template: null
  chat_template_kwargs: {enable_thinking: false}
  tools_column: null
  sampling_columns: {max_tokens: my_column}
  control_tokens: text
output: {path: out/gsm8k, format: parquet, columns: all, prefix: "", token_ids: true}
sampling: {max_tokens: 256, temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, n: 1, seed: null,
           stop: [], logprobs: null}
engine: {device: auto, deterministic: true, tensor_parallel_size: 1, max_model_len: null, max_num_seqs: auto,
         max_num_batched_tokens: auto, kv_cache_memory: 2GiB, enable_prefix_caching: true}
cluster: {kind: local, workers: 2}
failure: {max_failed_rows: auto, on_too_long: error}
""",
        )
    )
    assert spec.engine.kv_cache_memory == 2 * 2**30
    assert spec.cluster.workers == 2


def test_spec_has_every_sampling_and_engine_option():
    assert set(SamplingSpec.model_fields) == set(SAMPLING_FIELDS)
    ours = set(EngineSpec.model_fields) | set(ModelSpec.model_fields) | {"model", "seed", "instruction_level"}
    assert set(EngineConfig.__dataclass_fields__) <= ours


def test_all_problems_of_a_file_come_together_with_lines_and_suggestions(tmp_path):
    text = """\
model:
  path: m.gguf
  dtyp: auto
input:
  path: data.parquet
  prompt: "{a}"
  prompt_column: x
  limit: -3
output:
  path: out
  columns: 5
sampling: {temprature: 0.5, top_p: 3}
engine: {max_tokens: 5, max_num_seqs: many, block_size: 20}
cluser: {workers: 2}
"""
    message = refused(tmp_path, text)
    for part in (
        ":3: unknown key model.dtyp; did you mean dtype?",
        ":7: input needs exactly one of prompt, prompt_column, messages_column, messages: "
        "found prompt and prompt_column",
        ":8: input.limit must be at least 0, got -3",
        ":11: output.columns must be all or a list, got 5",
        ":12: unknown key sampling.temprature; did you mean temperature?",
        ":12: sampling.top_p must be above 0 and at most 1, got 3",
        ":13: unknown key engine.max_tokens; did you mean sampling.max_tokens?",
        ":13: engine.max_num_seqs must be auto or an integer, got 'many'",
        ":13: engine.split_size 256 must be a multiple of engine.block_size 20; use split_size 260, or another",
        ":14: unknown key cluser; did you mean cluster?",
    ):
        assert part in message, message
    assert "10 problems" in message


@pytest.mark.parametrize(
    ("find", "replace", "expected"),
    [
        ("name: gsm8k", "name: gsm8k\nname: b", "name is given twice (first on line 1)"),
        ("  path: out/gsm8k", "  path: a\n  path: b", "output.path is given twice"),
        ("temperature: 0.0", "temperature: hot", "sampling.temperature must be a number, got 'hot'"),
        ("temperature: 0.0", "temperature: -1", "sampling.temperature must be a finite number of at least 0"),
        ("max_tokens: 256", "max_tokens: 0", "sampling.max_tokens must be at least 1"),
        ("max_tokens: 256", "max_tokens: true", "sampling.max_tokens must be an integer"),
        ("max_tokens: 256", "max_tokens: 4, min_tokens: 5", "min_tokens (5) is larger than"),
        ('stop: ["###"]', 'stop: [""]', "sampling.stop must be a list of non-empty strings"),
        ("  prompt: ", "  promt: ", "found none"),
        ("  path: model.gguf", "  pat: model.gguf", "the key model.path is missing"),
        ("model:\n  path: model.gguf\n", "", "the section model is missing"),
        ("model:\n  path: model.gguf\n", "model: model.gguf\n", "model must be a section of key: value lines"),
        ("name: gsm8k", "name: gsm8k\nx: [1, 2", "not valid YAML"),
        ("name: gsm8k", "name: a: b", "must be quoted"),
        ('stop: ["###"]', "stop: [5]", "sampling.stop[0] must be text, got 5"),
        ("model:\n  path: model.gguf\n", "model:\n", "model must be a section of key: value lines, got nothing"),
        ("name: gsm8k", "1: 2", "the key 1 is not text"),
        ("{question}", "{question", "input.prompt: a single '{' at character"),
        ("output:", "  chat_template: x\noutput:", "input.chat_template needs input.messages_column"),
        ("output:", "  control_tokens: no\noutput:", "must be auto, text or parse, got false"),
        ("sampling:", "cluster: {kind: ray}\nsampling:", "cluster.kind must be local, got 'ray'"),
        (
            "sampling:",
            "engine: {split_size: 250}\nsampling:",
            "engine.split_size 250 must be a multiple of engine.block_size 16; use split_size 256, or another",
        ),
        (
            "sampling:",
            "engine: {block_size: 48}\nsampling:",
            "engine.split_size 256 must be a multiple of engine.block_size 48; use split_size 288, or another",
        ),
    ],
)
def test_one_problem_one_line(tmp_path, find, replace, expected):
    assert find in GOOD
    message = refused(tmp_path, GOOD.replace(find, replace))
    assert expected in message
    assert "job.yaml" in message


def test_sizes_that_are_wrong_alone_are_not_compared(tmp_path):
    for sizes in ("block_size: 0, split_size: 250", "block_size: 48, split_size: x", "block_size: null"):
        message = refused(tmp_path, GOOD.replace("sampling:", f"engine: {{{sizes}}}\nsampling:"))
        assert "problems" not in message and "multiple" not in message


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("engine.lora=x", "LoRA"),
        ("input.images=col", "image"),
        ("sampling.response_format={}", "structured output"),
        ("engine.speculative_config={}", "speculative"),
        ("output.format=jsonl", "jsonl is planned and not there yet; use parquet"),
        ("input.format=openai", "openai is planned"),
        ("cluster.kind=slurm", "slurm is planned and not there yet; use local"),
        ("cluster.kind=scheduler", "scheduler is planned"),
        ("model.quantization=int4", "int4 is planned"),
        ("model.kv_cache_dtype=fp8", "fp8 is planned"),
        ("engine.tensor_parallel_size=2", "2 is planned and not there yet"),
        ("sampling.prompt_logprobs=1", "prompt_logprobs"),
        ("failure.on_too_long=truncate", "truncate is planned"),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(tmp_path, override, named):
    message = refused(tmp_path, GOOD, overrides=[override])
    assert named in message and "not there yet" in message
    assert f"--set {override}" in message


def test_set_overrides_in_order_and_reads_values_as_yaml(tmp_path):
    path = write(tmp_path, GOOD)
    spec = JobSpec.from_yaml(
        path,
        overrides=[
            "sampling.temperature=0.7",
            "sampling.temperature=1e-1",
            "sampling.stop=[a, b]",
            "input.chat_template_kwargs.enable_thinking=false",
            "cluster.workers=3",
        ],
    )
    assert spec.sampling.temperature == 0.1
    assert spec.sampling.stop == ["a", "b"]
    assert spec.input.chat_template_kwargs == {"enable_thinking": False}
    assert spec.cluster.workers == 3
    with pytest.raises(ConfigError, match=r"--set workers: write it as"):
        JobSpec.from_yaml(path, overrides=["workers"])
    with pytest.raises(ConfigError, match="name is not a section"):
        JobSpec.from_yaml(path, overrides=["name.x=1"])


def test_section_with_nothing_under_it_is_as_good_as_none(tmp_path):
    spec = JobSpec.from_yaml(write(tmp_path, GOOD + "engine:\ncluster:\n"))
    assert spec.engine == EngineSpec() and spec.cluster.workers == 1


def test_files_that_are_not_job_files(tmp_path):
    with pytest.raises(ConfigError, match="no such job file"):
        JobSpec.from_yaml(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        JobSpec.from_yaml(tmp_path)
    assert "empty" in refused(tmp_path, "")
    assert "mapping" in refused(tmp_path, "- a\n- b\n")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        JobSpec.from_yaml(tmp_path / "latin.yaml")


def test_sampling_columns_are_checked(tmp_path):
    text = GOOD.replace("output:", "  sampling_columns: {max_token: a, logprobs: b}\noutput:")
    message = refused(tmp_path, text)
    assert "input.sampling_columns.max_token: no such sampling setting; did you mean max_tokens?" in message
    assert "set sampling.logprobs for the whole job" in message


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("input", "path", "a\0b", r"input\.path holds a zero byte"),
        ("output", "path", "a/" + "b" * 300, r"output\.path is no path: a name in it is longer than 255 bytes"),
        ("model", "path", "ä" * 200, r"model\.path is no path"),
        ("model", "tokenizer", "a\0b", r"model\.tokenizer holds a zero byte"),
        ("sampling", "stop", ["a", "\ud800"], r"sampling\.stop\[1\] holds half a character"),
        ("input", "prompt", "\udfff {p}", r"input\.prompt holds half a character"),
        ("input", "storage_options", {"key": object()}, r"input\.storage_options\.key must be plain data"),
        ("input", "storage_options", {"key": b"x"}, r"input\.storage_options\.key must be plain data"),
        ("input", "chat_template_kwargs", {"a": {1, 2}}, r"input\.chat_template_kwargs\.a must be plain data"),
        ("sampling", "min_tokens", -1, r"sampling\.min_tokens must be an integer of at least 0"),
        ("engine", "max_model_len", 1, r"engine\.max_model_len must be at least 2"),
    ],
)
def test_values_that_no_file_or_path_can_hold(tmp_path, section, key, value, says):
    data = {"model": {"path": "fake://hash"}, "input": {"path": "in", "prompt": "{p}"}, "output": {"path": "out"}}
    data[section] = {**data.get(section, {}), key: value}
    with pytest.raises(ConfigError, match=says):
        JobSpec.from_dict(data, base=tmp_path)


def test_paths_may_be_path_objects(tmp_path):
    data = {"model": {"path": "fake://hash"}, "input": {"path": tmp_path / "in", "prompt": "x"}}
    spec = JobSpec.from_dict({**data, "output": {"path": Path("out")}}, base=tmp_path)
    assert (spec.input.path, spec.output.path) == (str(tmp_path / "in"), str(tmp_path / "out"))


def test_a_home_that_is_none_is_a_name(tmp_path):
    data = {"model": {"path": "fake://hash"}, "input": {"path": "~nobody-there/in", "prompt": "x"}}
    spec = JobSpec.from_dict({**data, "output": {"path": "out"}}, base=tmp_path)
    assert spec.input.path == str(tmp_path / "~nobody-there/in")


def test_chat_template_kwargs_can_not_replace_the_row(tmp_path):
    data = {"model": {"path": "fake://hash"}, "output": {"path": "out"}}
    source = {"path": "in", "messages_column": "m", "chat_template_kwargs": {"messages": [], "x": 1}}
    with pytest.raises(ConfigError, match="sets messages, which come from the rows"):
        JobSpec.from_dict({**data, "input": source}, base=tmp_path)


def test_from_dict_takes_hub_ids_urls_and_absolute_paths(tmp_path):
    (tmp_path / "local").mkdir()
    data = {
        "model": {"path": "org/model-1B"},
        "input": {"path": "s3://bucket/x.parquet", "prompt_column": "q"},
        "output": {"path": "out"},
    }
    spec = JobSpec.from_dict(data, base=tmp_path)
    assert spec.model.path == "org/model-1B"
    assert spec.input.path == "s3://bucket/x.parquet"
    assert spec.output.path == str(tmp_path / "out")
    assert JobSpec.from_dict({**data, "model": {"path": "local"}}, base=tmp_path).model.path == str(tmp_path / "local")
    assert JobSpec.from_dict({**data, "model": {"path": "fake://hash"}}, base=tmp_path).model.path == "fake://hash"


def test_schema_for_editors_is_json_and_closed():
    schema = json.loads(json.dumps(JobSpec.json_schema()))
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["InputSpec"]["additionalProperties"] is False
    assert len(schema["$defs"]["InputSpec"]["oneOf"]) == 4
    assert set(schema["required"]) == {"model", "input", "output"}


def test_messages_stay_readable_whatever_is_wrong() -> None:
    long = "k" * 100_000
    with pytest.raises(ConfigError) as caught:
        JobSpec.from_dict({"model": {"path": "fake://echo"}, long: 1, **{f"key{i}": 1 for i in range(500)}})
    message = str(caught.value)
    assert len(message) < 40_000 and " … " in message and "more" in message.splitlines()[-1]
