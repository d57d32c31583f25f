"""Reads the header of a GGUF file: metadata and the list of tensors, without touching tensor data.

Responsible for: the container (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), its faults, split
files. Not for: what the metadata mean (`gguf_model`), nor dequantization (weights room). Written here rather than
taken from the `gguf` package because the header must be readable in a fraction of a second (a vocabulary's
hundred thousand strings), on machines without that package.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.errors import ModelError
from batchinfer.modelfiles.faults import check_weight_file
from batchinfer.modelfiles.files import StoredTensor

DEFAULT_ALIGNMENT = 32
# Type id -> (name, elements in a block, bytes in a block), from the format's specification.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """Metadata as Python values and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Cursor:
    """Walks the mapped file; running off its end is the file's fault, not ours."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def scalar(self, fmt: str) -> Any:
        try:
            (value,) = struct.unpack_from(fmt, self.data, self.at)
        except struct.error:
            raise self.truncated() from None
        self.at += struct.calcsize(fmt)
        return value

    def raw_string(self) -> bytes:
        length = self.scalar("<Q")
        end = self.at + length
        if end > len(self.data):
            raise self.truncated()
        value = self.data[self.at : end]
        self.at = end
        return value

    def string(self) -> str:
        # Tokens of byte-level vocabularies are stored as text; broken UTF-8 must not stop the reading.
        return self.raw_string().decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: metadata value of unknown kind {kind} at byte {self.at}: not valid GGUF")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > len(self.data):
            raise self.truncated()
        if kind == _STRING:
            return self.strings(count)
        if kind in _SCALARS:
            fmt = f"<{count}{_SCALARS[kind][1]}"
            try:
                values = list(struct.unpack_from(fmt, self.data, self.at))
            except struct.error:
                raise self.truncated() from None
            self.at += struct.calcsize(fmt)
            return values
        raise ModelError(f"{self.path}: a metadata array of kind {kind} at byte {self.at}: not valid GGUF")

    def strings(self, count: int) -> list[str]:
        # The hot loop of opening a model: a vocabulary and its merges are some hundred thousand strings.
        data, at, end = self.data, self.at, len(self.data)
        unpack: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            if at + 8 > end:
                raise self.truncated()
            (length,) = unpack(data, at)
            at += 8
            if at + length > end:
                raise self.truncated()
            values.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self.at = at
        return values

    def truncated(self) -> ModelError:
        return ModelError(
            f"{self.path}: the file ends inside its header ({len(self.data)} bytes): it is truncated; "
            "copy or download it again"
        )


def read_header(path: Path) -> GGUFHeader:
    """Reads one GGUF file's header. Raises ModelError on anything that would make its tensors wrong."""
    check_weight_file(path)
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        if data[:4] != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it starts with {data[:4]!r} instead of b'GGUF')")
        cursor.at = 4
        version = cursor.scalar("<I")
        if version & 0xFFFF == 0:
            raise ModelError(f"{path}: a big-endian GGUF file; only little-endian ones are read. Convert it again")
        if version not in (2, 3):
            raise ModelError(f"{path}: GGUF version {version}; versions 2 and 3 are read. Convert the model again")
        num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            if key in metadata:
                raise ModelError(f"{path}: metadata key {key!r} stands twice")
            metadata[key] = cursor.value(cursor.scalar("<I"))
        infos: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name = cursor.string()
            num_dims = cursor.scalar("<I")
            if num_dims > 8:
                raise ModelError(f"{path}: tensor {name!r} has {num_dims} dimensions: not valid GGUF")
            shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
            infos.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{path}: general.alignment is {alignment!r}: not valid GGUF")
        data_start = -(-cursor.at // alignment) * alignment
        return GGUFHeader(path=path, metadata=metadata, tensors=_tensors(path, infos, data_start, file_bytes=len(data)))


def _tensors(
    path: Path, infos: list[tuple[str, tuple[int, ...], int, int]], data_start: int, *, file_bytes: int
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ModelError(f"{path}: tensor {name!r} stands twice in the file")
        if kind not in GGML_TYPES:
            raise ModelError(f"{path}: tensor {name!r} is of GGUF type number {kind}, which is not known here")
        dtype, block, block_bytes = GGML_TYPES[kind]
        if shape and shape[-1] % block:
            raise ModelError(
                f"{path}: tensor {name!r} of type {dtype} has rows of {shape[-1]} elements, "
                f"not a multiple of {block}: not valid GGUF"
            )
        nbytes = math.prod(shape) // block * block_bytes
        start = data_start + offset
        if start + nbytes > file_bytes:
            raise ModelError(
                f"{path}: tensor {name!r} should end at byte {start + nbytes}, but the file has {file_bytes}: "
                "it is truncated; copy or download it again"
            )
        tensors[name] = StoredTensor(name=name, file=path, dtype=dtype, shape=shape, offset=start, nbytes=nbytes)
    return tensors


def read_headers(path: Path) -> tuple[GGUFHeader, tuple[Path, ...]]:
    """Reads a GGUF file, and the other parts where it is the first part of a split model.

    Returns one header (metadata of the first part, tensors of all) and the parts' paths.
    """
    header = read_header(path)
    num_parts = int(header.metadata.get("split.count", 0))
    if num_parts <= 1:
        return header, (path,)
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[3]) != num_parts:
        raise ModelError(
            f"{path}: one of {num_parts} parts of a split GGUF model, but it isn't named "
            f"NAME-00001-of-{num_parts:05d}.gguf; give the parts their names back, or merge them"
        )
    if int(header.metadata.get("split.no", 0)) != 0:
        raise ModelError(
            f"{path}: part {match[2]} of a split GGUF model; give the path of the first, "
            f"{match[1]}-00001-of-{match[3]}.gguf"
        )
    parts, tensors = [path], dict(header.tensors)
    for number in range(2, num_parts + 1):
        part = path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")
        if not part.exists():
            raise ModelError(f"{part}: missing; {path.name} is the first of {num_parts} parts")
        for name, tensor in read_header(part).tensors.items():
            if name in tensors:
                raise ModelError(f"{part}: tensor {name!r} stands also in {tensors[name].file.name}")
            tensors[name] = tensor
        parts.append(part)
    expected = header.metadata.get("split.tensors.count")
    if expected is not None and int(expected) != len(tensors):
        raise ModelError(f"{path}: its parts hold {len(tensors)} tensors, the first part says {expected}")
    return GGUFHeader(path=path, metadata=header.metadata, tensors=tensors), tuple(parts)
