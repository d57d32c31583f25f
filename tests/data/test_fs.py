"""Publishing: exactly one winner, whole files or none, foreign files ignored, other outputs refused by name."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from batchinfer.data import fs
from batchinfer.data.fs import LocalStore, Store, check_output_path
from batchinfer.errors import BatchinferError, ConfigError
from batchinfer.testing.stores import FaultyStore, InjectedFault, MemoryStore


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["local", "memory", "faulty"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return {
        "local": lambda: LocalStore(tmp_path / "out"),
        "memory": MemoryStore,
        "faulty": lambda: FaultyStore(MemoryStore()),
    }[request.param]()


def test_a_store_keeps_the_protocol(store: Store) -> None:
    assert isinstance(store, Store)
    assert store.get("a/b") is None
    assert store.list() == []
    assert store.put_if_absent("a/b", b"one")
    assert not store.put_if_absent("a/b", b"two")
    assert store.get("a/b") == b"one"
    store.replace("a/b", b"three")
    store.replace("a/c", b"")
    assert store.get("a/b") == b"three"
    assert store.get("a/c") == b""
    store.put_if_absent("ab", b"x")
    assert store.list() == ["a/b", "a/c", "ab"]
    assert store.list("a/") == ["a/b", "a/c"]
    assert store.list("a") == ["a/b", "a/c", "ab"]
    assert store.list("a/b") == ["a/b"]
    assert store.list("zzz/") == []
    store.delete("a/b")
    store.delete("a/b")
    assert store.get("a/b") is None


def test_of_many_writers_one_wins_and_its_bytes_stay(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    won: list[int] = []
    start = threading.Barrier(8)

    def write(i: int) -> None:
        start.wait()
        if store.put_if_absent("driver/e000001", b"%d" % i * 10_000):
            won.append(i)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("driver/e000001") == b"%d" % won[0] * 10_000
    assert [p.name for p in (tmp_path / "driver").iterdir()] == ["e000001"]  # no temporary file is left


def test_publish_takes_the_file_or_leaves_the_winner(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first, second = store.temp_path("part-0.parquet"), store.temp_path("part-0.parquet")
    first.write_bytes(b"first")
    second.write_bytes(b"second")
    assert store.publish(first, "part-0.parquet")
    assert not store.publish(second, "part-0.parquet")
    assert (tmp_path / "part-0.parquet").read_bytes() == b"first"
    assert names(tmp_path) == ["part-0.parquet"]
    third = store.temp_path("part-0.parquet")
    third.write_bytes(b"third")
    store.replace_file(third, "part-0.parquet")
    assert names(tmp_path) == ["part-0.parquet"]
    assert store.get("part-0.parquet") == b"third"


def test_a_link_that_the_network_carried_out_twice_still_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(a: Path, b: Path) -> None:
        link(a, b)
        raise FileExistsError(errno.EEXIST, "the second try", str(b))

    monkeypatch.setattr(os, "link", twice)
    assert LocalStore(tmp_path).put_if_absent("key", b"data")


def test_without_hard_links_a_rename_that_refuses_to_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(a: Path, b: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(tmp_path)
    assert store.put_if_absent("key", b"one")
    tmp = store.temp_path("key")
    tmp.write_bytes(b"two")
    assert not store.publish(tmp, "key")
    assert store.get("key") == b"one"
    assert names(tmp_path) == ["key"]


def test_a_file_system_that_can_do_neither_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(errno.ENOSYS, "not there")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fs, "_rename_no_replace", refuse)
    with pytest.raises(BatchinferError, match="neither hard links nor a rename"):
        LocalStore(tmp_path).put_if_absent("key", b"one")
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EINTR])
def test_stale_handles_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("key", b"data")
    read, failures = Path.read_bytes, [1, 1]

    def flaky(path: Path) -> bytes:
        if failures:
            failures.pop()
            raise OSError(code, "for a moment")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", flaky)
    assert store.get("key") == b"data"
    assert not failures


def test_retrying_gives_up_in_time() -> None:
    def stale() -> None:
        raise OSError(errno.ESTALE, "for ever")

    with pytest.raises(OSError, match="for ever"):
        fs.retrying(stale, limit_s=0.05)


def test_get_waits_for_a_key_from_another_machine(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    timer = threading.Timer(0.15, lambda: store.put_if_absent("key", b"late"))
    timer.start()
    assert store.get("key") is None
    assert store.get("key", wait_s=5) == b"late"
    timer.join()


def test_foreign_and_hidden_files_are_not_listed(tmp_path: Path) -> None:
    for name in (".nfs000123", "._x.parquet", ".x.parquet.crc", "x.crc", "x~", ".tmp-1-a-b", "part-1.parquet"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "file").write_bytes(b"")
    assert LocalStore(tmp_path).list() == ["part-1.parquet"]


def test_temporary_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("a/key", b"")
    mine = store.temp_path("a/key")
    scope, pid, start, *rest = mine.name.removeprefix(".tmp-").split("~")
    rest_of_name = "~".join(rest)

    def name(*mark: str) -> Path:
        return mine.with_name(f".tmp-{'~'.join(mark)}~{rest_of_name}")

    dead = [name(scope, str(2**22 + 5), start), name(scope, pid, str(int(start) - 1))]  # no such pid; another's by now
    far = name("0" * 12, pid, start)
    old = [name("1" * 12, pid, start), mine.with_name(".tmp-77-ae7133e14eb3-key.tmp")]  # the last is of before 0.2
    for path in (mine, *dead, far, *old):
        path.write_bytes(b"left behind")
    for path in (mine, *old):
        os.utime(path, (0, 0))
    assert store.remove_temps() == 4
    assert sorted(names(tmp_path / "a")) == sorted(["key", mine.name, far.name])
    assert store.list() == ["a/key"]


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127])
def test_names_may_be_as_long_as_file_systems_allow(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    assert store.put_if_absent(name, b"1")
    store.replace(name, b"2")
    assert store.get(name) == b"2" and names(tmp_path) == [name]


def test_the_temporary_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from batchinfer.data.fs import temp_path_for\n"
        "temp_path_for(Path(sys.argv[1]) / 'part').write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    assert LocalStore(tmp_path).remove_temps() == 1 and not names(tmp_path)


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_process_that_proc_hides_is_not_called_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """/proc mounted with hidepid, where a process of another user writes beside us."""
    store = LocalStore(tmp_path)
    theirs = store.temp_path("key")
    theirs.write_bytes(b"half")
    read_text = Path.read_text

    def hidden(path: Path, *args: str) -> str:
        if path.name == "stat":
            raise error(path)
        return read_text(path, *args)

    def refused(pid: int, signum: int) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr(os, "kill", refused)
    assert store.remove_temps() == 0
    os.utime(theirs, (0, 0))
    assert store.remove_temps() == 1


def test_a_writer_that_does_not_know_its_start_is_not_called_dead(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    mine = store.temp_path("key")
    scope, pid, _, *rest = mine.name.split("~")
    mine.with_name("~".join([scope, pid, "", *rest])).write_bytes(b"half")
    assert store.remove_temps() == 0


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "."])
def test_keys_stay_inside_the_store(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a store key"):
        LocalStore(tmp_path).put_if_absent(key, b"")


def test_object_stores_are_refused_by_name(tmp_path: Path) -> None:
    for url in ("s3://bucket/x", "gs://bucket/x", "hf://datasets/x"):
        with pytest.raises(ConfigError, match=url.split(":")[0]):
            check_output_path(url)
    with pytest.raises(ConfigError, match="empty"):
        check_output_path(" ")
    assert check_output_path(f"file://{tmp_path}/x") == tmp_path / "x"


def test_the_faulty_store_fails_as_told() -> None:
    store = FaultyStore(MemoryStore(), fail_when=lambda operation, key: operation == "get" and key == "bad")
    store.put_if_absent("bad", b"")
    with pytest.raises(InjectedFault):
        store.get("bad")
    assert store.get("good") is None
    lost = FaultyStore(MemoryStore(), lost_reply_rate=1.0)
    with pytest.raises(InjectedFault, match="reply"):
        lost.put_if_absent("key", b"data")
    assert lost.store.get("key") == b"data"  # it happened all the same


def test_the_faulty_store_hides_new_keys_but_not_from_a_claim() -> None:
    store = FaultyStore(MemoryStore(), hidden_s=0.1)
    assert store.put_if_absent("key", b"data")
    assert store.get("key") is None
    assert store.list() == []
    assert not store.put_if_absent("key", b"other")
    assert store.get("key", wait_s=2) == b"data"
