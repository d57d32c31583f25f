"""A kill at any point: after the nth change to the file system nothing more happens, then the same command runs again.

The process is killed inside every call that changes files, before it and after it. What must hold: nothing half
written under a final name, and after going on the parts are those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest

from batchinfer.data.parts import read_footer
from batchinfer.job import windows as windows_module
from batchinfer.job.cleaning import clean_leftovers, clean_window
from batchinfer.job.commit import commit_chunk
from batchinfer.job.driver_lock import DriverLock, TakenOver, lock_store
from batchinfer.job.manifest import freeze_job, load_manifest, save_run
from batchinfer.job.resolve import resolve_job
from batchinfer.job.verify import verify_job

CHANGES = ("link", "unlink", "rename", "replace", "mkdir", "rmdir", "fsync")


class Killed(BaseException):
    """The process is gone: not an Exception, so that no code of ours lives on by catching it."""


class Kill:
    """Counts the calls that change files; the nth is the last thing that happens, or just does not happen."""

    def __init__(self, monkeypatch, at: int, *, after: bool) -> None:
        self.count = 0
        self.at = at
        self.after = after
        self.dead = False
        for name in CHANGES:
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *args, _real=real, **named: self._call(_real, *args, **named))

    def _call(self, real, *args, **named):
        if self.dead:
            raise Killed
        self.count += 1
        if self.count == self.at:
            self.dead = True
            if self.after:
                real(*args, **named)
            raise Killed
        return real(*args, **named)


def unharmed(folder: Path) -> None:
    """Every file under a part's name is a whole part."""
    for path in folder.glob("part-*.parquet"):
        read_footer(path)


@pytest.fixture
def two_chunks(shop, monkeypatch):
    monkeypatch.setattr(windows_module, "MAX_CHUNK_ROWS", 4)
    shop.write("a.parquet", {"prompt": ["a", "b", None, "d", "e", "f", "x" * 400]})
    return shop


def expected(shop) -> list[dict]:
    return [
        {"prompt": p, "completion": None if bad else f"echo {p}", "source_row": i}
        for i, (p, bad) in enumerate([("a", 0), ("b", 0), (None, 1), ("d", 0), ("e", 0), ("f", 0), ("x" * 400, 1)])
    ]


def brief(rows) -> list[dict]:
    return [{key: row[key] for key in ("prompt", "completion", "source_row")} for row in rows]


def whole_run(shop, epoch) -> None:
    """What a driver does, in one process."""
    job = resolve_job(shop.spec(sampling={"seed": 1}))
    with DriverLock.claim(lock_store(shop.output)) as lock:
        job = freeze_job(job)
        clean_leftovers(job.layout, epoch=lock.epoch)
        shop.run(job, epoch=lock.epoch)


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_change_of_a_run(two_chunks, tmp_path, after):
    shop = two_chunks
    at, finished = 0, False
    while not finished:
        at += 4 if after else 3  # together they come close to every change
        shutil.rmtree(shop.output, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            kill = Kill(patch, at, after=after)
            try:
                whole_run(shop, 1)
                finished = not kill.dead
            except Killed:
                pass
        unharmed(shop.output)
        let_the_dead_rest(shop.output)
        whole_run(shop, 2)
        assert brief(shop.read()) == expected(shop), f"killed at change {at}"
        job = load_manifest(resolve_job(shop.spec(sampling={"seed": 1})).layout)
        assert verify_job(job).ok
    assert at > 60


def let_the_dead_rest(output: Path) -> None:
    """This process plays the killed one: let its claim look like that of a process that is gone."""
    for path in output.glob("__batchinfer/driver/*.json"):
        path.with_suffix(".released").write_text("{}")


def test_killed_while_committing_leaves_only_temporaries(two_chunks):
    shop = two_chunks
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    plan = shop.plan(job, 0, window.chunks)
    shop.answer(job, plan)
    for at in range(1, 30):
        with pytest.MonkeyPatch.context() as patch:
            kill = Kill(patch, at, after=False)
            try:
                commit_chunk(job, plan, window.chunks[0], epoch=1)
            except Killed:
                assert shop.parts() == [] or at > 2
        unharmed(shop.output)
        if not kill.dead:
            break
    assert not kill.dead and len(shop.parts()) == 1


def test_two_drivers_commit_the_same_chunk_and_one_part_stands(two_chunks, monkeypatch):
    shop = two_chunks
    job = freeze_job(resolve_job(shop.spec()))
    (window,) = job.windows()
    plan = shop.plan(job, 0, window.chunks)
    shop.answer(job, plan)
    real = os.link
    won = []

    def link(source, target, **named):
        # Just before ours: the zombie's commit of the same chunk goes through.
        if not won and str(target).endswith("part-00000-00000.parquet"):
            won.append(None)
            won[0] = commit_chunk(job, plan, window.chunks[0], epoch=1)
        return real(source, target, **named)

    monkeypatch.setattr(os, "link", link)
    summary = commit_chunk(job, plan, window.chunks[0], epoch=2)
    assert won[0].fresh and not summary.fresh
    assert read_footer(shop.parts()[0])["epoch"] == 1
    assert not list((job.layout.state / "tmp").iterdir())


def test_cleaning_killed_at_any_point_never_leaves_a_plan_without_its_results(two_chunks):
    shop = two_chunks
    job = freeze_job(resolve_job(shop.spec()))
    for at in range(1, 40):
        for path in shop.parts():
            path.unlink()
        shop.run(job, clean=False)
        with pytest.MonkeyPatch.context() as patch:
            kill = Kill(patch, at, after=False)
            with contextlib.suppress(Killed):
                clean_window(job.layout, 0)
        plan, done = job.layout.window(0), job.layout.window(0).with_suffix(".done")
        whole = job.layout.segments(0).exists() and list(job.layout.segments(0).glob("u*.arrow"))
        assert not plan.exists() or whole
        clean_leftovers(job.layout, epoch=1)
        if not plan.exists():
            assert not done.exists() and not job.layout.segments(0).exists()
            assert not list((job.layout.state / "prepared").glob("w0000-*"))
        if not kill.dead:
            break
    assert not kill.dead


@pytest.mark.parametrize("always", [False, True])
def test_what_can_not_be_deleted_is_tried_again_now_and_at_the_next_start(two_chunks, monkeypatch, always):
    shop = two_chunks
    job = freeze_job(resolve_job(shop.spec()))
    shop.run(job, clean=False)
    plan, done, segments = job.layout.window(0), job.layout.window(0).with_suffix(".done"), job.layout.segments(0)
    real, failures = os.unlink, []

    def failing(path, *args, **named):
        if str(path).endswith(".arrow") and (always or not failures):
            failures.append(path)
            raise OSError(errno.EIO, "input/output error", str(path))
        real(path, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        clean_window(job.layout, 0)
    assert failures and not plan.exists()
    assert segments.exists() == done.exists() == always
    clean_leftovers(job.layout, epoch=1)
    assert not segments.exists() and not done.exists()


def test_leftovers_of_the_dead_go_those_of_the_living_stay(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    job = shop.submit()
    folder = job.layout.state / "tmp"
    folder.mkdir(exist_ok=True)
    mine = job.layout.temporary("part.parquet")
    scope = mine.name.split("~")[0]
    dead, foreign, old = (
        folder / f"{mark}~77~0~part.parquet" for mark in (f"{scope}~{2**22 + 5}", "7" * 12 + "~4", "8" * 12 + "~4")
    )
    of_nfs = folder / ".nfs000000000001"
    for path in (mine, dead, foreign, old, of_nfs, folder / "notes.txt"):
        path.write_text("x")
    for path in (old, of_nfs):
        os.utime(path, (0, 0))
    clean_leftovers(job.layout, epoch=1)
    stay = [mine.name, foreign.name, of_nfs.name, "notes.txt"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(stay)


def test_jobs_as_run_by_earlier_drivers_go_since_they_may_hold_keys(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    job = freeze_job(resolve_job(shop.spec()))
    paths = [save_run(job, epoch) for epoch in (1, 2, 3)]
    clean_leftovers(job.layout, epoch=2)
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_driver_that_stood_still_before_it_cleans_takes_nothing_from_its_successor(shop):
    shop.write("a.parquet", {"prompt": ["a"]})
    job = freeze_job(resolve_job(shop.spec()))
    for _ in range(2):
        DriverLock.claim(lock_store(shop.output)).release()
    run = save_run(job, 2)
    (window,) = job.windows()
    shop.plan(job, 0, window.chunks, epoch=2)
    with pytest.raises(TakenOver):
        clean_leftovers(job.layout, [0], epoch=1)
    assert run.exists() and job.layout.window(0).exists()
