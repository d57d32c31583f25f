"""The faults. Each is a function of a round that does its harm once, and says whether there was something to harm.

What is stopped (SIGSTOP) may be left so: it is woken when the round resumes its job for the last time.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from batchinfer.testing.faults.processes import Role, send
from batchinfer.testing.faults.rounds import Round

Fault = Callable[[Round], bool]


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
    driver.terminate()
    code = round_.wait_exit(driver, 25.0)
    if code not in (0, 3, 75):
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
    )
}
