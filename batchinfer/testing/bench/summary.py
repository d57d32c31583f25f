"""From runs to medians, paired ratios and a table. A ratio is of two runs of one round, which stood side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from batchinfer.testing.bench.runs import ENGINE, SUBMIT, Run
from batchinfer.testing.bench.workloads import Sharing

Round = Mapping[str, Run]  # by contender; one that failed is not in it
OURS = (SUBMIT, ENGINE)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of the rounds' values."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        return Spread(median(values), min(values), max(values)) if values else None

    def text(self, digits: int) -> str:
        middle = f"{self.median:.{digits}f}"
        if self.least == self.most:
            return middle
        return f"{middle} ({self.least:.{digits}f} to {self.most:.{digits}f})"


def per_round(rounds: Sequence[Round], value: Callable[[Round], float | None]) -> Spread | None:
    return Spread.of([found for one in rounds if (found := value(one)) is not None])


def ratio(name: str, other: str) -> Callable[[Round], float | None]:
    """Rate of one contender by that of another, where a round has both."""
    return lambda one: one[name].rate / one[other].rate if name in one and other in one else None


def ratio_to_best(name: str) -> Callable[[Round], float | None]:
    """Rate by that of the round's best peer."""

    def value(one: Round) -> float | None:
        peers = [run.rate for other, run in one.items() if other not in OURS and other != name]
        return one[name].rate / max(peers) if name in one and peers else None

    return value


def overhead(one: Round) -> float | None:
    """How much longer `submit` takes from its first token to its last durable row than the engine alone, as a share."""
    if not one.keys() >= set(OURS):
        return None
    spans = [one[name].marks.span_s for name in OURS]
    return spans[0] / spans[1] - 1 if spans[0] is not None and spans[1] else None


def contenders_of(rounds: Sequence[Round]) -> list[str]:
    return list(dict.fromkeys(name for one in rounds for name in one))


def summarize(rounds: Sequence[Round], sharing: Sharing) -> dict[str, Any]:
    """Everything that the table shows, as plain values for the JSON file."""
    names = contenders_of(rounds)
    peers = [name for name in names if name not in OURS]
    return {
        "prompt_tokens": sharing.prompt_tokens,
        "shareable_tokens": sharing.shareable_tokens,
        "overhead_of_submit": _plain(per_round(rounds, overhead)),
        "contenders": {
            name: {
                "out_tokens_per_s": _plain(per_round(rounds, _rate(name))),
                "ratio_to_best_peer": _plain(per_round(rounds, ratio_to_best(name))),
                "ratio_to": {other: _plain(per_round(rounds, ratio(name, other))) for other in peers if other != name},
                "start_to_first_token_s": _plain(per_round(rounds, _of(name, lambda run: run.marks.first_token))),
                "start_to_end_s": _plain(per_round(rounds, _of(name, lambda run: run.marks.ended))),
                "peak_rss_bytes": _plain(per_round(rounds, _of(name, lambda run: run.peak_rss))),
                "peak_pss_bytes": _plain(per_round(rounds, _of(name, lambda run: run.peak_pss))),
                "cached_prompt_tokens": _plain(per_round(rounds, _of(name, lambda run: run.cached_tokens))),
            }
            for name in names
        },
    }


def table(title: str, rounds: Sequence[Round], sharing: Sharing) -> str:
    """The summary for people, in Markdown."""
    names = contenders_of(rounds)
    peers = [name for name in names if name not in OURS]
    mib = 1 << 20
    columns: list[tuple[str, Callable[[str], str]]] = [
        ("out tokens/s", lambda name: _text(per_round(rounds, _rate(name)), 0)),
        *((f"x {other}", lambda name, other=other: _text(per_round(rounds, ratio(name, other)), 2)) for other in peers),
        ("x best peer", lambda name: _text(per_round(rounds, ratio_to_best(name)), 2)),
        ("start to first token, s", lambda name: _text(_spread(rounds, name, lambda run: run.marks.first_token), 1)),
        ("start to end, s", lambda name: _text(_spread(rounds, name, lambda run: run.marks.ended), 1)),
        ("peak RSS, MiB", lambda name: _text(_spread(rounds, name, lambda run: _by(run.peak_rss, mib)), 0)),
        ("peak PSS, MiB", lambda name: _text(_spread(rounds, name, lambda run: _by(run.peak_pss, mib)), 0)),
        ("prompt tokens computed", lambda name: _text(_spread(rounds, name, _computed), 0)),
        (
            "shared, of what could be",
            lambda name: _percent(
                _spread(rounds, name, lambda run: _by(run.cached_tokens, max(1, sharing.shareable_tokens)))
            ),
        ),
    ]
    lines = [
        title,
        "",
        "| contender | " + " | ".join(heading for heading, _ in columns) + " |",
        "|---|" + "---|" * len(columns),
        *(f"| {name} | " + " | ".join(show(name) for _, show in columns) + " |" for name in names),
        "",
        f"Prompts: {sharing.prompt_tokens:,} tokens, of which {sharing.shareable_tokens:,} "
        f"({sharing.shareable_tokens / max(1, sharing.prompt_tokens):.1%}) can be shared.",
    ]
    more = per_round(rounds, overhead)
    if more is not None:
        lines.append(
            f"submit, first token to last durable row, takes {_percent(more)} more time than the engine alone."
        )
    return "\n".join(lines)


def _rate(name: str) -> Callable[[Round], float | None]:
    return _of(name, lambda run: run.rate)


def _of(name: str, value: Callable[[Run], float | None]) -> Callable[[Round], float | None]:
    return lambda one: value(one[name]) if name in one else None


def _spread(rounds: Sequence[Round], name: str, value: Callable[[Run], float | None]) -> Spread | None:
    return per_round(rounds, _of(name, value))


def _computed(run: Run) -> float | None:
    return None if run.cached_tokens is None else run.prompt_tokens - run.cached_tokens


def _by(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _text(spread: Spread | None, digits: int) -> str:
    return "" if spread is None else spread.text(digits)


def _percent(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return Spread(100 * spread.median, 100 * spread.least, 100 * spread.most).text(1) + " %"


def _plain(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {"median": spread.median, "min": spread.least, "max": spread.most}
