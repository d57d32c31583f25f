"""Finds the input's files: a file, a folder, a glob, an fsspec URL, a saved Hugging Face dataset or a hub id.

A file's name is its path relative to the input's root (the folder, or the part of a glob before its first wildcard),
so names stay the same when the whole folder moves. Not here: what is in the files (see `dataset`).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa

from batchinfer.data.fs import is_foreign, retrying
from batchinfer.errors import InputError

log = logging.getLogger("batchinfer.data")

FileFormat = Literal["parquet", "jsonl", "arrow"]
Compression = Literal["", "gzip", "zstd"]
EXTENSIONS: Mapping[str, FileFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSIONS: Mapping[str, Compression] = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
SIDE_FILES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"})
FORMATS = ("auto", "parquet", "jsonl", "arrow")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
EDGE_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of the input. `uri` is a local path or an fsspec URL."""

    name: str
    uri: str
    format: FileFormat
    compression: Compression = ""


def find_sources(path: str, format: str, storage_options: Mapping[str, Any]) -> list[Source]:
    """The input's files, in the order of their names. InputError when there is none that can be read."""
    if format not in FORMATS:
        raise InputError(f"input.format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if not path.strip():
        raise InputError("input.path is empty; name a file, a folder, a glob, a URL or a dataset")
    if "://" in path and not path.startswith("file://"):
        found = _find_remote(path, storage_options)
    else:
        base, _, split = path.partition("::")
        local = base.removeprefix("file://")
        if Path(local).is_dir() and (Path(local) / "dataset_dict.json").exists():
            return _find_saved_split(Path(local), split)
        if Path(local).is_dir() and all((Path(local) / n).exists() for n in ("state.json", "dataset_info.json")):
            return _find_saved(Path(local), "")
        if not Path(local).exists() and not glob.has_magic(local) and _looks_like_hub_id(local):
            return _find_on_hub(local, split, storage_options)
        if split:
            raise InputError(f"input.path {path!r}: `::{split}` names a split, but {base} is not a saved dataset")
        found = _find_local(local)
    return _typed(path, found, format)


def _find_local(path: str) -> list[tuple[str, str]]:
    root = Path(path)
    if root.is_file():
        return [(root.name, str(root.absolute()))]
    if root.is_dir():
        return [(name, str(root.absolute() / name)) for name in _walk(root)]
    if glob.has_magic(path):
        fixed = _fixed_part(path)
        found = []
        for hit in sorted(glob.glob(path, recursive=True)):  # noqa: PTH207  # patterns may be absolute
            name = os.path.relpath(hit, fixed or ".").replace(os.sep, "/")
            if Path(hit).is_file() and not _ignored(name):
                found.append((name, str(Path(hit).absolute())))
        if not found:
            raise InputError(f"input.path {path!r} matches no file (looked from {Path.cwd()})")
        return found
    parent = root.parent
    near = (
        f"; {parent} holds {_some(sorted(p.name for p in parent.iterdir() if not _ignored(p.name)))}"
        if parent.is_dir()
        else ""
    )
    raise InputError(f"input.path {path!r}: no such file or folder (looked from {Path.cwd()}){near}")


def _walk(root: Path) -> list[str]:
    names = []
    for folder, dirs, files in os.walk(root):
        dirs[:] = [d for d in dirs if not _ignored(d)]
        for file in files:
            if not _ignored(file):
                names.append((Path(folder) / file).relative_to(root).as_posix())
    return sorted(names)


def _fixed_part(pattern: str) -> str:
    """The folder before a pattern's first wildcard."""
    parts = pattern.split("/")
    fixed = []
    for part in parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return "/".join(fixed) or ("/" if pattern.startswith("/") else "")


def _ignored(name: str) -> bool:
    return any(is_foreign(part) or part.startswith("_") for part in name.split("/"))


def _find_remote(url: str, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    import fsspec

    scheme = url.split("://", 1)[0]
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
        if glob.has_magic(path) and not scheme.startswith("http"):
            paths, root = fs.glob(path), _fixed_part(path)
            paths = [p for p in paths if fs.isfile(p)]
        elif not scheme.startswith("http") and fs.isdir(path):
            paths, root = fs.find(path), path
        else:
            if not fs.exists(path):
                raise FileNotFoundError(url)
            return [(re.split(r"[?#]", path.rstrip("/").rsplit("/", 1)[-1])[0], url)]
    except ImportError as error:
        raise InputError(f"input.path {url!r}: {scheme}:// needs a package that is not installed: {error}") from None
    except FileNotFoundError:
        raise InputError(f"input.path {url!r}: there is nothing at this address") from None
    except ValueError as error:
        raise InputError(f"input.path {url!r}: {error}") from None
    except Exception as error:
        raise InputError(
            f"input.path {url!r} can't be listed: {type(error).__name__}: {error}; check the address and "
            "input.storage_options"
        ) from error
    found = []
    for hit in paths:
        name = hit[len(root) :].lstrip("/") if hit.startswith(root) else hit.lstrip("/")
        if not _ignored(name):
            found.append((name, fs.unstrip_protocol(hit)))
    if not found:
        raise InputError(f"input.path {url!r} holds no file")
    return sorted(found)


def _typed(path: str, found: Sequence[tuple[str, str]], format: str) -> list[Source]:
    sources: list[Source] = []
    skipped: list[str] = []
    if len(found) > 1 and format == "auto":
        found, skipped = _without_side_files(found)
    for name, uri in found:
        stem, compression = name.lower(), ""
        for ending, kind in COMPRESSIONS.items():
            if stem.endswith(ending):
                stem, compression = stem.removesuffix(ending), kind
                break
        by_name = EXTENSIONS.get(Path(stem).suffix)
        if format != "auto" and by_name != format and len(found) == 1:
            by_name = format  # type: ignore[assignment]  # the user says what a single file is
        if by_name is None or format not in ("auto", by_name) or (compression and by_name != "jsonl"):
            skipped.append(name)
            continue
        if not _is_text(name + uri):
            raise InputError(
                f"input.path {path!r}: the name of {os.fsencode(uri)!r} is not UTF-8, and could not be written to "
                "source_file; rename it"
            )
        sources.append(Source(name=name, uri=uri, format=by_name, compression=compression))  # type: ignore[arg-type]
    if not sources:
        what = f"{format} " if format != "auto" else ""
        there = f", only {_some(skipped)}" if skipped else ": it is an empty folder"
        advice = "Set input.format for one file with another ending"
        if any(name.lower().endswith((".csv", ".tsv")) for name in skipped):
            advice = "CSV is not read: convert it, say by pyarrow.parquet.write_table(pyarrow.csv.read_csv(OLD), NEW)"
        raise InputError(
            f"input.path {path!r} holds no {what}file that can be read{there}; known endings: {', '.join(EXTENSIONS)} "
            f"(JSON Lines also with .gz or .zst). {advice}"
        )
    if skipped:
        log.warning("input %s: ignored %d files that are no data files: %s", path, len(skipped), _some(skipped))
    kinds = {source.format for source in sources}
    if len(kinds) > 1:
        log.warning("input %s holds files of several formats: %s", path, ", ".join(sorted(kinds)))
    return sources


def _is_text(name: str) -> bool:
    """Bytes of a name that are no UTF-8 are halves of surrogates in Python's text."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _without_side_files(found: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Beside Parquet or Arrow files a .json file describes them; what `datasets` writes next to data never is data."""
    binary = any(EXTENSIONS.get(Path(name.lower()).suffix) in ("parquet", "arrow") for name, _ in found)
    side = [
        name
        for name, _ in found
        if name.rsplit("/", 1)[-1] in SIDE_FILES or (binary and Path(name.lower()).suffix == ".json")
    ]
    return [(name, uri) for name, uri in found if name not in side], side


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _find_saved(folder: Path, prefix: str) -> list[Source]:
    """Files of a folder that `datasets.Dataset.save_to_disk` wrote."""
    try:
        state = json.loads(retrying((folder / "state.json").read_bytes))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'state.json'} is not what save_to_disk writes: {error!r}") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"the saved dataset {folder} lacks its files {_some(missing)}")
    return [Source(name=prefix + n, uri=str((folder / n).absolute()), format="arrow") for n in names]


def _find_saved_split(folder: Path, split: str) -> list[Source]:
    try:
        splits = json.loads(retrying((folder / "dataset_dict.json").read_bytes))["splits"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'dataset_dict.json'} is not what save_to_disk writes: {error!r}") from None
    if not split and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        got = f"has no split {split!r}" if split else "holds several splits"
        raise InputError(
            f"the saved dataset {folder} {got}; name one, for instance input.path: {folder}::{splits[0]} "
            f"(splits: {', '.join(splits)})"
        )
    return _find_saved(folder / split, f"{split}/")


def _looks_like_hub_id(path: str) -> bool:
    ending = Path(path).suffix.lower()
    known = ending in EXTENSIONS or ending in COMPRESSIONS
    return bool(_HUB_ID.fullmatch(path)) and not known and not Path(path.split("/")[0]).exists()


def _find_on_hub(hub_id: str, split: str, options: Mapping[str, Any]) -> list[Source]:
    """Download a hub dataset through `datasets`; its cached Arrow files are the input's files."""
    name, _, config = hub_id.partition(":")
    try:
        import datasets

        with _offline_without_network(datasets.config):
            loaded = datasets.load_dataset(name, config or None, **options)
    except Exception as error:
        raise InputError(
            f"input.path {hub_id!r} is no local file or folder, and as a dataset on the Hugging Face hub it can't be "
            f"loaded: {type(error).__name__}: {error}. Check the spelling, the network (or HF_HUB_OFFLINE), and for a "
            "dataset with several configurations write org/name:config::split"
        ) from error
    if split not in loaded:
        raise InputError(
            f"the hub dataset {hub_id} has the splits {', '.join(loaded)}; name one, for instance "
            f"input.path: {hub_id}::{next(iter(loaded))}"
        )
    files = [entry["filename"] for entry in loaded[split].cache_files]
    return [Source(name=f"{split}/{Path(f).name}", uri=f, format="arrow") for f in files]


@contextlib.contextmanager
def _offline_without_network(config: Any) -> Iterator[None]:
    """Without a network `datasets` would try for half a minute before it looks into its cache."""
    before = config.HF_HUB_OFFLINE
    host = urllib.parse.urlsplit(config.HF_ENDPOINT).hostname
    if not before and host and not urllib.request.getproxies():
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            log.warning("%s can't be reached: only datasets in the local cache are looked for", host)
            config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def is_local(uri: str) -> bool:
    return "://" not in uri


def open_bytes(uri: str, storage_options: Mapping[str, Any]) -> IO[bytes]:
    """A seekable binary file (as far as the file system can seek)."""
    if is_local(uri):
        return retrying(lambda: open(uri, "rb"))  # noqa: PTH123
    import fsspec

    return fsspec.open(uri, "rb", **storage_options).open()  # type: ignore[no-any-return]


def open_arrow(uri: str, storage_options: Mapping[str, Any], *, memory_map: bool = False) -> pa.NativeFile:
    """The same for Arrow's readers. A memory map costs no copies, but its pages count as this process's memory."""
    if is_local(uri):
        return retrying(lambda: pa.memory_map(uri) if memory_map else pa.OSFile(uri))
    return pa.PythonFile(open_bytes(uri, storage_options), mode="r")


def file_size(uri: str, storage_options: Mapping[str, Any]) -> int:
    with open_bytes(uri, storage_options) as file:
        return file.seek(0, os.SEEK_END)


def edge_fingerprint(uri: str, storage_options: Mapping[str, Any], extra: bytes = b"") -> str:
    """Cheap fingerprint of a file: its size and first and last 64 KiB (where an Arrow footer lies), never its mtime."""
    with open_bytes(uri, storage_options) as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(f"{size}\0".encode() + extra)
        file.seek(0)
        digest.update(file.read(EDGE_BYTES))
        if size > EDGE_BYTES:
            file.seek(max(EDGE_BYTES, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()[:32]
