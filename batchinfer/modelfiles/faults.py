"""Faults that any weight file can have, told by name before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from batchinfer.errors import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_weight_file(path: Path) -> int:
    """Size of a weight file in bytes. Raises ModelError where it is missing, empty or a Git LFS pointer."""
    if path.is_symlink() and not path.exists():
        raise ModelError(f"{path}: a symbolic link to {path.readlink()}, which does not exist")
    if not path.is_file():
        raise ModelError(f"{path}: missing")
    try:
        with path.open("rb") as f:
            head = f.read(len(LFS_POINTER))
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error
    if size == 0:
        raise ModelError(f"{path}: empty (0 bytes); copy or download it again")
    if head == LFS_POINTER:
        raise ModelError(
            f"{path}: a Git LFS pointer (a small text file), not the weights; run `git lfs pull` in its folder"
        )
    return size
