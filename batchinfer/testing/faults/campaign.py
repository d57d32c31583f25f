"""A campaign: rounds with random jobs and faults, several side by side, and the sums over them."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from batchinfer.testing.faults.jobs import CampaignJob, make_job
from batchinfer.testing.faults.kinds import KINDS
from batchinfer.testing.faults.rounds import Calm, Hang, Round, Verdict, run_calm

ROUNDS_PER_JOB = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. `most_faults`: in a round; `limit_s`: a round's time; the rest as in `scripts/fault_campaign`."""

    rounds: int
    seed: int
    jobs: int = 1
    kinds: Sequence[str] = tuple(KINDS)
    most_faults: int = 3
    limit_s: float = 120.0
    rows: int | None = None
    model: str | None = None
    keep: bool = False


class _Jobs:
    """The jobs of a campaign and their undisturbed runs, each made when it is first asked for."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._mutex = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._jobs: dict[int, CampaignJob] = {}
        self._calm: dict[tuple[int, bool], Calm] = {}

    def get(self, seed: int) -> CampaignJob:
        with self._lock(seed):
            if seed not in self._jobs:
                folder = self._folder / f"job-{seed}"
                folder.mkdir()
                self._jobs[seed] = make_job(folder, seed, rows=self._plan.rows, model=self._plan.model)
            return self._jobs[seed]

    def calm(self, seed: int, *, retried: bool) -> Calm:
        job = self.get(seed)
        with self._lock(seed):
            key = (seed, retried)
            if key not in self._calm:
                name = "calm-retried" if retried else "calm"
                self._calm[key] = run_calm(job, job.folder / name, retried=retried)
            return self._calm[key]

    def _lock(self, seed: int) -> threading.Lock:
        with self._mutex:
            return self._locks.setdefault(seed, threading.Lock())


@dataclass(slots=True)
class Sums:
    """Over all rounds so far."""

    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)

    def faults(self) -> dict[str, int]:
        return dict(sorted(Counter(name for verdict in self.verdicts for name in verdict.faults).items()))

    def total(self, name: str) -> int:
        return sum(getattr(verdict, name) for verdict in self.verdicts)


def run_campaign(plan: Plan, folder: Path, told: Callable[[Verdict], None]) -> Sums:
    """Runs the rounds in `folder`; `told` gets each verdict. Folders of good rounds are removed, unless `keep`."""
    jobs = _Jobs(plan, folder)
    sums = Sums()
    mutex = threading.Lock()

    def one(number: int) -> None:
        verdict = _run_round(plan, jobs, number, folder)
        with mutex:
            sums.verdicts.append(verdict)
            told(verdict)

    with ThreadPoolExecutor(plan.jobs) as pool:
        for future in [pool.submit(one, number) for number in range(plan.rounds)]:
            future.result()
    return sums


def _run_round(plan: Plan, jobs: _Jobs, number: int, folder: Path) -> Verdict:
    draw = random.Random(f"{plan.seed} {number}")
    job_seed = plan.seed * 100_003 + number // ROUNDS_PER_JOB
    job = jobs.get(job_seed)
    # Kinds come round in turn, so that each is met; what comes with it is drawn.
    first = plan.kinds[number % len(plan.kinds)]
    names = [first, *draw.choices(plan.kinds, k=draw.randrange(plan.most_faults))]
    draw.shuffle(names)
    place = folder / f"round-{number:04d}"
    round_ = Round(number, job, job_seed, place, draw=draw, limit_s=plan.limit_s)
    verdict = round_.verdict
    try:
        for name in names:
            if KINDS[name](round_):
                verdict.faults.append(name)
        round_.finish()
        round_.judge(jobs.calm(job_seed, retried=round_.retried))
    except Hang:
        verdict.hangs = 1
        verdict.problems.append(f"hangs after {names}: {round_.processes.find()}")
    finally:
        round_.processes.end_all()
        round_.reader.close()
    if verdict.ok and not plan.keep:
        shutil.rmtree(place)
    return verdict
