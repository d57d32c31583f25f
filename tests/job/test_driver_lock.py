"""One driver at a time: claims, takeover, zombies; time is injected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from batchinfer.data.fs import LocalStore
from batchinfer.errors import ResumeRefused
from batchinfer.job import driver_lock
from batchinfer.job.driver_lock import DriverLock, DriverProcess, last_driver
from batchinfer.testing.stores import FaultyStore, MemoryStore

ELSEWHERE = DriverProcess("node7", 4711, "node7/boot/pid:[1]", "123")


class FakeClock:
    """Sleeping moves time on and lets the other driver do something."""

    def __init__(self, during=lambda now: None):
        self.now = 100.0
        self.during = during

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.during(self.now)


def claim_elsewhere(store):
    return DriverLock.claim(store, process=ELSEWHERE)


def test_first_claim_and_next_after_release(tmp_path):
    store = LocalStore(tmp_path)
    with DriverLock.claim(store) as lock:
        assert lock.epoch == 1
        assert not last_driver(store).gone
    clock = FakeClock()
    again = DriverLock.claim(store, clock=clock)
    assert again.epoch == 2
    assert clock.now == 100.0, "no waiting after a goodbye"


def test_a_second_live_submit_is_refused_naming_host_and_process(tmp_path):
    store = LocalStore(tmp_path)
    first = claim_elsewhere(store)
    clock = FakeClock(during=lambda now: first.bump() if now == 103.0 else None)
    with pytest.raises(ResumeRefused, match=r"process 4711 on host node7.*one driver at a time"):
        DriverLock.claim(store, clock=clock)
    assert clock.now < 110, "refused as soon as life shows"
    first.bump()  # and the first goes on unharmed


def test_own_live_process_is_refused_too(tmp_path):
    store = LocalStore(tmp_path)
    first = DriverLock.claim(store)
    clock = FakeClock(during=lambda now: first.bump())
    with pytest.raises(ResumeRefused, match=str(os.getpid())):
        DriverLock.claim(store, clock=clock)


def test_lock_of_a_dead_process_on_another_host_is_broken_after_30_s_of_silence(tmp_path):
    store = LocalStore(tmp_path)
    claim_elsewhere(store).bump()
    clock = FakeClock()
    said = []
    lock = DriverLock.claim(store, clock=clock, on_wait=said.append)
    assert lock.epoch == 2
    assert 30 <= clock.now - 100 <= 31
    assert len(said) == 1 and "4711" in said[0] and "node7" in said[0]


def test_dead_process_on_this_host_is_succeeded_at_once(tmp_path):
    code = (
        "import sys; from batchinfer.data.fs import LocalStore; from batchinfer.job.driver_lock import DriverLock;"
        "DriverLock.claim(LocalStore(sys.argv[1])).bump()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    clock = FakeClock()
    assert DriverLock.claim(LocalStore(tmp_path), clock=clock).epoch == 2
    assert clock.now == 100.0


def test_a_pid_used_again_by_another_process_counts_as_dead(tmp_path):
    store = LocalStore(tmp_path)
    me = DriverProcess.current()
    DriverLock.claim(store, process=DriverProcess(me.host, me.pid, me.scope, "1"))
    clock = FakeClock()
    assert DriverLock.claim(store, clock=clock).epoch == 2
    assert clock.now == 100.0


def test_a_zombie_learns_that_it_was_succeeded(tmp_path):
    store = LocalStore(tmp_path)
    zombie = claim_elsewhere(store)
    DriverLock.claim(store, clock=FakeClock())
    with pytest.raises(ResumeRefused, match="another driver took over"):
        zombie.bump()
    assert zombie.lost
    zombie.release()
    assert not last_driver(store).released, "a zombie's goodbye is not the successor's"


def test_of_two_successors_one_wins_and_the_other_is_refused(tmp_path):
    store = LocalStore(tmp_path)
    claim_elsewhere(store)
    winners = []

    def rival(now):
        if now >= 129.5 and not winners:
            winners.append(DriverLock.claim(store, clock=FakeClock()))
        if winners:
            winners[0].bump()

    with pytest.raises(ResumeRefused, match="one driver at a time"):
        DriverLock.claim(store, clock=FakeClock(during=rival))
    assert winners[0].epoch == 2


def test_heartbeat_thread_bumps_and_stops(tmp_path):
    store = LocalStore(tmp_path)
    with DriverLock.claim(store, takeover_after_s=0.06) as lock:
        lock.start_heartbeat()
        deadline = 200
        while last_driver(store).counter < 3 and deadline:
            deadline -= 1
            Path(tmp_path).stat()
            lock._stop.wait(0.01)
        assert last_driver(store).counter >= 3
    assert last_driver(store).released


def test_a_driver_is_waited_for_as_long_as_its_own_claim_says(tmp_path):
    store = LocalStore(tmp_path)
    first = DriverLock.claim(store, process=ELSEWHERE, takeover_after_s=4.0)
    clock = FakeClock()
    begin = clock.now
    second = DriverLock.claim(store, clock=clock, takeover_after_s=90.0)
    assert 4 <= clock.now - begin < 6
    with pytest.raises(ResumeRefused, match="no life for 4 s"):
        first.bump()
    assert last_driver(store).takeover_after_s == second.takeover_after_s == 90


def test_a_claim_of_an_earlier_version_names_its_process_and_is_waited_for_as_by_default(tmp_path):
    store = LocalStore(tmp_path)
    store.put_if_absent("__batchinfer/driver/000001.json", json.dumps({"process": asdict(ELSEWHERE)}).encode())
    found = last_driver(store)
    assert (found.process, found.takeover_after_s) == (ELSEWHERE, 30.0)


def test_foreign_files_beside_the_lock_do_not_disturb(tmp_path):
    store = LocalStore(tmp_path)
    folder = tmp_path / "__batchinfer" / "driver"
    folder.mkdir(parents=True)
    for name in (".nfs000123", "_SUCCESS", "000009.json.bak", "notes.txt"):
        (folder / name).write_text("x")
    assert DriverLock.claim(store).epoch == 1


def test_file_system_that_shows_new_files_late_and_loses_replies(tmp_path):
    """Two contenders; what either writes is invisible for a while, and a beat's reply may be lost."""
    disk = MemoryStore()
    first = DriverLock.claim(disk, process=ELSEWHERE)
    slow = FaultyStore(disk, hidden_s=0.2)
    slow._born = {key: time.monotonic() for key in disk.blobs}
    clock = FakeClock(during=lambda now: (time.sleep(0.02), first.bump()))
    with pytest.raises(ResumeRefused, match="one driver at a time"):
        DriverLock.claim(slow, clock=clock)
    lossy = DriverLock.claim(MemoryStore())
    lossy._store = FaultyStore(lossy._store, lost_reply_rate=1.0)
    with pytest.raises(OSError, match="injected"):
        lossy.bump()
    lossy._store = lossy._store.store
    lossy.bump()
    assert last_driver(lossy._store).counter == 2


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_a_damaged_claim_is_succeeded_after_silence_and_learns_of_it(tmp_path, cut):
    store = LocalStore(tmp_path)
    first = claim_elsewhere(store)
    folder = tmp_path / "__batchinfer" / "driver"
    claim = folder / "000001.json"
    claim.write_bytes(claim.read_bytes()[:cut])
    (folder / "000001.beat").write_bytes(b"\0\0")
    clock = FakeClock()
    assert DriverLock.claim(store, clock=clock).epoch == 2
    assert clock.now >= 130
    second = folder / "000002.json"
    second.write_bytes(second.read_bytes()[:cut])
    with pytest.raises(ResumeRefused, match="another driver took over"):
        first.bump()


def test_a_damaged_claim_of_a_living_driver_protects_it_all_the_same(tmp_path):
    store = LocalStore(tmp_path)
    first = claim_elsewhere(store)
    (tmp_path / "__batchinfer" / "driver" / "000001.json").write_bytes(b"{")
    with pytest.raises(ResumeRefused, match="one driver at a time"):
        DriverLock.claim(store, clock=FakeClock(during=lambda now: first.bump()))


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_driver_that_proc_hides_is_not_called_dead(monkeypatch, error):
    def hidden(path):
        raise error(path)

    def refused(pid, signum):
        raise PermissionError

    process = DriverProcess.current()
    monkeypatch.setattr(driver_lock, "process_scope", lambda: process.scope)
    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr(os, "kill", refused)
    assert not process.dead_here()
