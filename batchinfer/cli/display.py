"""Progress of a run: a bar on a terminal, a line now and then elsewhere. On standard error."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

import click

from batchinfer.cli.texts import duration, number, rate
from batchinfer.cluster.progress import Progress
from batchinfer.cluster.submit import Listener

LINE_EVERY_S = 10.0


class ProgressDisplay:
    """A context; `listener` is what the run tells."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None
        self._is_terminal = sys.stderr.isatty()
        self._last_line = 0.0
        self._last_phase = ""
        self._notes: tuple[str, ...] = ()

    def listener(self) -> Listener:
        return Listener(said=self.say, progress=self.show)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.say(text)
        else:
            _print(text)

    def show(self, progress: Progress) -> None:
        for note in progress.notes[len(self._notes) :]:
            self.say(note)
        self._notes = progress.notes
        if self._is_terminal:
            if self._bar is None:
                self._bar = _Bar()
            self._bar.show(progress)
            return
        now = time.monotonic()
        if progress.phase != self._last_phase or now - self._last_line >= LINE_EVERY_S:
            self._last_line, self._last_phase = now, progress.phase
            _print(progress_line(progress))

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def progress_line(progress: Progress) -> str:
    done = progress.tally.rows
    share = f" ({100 * done / progress.num_rows:.1f} %)" if progress.num_rows else ""
    text = f"{progress.phase}: {number(done)} of {number(progress.num_rows)} rows{share}"
    if progress.tally.failed:
        text += f", {number(progress.tally.failed)} failed"
    if progress.rows_per_s:
        text += f", {rate(progress.rows_per_s)} rows/s"
    if progress.prompt_tokens_per_s or progress.completion_tokens_per_s:
        text += f", tokens/s {rate(progress.prompt_tokens_per_s)} in, {rate(progress.completion_tokens_per_s)} out"
    if progress.eta_s:
        text += f", {duration(progress.eta_s)} left"
    return text


class _Bar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        self._bar: Any = Progress(
            TextColumn("{task.fields[phase]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[rows]}"),
            TextColumn("{task.fields[rates]}", style="cyan"),
            TextColumn("{task.fields[failed]}", style="red"),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=None, phase="", rows="", rates="", failed="", left="")
        self._bar.start()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def show(self, progress: Progress) -> None:
        rates = ""
        if progress.prompt_tokens_per_s or progress.completion_tokens_per_s:
            rates = f"tok/s {rate(progress.prompt_tokens_per_s)} in {rate(progress.completion_tokens_per_s)} out"
        self._bar.update(
            self._task,
            total=max(progress.num_rows, 1),
            completed=progress.tally.rows,
            phase=progress.phase,
            rows=f"{number(progress.tally.rows)}/{number(progress.num_rows)}",
            rates=rates,
            failed=f"{number(progress.tally.failed)} failed" if progress.tally.failed else "",
            left=f"{duration(progress.eta_s)} left" if progress.eta_s else "",
        )

    def close(self) -> None:
        self._bar.stop()


def _print(text: str) -> None:
    try:
        click.echo(text, err=True)
    except OSError:  # nobody reads it any more: the job goes on
        logging.getLogger("batchinfer.cli").info("%s", text)
