"""What can't work is refused while a job is resolved: one message, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from batchinfer.errors import ConfigError, InputError, ModelError
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import JobSpec
from batchinfer.job.verify import verify_job
from batchinfer.testing.tiny import make_tiny, write_tokenizer

PROMPTS = {
    "text": pa.array(["a", None]),
    "large": pa.array(["a", None], pa.large_string()),
    "view": pa.array(["a", None], pa.string_view()),
    "dictionary": pa.array(["a", None]).dictionary_encode(),
    "nothing": pa.nulls(2),
    "number": pa.array([1, None]),
    "truth": pa.array([True, None]),
    "bytes": pa.array([b"a", None]),
    "fixed": pa.array([b"a", None], pa.binary(1)),
    "texts": pa.array([["a"], None]),
    "struct": pa.array([{"a": "x"}, None]),
    "messages": pa.array([[{"role": "user", "content": "x"}], None]),
    "day": pa.array([1, None], pa.date32()),
}


def refused(shop, says: str, *, error: type[Exception] = InputError, **sections) -> None:
    with pytest.raises(error, match=says):
        resolve_job(shop.spec(**sections))
    assert not shop.output.is_dir()


@pytest.mark.parametrize(
    ("key", "good"),
    [
        ("prompt_column", {"text", "large", "view", "dictionary", "nothing"}),
        ("messages_column", {"messages", "nothing"}),
    ],
)
def test_columns_of_types_that_can_be_no_prompt(shop, key, good):
    shop.write("a.parquet", PROMPTS)
    for name in PROMPTS:
        given = {"prompt_column": None, key: name}
        if name in good:
            resolve_job(shop.spec(input=given))
        else:
            refused(shop, rf"^input\.{key}: column '{name}' is .* in a\.parquet; it must hold ", input=given)


def test_messages_for_a_model_without_a_chat_template(shop):
    shop.write("a.parquet", PROMPTS)
    model = make_tiny(shop.root / "model")
    write_tokenizer(model, chat_template=None)
    chat = {"prompt_column": None, "messages_column": "messages"}
    says = r"no chat template.*input\.chat_template"
    refused(shop, says, error=ModelError, model={"path": str(model)}, input=chat)
    given = [{"role": "user", "content": "{text}"}]
    refused(shop, says, error=ModelError, model={"path": str(model)}, input={"prompt_column": None, "messages": given})
    resolve_job(shop.spec(model={"path": str(model)}, input={"prompt_column": "text"}))
    resolve_job(shop.spec(model={"path": str(model)}, input={**chat, "chat_template": "{{ messages[0].content }}"}))


def test_tools_are_lists_or_json_text(shop):
    shop.write("a.parquet", PROMPTS)
    source = {"prompt_column": None, "messages_column": "messages"}
    for name in ("messages", "text", "nothing"):
        resolve_job(shop.spec(input={**source, "tools_column": name}))
    refused(shop, r"input\.tools_column: column 'number' is int64", input={**source, "tools_column": "number"})


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{a.b}", None),
        ("{a.c.d}", None),
        ("{x.y}", None),  # a column of that name
        ("{nothing.b}", None),  # row by row: a null is no struct
        ("{p.q}", r"^input\.prompt: .* has no 'p\.q': 'p' is string, not a struct"),
        ("{a.z}", r"^input\.prompt: .* has no 'a\.z': 'a' has the fields b, c"),
        ("{a.c.z}", r"'a\.c' has the fields d"),
        ("{a.b.z}", r"'a\.b' is int64, not a struct"),
        ("{z.b}", r"^input\.prompt: .* has no column 'z'"),
    ],
)
def test_dotted_names_lead_somewhere(shop, template, says):
    row = {"p": "x", "a": {"b": 1, "c": {"d": "x"}}, "x.y": "z"}
    shop.write("a.parquet", pa.Table.from_pylist([row]).append_column("nothing", pa.nulls(1)))
    if says is None:
        resolve_job(shop.spec(input={"prompt_column": None, "prompt": template}))
    else:
        refused(shop, says, input={"prompt_column": None, "prompt": template})
    messages = [{"role": "user", "content": template}]
    if says is not None:
        said = says.replace(r"input\.prompt", r"input\.messages")
        refused(shop, said, input={"prompt_column": None, "messages": messages})


@pytest.mark.parametrize(
    ("source", "output", "clash"),
    [
        ("in", "in", True),
        ("in", "in/out", True),
        ("in/*.parquet", "in", True),
        ("in/*.parquet", "in/out", False),
        ("in/*/*.parquet", "in/out", True),
        ("in/**/*.parquet", "in/deep/out", True),
        ("in/**", "in/out", True),
        ("*/*.parquet", "out", True),
        ("in/a.parquet", "in/out", False),
        ("in/[a-b].parquet", "in", False),
        ("link", "in/out", True),
        ("in", "link/out", True),
        ("in", "out", False),
        ("in", "in2/out", False),
    ],
)
def test_an_output_that_would_become_input(shop, source, output, clash):
    shop.write("a.parquet", {"prompt": ["x"]})
    (shop.input / "deep").mkdir()
    (shop.input / "deep" / "a.parquet").write_bytes((shop.input / "a.parquet").read_bytes())
    (shop.root / "link").symlink_to("in")
    spec = shop.spec(input={"path": source}, output={"path": output})
    if clash:
        with pytest.raises(ConfigError, match="looks for files: the output would be taken for input"):
            resolve_job(spec)
    elif output == "in":
        with pytest.raises(ConfigError, match="holds 1 Parquet files"):
            resolve_job(spec)
    else:
        resolve_job(spec)


@pytest.mark.parametrize("output", ["file", "file/deeper/out", "nowhere", "nowhere/out"])
def test_an_output_folder_that_can_be_none(shop, output):
    shop.write("a.parquet", {"prompt": ["x"]})
    (shop.root / "file").write_text("x")
    (shop.root / "nowhere").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"^output\.path .* (a file|a link to nowhere), not a folder"):
        resolve_job(shop.spec(output={"path": output}))


def test_an_output_folder_without_permission(shop, monkeypatch):
    shop.write("a.parquet", {"prompt": ["x"]})
    (shop.root / "locked").mkdir(mode=0o500)
    if os.geteuid() == 0:  # root may write everywhere: what the owner's bits say to anybody else
        monkeypatch.setattr(os, "access", lambda path, mode: bool(Path(path).stat().st_mode & 0o200))
    resolve_job(shop.spec(output={"path": "open/out"}))
    with pytest.raises(ConfigError, match="can't be written to"):
        resolve_job(shop.spec(output={"path": "locked/out"}))


def test_empty_inputs_say_so(shop):
    (shop.input / "a.jsonl").write_text("\n")
    refused(shop, r"^input\.prompt_column: the input .* is empty: it holds no rows and no columns")


def test_one_wrong_value_costs_its_own_row_only(shop):
    """Of JSON Lines with few rows: the good ones run whatever the others hold."""
    lines = ['{"m": [{"role": "user", "content": "hi"}], "t": 5}'] * 2
    lines += ['{"m": "text", "t": 5}', '{"m": {"role": "user"}}', '{"m": [3]}', '{"m": null}', '{"m": []}', "{}"]
    lines += ['{"m": [{"role": "user", "content": "hi"}], "t": "5"}']
    (shop.input / "a.jsonl").write_text("\n".join(lines))
    job = shop.submit(input={"prompt_column": None, "messages_column": "m", "sampling_columns": {"max_tokens": "t"}})
    errors = [row["error"] and row["error"]["class"] for row in shop.read()]
    assert errors == [None, None, *["invalid_row"] * 3, *["invalid_prompt"] * 3, "invalid_row"]
    assert verify_job(job).ok


def test_list_views_are_carried_as_lists(shop):
    values = [[1], None, [], [2, 3]]
    table = pa.table({"prompt": ["a"] * 4, "x": pa.array(values, pa.list_view(pa.int32()))})
    with pa.ipc.new_file(str(shop.input / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=3)
    job = shop.submit()
    assert [row["x"] for row in shop.read()] == values
    assert verify_job(job).ok


def test_links_and_names_of_hubs_in_paths(tmp_path: Path):
    def paths(input_path: str, model_path: str = "m") -> tuple[str, str]:
        data = {
            "model": {"path": model_path},
            "input": {"path": input_path, "prompt_column": "p"},
            "output": {"path": "out"},
        }
        spec = JobSpec.from_dict(data, base=tmp_path)
        return spec.input.path, spec.model.path

    (tmp_path / "blob").write_bytes(b"x")
    (tmp_path / "a.parquet").symlink_to("blob")
    (tmp_path / "m.gguf").symlink_to("blob")
    assert paths("a.parquet", "m.gguf") == (str(tmp_path / "a.parquet"), str(tmp_path / "m.gguf"))
    for name in ("owner/data", "owner/data::train", "owner/data:config::train", "openai/gsm8k:main::test"):
        assert paths(name)[0] == name
    (tmp_path / "owner" / "data").mkdir(parents=True)
    assert paths("owner/data::train")[0] == str(tmp_path / "owner/data::train")
    assert paths("a:b")[0] == str(tmp_path / "a:b")
