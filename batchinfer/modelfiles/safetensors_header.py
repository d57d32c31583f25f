"""Reads headers of safetensors files and the index of a sharded checkpoint, without touching tensor data.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON, then the data).
Tensor data is read by the weights room.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.modelfiles.faults import check_weight_file
from batchinfer.modelfiles.files import StoredTensor

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"tensor {key!r} stands twice in the file")
        found[key] = value
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises ModelError where the file is damaged, cut short or padded."""
    file_bytes = check_weight_file(path)
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if file_bytes < 8 or length > MAX_HEADER_BYTES:
            raise ModelError(f"{path}: not a safetensors file (no valid header length at its start)")
        if 8 + length > file_bytes:
            raise ModelError(
                f"{path}: the file ends inside its header ({file_bytes} bytes): it is truncated; "
                "copy or download it again"
            )
        raw = f.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        header.pop("__metadata__", None)
        tensors: dict[str, StoredTensor] = {}
        data_start = 8 + length
        for name, info in header.items():
            start, end = info["data_offsets"]
            if not all(isinstance(n, int) and n >= 0 for n in (start, end - start, *info["shape"])):
                raise ValueError(f"tensor {name!r} has shape {info['shape']} at bytes {start} to {end}")
            tensors[name] = StoredTensor(
                name=name,
                file=path,
                dtype=info["dtype"],
                shape=tuple(info["shape"]),
                offset=data_start + start,
                nbytes=end - start,
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: its safetensors header is damaged: {error}") from error
    for tensor in tensors.values():
        width = ELEMENT_BYTES.get(tensor.dtype)
        if width is not None and math.prod(tensor.shape) * width != tensor.nbytes:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} of shape {list(tensor.shape)} and type {tensor.dtype} "
                f"should take {math.prod(tensor.shape) * width} bytes, the header gives it {tensor.nbytes}"
            )
        if tensor.offset + tensor.nbytes > file_bytes:
            raise ModelError(
                f"{path}: tensor {tensor.name!r} should end at byte {tensor.offset + tensor.nbytes}, but the "
                f"file has {file_bytes}: it is truncated; copy or download it again"
            )
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            raise ModelError(
                f"{path}: its safetensors header is damaged: tensor {tensor.name!r} begins at byte {tensor.offset}, "
                f"the one before it ends at {end}"
            )
        end += tensor.nbytes
    if end != file_bytes:
        raise ModelError(f"{path}: {file_bytes - end} bytes follow the last tensor: not the file that its header says")
    return tensors


def read_checkpoint(folder: Path) -> tuple[tuple[Path, ...], dict[str, StoredTensor]]:
    """Files and tensors of a checkpoint folder: with an index, exactly the files that it names."""
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        single = folder / SINGLE_NAME
        if not single.exists() and not single.is_symlink():
            raise ModelError(_no_weights(folder))
        return (single,), read_header(single)
    check_weight_file(index_path)
    weight_map = _weight_map(index_path)
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.exists() and not file.is_symlink():
            lost = sorted(name for name, shard in weight_map.items() if shard == file.name)
            raise ModelError(
                f"{file}: missing; {INDEX_NAME} says that it holds {len(lost)} tensors, {lost[0]!r} among them"
            )
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ModelError(f"{file}: tensor {name!r} stands also in {tensors[name].file.name}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        found = tensors.get(name)
        if found is None:
            raise ModelError(f"{folder / shard}: tensor {name!r} is not in it, though {INDEX_NAME} says so")
        if found.file.name != shard:
            raise ModelError(
                f"{index_path}: stale: it says that tensor {name!r} is in {shard}, but it is in {found.file.name}"
            )
    unlisted = sorted(set(tensors) - set(weight_map))
    if unlisted:
        raise ModelError(
            f"{index_path}: stale: {len(unlisted)} tensors are in its files but not in the index: "
            + ", ".join(f"{name!r} in {tensors[name].file.name}" for name in unlisted[:5])
        )
    return files, tensors


def _weight_map(index_path: Path) -> dict[str, str]:
    try:
        index: Mapping[str, Any] = json.loads(index_path.read_bytes())
        weight_map = dict(index["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index_path}: not a checkpoint index: {error}") from error
    for name, shard in weight_map.items():
        # A shard's name is a plain file name: an index must not lead out of its folder.
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise ModelError(f"{index_path}: tensor {name!r} is said to be in {shard!r}, which is not a file name")
    if not weight_map:
        raise ModelError(f"{index_path}: it lists no tensor")
    return weight_map


def _no_weights(folder: Path) -> str:
    others = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".safetensors"})
    message = f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME}"
    if others:
        message += f" (found {', '.join(others[:5])}); only safetensors under these names are read. Convert it"
    return message
