"""Damaged, missing, stale or doubled weight files: each is told by file and tensor before anything is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.errors import ModelError
from batchinfer.modelfiles import open_model
from batchinfer.modelfiles.safetensors_header import read_header
from batchinfer.testing.tiny import make_tiny

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny", num_shards=3)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_model(str(folder))
    for word in words:
        assert word in str(caught.value)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_shards_hold_what_one_file_holds(folder: Path, tmp_path: Path) -> None:
    whole = open_model(str(make_tiny(tmp_path / "whole")))
    sharded = open_model(str(folder))
    assert len(sharded.weight_files) == 3
    assert {n: (t.dtype, t.shape) for n, t in sharded.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in whole.tensors.items()
    }


def test_a_missing_shard(folder: Path) -> None:
    (folder / SECOND).unlink()
    refused(folder, SECOND, "missing", "tensors, 'model.layers.", "among them")


def test_a_shard_that_is_cut_short(folder: Path) -> None:
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-1000])
    refused(folder, SECOND, "tensor 'model.layers.", "it is truncated")


@pytest.mark.parametrize("size", [1, 7, 8, 100])
def test_a_shard_that_ends_in_its_header(folder: Path, size: int) -> None:
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:size])
    refused(folder, SECOND, "truncated" if size >= 8 else "not a safetensors file")


def test_an_empty_shard(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"")
    refused(folder, SECOND, "empty (0 bytes)")


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / SECOND).write_text(LFS)
    refused(folder, SECOND, "Git LFS pointer", "git lfs pull")
    (folder / INDEX).write_text(LFS)
    refused(folder, INDEX, "Git LFS pointer")


def test_a_link_to_nowhere(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / "blobs" / "0123")
    refused(folder, SECOND, "symbolic link to", "which does not exist")


def test_other_bytes(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"PK\x03\x04" + b"x" * 1000)
    refused(folder, SECOND, "not a safetensors file")


def test_a_stray_file_is_not_read(folder: Path, tmp_path: Path) -> None:
    before = open_model(str(folder))
    other = make_tiny(tmp_path / "other", seed=9)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    (folder / "consolidated.safetensors").write_bytes(b"")
    after = open_model(str(folder))
    assert after.weight_files == before.weight_files
    assert after.tensors == before.tensors


def test_an_index_that_names_the_wrong_shard(folder: Path) -> None:
    edit_index(folder, lambda m: m.update({"lm_head.weight": SECOND}))
    refused(folder, INDEX, "stale", "'lm_head.weight' is in model-00002", "it is in model-00003")


def test_an_index_that_names_a_tensor_that_is_nowhere(folder: Path) -> None:
    edit_index(folder, lambda m: m.update({"model.extra.weight": SECOND}))
    refused(folder, SECOND, "'model.extra.weight' is not in it")


def test_a_tensor_that_the_index_does_not_name(folder: Path) -> None:
    edit_index(folder, lambda m: m.pop("lm_head.weight"))
    refused(folder, INDEX, "stale", "'lm_head.weight' in model-00003-of-00003.safetensors")


def test_a_tensor_in_two_shards(folder: Path, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "whole")
    (folder / SECOND).write_bytes((source / "model.safetensors").read_bytes())
    refused(folder, "stands also in model-00001-of-00003.safetensors")


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", ""])
def test_an_index_must_not_lead_out_of_its_folder(folder: Path, target: str) -> None:
    edit_index(folder, lambda m: m.update({"lm_head.weight": target}))
    refused(folder, INDEX, "not a file name")


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "no"])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    refused(folder, INDEX)


def test_a_name_twice_in_one_file(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + length].rstrip().removesuffix(b"}")
    entry = json.dumps(json.loads(data[8 : 8 + length])["model.norm.weight"]).encode()
    header += b',"model.norm.weight":' + entry + b"}"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    refused(folder, "'model.norm.weight' stands twice")


def test_bytes_behind_the_last_tensor(folder: Path) -> None:
    """Two files written into one, or a longer one whose beginning was overwritten."""
    with (folder / SECOND).open("ab") as f:
        f.write(b"\0" * 64)
    refused(folder, SECOND, "64 bytes follow the last tensor")


def test_tensors_that_lie_on_each_other(tmp_path: Path) -> None:
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": {**entry, "data_offsets": [2, 6]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    with pytest.raises(ModelError, match="tensor 'b' begins at byte"):
        read_header(tmp_path / "x.safetensors")


def test_a_shape_that_does_not_match_its_bytes(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    rewrite_header(folder / "model.safetensors", lambda h: h["model.norm.weight"].update(shape=[65]))
    refused(folder, "'model.norm.weight' of shape [65] and type F32 should take 260 bytes")


def test_a_header_without_offsets(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    rewrite_header(folder / "model.safetensors", lambda h: h["model.norm.weight"].pop("data_offsets"))
    refused(folder, "its safetensors header is damaged")


@pytest.mark.parametrize(
    "entry",
    [{"data_offsets": [8, 4]}, {"data_offsets": [-4, 252]}, {"data_offsets": [0]}, {"shape": [-64]}, {"shape": "64"}],
    ids=str,
)
def test_a_header_with_impossible_numbers(tmp_path: Path, entry: dict[str, Any]) -> None:
    folder = make_tiny(tmp_path / "tiny")
    rewrite_header(folder / "model.safetensors", lambda h: h["model.norm.weight"].update(entry))
    refused(folder, "its safetensors header is damaged")


def test_weights_in_another_format(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "found pytorch_model.bin", "only safetensors")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, "no model.safetensors and no model.safetensors.index.json")
