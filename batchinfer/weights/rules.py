"""Which stored tensor belongs to which parameter: explicit rules, strict both ways.

A model's file lists `Rule`s and `Ignore`s; `match` holds them against a checkpoint. Each stored tensor is ignored or
matches exactly one rule, each part of each parameter is filled by exactly one tensor; anything else is a WeightError
that lists both sides. Reading the tensors is `loading`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from batchinfer.errors import ModelError
from batchinfer.modelfiles import StoredTensor

MAX_LISTED = 12
_KIND = ".{kind}"
_PLACES = {"i": "[0-9]+", "rest": ".+"}


class WeightError(ModelError):
    """A checkpoint's tensors and the model's parameters don't fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Stored name -> (parameter, part of it).

    stored, parameter, part   patterns: `{i}` stands for a number, `{any_other_name}` for letters, digits and `_`;
                              what they match is put in for the same name in `parameter` and `part`
    view    from a part of the parameter to the same memory in the order of the stored tensor's elements
            (for formats that store rows in another order); None: the same order
    group   `view` works on groups of this many rows: tensors are read in pieces that don't cut them
    """

    stored: str
    parameter: str
    part: str = ""
    view: Callable[[Tensor], Tensor] | None = None
    group: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignore:
    """Stored tensors that are left alone on purpose, and why, also where a rule matches them: a parameter that is
    then not filled is an error. `{rest}` stands for any end of a name."""

    stored: str
    reason: str


Part = tuple[str, str]  # parameter's name in the model, part of it ("" where it has one part only)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    def group(match: re.Match[str]) -> str:
        name = match[1]
        return f"(?P<{name}>{_PLACES.get(name, '[a-z0-9_]+')})"

    escaped = re.escape(pattern).replace(r"\{", "{").replace(r"\}", "}")
    return re.compile(re.sub(r"\{([a-z_]+)\}", group, escaped))


def match(
    stored_names: Iterable[str],
    parts: Collection[Part],
    rules: Sequence[Rule],
    ignores: Sequence[Ignore],
    *,
    where: str,
) -> dict[str, tuple[Part, Rule]]:
    """Part and rule by stored name, for all that is not ignored. `where` names the checkpoint in errors."""
    compiled = [(compile_pattern(rule.stored), rule) for rule in rules]
    ignored = [compile_pattern(ignore.stored) for ignore in ignores]
    found: dict[str, tuple[Part, Rule]] = {}
    filled: dict[Part, str] = {}
    unknown: list[str] = []
    doubled: list[str] = []
    for name in stored_names:
        if any(pattern.fullmatch(name) for pattern in ignored):
            continue
        hits = [(hit, rule) for pattern, rule in compiled if (hit := pattern.fullmatch(name))]
        if len(hits) > 1:
            raise AssertionError(f"{name!r} matches several rules: {[rule.stored for _, rule in hits]}")
        if not hits:
            unknown.append(name)
            continue
        hit, rule = hits[0]
        part = (rule.parameter.format(**hit.groupdict()), rule.part.format(**hit.groupdict()))
        if part not in parts:
            unknown.append(name)
        elif part in filled:
            doubled.append(f"{filled[part]} and {name}")
        else:
            filled[part] = name
            found[name] = (part, rule)
    missing = [part for part in parts if part not in filled]
    if unknown or missing or doubled:
        raise WeightError(_complaint(where, unknown, [_stored_name(p, rules) for p in missing], doubled))
    return found


def stored_parts(tensors: Mapping[str, StoredTensor], rules: Sequence[Rule]) -> dict[Part, dict[str, StoredTensor]]:
    """What is stored for each layer, by (its name in the model, part), then by kind: the last part of a tensor's name.
    Of the rules that leave the kind open, as "{kind}" at the end of `stored` and of `parameter`."""
    compiled = [(compile_pattern(rule.stored), rule) for rule in rules if rule.parameter.endswith(_KIND)]
    found: dict[Part, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        for pattern, rule in compiled:
            if (hit := pattern.fullmatch(name)) is not None:
                values = hit.groupdict()
                part = (rule.parameter.removesuffix(_KIND).format(**values), rule.part.format(**values))
                found.setdefault(part, {})[values["kind"]] = tensor
    return found


def _complaint(where: str, unknown: list[str], missing: list[str], doubled: list[str]) -> str:
    lines = [f"{where}: its tensors don't fit the model that its config describes."]
    for title, names in (
        ("in the checkpoint, not in the model", unknown),
        ("in the model, not in the checkpoint", missing),
        ("two tensors for one parameter", doubled),
    ):
        if names:
            more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
            lines.append(f"  {title} ({len(names)}): {', '.join(sorted(names)[:MAX_LISTED])}{more}")
    lines.append("  The files are incomplete, of another model than config.json, or of a variant not supported here.")
    return "\n".join(lines)


def _stored_name(part: Part, rules: Sequence[Rule]) -> str:
    """The stored name that would fill a part: what the user can look for in the files."""
    for rule in rules:
        parameter = compile_pattern(rule.parameter).fullmatch(part[0])
        within = compile_pattern(rule.part).fullmatch(part[1])
        if parameter is not None and within is not None:
            values: Mapping[str, str] = {**parameter.groupdict(), **within.groupdict()}
            return rule.stored.format(**values)
    return f"{part[0]}[{part[1]}]" if part[1] else part[0]
