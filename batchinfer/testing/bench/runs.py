"""One run of one contender: what it was given, what came out, and when.

Responsible for: starting each contender in processes of its own on the same rows, the moments of a run, its peak
memory. Not for rounds, medians and ratios (`summary`), nor for prompts (`workloads`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchinfer.errors import BatchinferError
from batchinfer.testing.bench.memory import MemoryWatch, family
from batchinfer.testing.bench.workloads import Workload

HERE = Path(__file__).parent
SUBMIT, ENGINE = "submit", "engine alone"


class RunFailed(BatchinferError):
    """A contender did not end well; the message says how and where its output lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Moments of a run, in seconds from the start of its process.

    ready        loaded, and about to take its first row
    first_token  None where the contender does not tell
    last         the last row's completion is there; for `submit`, durable
    ended        the process has left
    """

    ready: float
    first_token: float | None
    last: float
    ended: float

    @property
    def span_s(self) -> float | None:
        """First token to last row."""
        return None if self.first_token is None else self.last - self.first_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """completions are in the workload's order. cached_tokens: prompt tokens that were not computed again."""

    contender: str
    marks: Marks
    out_tokens: int
    prompt_tokens: int
    cached_tokens: int | None
    peak_rss: int | None
    peak_pss: int | None
    completions: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Output tokens per second, loading left out."""
        return self.out_tokens / (self.marks.last - self.marks.ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another engine: the Python that has it, its program beside this file, its model, what its environment needs."""

    name: str
    python: Path
    model: Path
    program: str
    environment: Mapping[str, str] = field(default_factory=dict)


def vllm_peer(python: Path, model: Path, *, cores: Sequence[int], with_amx: bool = True) -> Peer:
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "6",
        # Without these two it takes one thread.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not with_amx:
        # oneDNN is told, and torch, which vLLM's own kernels ask, in each of its processes.
        environment |= {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": str(HERE / "without_amx")}
    return Peer(name="vllm", python=python, model=model, program="drive_vllm.py", environment=environment)


def openvino_peer(python: Path, model: Path) -> Peer:
    return Peer(name="openvino", python=python, model=model, program="drive_openvino.py")


# ---------------------------------------------------------------- batchinfer


def run_submit(
    workload: Workload, model: str, settings: Mapping[str, Any], *, max_tokens: int, folder: Path, timeout_s: float
) -> tuple[Run, list[int]]:
    """A job from nothing to its last row, through the command line; and in which order its engine was given the rows.

    `settings` are dotted keys of the job file (engine.max_num_seqs, model.quantization).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    rows = pa.table({"id": range(len(workload.prompts)), "prompt": list(workload.prompts)})
    pq.write_table(rows, folder / "input.parquet")
    job: dict[str, dict[str, Any]] = {
        "model": {"path": model},
        "input": {"path": str(folder / "input.parquet"), "prompt_column": "prompt"},
        "output": {"path": str(folder / "out"), "columns": ["id"], "token_ids": True},
        "sampling": {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True},
        "cluster": {"workers": 1},
    }
    for key, value in settings.items():
        section, name = key.split(".", 1)
        job.setdefault(section, {})[name] = value
    (folder / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "batchinfer", "submit", str(folder / "job.yaml")]
    trace = folder / "trace.jsonl"
    begun, ended, watch = _run(command, folder, {"BATCHINFER_TRACE": str(trace)}, timeout_s)

    events = [json.loads(line) for line in trace.read_text().splitlines()]
    leases = sorted((event for event in events if event["event"] == "lease"), key=lambda event: event["leased_at"])
    order = list(dict.fromkeys(row for event in leases for _, row in event["rows"]))
    table = pa.concat_tables(
        pq.read_table(part, columns=["id", "completion", "token_ids"])
        for part in sorted((folder / "out").glob("part-*.parquet"))
    ).sort_by("id")
    state = folder / "out/__batchinfer"
    status, timings = (json.loads((state / name).read_text()) for name in ("status.json", "timings.json"))
    moments = timings["moments"]
    # Its clock starts when the command's own code does; ours when its process is asked for.
    before = timings["started_at_s"] - begun
    run = Run(
        contender=SUBMIT,
        marks=Marks(
            ready=before + max(moments["engine_ready"], moments["first_lease"]),
            first_token=before + moments["first_token"],
            last=max(event["time"] for event in events if event["event"] == "published") - begun,
            ended=ended - begun,
        ),
        out_tokens=sum(map(len, table["token_ids"].to_pylist())),
        prompt_tokens=status["prompt_tokens"],
        cached_tokens=status["cached_tokens"],
        peak_rss=watch.peak_rss,
        peak_pss=watch.peak_pss,
        completions=table["completion"].to_pylist(),
        facts={"moments": moments, "cpu_s": timings["cpu_s"], "engine": timings["engine"]},
    )
    return run, order


def run_engine(
    workload: Workload,
    order: Sequence[int],
    model: str,
    settings: Mapping[str, Any],
    *,
    max_tokens: int,
    folder: Path,
    timeout_s: float,
) -> Run:
    """`batchinfer.LLM` in a process of its own, given the rows in `order`. `settings` as for `run_submit`."""
    options = {key.split(".", 1)[1]: value for key, value in settings.items() if key.startswith(("model.", "engine."))}
    job = {
        "prompts": [workload.prompts[i] for i in order],
        "max_tokens": max_tokens,
        "options": {"model": model, **options},
    }
    command = [sys.executable, "-m", "batchinfer.testing.bench.drive_engine"]
    return _driven(ENGINE, command, job, order, {}, folder, timeout_s)


# ---------------------------------------------------------------- others


def run_peer(
    peer: Peer, workload: Workload, *, max_tokens: int, max_model_len: int, folder: Path, timeout_s: float
) -> Run:
    """A peer on the rows as they stand."""
    job = {
        "prompts": list(workload.prompts),
        "max_tokens": max_tokens,
        "max_model_len": max_model_len,
        "model": str(peer.model),
    }
    # -P: modules beside the program are not to be found by the peer's imports.
    command = [str(peer.python), "-P", str(HERE / peer.program)]
    order = range(len(workload.prompts))
    return _driven(peer.name, command, job, order, peer.environment, folder, timeout_s)


def _driven(
    name: str,
    command: Sequence[str],
    job: Mapping[str, Any],
    order: Sequence[int],
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> Run:
    """Runs one of the `drive_*` programs. They write moments as seconds of the host's clock."""
    folder.mkdir(parents=True)
    files = [folder / "job.json", folder / "result.json"]
    files[0].write_text(json.dumps(job))
    begun, ended, watch = _run([*command, *map(str, files)], folder, environment, timeout_s)
    result = json.loads(files[1].read_text())
    first = result["first_token_at"]
    completions = [""] * len(order)
    for place, text in zip(order, result["completions"], strict=True):
        completions[place] = text
    return Run(
        contender=name,
        marks=Marks(
            ready=result["ready_at"] - begun,
            first_token=None if first is None else first - begun,
            last=result["last_at"] - begun,
            ended=ended - begun,
        ),
        out_tokens=result["out_tokens"],
        prompt_tokens=result["prompt_tokens"],
        cached_tokens=result["cached_tokens"],
        peak_rss=watch.peak_rss,
        peak_pss=watch.peak_pss,
        completions=completions,
        facts=result["facts"],
        versions=result["versions"],
    )


def _run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], timeout_s: float
) -> tuple[float, float, MemoryWatch]:
    """Runs a command to its end: when it began and ended by the host's clock, and its memory. Raises RunFailed."""
    log = folder / "log.txt"
    with log.open("wb") as output:
        begun = time.time()
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
        try:
            with MemoryWatch(process.pid) as watch:
                code = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"{' '.join(command[:3])}: not done after {timeout_s:.0f} s; see {log}") from error
        finally:
            _end(process)
    ended = time.time()
    if code != 0:
        tail = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise RunFailed(f"{' '.join(command[:3])}: exit code {code}; {' / '.join(tail)}; see {log}")
    return begun, ended, watch


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leaves nothing of an interrupted run behind: engines of its own may live in processes that it started."""
    if process.poll() is not None:
        return
    for pid in reversed(family(process.pid)):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
