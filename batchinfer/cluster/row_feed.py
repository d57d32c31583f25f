"""Feeds leased rows to an engine and takes its outcomes: the inner loop of the engine process.

Keeps more rows in the engine than it can run at once, from as many leases as that takes, so that its batch never
drains at a unit's edge. Equal greedy prompts, which stand together in a unit, run once; each row gets the result. When
it is closed, what rows in flight have so far is kept for their next lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from batchinfer.cluster.leased_rows import LeasedRows
from batchinfer.cluster.phases import phases
from batchinfer.cluster.result_sink import ResultSink
from batchinfer.data.partials import PartialRow, longest_rows, prompt_key, write_partials
from batchinfer.data.segments import ResultRow
from batchinfer.engine import Engine
from batchinfer.engine.stopping import partial_problem
from batchinfer.job.driver_lock import succeeded
from batchinfer.job.frozen_job import FrozenJob
from batchinfer.types.request import PartialOutput, Request, RequestOutput, SamplingParams

_log = logging.getLogger("batchinfer.cluster")
MAX_BEGUN_AT_ONCE = 1024
# An engine begins with a few rows, so that the first token comes at once and not after the prompts of a whole batch.
FIRST_ROWS = 4
_PromptKey = tuple[bytes, str | None]


class _Running:
    """A request in the engine, and the rows that wait for its outcome: (position, chunk, row)."""

    __slots__ = ("key", "lease", "outcome", "rows")

    def __init__(self, lease: LeasedRows, key: _PromptKey | None) -> None:
        self.lease = lease
        self.key = key  # prompt and settings, where equal ones may share the outcome
        self.rows: list[tuple[int, int, int]] = []
        self.outcome: RequestOutput | None = None


class RowFeed:
    def __init__(self, engine: Engine, job: FrozenJob, *, epoch: int, report: Callable[[dict[str, Any]], None]) -> None:
        self.engine = engine
        self.sink = ResultSink(epoch=epoch, folder=job.layout.segments, told=report)
        self._job = job
        self._epoch = epoch
        self._report = report
        self._leases: dict[int, LeasedRows] = {}
        self._running: dict[int, _Running] = {}
        self._last: _Running | None = None  # the request begun last
        self._next_id = 0
        self._files = {chunk.chunk: chunk.file for window in job.windows() for chunk in window.chunks}
        self._eos = job.eos_token_ids
        self._settings: dict[str | None, SamplingParams] = {}
        self._token_told = False
        self._misfit_told = False
        self._loop_s = 0.0

    @property
    def busy(self) -> bool:
        return self.engine.has_unfinished() or any(lease.num_left for lease in self._leases.values())

    def add(self, lease: LeasedRows) -> None:
        self._leases[lease.lease] = lease
        if lease.partials:
            _log.info("lease %d: %d rows go on from what an earlier engine had", lease.lease, len(lease.partials))
        self._close_if_ended(lease)

    def give_back(self, lease_id: int, *, half: bool) -> None:
        """Answers with `returned`, or not at all where the lease is over (its `done` is on the way)."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        had_left = lease.num_left
        stop = lease.give_back(half=half)
        self._report({"t": "returned", "lease": lease_id, "stop": stop})
        if stop == lease.start:
            del self._leases[lease_id]
            return
        if had_left and not lease.num_left:  # what is left of it is all in the engine, and no reserve any more
            self._report({"t": "begun_all", "lease": lease_id})
        self._close_if_ended(lease)

    def step(self) -> None:
        begin = time.perf_counter()
        self._fill()
        outputs = self.engine.step()
        if not self._token_told and self.engine.scheduler.num_generated_tokens:
            self._token_told = True
            told = {"at": time.time(), "cpu_s": time.process_time(), "spans": phases.take()}
            self._report({"t": "first_token", **told})
        for output in outputs:
            running = self._running.pop(output.request_id)
            running.outcome = output
            lease, rows = running.lease, running.rows
            position, chunk, row = rows[0]
            self._end(lease, position, ResultRow.of(chunk, row, output))
            if len(rows) > 1:
                for position, chunk, row in rows[1:]:
                    self._end(lease, position, _equal_row(chunk, row, output))
        self.sink.flush_if_due()
        self._loop_s += time.perf_counter() - begin

    def close(self) -> None:
        """Everything finished is made durable and told; then what is in the engine is, as far as it has come."""
        self.sink.close()
        try:
            self._keep_partials()
        except OSError as error:  # it would only have saved work
            _log.warning("what rows in flight had generated could not be kept: %s", error)
        self.engine.close()

    def stats(self) -> dict[str, float]:
        """The engine's counts, and where its time went: seconds of the loop, and CPU seconds of this process."""
        stats = self.engine.stats()
        return {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "computed_tokens": stats.num_computed_tokens,
            "cached_tokens": stats.num_cached_tokens,
            "generated_tokens": stats.num_generated_tokens,
            "preemptions": stats.num_preemptions,
            "steps": stats.num_steps,
            "scheduler_s": round(stats.scheduler_s, 3),
            "runner_s": round(stats.runner_s, 3),
            "output_s": round(stats.output_s, 3),
            "loop_s": round(self._loop_s, 3),
            "cpu_s": round(time.process_time(), 3),
        }

    def _keep_partials(self) -> None:
        """For the next lease of these rows. Of equal rows only the first is told of, which will be begun first."""
        leases = {self._partial_of(request_id, running): running.lease for request_id, running in self._running.items()}
        kept: dict[LeasedRows, list[PartialRow]] = {}
        for row in longest_rows(leases):
            kept.setdefault(leases[row], []).append(row)
        layout = self._job.layout
        if not kept or succeeded(layout.output, self._epoch):
            return
        fingerprint = self._job.fingerprint
        for lease, rows in kept.items():
            folder = layout.segments(lease.window)
            write_partials(folder, lease.unit, self._epoch, lease.lease, rows, fingerprint=fingerprint)
        _log.info("kept what %d of %d rows in flight have so far", sum(map(len, kept.values())), len(leases))

    def _partial_of(self, request_id: int, running: _Running) -> PartialRow:
        lease, (position, chunk, row) = running.lease, running.rows[0]
        place = position - lease.start
        prompt = prompt_key(lease.rows.token_ids(place), lease.rows.params_of(place))
        return PartialRow(chunk=chunk, row=row, prompt=prompt, outputs=self.engine.partial_outputs(request_id))

    def _partials_for(self, lease: LeasedRows, position: int, sampling: SamplingParams) -> tuple[PartialOutput, ...]:
        """What an earlier engine had of a row, if it can be that."""
        found = lease.partials.pop(position, ())
        if not found:
            return ()
        problem = partial_problem(found, sampling, vocab_size=self.engine.vocab_size)
        if problem is None:
            return found
        if not self._misfit_told:
            self._misfit_told = True
            _log.warning("partial results of unit %d do not fit, their rows begin anew: %s", lease.unit, problem)
        return ()

    def _fill(self) -> None:
        engine = self.engine
        most = engine.scheduler.max_num_seqs * 3 // 2 + 1
        if not self._token_told:
            most = min(most, FIRST_ROWS)
        if engine.num_unfinished > most * 5 // 6:
            return
        for lease in list(self._leases.values()):
            while lease.num_left and engine.num_unfinished < most:
                self._begin(lease, min(lease.num_left, most - engine.num_unfinished, MAX_BEGUN_AT_ONCE))
                if not lease.num_left:
                    self._report({"t": "begun_all", "lease": lease.lease})

    def _begin(self, lease: LeasedRows, count: int) -> None:
        start, stop = lease.begun_range(count)
        self._report({"t": "begun", "lease": lease.lease, "start": start, "stop": stop})  # before it can kill us
        rows = lease.rows
        params, all_tokens = rows.params, rows.tokens
        positions = lease.begin(count)
        indices = positions - lease.start
        chunks, numbers = rows.chunks[indices].tolist(), rows.rows[indices].tolist()
        starts, stops = rows.offsets[indices].tolist(), rows.offsets[indices + 1].tolist()
        for i, position in enumerate(positions.tolist()):
            own = None if params is None else params[position - lease.start].as_py()
            sampling = self._settings.get(own) or self._settings_of(own)
            tokens = all_tokens[starts[i] : stops[i]]
            chunk, row = chunks[i], numbers[i]
            key = (tokens.tobytes(), own) if sampling.greedy else None
            last = self._last
            if key is not None and last is not None and last.key == key and last.lease is lease:
                if last.outcome is not None:
                    self._end(lease, position, _equal_row(chunk, row, last.outcome))
                else:
                    last.rows.append((position, chunk, row))
                continue
            running = self._last = _Running(lease, key)
            running.rows.append((position, chunk, row))
            request_id, self._next_id = self._next_id, self._next_id + 1
            self._running[request_id] = running
            # Greedy rows draw no numbers: their stream need not be computed.
            stream = 0 if sampling.greedy else self._job.stream_key(self._files[chunk], row, sampling.seed)
            self.engine.add_request(
                Request(
                    request_id=request_id,
                    prompt_token_ids=tokens.tolist(),
                    sampling=sampling,
                    stream_key=stream,
                    eos_token_ids=self._eos,
                    partial_outputs=self._partials_for(lease, position, sampling) if lease.partials else (),
                )
            )

    def _settings_of(self, own: str | None) -> SamplingParams:
        if len(self._settings) > 10_000:  # a setting of its own in every row
            self._settings.clear()
        sampling = self._settings[own] = self._job.sampling_of(own)
        return sampling

    def _end(self, lease: LeasedRows, position: int, result: ResultRow) -> None:
        lease.num_ended += 1
        self.sink.add(lease, position, result)
        self._close_if_ended(lease)

    def _close_if_ended(self, lease: LeasedRows) -> None:
        if lease.ended and not lease.closed:
            self.sink.close_lease(lease)
            self._leases.pop(lease.lease, None)


def _equal_row(chunk: int, row: int, output: RequestOutput) -> ResultRow:
    """The result of a row that did not run, since an equal one did: none of its prompt was computed."""
    return replace(ResultRow.of(chunk, row, output), cached_tokens=len(output.prompt_token_ids))
