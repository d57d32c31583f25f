"""Job files as text: every kind of broken YAML is one ConfigError that names the line, and never a hang."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ConfigError
from batchinfer.job.job_file import parse_yaml, read_job_file, with_overrides
from batchinfer.job.spec import JobSpec

_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
_MERGE_BOMB = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join(['*' + before] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def read(text: str | bytes, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_job_file(path, overrides=overrides).data


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n", r":1: a job file is a mapping"),
        ("a: 1\n\tb: 2\n", r":2: .*spaces, not tabs"),
        ("input: {path: *.parquet}", r":1: .*text that begins with \* .*must be quoted"),
        ("name: a: b", r":1: .*must be quoted"),
        ("a: [1, 2", r"not valid YAML"),
        ("a: 1\n---\nb: 1\n", r":2: .*a second document"),
        ("a: 1\nb: 'x\0y'\n", r":2: .*'\\x00' is not allowed"),
        ("a: &x {b: *x}", r":1: an alias .*inside its own anchor"),
        ("a: &x [*x]", r":1: an alias .*inside its own anchor"),
        ("a: &x {<<: *x}", r":1: an alias .*inside its own anchor"),
        ("a: *nobody", r":1: .*undefined alias"),
        ("a: {<<: 3}", r":1: << merges mappings only"),
        ("a: !!int four", r":1: 'four' is no int"),
        ("a: !!bool four", r":1: 'four' is no bool"),
        ("a: !!int ''", r":1: '' is no int"),
        ("a: !!float ''", r":1: '' is no float"),
        ("a: !!timestamp yesterday", r":1: 'yesterday' is no timestamp"),
        ('b: 1\na: "\\U00110000"', r":2: not valid YAML: "),
        ("a: !unknown four", r":1: .*could not determine a constructor"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("a: " + "9" * 5000, r":1: '9+' is no int"),
        (b"name: caf\xe9", r"not UTF-8 text \(byte 9\)"),
        ("a: 1".encode("utf-16"), "not UTF-8"),
    ],
)
def test_what_is_no_job_file_is_one_message(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        read(text, tmp_path)
    assert "job.yaml" in str(caught.value)


@pytest.mark.parametrize("text", [_BOMB, _MERGE_BOMB])
def test_aliases_of_aliases_end_soon(text: str, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match="multiply"):
        read(text, tmp_path)
    assert time.monotonic() - start < 10


def test_nothing_but_plain_values_is_made(tmp_path: Path) -> None:
    assert read("a: !!python/object/apply:os.system ['exit 1']", tmp_path) == {"a": ["exit 1"]}


def test_merged_keys_give_way_to_own_ones(tmp_path: Path) -> None:
    text = "base: &base {path: x, format: y}\nother: &other {path: o, limit: 1}\nmine: {path: z, <<: [*base, *other]}\n"
    assert read(text, tmp_path)["mine"] == {"path": "z", "format": "y", "limit": 1}


def test_own_keys_are_still_counted_beside_merged_ones() -> None:
    data, _, problems = parse_yaml("base: &base {n: 1}\nmine: {<<: *base, n: 2, n: 3}\n", "job.yaml")
    assert data["mine"] == {"n": 2}
    assert problems == ["job.yaml:2: mine.n is given twice (first on line 2); keep one of them"]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    assert read(b"\xef\xbb\xbfa: 1\r\nb: x\r\n", tmp_path) == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=3", {"a": {"b": 3}}),
        ("a.b=", {"a": {"b": ""}}),
        ("a.b=x: y: z", {"a": {"b": "x: y: z"}}),
        ("a.b=[1, 2", {"a": {"b": "[1, 2"}}),
        ("a.b=*.parquet", {"a": {"b": "*.parquet"}}),
        ("a.b=1e-3", {"a": {"b": 0.001}}),
        ("a.b.50=1", {"a": {"b": {50: 1}}}),
        ("a.b=&x [*x]", {"a": {"b": "&x [*x]"}}),
    ],
)
def test_values_of_overrides(override: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert read("a: {}", tmp_path, override) == expected


def test_a_long_override_is_shown_in_short(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        JobSpec.from_dict({"model": {"path": "m"}}, base=tmp_path, overrides=["a" * 5000 + "=1"])
    assert "--set aaa" in str(error.value)
    assert "a" * 101 not in str(error.value).partition("unknown key")[0]


def test_an_override_is_named_where_it_is_wrong(tmp_path: Path) -> None:
    source = with_overrides(read_job_file(_written(tmp_path)), ["foo.bar.baz=1"])
    assert source.place(("foo",)) == "--set foo.bar.baz=1"
    with pytest.raises(ConfigError, match=r"^--set foo\.bar\.baz=1: unknown key foo"):
        JobSpec.from_yaml(_written(tmp_path), overrides=["foo.bar.baz=1"])


def _written(folder: Path) -> Path:
    path = folder / "job.yaml"
    path.write_text("model: {path: 'fake://hash'}\ninput: {path: x, prompt_column: p}\noutput: {path: out}\n")
    return path
