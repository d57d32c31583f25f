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

from batchinfer.testing.faults.jobs import RUN_S, CampaignJob, make_job
from batchinfer.testing.faults.kinds import KINDS
from batchinfer.testing.faults.processes import Processes
from batchinfer.testing.faults.rounds import Calm, Hang, Round, SmallDisk, Verdict, run_calm

ROUNDS_PER_JOB = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, as in `scripts/fault_campaign`. `least_faults`, `most_faults`: in a round; `limit_s`: its time."""

    rounds: int
    seed: int
    jobs: int = 1
    kinds: Sequence[str] = tuple(KINDS)
    least_faults: int = 1
    most_faults: int = 3
    limit_s: float = 120.0
    rows: int | None = None
    run_s: float = RUN_S
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
        self._sites: Counter[str] = Counter()
        self._small_disks: bool | None = None
        self.rounds: list[Round] = []

    def get(self, seed: int) -> CampaignJob:
        with self._lock(seed):
            if seed not in self._jobs:
                folder = self._folder / f"job-{seed}"
                folder.mkdir()
                self._jobs[seed] = make_job(
                    folder, seed, rows=self._plan.rows, model=self._plan.model, run_s=self._plan.run_s
                )
            return self._jobs[seed]

    def calm(self, seed: int, *, retried: bool) -> Calm:
        job = self.get(seed)
        with self._lock(seed):
            key = (seed, retried)
            if key not in self._calm:
                name = "calm-retried" if retried else "calm"
                self._calm[key] = run_calm(job, job.folder / name, retried=retried)
            return self._calm[key]

    def abandon(self) -> None:
        """Ends all rounds: they find that their time is over."""
        for round_ in list(self.rounds):  # they leave the list meanwhile, in their threads
            round_.expire()
        for processes in list(Processes.all):
            processes.end_all()

    def next_site(self, seed: int) -> str:
        """Of the call sites that change files in this job and in a retry of it, the one that was taken least so far."""
        sites = self.calm(seed, retried=self.get(seed).retryable).sites
        with self._mutex:
            site = min(sorted(sites), key=lambda site: self._sites[site])
            self._sites[site] += 1
            return site

    def small_disks(self) -> bool:
        with self._lock(-1):
            if self._small_disks is None:
                self._small_disks = SmallDisk.available(self._folder / "disk")
            return self._small_disks

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

    def sites(self) -> int:
        """How many call sites were met by a file fault that was to happen there."""
        return len({site.partition(": ")[2] for verdict in self.verdicts for site in verdict.sites})

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
        futures = [pool.submit(one, number) for number in range(plan.rounds)]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C, or a fault of the campaign's own: nothing is left running
            pool.shutdown(wait=False, cancel_futures=True)
            jobs.abandon()
            raise
    return sums


def in_turn(kinds: Sequence[str]) -> list[str]:
    """The order in which kinds come round: those of files more often, since there are many call sites."""
    if "file_fault" not in kinds:
        return list(kinds)
    others = [kind for kind in kinds if kind != "file_fault"]
    order: list[str] = []
    for number, kind in enumerate(others):
        order += [kind, "file_fault"] if number % 2 else [kind]
    return order or ["file_fault"]


def _run_round(plan: Plan, jobs: _Jobs, number: int, folder: Path) -> Verdict:
    draw = random.Random(f"{plan.seed} {number}")
    job_seed = plan.seed * 100_003 + number // ROUNDS_PER_JOB
    job = jobs.get(job_seed)
    # Kinds come round in turn, so that each is met; what comes with it is drawn.
    order = in_turn(plan.kinds)
    first = order[number % len(order)]
    names = [first, *draw.choices(plan.kinds, k=draw.randrange(plan.least_faults - 1, plan.most_faults))]
    draw.shuffle(names)
    place = folder / f"round-{number:04d}"
    small_disk = "fill_disk" in names and jobs.small_disks()
    if not small_disk:
        names = [name for name in names if name != "fill_disk"]
    round_ = Round(
        number,
        job,
        job_seed,
        place,
        draw=draw,
        limit_s=plan.limit_s,
        next_site=lambda: jobs.next_site(job_seed),
        small_disk=small_disk,
    )
    jobs.rounds.append(round_)
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
        round_.close()
        jobs.rounds.remove(round_)
    if verdict.ok and not plan.keep:
        shutil.rmtree(place)
    return verdict
