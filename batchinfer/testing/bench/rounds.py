"""Runs the contenders of a workload in rounds: each once a round, the order turned by one with each round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.testing.bench.runs import ENGINE, SUBMIT, Peer, Run, RunFailed, run_engine, run_peer, run_submit
from batchinfer.testing.bench.workloads import Workload


class Contest:
    """The contenders over one workload. `order`: the rows as a job's engine gets them; until one has run, sorted by
    their tokens."""

    def __init__(
        self,
        workload: Workload,
        tokens: Sequence[list[int]],
        names: Sequence[str],
        *,
        model: str,
        settings: Mapping[str, Any],
        peers: Sequence[Peer],
        max_tokens: int,
        folder: Path,
        timeout_s: float,
    ) -> None:
        self.workload = workload
        self.names = list(names)
        self.rounds: list[dict[str, Run]] = []
        self.failures: list[str] = []
        self._model, self._settings, self._max_tokens = model, settings, max_tokens
        self._peers = {peer.name: peer for peer in peers}
        self._folder, self._timeout_s = folder, timeout_s
        self._order = sorted(range(len(tokens)), key=lambda i: tokens[i])
        # A peer sizes buffers by it: the longest row, in whole blocks.
        self._max_model_len = -(-(max(map(len, tokens)) + max_tokens + 1) // 64) * 64

    def run(self, rounds: int, said: Callable[[str], None]) -> None:
        """Every round, or until interrupted: what has run stays. `said` is told what happens."""
        for number in range(rounds):
            done: dict[str, Run] = {}
            self.rounds.append(done)
            for name in turned(self.names, number):
                try:
                    run = done[name] = self._one(name, self._folder / f"round-{number + 1}-{name.replace(' ', '-')}")
                except RunFailed as error:
                    self.failures.append(f"{self.workload.name}, round {number + 1}, {name}: {error}")
                    said(self.failures[-1])
                    continue
                said(f"{self.workload.name}, round {number + 1}, {name}: {run.rate:.0f} tokens/s")
                self._check(run)
            self._compare(done, number + 1)

    def _one(self, name: str, folder: Path) -> Run:
        common: dict[str, Any] = {
            "max_tokens": self._max_tokens,
            "folder": folder,
            "timeout_s": self._timeout_s,
        }
        if name == SUBMIT:
            run, self._order = run_submit(self.workload, self._model, self._settings, **common)
            return run
        if name == ENGINE:
            return run_engine(self.workload, self._order, self._model, self._settings, **common)
        return run_peer(self._peers[name], self.workload, max_model_len=self._max_model_len, **common)

    def _check(self, run: Run) -> None:
        wanted = self._max_tokens * len(self.workload.prompts)
        if run.out_tokens != wanted:
            self.failures.append(f"{self.workload.name}, {run.contender}: {run.out_tokens} tokens, not {wanted}")

    def _compare(self, done: Mapping[str, Run], number: int) -> None:
        """A job must give the very completions that the engine alone gives."""
        if SUBMIT in done and ENGINE in done and list(done[SUBMIT].completions) != list(done[ENGINE].completions):
            self.failures.append(f"{self.workload.name}, round {number}: {SUBMIT} and {ENGINE} differ")


def turned(names: Sequence[str], by: int) -> list[str]:
    """The names from another one on, around the circle; batchinfer's two stay neighbours, the job in front."""
    start = by % len(names) if names else 0
    if names and names[start] == ENGINE and SUBMIT in names:
        start -= 1
    return [*names[start:], *names[:start]]
