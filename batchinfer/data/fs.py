"""Durable, atomic files: create-if-absent publish, atomic replace, and retries for shared file systems.

Publishing is a hard link (`renameat2` with RENAME_NOREPLACE where there are no hard links), so a name either is
absent or holds complete, fsynced bytes, and of two writers exactly one wins. Not here: what the files hold (see
`segments`, `parts`), and fakes for tests (`batchinfer.testing.stores`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol, TypeAlias, TypeVar, runtime_checkable

from batchinfer.data.writers import is_left_over, writer_mark
from batchinfer.errors import BatchinferError, ConfigError

T = TypeVar("T")
Keys: TypeAlias = list[str]  # inside a store, `list` is a method

TMP_PREFIX = ".tmp-"
LONGEST_NAME = 255  # bytes, of all file systems that are promised anything for
RETRIED = frozenset({errno.ESTALE, errno.EINTR, errno.EAGAIN})
NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
RETRY_LIMIT_S = 10.0
VISIBLE_LIMIT_S = 15.0  # how long a shared file system may hide a file that another machine has published


@runtime_checkable
class Store(Protocol):
    """Small named blobs. Keys are relative paths with `/`; a put or replace is atomic and durable on return."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create `key`; False (and no change) when it exists."""

    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite `key`; readers see the old or the new bytes, never a mixture."""

    def get(self, key: str, *, wait_s: float = 0.0) -> bytes | None:
        """The bytes, or None when absent; `wait_s` waits for a key that another machine has just written."""

    def list(self, prefix: str = "") -> Keys:
        """Sorted keys that start with `prefix`, without hidden and temporary files."""

    def delete(self, key: str) -> None:
        """Remove `key`; absent is fine."""


def retrying(action: Callable[[], T], limit_s: float = RETRY_LIMIT_S) -> T:
    """Run `action` again while it fails with an error that shared file systems give for a moment (ESTALE, EINTR)."""
    deadline = time.monotonic() + limit_s
    pause_s = 0.01
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in RETRIED or time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 1.0)


def when_visible(action: Callable[[], T]) -> T:
    """`retrying` for a file that another process says it has published: absence is waited out as well.

    Where the folder itself is local to this machine or the file is really gone, that costs VISIBLE_LIMIT_S once.
    """
    deadline = time.monotonic() + VISIBLE_LIMIT_S
    pause_s = 0.02
    while True:
        try:
            return retrying(action)
        except FileNotFoundError as error:
            if time.monotonic() + pause_s > deadline:
                raise
            # A listing makes network file systems ask the server again.
            with contextlib.suppress(OSError):
                next(Path(error.filename or ".").parent.iterdir(), None)
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 1.0)


def is_foreign(name: str) -> bool:
    """Names that are never ours and never data: hidden files, `.nfs...`, editors' and checksum files."""
    return name.startswith(".") or name.endswith((".crc", "~"))


def temp_path_for(path: Path) -> Path:
    """A fresh hidden name beside `path`, so that linking and renaming stay inside one file system. It has an ending
    of its own: DuckDB's `*.parquet` takes hidden files too."""
    start = f"{TMP_PREFIX}{writer_mark()}~{secrets.token_hex(6)}~"
    name = os.fsencode(path.name)[: LONGEST_NAME - len(start) - len(".tmp")].decode(errors="ignore")
    return path.parent / f"{start}{name}.tmp"


def is_temp(name: str) -> bool:
    return name.startswith(TMP_PREFIX)


def fsync_file(path: Path) -> None:
    def sync() -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    retrying(sync)


def fsync_dir(path: Path) -> None:
    """Make names in a directory durable. Some network file systems can't sync directories: they need not."""

    def sync() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            os.close(fd)

    retrying(sync)


def _rename_no_replace(source: Path, target: Path) -> bool:
    """renameat2(RENAME_NOREPLACE): True when renamed, False when `target` exists, OSError when unsupported."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, "renameat2 is not there") from None
    at_fdcwd, no_replace = -100, 1
    if renameat2(at_fdcwd, os.fsencode(source), at_fdcwd, os.fsencode(target), no_replace) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    raise OSError(code, os.strerror(code), str(target))


def publish_file(tmp: Path, target: Path) -> bool:
    """Give the complete file `tmp` the name `target` if that name is free; durable on return.

    True: published (`tmp` is gone). False: the name was taken (`tmp` is removed, nothing changed). The bytes are
    synced before the name appears, so a reader that sees the name sees the whole file, also after a power cut.
    """
    fsync_file(tmp)
    won = retrying(lambda: _claim(tmp, target))
    with contextlib.suppress(FileNotFoundError):
        tmp.unlink()
    fsync_dir(target.parent)
    return won


def _claim(tmp: Path, target: Path) -> bool:
    try:
        os.link(tmp, target)
        return True
    except FileExistsError:
        # NFS may carry a link out twice when a reply is lost: the second answer is EEXIST for our own file.
        return _same_file(tmp, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
    try:
        return _rename_no_replace(tmp, target)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        raise BatchinferError(
            f"the file system of {target.parent} has neither hard links nor a rename that refuses to overwrite, so "
            "two writers could not be kept apart; put the output on another file system (ext4, xfs, btrfs, NFS, "
            "Lustre and tmpfs work)"
        ) from None


def _same_file(a: Path, b: Path) -> bool:
    try:
        return os.path.samestat(a.stat(), b.stat())
    except FileNotFoundError:
        return False


def replace_file(tmp: Path, target: Path) -> None:
    """Give the complete file `tmp` the name `target`, over whatever has it; atomic, durable on return."""
    fsync_file(tmp)
    retrying(lambda: tmp.replace(target))
    fsync_dir(target.parent)


@contextlib.contextmanager
def temp_for(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, whose file is removed at the end if it is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = temp_path_for(path)
    try:
        yield tmp
    finally:
        with contextlib.suppress(FileNotFoundError):
            tmp.unlink()


def read_bytes(path: Path) -> bytes:
    return retrying(path.read_bytes)


def check_output_path(path: str) -> Path:
    """The local folder that an output path names. ConfigError for object stores and other URLs."""
    if path.startswith("file://"):
        path = path[len("file://") :]
    scheme, found, _ = path.partition("://")
    if found:
        raise ConfigError(
            f"output.path is {path!r}: writing to {scheme}:// is not supported yet (publishing needs a conditional "
            "put); write to a local or shared folder and copy it afterwards"
        )
    if not path.strip():
        raise ConfigError("output.path is empty; name a folder, for instance out/my-job")
    return Path(path)


class LocalStore:
    """A `Store` in a folder of a local or shared POSIX file system, and publishing of files into that folder.

    Temporary files lie beside their targets under hidden names: `remove_temps` deletes those of dead writers.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def path(self, key: str) -> Path:
        """Where `key` lies. Keys can't leave the root."""
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"not a store key: {key!r}")
        return self.root.joinpath(*parts)

    def temp_path(self, key: str) -> Path:
        """A fresh temporary name beside `key` (its folder is made): write it, then `publish` or `replace_file`."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        return temp_path_for(target)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        target = self.path(key)
        if target.exists():  # saves the write; the link below decides
            return False
        with temp_for(target) as tmp:
            self._write(tmp, data)
            return publish_file(tmp, target)

    def replace(self, key: str, data: bytes) -> None:
        target = self.path(key)
        with temp_for(target) as tmp:
            self._write(tmp, data)
            replace_file(tmp, target)

    def get(self, key: str, *, wait_s: float = 0.0) -> bytes | None:
        path = self.path(key)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return read_bytes(path)
            except (FileNotFoundError, NotADirectoryError):
                if time.monotonic() >= deadline:
                    return None
            # A listing of the folder makes NFS clients ask the server again.
            with contextlib.suppress(OSError):
                next(path.parent.iterdir(), None)
            time.sleep(0.1)

    def list(self, prefix: str = "") -> Keys:
        folder, _, start = prefix.rpartition("/")
        base = self.path(folder) if folder else self.root
        keys: Keys = []
        self._walk(base, folder + "/" if folder else "", start, keys)
        return sorted(keys)

    def _walk(self, folder: Path, key: str, start: str, keys: Keys) -> None:
        try:
            entries = retrying(lambda: [(path.name, path.is_dir()) for path in folder.iterdir()])
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, is_dir in entries:
            if is_foreign(name) or not name.startswith(start):
                continue
            if is_dir:
                self._walk(folder / name, f"{key}{name}/", "", keys)
            else:
                keys.append(key + name)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            retrying(self.path(key).unlink)

    def publish(self, tmp: str | Path, key: str) -> bool:
        """`publish_file` under a key: create-if-absent, False when the key exists. `tmp` is gone either way."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        return publish_file(Path(tmp), target)

    def replace_file(self, tmp: str | Path, key: str) -> None:
        """Replace `key` by the file `tmp`, atomically."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(tmp), target)

    def remove_temps(self, prefix: str = "") -> int:
        """Delete temporary files under the folder `prefix` that dead writers left (`writers.is_left_over`); returns how
        many."""
        base = self.path(prefix) if prefix else self.root
        now = time.time()
        removed = 0
        for folder, _, names in os.walk(base):
            for name in filter(is_temp, names):
                path = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):
                    if is_left_over(name, now - path.stat().st_mtime):
                        path.unlink()
                        removed += 1
        return removed

    def _write(self, tmp: Path, data: bytes) -> None:
        def write() -> None:
            file: IO[bytes]
            with tmp.open("wb") as file:
                file.write(data)

        retrying(write)
