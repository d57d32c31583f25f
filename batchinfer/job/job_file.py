"""Reading a job file: YAML to plain dicts, remembering on which line every key stands.

Responsible for: syntax errors, duplicate keys, numbers like 1e-3, `--set key=value`. Not for what the keys mean
(`job.spec`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from batchinfer.errors import ConfigError

KeyPath = tuple[str | int, ...]


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
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{label}: the file is empty; it needs at least model, input, output")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{label}:{node.start_mark.line + 1}: a job file is a mapping (key: value lines)")
        where: dict[KeyPath, str] = {}
        problems: list[str] = []
        data = _build(loader, node, (), label, where, problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        hint = ""
        if error.problem and "found character '\\t'" in error.problem:
            hint = "; indent with spaces, not tabs"
        elif error.problem and "mapping values are not allowed" in error.problem:
            hint = "; text that holds ': ' must be quoted"
        raise ConfigError(f"{label}{line}: not valid YAML: {error.problem}{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{label}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    return data, where, problems


def _build(
    loader: _Loader,
    node: yaml.Node,
    path: KeyPath,
    label: str,
    where: dict[KeyPath, str],
    problems: list[str],
) -> Any:
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)  # YAML merge keys (<<)
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                problems.append(f"{label}:{line}: the key {key!r} is not text; quote it if it is meant as text")
                continue
            here = (*path, key)
            if key in result:
                first = where[here].rpartition(":")[2]
                problems.append(
                    f"{label}:{line}: {dotted(here)} is given twice (first on line {first}); keep one of them"
                )
                continue
            where[here] = f"{label}:{line}"
            result[key] = _build(loader, value_node, here, label, where, problems)
        return result
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            where[(*path, index)] = f"{label}:{item.start_mark.line + 1}"
            items.append(_build(loader, item, (*path, index), label, where, problems))
        return items
    return loader.construct_object(node, deep=True)


def with_overrides(source: JobSource, overrides: Iterable[str]) -> JobSource:
    """Applies `--set a.b=value` in order; values are read as YAML. A later one wins."""
    data = _copy(source.data)
    where = dict(source.where)
    for text in overrides:
        key, equals, raw = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set {text}: write it as --set section.key=value")
        try:
            value = yaml.load(raw, Loader=_Loader) if raw.strip() else ""
        except yaml.YAMLError:
            value = raw  # plain text such as "a: b: c" is taken as it is
        target = data
        for depth, part in enumerate(parts[:-1]):
            child = target.get(part)
            if child is None:
                child = target[part] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"--set {text}: {'.'.join(parts[: depth + 1])} is not a section")
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
