"""Steps in which every chunk is one token, as CUDA graphs: a model's launches recorded once, then launched as a whole.

A step is padded to one of few numbers of rows, and written into memory that stays where it is, so that a graph's
launches find it there; `attention.kept_plans` does that for attention. Padding changes no bytes of the rows that are
there: operations go by rows, and sums have one order for any number of them.

What a graph is, is the `Capture`'s matter: `rerun` has none, and calls the model again on the same memory, which shows
without a GPU that a step follows from nothing else. Steps with longer chunks, and sampling, are `local`'s. This module
imports triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchinfer.attention.context import LayerCache, PagedContext
from batchinfer.attention.kept_plans import KeptPlans
from batchinfer.attention.staging import Staging
from batchinfer.attention.tiles import StepBatch
from batchinfer.attention.triton import TritonAttention, TritonLatentAttention
from batchinfer.models import CausalLM
from batchinfer.runner.batch import StepBatches

Run = Callable[[], Tensor]
# Of a step: its rows, and its tiles by KV group and kind; padded, both.
Shape = tuple[int, tuple[tuple[int, ...], ...]]
# Makes of something that was run once what does the same again, to the same memory, and gives the same tensor.
Capture = Callable[[Run], Run]

_log = logging.getLogger(__name__)


def rerun(run: Run) -> Run:
    """For the interpreter: the same calls once more."""
    return run


class CudaCapture:
    """CUDA graphs whose memory is one pool: no two run at the same time, and what one gives is read before the next.
    When all of them are gone, so is the pool: torch captures nothing into it any more, and another one is needed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        # Of this thread only: another one may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraphs:
    """Runs steps of up to max_rows chunks of one token each, of sequences of up to max_len tokens.

    new_capture   makes what captures; asked again when all graphs had to go
    num_captured, num_replayed   what was done so far
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        layers: Sequence[LayerCache],
        backends: Sequence[TritonAttention | TritonLatentAttention],
        device: torch.device,
        max_rows: int,
        max_len: int,
        new_capture: Callable[[], Capture],
    ) -> None:
        self._model, self._layers, self._backends = model, layers, backends
        self._new_capture, self._capture = new_capture, new_capture()
        self._buckets = row_buckets(max_rows)
        self._plans = [KeptPlans(backend, max_rows=max_rows, max_len=max_len) for backend in backends]
        self._inputs = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        self._staging = Staging(device, torch.int64)
        self._graphs: dict[Shape, Run | None] = {}
        self._generations = self._now()
        self._is_off = False
        self.num_captured = self.num_replayed = 0

    def takes(self, batches: StepBatches) -> bool:
        """Whether `run` can run a step."""
        rows = len(batches.by_group[0].lengths)
        return len(batches.token_ids) == rows <= self._buckets[-1] and not self._is_off

    def run(self, batches: StepBatches) -> Tensor:
        """Hidden states [T, H] of a step's tokens, there until the next run.

        A shape of step is captured when it comes the second time: its first run has compiled what it launches."""
        rows = len(batches.token_ids)
        shape = self._write(batches, next(bucket for bucket in self._buckets if bucket >= rows))
        if shape not in self._graphs:
            self._graphs[shape] = None
            return self._runs(shape)()[:rows]
        replay = self._graphs[shape] or self._captured_for(batches, shape)
        if replay is None:
            return self._runs(self._write(batches, shape[0]))()[:rows]
        self.num_replayed += 1
        return replay()[:rows]

    def _captured_for(self, batches: StepBatches, shape: Shape) -> Run | None:
        """The graph of a step that was written, and still is; None where there is no memory for it, and from then on
        for none."""
        try:
            if not any(self._graphs.values()):
                # The most rows first, of nothing but padding: the pool then has what every other graph needs.
                self._captured(self._write(None, self._buckets[-1]))
                self._write(batches, shape[0])
            return self._graphs[shape] or self._captured(shape)
        except RuntimeError as error:  # of torch's allocator, or of CUDA, whose graphs take memory beside it
            if "out of memory" not in str(error):
                raise
            _log.warning("no memory for CUDA graphs, steps run without from now on: %s", error)
        self._is_off = True
        self._graphs.clear()
        return None

    def _captured(self, shape: Shape) -> Run:
        run = self._runs(shape)
        if shape not in self._graphs:
            run()
        replay = self._graphs[shape] = self._capture(run)
        self.num_captured += 1
        return replay

    def _write(self, batches: StepBatches | None, rows: int) -> Shape:
        """Puts a step, or padding only, where graphs find it."""
        count = 0 if batches is None else len(batches.token_ids)
        host = self._staging.write(2 * rows).view(2, rows).zero_()
        if batches is not None:
            host[0, :count] = torch.from_numpy(batches.token_ids)
            host[1, :count] = torch.from_numpy(batches.positions)
        for there, here in zip(self._inputs, host, strict=True):
            there[:rows].copy_(here, non_blocking=True)
        self._staging.sent()
        if batches is not None and batches.unknown is not None:
            token_ids = self._inputs[0, :count]
            token_ids.copy_(batches.known(token_ids))
        groups: Sequence[StepBatch | None] = [None] * len(self._plans) if batches is None else batches.by_group
        tiles = tuple(plans.write(batch, rows) for plans, batch in zip(self._plans, groups, strict=True))
        if self._generations != self._now():
            self._generations = self._now()
            self._graphs.clear()
            self._capture = self._new_capture()
        return rows, tiles

    def _now(self) -> list[int]:
        return [plans.generation for plans in self._plans]

    def _runs(self, shape: Shape) -> Run:
        rows, tiles = shape
        token_ids, positions = self._inputs[:, :rows]
        ctx = PagedContext(
            num_tokens=rows,
            positions=positions,
            layers=self._layers,
            backends=self._backends,
            plans=[plans.plan(rows, counts) for plans, counts in zip(self._plans, tiles, strict=True)],
        )
        return lambda: self._model.forward(token_ids, positions, ctx)


def row_buckets(most: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to: 1, 2, 4, then multiples of 8, and `most`."""
    return (*(bucket for bucket in (1, 2, 4, *range(8, most, 8)) if bucket < most), most)
