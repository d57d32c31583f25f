"""Reading a job file: YAML to plain dicts, remembering on which line every key stands.

Responsible for: syntax errors, duplicate keys, numbers like 1e-3, `--set key=value`. Not for what the keys mean
(`job.spec`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from batchinfer.errors import ConfigError

KeyPath = tuple[str | int, ...]
_MAX_NODES = 100_000  # aliases of aliases make a small file endless
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """A job as read, not yet checked.

    data      plain dicts, lists and scalars
    where     for each key path, the place to name in a message ("job.yaml:7" or "--set sampling.top_p=2")
    problems  what is already known to be wrong (duplicate keys), to be reported together with the rest
    label     what to call the whole: the file's path, or "job"
    base      relative paths in the job are relative to this folder
    """

    data: dict[str, Any]
    where: Mapping[KeyPath, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    label: str = "job"
    base: Path = field(default_factory=Path.cwd)
    default_name: str = "job"

    def place(self, path: KeyPath) -> str:
        """The closest known place of a key: its own, else its parent's, else the whole job."""
        while path:
            if path in self.where:
                return self.where[path]
            path = path[:-1]
        return self.label


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as pyyaml reads it, except that 1e-3 is a number and 2024-01-01 stays text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_job_file(path: str | Path, *, overrides: Iterable[str] = ()) -> JobSource:
    """Reads a YAML job file. Raises ConfigError where it can't be read or is not YAML."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such job file; give the path of a YAML file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the path of a YAML job file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    data, where, problems = parse_yaml(text, str(path))
    source = JobSource(
        data=data,
        where=where,
        problems=tuple(problems),
        label=str(path),
        base=path.resolve().parent,
        default_name=path.stem,
    )
    return with_overrides(source, overrides)


def parse_yaml(text: str, label: str) -> tuple[dict[str, Any], dict[KeyPath, str], list[str]]:
    """YAML text to (data, place of each key, problems). The top level must be a mapping."""
    with _parsing(text, label) as loader:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{label}: the file is empty; it needs at least model, input, output")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{label}:{node.start_mark.line + 1}: a job file is a mapping (key: value lines)")
        builder = _Builder(loader, label)
        data = builder.build(node, ())
    return data, builder.where, builder.problems


def parse_value(text: str) -> Any:
    """One value as YAML. Raises ConfigError."""
    with _parsing(text, "value") as loader:
        node = loader.get_single_node()
        builder = _Builder(loader, "value")
        value = None if node is None else builder.build(node, ())
    if builder.problems:
        raise ConfigError(builder.problems[0])
    return value


@contextlib.contextmanager
def _parsing(text: str, label: str) -> Iterator[_Loader]:
    """A loader; whatever goes wrong while it is used becomes a ConfigError that names the line."""
    loader = None
    try:
        loader = _Loader(text)
        yield loader
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{label}{line}: not valid YAML: {_explained(error)}") from None
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{label}:{number}: not valid YAML: the character {chr(error.character)!r} is not allowed"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{label}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{label}: nested too deeply for a job file") from None
    except ValueError as error:  # an escape for a character that there is none of
        line = f":{loader.line + 1}" if loader is not None else ""
        raise ConfigError(f"{label}{line}: not valid YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _explained(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "can't be read"
    if "found character '\\t'" in problem:
        return f"{problem}; indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return f"{problem}; text that holds ': ' must be quoted"
    if error.context == "while scanning an alias":
        return f"{problem}; text that begins with * (a glob, for instance) must be quoted"
    if "found another document" in problem:
        return "a second document begins here (---); a job file is one document"
    return problem


class _Builder:
    """Makes plain values of YAML nodes, and notes where the keys stand. Nothing but plain types is ever made."""

    def __init__(self, loader: _Loader, label: str) -> None:
        self._loader, self._label = loader, label
        self._open: list[yaml.Node] = []
        self._num_nodes = 0
        self.where: dict[KeyPath, str] = {}
        self.problems: list[str] = []

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        with self._entered(node):
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                for index, item in enumerate(node.value):
                    self.where[(*path, index)] = self._place(item)
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        own, merged = self._split(node)
        values = {self._key(key): (key, value) for key, value in merged}  # of the mappings under <<, own keys win
        first: dict[Any, int] = {}
        for key_node, value_node in own:
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                shown = repr(key) if isinstance(key_node, yaml.ScalarNode) else "[...]"
                self.problems.append(
                    f"{self._place(key_node)}: the key {shown} is not text; quote it if it is meant as text"
                )
            elif key in first:
                self.problems.append(
                    f"{self._place(key_node)}: {dotted((*path, key))} is given twice (first on line {first[key]}); "
                    "keep one of them"
                )
            else:
                first[key] = line
                values[key] = (key_node, value_node)
        result = {}
        for key, (key_node, value_node) in values.items():
            self.where[(*path, key)] = self._place(key_node)
            result[key] = self.build(value_node, (*path, key))
        return result

    def _split(self, node: yaml.MappingNode) -> tuple[list[Any], list[Any]]:
        """A mapping's own (key, value) nodes, and those of the mappings that it merges (<<), the weakest first."""
        own, merged = [], []
        for key, value in node.value:
            if key.tag != _MERGE_TAG:
                own.append((key, value))
                continue
            for source in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
                if not isinstance(source, yaml.MappingNode):
                    raise ConfigError(f"{self._place(key)}: << merges mappings only")
                with self._entered(source):
                    inner_own, inner_merged = self._split(source)
                self._count(source, len(inner_own) + len(inner_merged))
                merged += inner_merged + inner_own
        return own, merged

    def _key(self, node: yaml.Node) -> Any:
        return self._scalar(node) if isinstance(node, yaml.ScalarNode) else (id(node),)

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node, deep=True)
        except (ValueError, LookupError, OverflowError, AttributeError, TypeError):  # a tag that does not fit: !!int x
            raise ConfigError(f"{self._place(node)}: {node.value[:40]!r} is no {node.tag.rpartition(':')[2]}") from None

    @contextlib.contextmanager
    def _entered(self, node: yaml.Node) -> Iterator[None]:
        if any(outer is node for outer in self._open):
            raise ConfigError(f"{self._place(node)}: an alias (*name) inside its own anchor (&name) has no end")
        self._count(node, 1)
        self._open.append(node)
        yield
        self._open.pop()

    def _count(self, node: yaml.Node, more: int) -> None:
        self._num_nodes += more
        if self._num_nodes > _MAX_NODES:
            raise ConfigError(
                f"{self._place(node)}: more than {_MAX_NODES:,} values; aliases (*name) of lists of aliases multiply"
            )

    def _place(self, node: yaml.Node) -> str:
        return f"{self._label}:{node.start_mark.line + 1}"


def with_overrides(source: JobSource, overrides: Iterable[str]) -> JobSource:
    """Applies `--set a.b=value` in order; values are read as YAML. A later one wins."""
    data = _copy(source.data)
    where = dict(source.where)
    for text in overrides:
        key, equals, raw = text.partition("=")
        text = text if len(text) <= 100 else text[:97] + "..."
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"--set {text}: write it as --set section.key=value")
        parts: list[str | int] = [
            int(name) if name.isdecimal() else name for name in names
        ]  # numbers: sampling.logit_bias.50=1
        try:
            value = parse_value(raw) if raw.strip() else ""
        except ConfigError:
            value = raw  # plain text such as "a: b: c" is taken as it is
        target = data
        for depth, part in enumerate(parts[:-1]):
            child = target.get(part)
            if child is None:
                child = target[part] = {}
                where.setdefault(tuple(parts[: depth + 1]), f"--set {text}")
            if not isinstance(child, dict):
                raise ConfigError(f"--set {text}: {'.'.join(names[: depth + 1])} is not a section")
            target = child
        target[parts[-1]] = value
        path = tuple(parts)
        for known in [k for k in where if k[: len(path)] == path]:
            del where[known]
        where[path] = f"--set {text}"
    return JobSource(
        data=data,
        where=where,
        problems=source.problems,
        label=source.label,
        base=source.base,
        default_name=source.default_name,
    )


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def dotted(path: KeyPath) -> str:
    return "".join(
        f"[{part}]" if isinstance(part, int) else (f".{part}" if index else part) for index, part in enumerate(path)
    )
