"""The commands. Each imports what it needs when it runs, so that `batchinfer --help` is there at once.

Results go to standard output, everything else (progress, errors) to standard error. An error that the user can do
something about is one message; what is unexpected leaves its traceback in a file that the message names.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import click

from batchinfer.errors import BatchinferError, ConfigError, Interrupted
from batchinfer.garbage import WHILE_LOADING

EXIT_CODES = """\b
Exit codes:
  0   every row completed
  3   finished, some rows are error rows
  4   stopped by the failure limit: mend the cause, run the same command again
  2   the job file, the model or the input is wrong
  75  interrupted: run the same command again to go on
  1   anything else
"""
_SET_HELP = "Override a key of the job file: --set sampling.max_tokens=64. May be given often."


def _overrides(command: Any) -> Any:
    return click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help=_SET_HELP)(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES)
@click.version_option(package_name="batchinfer")
def cli() -> None:
    """Offline batch LLM inference: a dataset of prompts in, the same dataset with completions out."""


@cli.command(short_help="Run a job, or go on with it.")
@click.argument("job", type=click.Path())
@_overrides
@click.option("--fresh", is_flag=True, help="Start over: the old output folder is moved aside, never deleted.")
@click.option("--extend", is_flag=True, help="Go on with files that were added beside unchanged ones.")
@click.option("--dry-run", is_flag=True, help="Check everything and show what would be run; write nothing.")
def submit(job: str, overrides: tuple[str, ...], fresh: bool, extend: bool, dry_run: bool) -> int:
    """Run a job in the foreground, or go on with it: the same command resumes."""
    if dry_run:
        from batchinfer.cli.plan_command import show_plan
        from batchinfer.job.spec import JobSpec

        spec = JobSpec.from_yaml(job, overrides=overrides)
        return show_plan(spec, read_rows=False, extend=extend, ignore_existing=fresh)
    from batchinfer.cluster.phases import phases
    from batchinfer.cluster.warm import early_worker, fit

    with early_worker(job, overrides) as workers:  # it loads its libraries while this process does
        phases.add("started", workers.began, time.process_time())
        with phases.span("reads the job file"):
            from batchinfer.job.spec import JobSpec

            spec = JobSpec.from_yaml(job, overrides=overrides)
        fit(workers, spec)
        with phases.span("imports the driver"):
            from batchinfer.cli.display import ProgressDisplay
            from batchinfer.cli.texts import result_text
            from batchinfer.cluster.submit import run_job

        with ProgressDisplay() as display:
            result = run_job(spec, workers, fresh=fresh, extend=extend, listener=display.listener())
    _result(result_text(result))
    return result.exit_code


@cli.command(short_help="Check every row and estimate the cost; loads no model.")
@click.argument("job", type=click.Path())
@_overrides
@click.option(
    "--device",
    metavar="DEVICE",
    help="Also predict for a GPU: H100, 4xH100, ..., or H100,bandwidth=3.0e12,bfloat16=7e14 with measured rates.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def plan(job: str, overrides: tuple[str, ...], device: str | None, as_json: bool) -> int:
    """Read, render and tokenize every row without loading the model: what a run would meet and cost."""
    from batchinfer.cli.plan_command import show_plan
    from batchinfer.cost import parse_device
    from batchinfer.job.spec import JobSpec

    known = None if device is None else parse_device(device)
    return show_plan(JobSpec.from_yaml(job, overrides=overrides), read_rows=True, device=known, as_json=as_json)


@cli.command()
@click.argument("job", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def status(job: str, as_json: bool) -> int:
    """Show how far a job is. JOB is a job file or its output folder; works while the job runs, on any machine."""
    from batchinfer.cli.texts import status_text
    from batchinfer.job.status import read_status

    found = read_status(output_folder(job))
    click.echo(found.to_json() if as_json else status_text(found))
    return 0


@cli.command()
@click.argument("job", type=click.Path())
@click.option("--deep", is_flag=True, help="Also run some completed rows again, and compare them byte for byte.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="With --deep: how many rows; 100 otherwise.")
def verify(job: str, deep: bool, sample: int | None) -> int:
    """Prove that the output holds each input row exactly once. JOB is a job file or its output folder."""
    if sample is not None and not deep:
        raise ConfigError("--sample says how many rows --deep runs again; give --deep, too")
    from batchinfer.cli.texts import verify_text
    from batchinfer.job.layout import JobLayout
    from batchinfer.job.manifest import load_manifest, with_access
    from batchinfer.job.spec import JobSpec
    from batchinfer.job.verify import verify_job

    _look_for(job)
    spec = None if Path(job).is_dir() else JobSpec.from_yaml(job)
    folder = Path(job) if spec is None else Path(spec.output.path)
    resolved = load_manifest(JobLayout(folder))
    if resolved is None:
        raise ConfigError(f"{folder}: no batchinfer job here; give a job file, or the folder of its output")
    resolved = resolved if spec is None else with_access(resolved, spec)
    report = verify_job(resolved)
    _result(verify_text(report))
    if not (deep and report.ok):
        return 0 if report.ok else 1
    from batchinfer.cli.texts import deep_text
    from batchinfer.cluster.deep_verify import SAMPLE_ROWS, verify_deep

    again = verify_deep(resolved, sample or SAMPLE_ROWS)
    _result(deep_text(again))
    return 0 if again.ok else 1


@cli.command(short_help="Run failed rows again.")
@click.argument("job", type=click.Path())
@click.option("--class", "error_class", metavar="CLASS", help="Only rows of this error class.")
@_overrides
def retry(job: str, error_class: str | None, overrides: tuple[str, ...]) -> int:
    """Run failed rows again, and replace them: those of all retryable error classes, or of one."""
    from batchinfer.cli.display import ProgressDisplay
    from batchinfer.cli.texts import result_text
    from batchinfer.cluster.submit import retry_job
    from batchinfer.cluster.warm import local_workers
    from batchinfer.job.spec import JobSpec

    spec = JobSpec.from_yaml(job, overrides=overrides)
    with local_workers(spec, start=False) as workers, ProgressDisplay() as display:
        result = retry_job(spec, workers, error_class=error_class, listener=display.listener())
    _result(result_text(result))
    return result.exit_code


@cli.command()
def schema() -> int:
    """Print the JSON Schema of a job file, for editors."""
    import json

    from batchinfer.job.spec import JobSpec

    click.echo(json.dumps(JobSpec.json_schema(), indent=2))
    return 0


@cli.command()
@click.argument("model")
def inspect(model: str) -> int:
    """Show what a model's files say, without loading it. MODEL is a folder, a .gguf file or a hub id."""
    from batchinfer.cli.texts import model_text
    from batchinfer.modelfiles import open_model

    click.echo(model_text(open_model(model)))
    return 0


@cli.command(hidden=True)
@click.argument("model")
@click.argument("out")
def quantize(model: str, out: str) -> int:
    """Planned."""
    raise ConfigError("quantize is planned and not there yet; GGUF files are read as they are stored")


def output_folder(job: str) -> Path:
    """Of a job file, or the folder itself."""
    _look_for(job)
    path = Path(job)
    if path.is_dir():
        return path
    from batchinfer.job.spec import JobSpec

    return Path(JobSpec.from_yaml(path).output.path)


def _look_for(job: str) -> None:
    """What is neither there as a job file nor as a folder gets a message that names both."""
    if not Path(job).exists():
        raise ConfigError(f"{job}: no such job file or output folder (looked from {Path.cwd()})")


def main(arguments: list[str] | None = None) -> None:
    _open_standard_files()
    gc.set_threshold(*WHILE_LOADING)
    signal.signal(signal.SIGTERM, _terminated)  # a run has a better way, once there is something to stop in order
    code = _run(arguments)
    with contextlib.suppress(OSError, ValueError):  # the reader of our output may have left
        sys.stdout.flush()
        sys.stderr.flush()
    if resolve := sys.modules.get("batchinfer.job.resolve"):
        resolve.remove_temporary_caches()
    # Not sys.exit: by now nothing is left to tidy up, and a library's thread must not hold up the end.
    os._exit(code)


def _run(arguments: list[str] | None) -> int:
    logging.getLogger("batchinfer").addHandler(logging.NullHandler())
    try:
        return int(cli.main(args=arguments, prog_name="batchinfer", standalone_mode=False) or 0)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except BatchinferError as error:
        _complain(str(error), "Stopped" if isinstance(error, Interrupted) else "Error")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain("the same command goes on", "Interrupted")
        return Interrupted.exit_code
    except BrokenPipeError:
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:  # of the system; others are libraries', such as time-outs
            where = f": {error.filename}" if error.filename else ""
            _complain(
                f"{error.strerror}{where}\nWhat is finished is kept: once that is mended, the same command goes on. "
                f"{_details()}"
            )
            return 1
        _complain(f"{type(error).__name__}: {error}\nThis is not expected. {_details()}")
        return 1


def _details() -> str:
    """Where to read more about the exception that is being handled."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="batchinfer-error-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
    except OSError as error:
        return f"Its details could not be written: {error}."
    return f"The details are in {file.name}."


def _terminated(signum: int, frame: FrameType | None) -> None:
    """Ends it here, not by an exception: a library that is being imported may swallow that, and the run would go on."""
    with contextlib.suppress(OSError):
        os.write(2, b"Stopped: stopped by SIGTERM; the same command goes on\n")
    # A module that is still being imported has made nothing, and lacks the name.
    if abandon := getattr(sys.modules.get("batchinfer.cluster.warm"), "abandon_workers", None):
        abandon()
    if remove := getattr(sys.modules.get("batchinfer.job.resolve"), "remove_temporary_caches", None):
        remove()
    os._exit(Interrupted.exit_code)


def _result(text: str) -> None:
    """What came out, and its exit code, hold also if nobody reads the text to its end."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(text)


def _complain(message: str, kind: str = "Error") -> None:
    with contextlib.suppress(OSError, ValueError):
        click.echo(f"{kind}: {message}", err=True)


def _open_standard_files() -> None:
    """A closed standard output must not become the number of the next file that is opened."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            break
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


if __name__ == "__main__":
    main()
