"""The command line without running a job: options, help, texts, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.cli import texts
from batchinfer.cli.display import progress_line
from batchinfer.cli.main import cli
from batchinfer.cluster.progress import ProgressMeter
from batchinfer.cluster.submit import JobResult
from batchinfer.job.events import Tally
from batchinfer.job.report import JobReport
from batchinfer.job.verify import VerifyReport
from batchinfer.testing.tiny import make_tiny, tiny_config

OPTIONS = {
    "submit": ["--dry-run", "--extend", "--fresh", "--help", "--set", "JOB"],
    "plan": ["--device", "--help", "--json", "--set", "JOB"],
    "status": ["--help", "--json", "JOB"],
    "verify": ["--deep", "--help", "--sample", "JOB"],
    "retry": ["--class", "--help", "--set", "JOB"],
    "schema": ["--help"],
    "inspect": ["--help", "MODEL"],
    "quantize": ["--help", "MODEL", "OUT"],
}


def batchinfer(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "batchinfer", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"text": ["one", None, "three"]}), tmp_path / "in.parquet")
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {path: 'fake://hash'}\n"
        "input: {path: in.parquet, prompt: 'Say {text}'}\n"
        "output: {path: out}\n"
        "sampling: {max_tokens: 4}\n"
    )
    return path


def test_the_options_are_these_and_nobody_adds_one_by_the_way() -> None:
    import click

    found = {}
    for name, command in cli.commands.items():
        context = click.Context(command)
        found[name] = sorted(
            parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.name.upper()
            for parameter in command.get_params(context)
        )
    assert found == OPTIONS


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom batchinfer.cli import main\n"
        "sys.argv = ['batchinfer', '--help']\n"
        "try: main.cli.main(standalone_mode=False)\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'dask', 'distributed', 'pyarrow', 'pydantic', 'numpy', 'rich', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    start = time.process_time()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert "Exit codes" in out
    assert time.process_time() - start < 0.4


def test_plan_reads_every_row_and_writes_nothing(job: Path) -> None:
    done = batchinfer("plan", str(job))
    assert done.returncode == 0, done.stderr
    for text in ("sampling.max_tokens", "(user)", "bad rows", "invalid_prompt", "row 1 of in.parquet", "Say one"):
        assert text in done.stdout, text
    assert not (job.parent / "out").exists()


def test_plan_predicts_for_a_device(job: Path, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    arguments = ("plan", str(job), "--set", f"model.path={folder}", "--device", "2xH100")
    told = batchinfer(*arguments)
    assert told.returncode == 0, told.stderr
    for text in ("On 2 x H100\n", "in bfloat16", "bound by memory", "not yet compared with a GPU"):
        assert text in told.stdout, text
    found = json.loads(batchinfer(*arguments, "--json").stdout)
    assert found["survey"]["rows"] == 3 and found["settings"]["sampling.max_tokens"] == {"value": 4, "source": "user"}
    assert found["on_device"]["device"] == "2 x H100" and found["on_device"]["batch"] == 2
    assert found["on_device"]["total_s"] > 0 and found["on_device"]["decode_tokens_per_s"] > 0
    assert found["off_device"] is None


def test_plan_says_why_it_predicts_nothing_for_a_device(job: Path) -> None:
    assert "the model's config does not say how large" in batchinfer("plan", str(job), "--device", "L4").stdout
    found = json.loads(batchinfer("plan", str(job), "--json").stdout)
    assert found["on_device"] is found["off_device"] is None


def test_a_dry_run_says_what_would_be_run_and_writes_nothing(job: Path) -> None:
    done = batchinfer("submit", str(job), "--dry-run", "--set", "sampling.max_tokens=5")
    assert done.returncode == 0 and "3 rows in 1 file\n" in done.stdout
    assert not (job.parent / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("submit", "none.yaml"), "no such job file"),
        (("submit",), "Missing argument"),
        (("submit", "job.yaml", "--set", "sampling.max_token=3"), "max_tokens"),
        (("submit", "job.yaml", "--set", "input.prompt_column=text"), "exactly one of"),
        (("submit", "job.yaml", "--set", "input.prompt={txt}"), "txt"),
        (("submit", "job.yaml", "--extend"), "--extend"),
        (("plan", "job.yaml", "--set", "model.path=none.gguf"), "none.gguf"),
        (("plan", "job.yaml", "--device", "H1"), "known are A100-40GB"),
        (("status", "job.yaml"), "no batchinfer job here"),
        (("status", "none"), "no such job file or output folder"),
        (("verify", "none"), "no such job file or output folder"),
        (("verify", "."), "no batchinfer job here"),
        (("retry", "job.yaml"), "submit it first"),
        (("inspect", "none"), "none"),
        (("quantize", "a", "b"), "planned and not there yet"),
        (("nothing",), "No such command"),
    ],
)
def test_what_the_user_gets_wrong_is_one_message_and_exit_code_2(
    job: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = batchinfer(*arguments, cwd=job.parent)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (job.parent / "out").exists()


def test_schema_is_json() -> None:
    schema = json.loads(batchinfer("schema").stdout)
    assert schema["title"] == "batchinfer job" and "model" in schema["properties"]


def test_inspect() -> None:
    assert "2,048 tokens" in batchinfer("inspect", "fake://hash").stdout


def test_inspect_says_whether_a_model_can_be_run(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    assert re.search(r"can be run +yes", batchinfer("inspect", str(folder)).stdout)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "64"}))
    assert re.search(r"can be run +no: .*hidden_size .* integer, got '64'", batchinfer("inspect", str(folder)).stdout)


@pytest.mark.parametrize(("family", "latents"), [("deepseek-v3", True), ("qwen3-moe", False), ("mixtral", False)])
def test_inspect_says_what_a_model_has_of_experts_and_latents(tmp_path: Path, family: str, latents: bool) -> None:
    config = tiny_config(family)
    said = batchinfer("inspect", str(make_tiny(tmp_path / "tiny", family))).stdout
    assert re.search(r"experts +8\n", said)
    assert re.search(rf"experts of a token +{config['num_experts_per_tok']}\n", said)
    assert bool(re.search(r"size of latents +32\n", said)) == latents


def test_a_reader_that_leaves_is_no_error_of_ours(job: Path) -> None:
    command = f"{sys.executable} -m batchinfer schema | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_numbers_as_text() -> None:
    assert [texts.duration(s) for s in (5, 65, 3700, 200_000)] == ["5 s", "1 min 05 s", "1 h 01 min", "2 d 7 h"]
    assert [texts.rate(r) for r in (0, 0.031, 0.5, 12, 1234, 45_600, 1_234_567)] == [
        "0.0",
        "0.031",
        "0.5",
        "12",
        "1,234",
        "45.6k",
        "1,235k",
    ]
    assert [texts.num_bytes(b) for b in (10, 2048, 3 * 2**30)] == ["10 B", "2.0 KiB", "3.0 GiB"]


def test_a_result_with_error_rows_says_where_to_look_and_whether_retry_can_help() -> None:
    def text(**failed: int) -> str:
        report = JobReport(rows_total=9, rows_done=9, failed=failed, parts_total=1, parts_done=1)
        return texts.result_text(JobResult(output=Path("out"), report=report, elapsed_s=1.0, rows_run=9))

    assert "column `error`" not in text()
    assert "column `error`" in text(invalid_row=2) and "retry" not in text(invalid_row=2)
    assert "`batchinfer retry`" in text(invalid_row=2, prompt_too_long=1)


def test_verify_says_what_makes_missing_files() -> None:
    def text(parts_found: int) -> str:
        report = VerifyReport(
            rows_expected=4,
            rows_found=2,
            rows_failed=0,
            parts_expected=2,
            parts_found=parts_found,
            problems=("part-1: x",),
        )
        return texts.verify_text(report)

    assert text(1).startswith("NOT proved: 1 problem\n  2 of 4 rows in 1 of 2 files\n  part-1: x\n")
    assert "`batchinfer submit`" in text(1) and "`batchinfer submit`" not in text(2)


def test_progress_rates_and_time_left() -> None:
    meter = ProgressMeter("job", 1000, Tally(rows=100), now=0.0)
    common = {"phase": "running", "parts_done": 0, "workers_ready": 1, "workers": 1}
    first = meter.measure(0.0, Tally(), prompt_tokens=0, completion_tokens=0, **common)
    assert first.eta_s is None
    later = meter.measure(10.0, Tally(rows=200, failed=3), prompt_tokens=5000, completion_tokens=1000, **common)
    assert (later.rows_per_s, later.prompt_tokens_per_s, later.completion_tokens_per_s) == (20.0, 500.0, 100.0)
    assert later.eta_s == pytest.approx(35.0)
    line = progress_line(later)
    assert line == "running: 300 of 1,000 rows (30.0 %), 3 failed, 20 rows/s, tokens/s 500 in, 100 out, 35 s left"


def test_no_rate_comes_of_rows_that_were_there_before_the_work_and_no_time_left_of_a_few() -> None:
    meter = ProgressMeter("job", 1000, Tally(), now=0.0)

    def measure(now: float, rows: int, phase: str) -> tuple[float, float | None]:
        seen = meter.measure(
            now,
            Tally(rows=rows),
            phase=phase,
            parts_done=0,
            prompt_tokens=0,
            completion_tokens=0,
            workers_ready=1,
            workers=1,
        )
        return seen.rows_per_s, seen.eta_s

    assert measure(0.0, 0, "planning") == (0.0, None)
    assert measure(2.0, 300, "loading the model") == (0.0, None)
    assert measure(5.0, 400, "running") == (0.0, None)
    assert measure(15.0, 401, "running") == (0.1, None)
    assert measure(25.0, 500, "running") == (5.0, pytest.approx(100.0))
    assert measure(60.0, 505, "planning") == (pytest.approx(5 / 35), pytest.approx(495 * 55 / 105))  # of the whole run


def test_verify_of_a_job_file_reads_the_input_with_its_storage_options(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest does not keep them: they may hold keys."""
    from click.testing import CliRunner

    from batchinfer.job import verify
    from batchinfer.job.manifest import ResolvedJob, freeze_job
    from batchinfer.job.resolve import resolve_job
    from batchinfer.job.spec import JobSpec

    text = job.read_text().replace("in.parquet,", "in.parquet, storage_options: {auto_mkdir: false},")
    job.write_text(text)
    freeze_job(resolve_job(JobSpec.from_yaml(job)))
    seen: list[ResolvedJob] = []
    report = verify.VerifyReport(
        rows_expected=3, rows_found=3, rows_failed=0, parts_expected=1, parts_found=1, problems=()
    )
    monkeypatch.setattr(verify, "verify_job", lambda job: seen.append(job) or report)
    assert CliRunner().invoke(cli, ["verify", str(job)]).exit_code == 0
    assert seen[0].spec.input.storage_options == {"auto_mkdir": False}
    assert CliRunner().invoke(cli, ["verify", str(job.parent / "out")]).exit_code == 0


def test_the_exit_code_holds_if_nobody_reads_the_result(job: Path) -> None:
    command = f"({sys.executable} -m batchinfer submit job.yaml; echo $? > code) | true"
    subprocess.run(["bash", "-c", command], cwd=job.parent, capture_output=True, timeout=60, check=False)
    assert (job.parent / "code").read_text().strip() == "3"


def test_sigterm_ends_it_even_where_a_library_swallows_exceptions() -> None:
    """The signal can arrive while an import inside `try: … except Exception` runs."""
    script = (
        "import signal, click\n"
        "import batchinfer.cli.main as entry\n"
        "@click.command()\n"
        "def cli():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    except Exception:\n"
        "        pass\n"
        "entry.cli = cli\n"
        "entry.main([])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 75
    assert "SIGTERM" in ended.stderr


def test_plan_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "job.yaml").write_text(
        "model: {path: 'fake://echo'}\ninput: {path: in.jsonl, prompt_column: text}\noutput: {path: out}\n"
    )
    command = [sys.executable, "-m", "batchinfer", "plan", "job.yaml"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert list(temporary.glob("batchinfer-*")) == []


def in_process(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process that has run `script` before."""
    code = f"import sys, tempfile\nimport batchinfer.cli.main as entry\n{script}\nentry.main(sys.argv[1:])\n"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_a_temporary_folder_that_can_not_be_used_is_named(job: Path) -> None:
    ended = in_process("tempfile.tempdir = '/nonexistent'", "submit", "job.yaml", cwd=job.parent)
    assert ended.returncode == 2, ended.stderr
    assert "/nonexistent/batchinfer-" in ended.stderr and "set TMPDIR" in ended.stderr
    assert "Traceback" not in ended.stderr and not (job.parent / "out").exists()


@pytest.mark.parametrize("temporary", ["None", "'/nonexistent'"])
def test_a_disk_that_fails_where_nothing_waits_for_it_is_a_message(tmp_path: Path, temporary: str) -> None:
    script = (
        "def cli(**_):\n    raise OSError(5, 'Input/output error', '/data/file')\n"
        f"entry.cli = type('Cli', (), {{'main': staticmethod(cli)}})\ntempfile.tempdir = {temporary}"
    )
    ended = in_process(script, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "Error: Input/output error: /data/file" in ended.stderr and "the same command goes on" in ended.stderr
    assert ("could not be written" in ended.stderr) == (temporary != "None")
    assert "Traceback" not in ended.stderr


def test_a_time_out_of_a_library_is_not_taken_for_a_disk(tmp_path: Path) -> None:
    """It is an OSError, too, and may say nothing."""
    script = "def cli(**_):\n    raise TimeoutError\nentry.cli = type('Cli', (), {'main': staticmethod(cli)})"
    ended = in_process(script, cwd=tmp_path)
    assert ended.returncode == 1 and "TimeoutError: \nThis is not expected" in ended.stderr, ended.stderr
