"""Fills a model's parameters from checkpoint files: read, dequantize, cast, copy; in pieces, on several threads. Or,
of a model that no file holds, by whoever makes up its numbers (`fill_weights`).

Responsible for: bounded memory (a few pieces of a tensor at a time beside the parameters), shape and type checks
with names. Not for: which tensor goes where (`rules`), what the files hold (modelfiles), how a layer keeps its
weights (layers, quant).
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from batchinfer.modelfiles import StoredTensor
from batchinfer.weights.gguf_types import DEQUANTIZED, Bytes, Floats, dequantize
from batchinfer.weights.rules import Ignore, Part, Rule, WeightError, match

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Read as they are, where a layer asks for just that type.
STORED_TYPES = {"I8": torch.int8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}
_TYPES = PLAIN_TYPES | STORED_TYPES
# Elements handled at once: large enough that Python's share is nothing, small enough for the cache.
PIECE_ELEMENTS = 1 << 18
FILLED_ELEMENTS = 1 << 26  # at once, where numbers are made up

# Writes numbers of a tensor into memory: all of them, or some of its rows.
Fill = Callable[[StoredTensor, Tensor], None]


class RowSink(Protocol):
    """Takes a part's rows as they are read, where they are not kept as they are stored. Called by several threads."""

    def put(self, start: int, rows: Tensor) -> None:
        """Rows start, start + 1, ... of the part, float32, on the CPU or where the layer is, to be overwritten."""
        ...


@runtime_checkable
class Loadable(Protocol):
    """A layer that owns parameters. The loader asks `parts`, fills each `target`, then says `loaded`."""

    def parts(self) -> dict[Part, tuple[int, ...]]:
        """Shape of what is stored, by (parameter's name in this layer, part)."""
        ...

    def target(self, part: Part) -> Tensor | RowSink:
        """Memory to fill with a part, or who takes its rows; asked for once, when its tensor is about to be read."""
        ...

    def loaded(self) -> None:
        """Called once when all parts are filled: the place to repack. A layer without parts of its own (one that
        shares another's) is called last, when the others are there."""
        ...


@dataclass(slots=True)
class _Item:
    """One stored tensor on its way into a part."""

    stored: StoredTensor
    layer: Loadable
    part: Part
    rule: Rule
    pieces_left: int = 0
    target: Tensor | RowSink | None = None


@dataclass(slots=True)
class _Progress:
    lock: threading.Lock = field(default_factory=threading.Lock)
    parts_left: dict[int, int] = field(default_factory=dict)  # by id of the layer


def load_weights(
    model: nn.Module,
    tensors: Mapping[str, StoredTensor],
    rules: Sequence[Rule],
    ignores: Sequence[Ignore] = (),
    *,
    where: str,
    num_threads: int | None = None,
    stored_types: Collection[str] = (),
) -> None:
    """Fills every parameter of `model` from `tensors`. Raises WeightError where they don't fit together.

    stored_types   of STORED_TYPES: what may be there beside floating-point types and those that are made such
    """
    items = _place(model, tensors, rules, ignores, where=where, stored_types=stored_types)
    progress = _Progress(parts_left=Counter(id(item.layer) for item in items))
    workers = num_threads or min(8, len(os.sched_getaffinity(0)))
    with (
        TensorReader() as reader,
        ThreadPoolExecutor(max_workers=workers, thread_name_prefix="load-weights") as pool,
    ):
        try:
            for _ in pool.map(lambda job: _copy_piece(reader, progress, *job), _pieces(items)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    _end(model)


def fill_weights(
    model: nn.Module,
    tensors: Mapping[str, StoredTensor],
    rules: Sequence[Rule],
    ignores: Sequence[Ignore] = (),
    *,
    where: str,
    device: torch.device,
    fill: Fill,
) -> None:
    """`load_weights` of plain tensors that are nowhere but in their names and shapes: `fill` gives their numbers, on
    the model's device, one tensor after the other in the order of `tensors`."""
    items = _place(model, tensors, rules, ignores, where=where, stored_types=())
    left = Counter(id(item.layer) for item in items)
    for item in items:
        stored, target = item.stored, item.layer.target(item.part)
        if isinstance(target, Tensor):
            fill(stored, target)
        else:
            rows, width = stored.shape[0], math.prod(stored.shape[1:])
            step = max(1, FILLED_ELEMENTS // width)
            for start in range(0, rows, step):
                piece = torch.empty(min(step, rows - start), *stored.shape[1:], device=device)
                fill(stored, piece)
                target.put(start, piece)
        left[id(item.layer)] -= 1
        if not left[id(item.layer)]:
            item.layer.loaded()
    _end(model)


def _place(
    model: nn.Module,
    tensors: Mapping[str, StoredTensor],
    rules: Sequence[Rule],
    ignores: Sequence[Ignore],
    *,
    where: str,
    stored_types: Collection[str],
) -> list[_Item]:
    """Where each tensor goes."""
    owners: dict[Part, tuple[Loadable, Part, tuple[int, ...]]] = {}
    for name, layer in _loadable(model):
        for (parameter, part), shape in layer.parts().items():
            owners[f"{name}.{parameter}", part] = (layer, (parameter, part), shape)
    items = []
    for name, (model_part, rule) in match(tensors, owners, rules, ignores, where=where).items():
        layer, layer_part, shape = owners[model_part]
        stored = tensors[name]
        _check(stored, shape, stored_types)
        if not shape:
            stored = replace(stored, shape=(1,))
        items.append(_Item(stored=stored, layer=layer, part=layer_part, rule=rule))
    return items


def _end(model: nn.Module) -> None:
    """For layers that share others', which are there now."""
    for _, layer in _loadable(model):
        if not layer.parts():
            layer.loaded()


def _loadable(model: nn.Module) -> list[tuple[str, Loadable]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Loadable)]


def _check(stored: StoredTensor, shape: tuple[int, ...], stored_types: Collection[str]) -> None:
    if stored.dtype not in PLAIN_TYPES and stored.dtype not in DEQUANTIZED and stored.dtype not in stored_types:
        raise WeightError(
            f"{stored.file}: tensor {stored.name!r} is of type {stored.dtype}, which is not supported; "
            f"supported are {', '.join([*PLAIN_TYPES, *sorted(stored_types), *sorted(DEQUANTIZED)])}"
        )
    if stored.shape != shape:
        raise WeightError(
            f"{stored.file}: tensor {stored.name!r} has shape {list(stored.shape)}, "
            f"the model's config asks for {list(shape)}"
        )


def _pieces(items: Sequence[_Item]) -> Iterator[tuple[_Item, int, int]]:
    """(item, first row, last row + 1), in the order of the files."""
    for item in items:
        rows, group = item.stored.shape[0], item.rule.group
        per_group = group * math.prod(item.stored.shape[1:])
        step = group * max(1, PIECE_ELEMENTS // max(1, per_group))
        starts = range(0, rows, step)
        item.pieces_left = len(starts)
        for start in starts:
            yield item, start, min(rows, start + step)


def _copy_piece(reader: TensorReader, progress: _Progress, item: _Item, start: int, stop: int) -> None:
    with progress.lock:
        if item.target is None:
            item.target = item.layer.target(item.part)
            _check_target(item.stored, item.target)
    stored, target = item.stored, item.target
    if isinstance(target, Tensor):
        _fill(target[start:stop], item.rule, reader, stored, start, stop)
    else:
        rows = torch.empty(stop - start, *stored.shape[1:])
        _fill(rows, item.rule, reader, stored, start, stop)
        target.put(start, rows)
    with progress.lock:
        item.pieces_left -= 1
        if item.pieces_left:
            return
        item.target = None
        progress.parts_left[id(item.layer)] -= 1
        complete = progress.parts_left[id(item.layer)] == 0
    if complete:
        item.layer.loaded()


def _check_target(stored: StoredTensor, target: Tensor | RowSink) -> None:
    """Types that are read as they are go where that type is kept, and nothing else does."""
    kept = target.dtype if isinstance(target, Tensor) and target.dtype in STORED_TYPES.values() else None
    if STORED_TYPES.get(stored.dtype) != kept:
        raise WeightError(
            f"{stored.file}: tensor {stored.name!r} is of type {stored.dtype}, which is not expected there"
        )


def _fill(piece: Tensor, rule: Rule, reader: TensorReader, stored: StoredTensor, start: int, stop: int) -> None:
    """Rows start .. stop of a stored tensor into the part of a parameter that they belong to."""
    on_cpu = piece.device.type == "cpu"
    if on_cpu and rule.view is None and piece.dtype == _TYPES.get(stored.dtype) and piece.is_contiguous():
        row_bytes = stored.nbytes // stored.shape[0]
        reader.read_into(piece.view(-1).view(torch.uint8).numpy(), stored, start * row_bytes)
        return
    if rule.view is not None:
        piece = rule.view(piece)
    elif on_cpu and piece.dtype == torch.float32 and stored.dtype in DEQUANTIZED and piece.is_contiguous():
        reader.dequantize_into(piece.view(-1).numpy(), stored, start, stop)
        return
    values = reader.rows(stored, start, stop)
    if on_cpu and piece.dtype == torch.float32 and values.dtype == torch.float32:
        # numpy copies on this thread; torch would start a team of threads for each piece.
        np.copyto(piece.numpy(), values.numpy().reshape(piece.shape))
        return
    piece.copy_(values.view(piece.shape))
    if piece.dtype == torch.float16 and values.dtype != torch.float16 and not torch.isfinite(piece).all():
        raise WeightError(
            f"{stored.file}: tensor {stored.name!r} ({stored.dtype}) has values that float16 can't hold; "
            "use dtype: bfloat16 or float32"
        )


class TensorReader:
    """Reads rows of stored tensors; holds each file open once. Several threads may use one reader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def rows(self, stored: StoredTensor, start: int, stop: int) -> Tensor:
        """Rows start .. stop, in the stored type where torch has it, else dequantized to float32."""
        row_bytes = stored.nbytes // stored.shape[0]
        raw = self.bytes(stored, start * row_bytes, (stop - start) * row_bytes)
        shape = (stop - start, *stored.shape[1:])
        plain = _TYPES.get(stored.dtype)
        if plain is not None:
            return torch.from_numpy(raw).view(plain).view(shape)
        return torch.from_numpy(dequantize(raw, stored.dtype)).view(shape)

    def dequantize_into(self, out: Floats, stored: StoredTensor, start: int, stop: int) -> None:
        """Rows start .. stop of a tensor of a block type, as float32 to `out` (flat)."""
        row_bytes = stored.nbytes // stored.shape[0]
        dequantize(self.bytes(stored, start * row_bytes, (stop - start) * row_bytes), stored.dtype, out)

    def bytes(self, stored: StoredTensor, offset: int, nbytes: int) -> Bytes:
        """nbytes from offset within a tensor's data."""
        buffer = np.empty(nbytes, dtype=np.uint8)
        self.read_into(buffer, stored, offset)
        return buffer

    def read_into(self, buffer: Bytes, stored: StoredTensor, offset: int) -> None:
        """Fills the buffer from offset within a tensor's data."""
        # Read, not mapped: a file that shrinks meanwhile is then an error with a name, not a SIGBUS.
        done, nbytes = 0, buffer.size
        try:
            descriptor = self._descriptor(stored.file)
            while done < nbytes:
                count = os.preadv(descriptor, [buffer[done:].data], stored.offset + offset + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise WeightError(
                f"{stored.file}: tensor {stored.name!r} can't be read: {error.strerror or error}"
            ) from error
        if done < nbytes:
            raise WeightError(f"{stored.file}: ends inside tensor {stored.name!r}; copy or download it again")

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]


def equal_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two stored tensors hold the same bytes in the same type and shape."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = 4 << 20
    with TensorReader() as reader:
        return all(
            np.array_equal(reader.bytes(a, at, min(step, a.nbytes - at)), reader.bytes(b, at, min(step, b.nbytes - at)))
            for at in range(0, a.nbytes, step)
        )
