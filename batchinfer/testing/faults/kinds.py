"""The faults. Each is a function of a round that does its harm once, and says whether there was something to harm.

What is stopped (SIGSTOP) may be left so: it is woken when the round resumes its job for the last time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from batchinfer.data.parts import BrokenPart, read_footer
from batchinfer.data.segments import SegmentName, read_segment
from batchinfer.job.driver_lock import last_driver, lock_store
from batchinfer.testing.faults import inside
from batchinfer.testing.faults.processes import Role, catches, send
from batchinfer.testing.faults.rounds import FINISHED, SITES_AT_A_STOP, Round

Fault = Callable[[Round], bool]
_WINDOW = re.compile(r"w(\d{4,})")


def _signal_one(round_: Round, role: Role, signum: signal.Signals) -> bool:
    if not round_.pause():
        return False
    found = round_.processes.find(role)
    return bool(found) and send(round_.draw.choice(found).pid, signum)


def kill_driver(round_: Round) -> bool:
    """`kill -9` of the driver, which has Dask's scheduler in its process."""
    if not round_.pause():
        return False
    assert round_.driver is not None
    round_.kill(round_.driver)
    return True


def kill_worker(round_: Round) -> bool:
    return _signal_one(round_, "worker", signal.SIGKILL)


def kill_engine(round_: Round) -> bool:
    return _signal_one(round_, "engine", signal.SIGKILL)


def kill_all(round_: Round) -> bool:
    """As when a machine goes down: every process at the same moment."""
    if not round_.pause():
        return False
    for process in round_.processes.find():
        send(process.pid, signal.SIGKILL)
    return True


def terminate_driver(round_: Round) -> bool:
    """SIGTERM, and the time to end in order."""
    if not round_.pause():
        return False
    driver = round_.driver
    assert driver is not None
    # Without a handler it is Python itself that is starting.
    expected = [0, 3, 75] if catches(driver.pid, signal.SIGTERM) else [0, 3, 75, -signal.SIGTERM]
    driver.terminate()
    code = round_.wait_exit(driver, 25.0)
    if code not in expected:
        round_.problem(f"SIGTERM to the driver: exit code {code}")
    return True


def terminate_worker(round_: Round) -> bool:
    return _signal_one(round_, "worker", signal.SIGTERM)


def terminate_engine(round_: Round) -> bool:
    return _signal_one(round_, "engine", signal.SIGTERM)


def terminate_all(round_: Round) -> bool:
    """What a batch system does at the end of the walltime: SIGTERM to all, and after a grace SIGKILL."""
    if not round_.pause():
        return False
    processes = round_.processes
    for process in processes.find():
        send(process.pid, signal.SIGTERM)
    round_.wait(lambda: not processes.find(), round_.draw.uniform(0.1, 6.0))
    for process in processes.find():
        send(process.pid, signal.SIGKILL)
    return True


def stop_engine(round_: Round) -> bool:
    """An engine that hangs for longer than `cluster.hang_timeout_s`."""
    return _signal_one(round_, "engine", signal.SIGSTOP)


def stop_worker(round_: Round) -> bool:
    """A worker that hangs for longer than its heartbeat; its engine goes on."""
    return _signal_one(round_, "worker", signal.SIGSTOP)


def pause_driver(round_: Round) -> bool:
    """The driver stands still for a while, and nobody takes over."""
    if not round_.pause():
        return False
    assert round_.driver is not None
    send(round_.driver.pid, signal.SIGSTOP)
    round_.sleep(round_.draw.uniform(0.5, 4.0))
    send(round_.driver.pid, signal.SIGCONT)
    return True


# Two drivers ---------------------------------------------------------------------------------------------------------


def second_submit(round_: Round) -> bool:
    """The same command beside a driver that lives: it is refused, or finds the job finished."""
    if not round_.pause():
        return False
    first, second = round_.driver, round_.start()
    assert first is not None
    code = round_.wait_exit(second, 40.0)
    alone = first.poll() is None
    if code == 2 or (code in FINISHED and not alone) or (code in (1, 75) and not alone):
        return True
    if code is None or alone:
        # It has taken over, since the first one had no time to show life. The first one then has to go.
        round_.driver = second
        if code is None and round_.wait_exit(first, 20.0) != 75:
            round_.problem(f"two drivers: the first ended with {first.poll()}, the second with {second.poll()}")
    return True


def zombie_driver(round_: Round) -> bool:
    """The driver stands still until another one has taken over, and wakes at some moment of that one's run."""
    return _succeed(round_, "driver")


def zombie_family(round_: Round) -> bool:
    """The same with its workers and engines: none of them has learnt of the other driver when it wakes."""
    return _succeed(round_, None)


def _succeed(round_: Round, role: Role | None) -> bool:
    if not round_.pause():
        return False
    old = round_.driver
    assert old is not None
    stopped = [process.pid for process in round_.processes.below(old.pid) if role in (None, process.role)]
    for pid in stopped:
        send(pid, signal.SIGSTOP)
    drove = _drives(round_, old)
    if not _take_over(round_):
        return True
    round_.sleep(round_.draw.choice([0.0, round_.draw.uniform(0.0, 3.0)]))
    for pid in stopped:
        send(pid, signal.SIGCONT)
    _ends_in_order(round_, old, drove)
    return True


def _drives(round_: Round, driver: subprocess.Popen[bytes]) -> bool:
    """Whether it has claimed the job: one that stood still before that is refused when it wakes."""
    found = last_driver(lock_store(round_.output))
    return found is not None and found.process.pid == driver.pid


def _ends_in_order(round_: Round, old: subprocess.Popen[bytes], drove: bool) -> None:
    """A driver that was succeeded says so and ends, unless it had ended its work or never begun it."""
    code = round_.wait_exit(old, 40.0)
    if code not in (75, *FINISHED) and (drove or code != 2):
        round_.problem(f"a driver that was succeeded ended with exit code {code}")


def _take_over(round_: Round) -> bool:
    """Starts a successor; False if it ended before it had the job (the other one was done with it)."""
    epoch = _epoch(round_)
    successor = round_.driver = round_.start()
    round_.wait(lambda: successor.poll() is not None or _epoch(round_) > epoch)
    return successor.poll() is None


def _epoch(round_: Round) -> int:
    found = last_driver(lock_store(round_.output))
    return 0 if found is None else found.epoch


def zombie_engine(round_: Round) -> bool:
    """An engine stands still while its driver is killed; it wakes when its rows have been leased to another one."""
    return _orphan(round_, ("engine",))


def zombie_worker(round_: Round) -> bool:
    """The same with the worker, which may be in the middle of a commit, and its engine."""
    return _orphan(round_, ("worker", "engine"))


def _orphan(round_: Round, roles: tuple[Role, ...]) -> bool:
    if not round_.pause():
        return False
    assert round_.driver is not None
    stopped = [process.pid for process in round_.processes.below(round_.driver.pid) if process.role in roles]
    for pid in stopped:
        send(pid, signal.SIGSTOP)
    round_.driver.kill()
    round_.driver.wait()
    _take_over(round_)
    round_.pause()
    for pid in stopped:
        send(pid, signal.SIGCONT)
    return bool(stopped)


# Retries -------------------------------------------------------------------------------------------------------------


def disturbed_retry(round_: Round) -> bool:
    """The job ends; then a retry of the rows that were too long is disturbed."""
    if not round_.job.retryable or round_.retried:
        return False
    round_.finish()
    round_.begin_retry()
    return round_.draw.choice([kill_driver, kill_all, kill_engine, terminate_driver, terminate_all])(round_)


def zombie_of_before_a_retry(round_: Round) -> bool:
    """A driver with its family stands still; another one ends the job, a retry replaces rows, then it wakes."""
    if not round_.job.retryable or round_.retried or not round_.pause():
        return False
    assert round_.driver is not None
    old = round_.driver
    stopped = [process.pid for process in round_.processes.below(old.pid)]
    for pid in stopped:
        send(pid, signal.SIGSTOP)
    drove = _drives(round_, old)
    _take_over(round_)
    round_.finish(wake=False)
    round_.begin_retry()
    round_.driver = round_.start()
    if round_.draw.random() < 0.5:
        round_.pause()
    else:
        round_.wait_exit(round_.driver)
    for pid in stopped:
        send(pid, signal.SIGCONT)
    _ends_in_order(round_, old, drove)
    return True


# Files ---------------------------------------------------------------------------------------------------------------


def cut_files(round_: Round) -> bool:
    """Between two runs, files are cut short: parts, segments, partial and units' results, plans, prepared rows,
    counters."""
    if not round_.pause() and round_.draw.random() < 0.5:
        return False
    if round_.driver is not None and round_.driver.poll() is None:
        round_.kill(round_.driver)
    round_.wait(lambda: not round_.processes.find(), 20.0)
    state, work = round_.layout.state, round_.work
    groups = [
        [*round_.output.glob("part-*.parquet")],
        [*work.glob("segments/*/u*-l*.arrow")],
        [*work.glob("segments/*/partial-*.arrow")],
        [*work.glob("segments/*/u?????.arrow")],
        [*work.glob("segments/*/plan-*.arrow")],
        [*work.glob("prepared/*/*.arrow")],
        [*work.glob("windows/*.json"), *state.glob("driver/*.beat"), state / "status.json", state / "timings.json"],
    ]
    chosen = [round_.draw.choice(paths) for paths in groups if paths and round_.draw.random() < 0.4]
    # A retry works on the rows of finished parts: those are not its own to make again.
    chosen = [path for path in chosen if path.exists() and not (round_.retried and path.name.startswith("part-"))]
    for path in chosen:
        _cut(round_, path)
    round_.driver = None  # it may have finished: now there is something to do again
    return bool(chosen)


def _cut(round_: Round, path: Path) -> None:
    """Cuts a file short, and notes which results are gone by that."""
    size = path.stat().st_size
    of_window = _WINDOW.match(path.stem if path.parent.name == "windows" else path.parent.name)
    window = int(of_window[1]) if of_window else None
    name = SegmentName.parse(path.name)
    if path.name.startswith("part-"):
        round_.reader.spoiled.add(path.stat().st_ino)
        try:
            footer = read_footer(path)
        except BrokenPart:  # cut before
            return
        rows = [(footer["chunk"], row) for row in range(footer["start"], footer["stop"])]
        round_.destroyed(round_.window_of(footer["chunk"]), rows)
    elif name is not None:
        table = read_segment(path, ["chunk", "row"])
        if table is None:  # cut before
            return
        round_.destroyed(window, zip(table["chunk"].to_pylist(), table["row"].to_pylist(), strict=True))
    elif "prepared" in path.parts or path.name.startswith("plan-"):
        round_.destroyed(window, None)  # the window is planned again
    elif path.parent.name == "windows":
        round_.destroyed(window, None)
    os.truncate(path, round_.draw.choice([0, size // 2, max(0, size - 1), max(0, size - 8)]))


def cut_manifest(round_: Round) -> bool:
    """The frozen job is cut short: it is refused, by name, until the file is restored."""
    if not round_.pause():
        return False
    assert round_.driver is not None
    round_.kill(round_.driver)
    path = round_.layout.manifest
    if not path.exists():
        return False
    whole = path.read_bytes()
    path.write_bytes(whole[: round_.draw.choice([0, len(whole) // 2, len(whole) - 1])])
    said = round_.folder / "refused.txt"
    code = round_.wait_exit(round_.start(said))
    if code != 2 or "manifest.json" not in said.read_text():
        round_.problem(f"a damaged manifest: exit code {code}, {said.read_text()[-300:]}")
    path.write_bytes(whole)
    round_.driver = None
    return True


def file_fault(round_: Round) -> bool:
    """At one of the call sites that change files, in turn: error, lost reply, full disk, slow or torn write."""
    site = round_.next_site()
    if round_.of_retry(site) and not round_.retried:
        round_.finish()
        round_.begin_retry()
    elif round_.driver is not None and round_.driver.poll() is None:
        round_.kill(round_.driver)
    mode = round_.draw.choice(inside.modes_of(site))
    place = round_.folder / "file-faults"
    done = place / f"done-{round_.verdict.starts}"
    hit = round_.draw.choice([1, 1, 2, 4] if round_.job.several_windows else [1, 1, 1, 2])
    plan = {"site": site, "mode": mode, "hit": hit, "done": str(done)}
    round_.verdict.sites.append(f"{mode}: {site}")
    round_.arm(plan)
    driver = round_.driver = round_.start()
    if site in SITES_AT_A_STOP:  # while rows are in flight
        seen = round_.num_published()
        round_.wait(lambda: driver.poll() is not None or round_.num_published() > seen)
        driver.terminate()
    round_.wait(lambda: done.exists() or driver.poll() is not None)
    round_.disarm()
    if mode in ("kill", "torn", "torn_kill") and done.exists():
        round_.wait_exit(driver, round_.draw.uniform(0.0, 3.0))
    return done.exists()


def fill_disk(round_: Round) -> bool:
    """No space is left for a while, then there is again."""
    if not round_.pause():
        return False
    assert round_.driver is not None
    with round_.full_disk():
        round_.wait_exit(round_.driver, round_.draw.uniform(0.5, 6.0))
    return True


KINDS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_driver,
        kill_worker,
        kill_engine,
        kill_all,
        terminate_driver,
        terminate_worker,
        terminate_engine,
        terminate_all,
        stop_engine,
        stop_worker,
        pause_driver,
        second_submit,
        zombie_driver,
        zombie_family,
        zombie_engine,
        zombie_worker,
        disturbed_retry,
        zombie_of_before_a_retry,
        cut_files,
        cut_manifest,
        file_fault,
        fill_disk,
    )
}
