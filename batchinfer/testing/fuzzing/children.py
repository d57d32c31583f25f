"""Trials in processes of their own, which may crash, hang or eat memory: `Child`, and the program that it runs.

`python -m batchinfer.testing.fuzzing.children FOLDER` reads one line a trial ({"kind", "seed", "number"}, or {"file"}
of a kept case) and answers one line each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random
from typing import IO, Any

from batchinfer.testing.fuzzing.case import Case
from batchinfer.testing.fuzzing.kinds import KINDS

MEMORY_BYTES = 8 << 30
START_S = 60.0
TAIL_BYTES = 3_000


def make_case(kind: str, seed: int, number: int) -> Case:
    """The same case for the same three."""
    return KINDS[kind](Random(f"{kind}/{seed}/{number}"))


class Child:
    """One process for trials, started again when a trial has ended it. `limit_s`: CPU seconds of a trial."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        """{"outcome", "detail", "seconds"} of a trial; a crash or a hang is a fault."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
            line = self._answer(process, self._limit_s)
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        hung = process.poll() is None and not self._ended_soon(process)
        self.close()
        code = process.returncode
        what = f"no end after {self._limit_s:g} CPU seconds" if hung else f"the process ended by {_ended(code)}"
        return {
            "outcome": "fault",
            "detail": f"{what}\n{self._last_words()}",
            "seconds": self._limit_s if hung else 0.0,
        }

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # it says where it is
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "batchinfer.testing.fuzzing.children", str(self._folder)]
            with (self._folder / "child.log").open("wb") as log:
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
            if not self._answer(self._process, START_S):
                words = self._last_words()
                self.close()
                raise RuntimeError(f"the process for trials does not start: {words}")
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        """Its next line, or nothing once it has used up the limit: in CPU seconds, since the machine may be busy with
        something else, or ten times that on the wall clock."""
        assert process.stdout is not None
        begin, begin_cpu = time.monotonic(), _cpu_s(process.pid)
        while True:
            ready, _, _ = select.select([process.stdout], [], [], 1.0)
            if ready:
                return process.stdout.readline()
            if _cpu_s(process.pid) - begin_cpu > limit_s or time.monotonic() - begin > 10 * limit_s:
                return b""

    def _ended_soon(self, process: subprocess.Popen[bytes]) -> bool:
        """Its output has ended: is it itself about to?"""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 0)
        if not ready:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        return True

    def _last_words(self) -> str:
        try:
            return (self._folder / "child.log").read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
        except OSError:
            return ""


def _cpu_s(pid: int) -> float:
    try:
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def _ended(code: int | None) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit code {code}"


def main(folder: Path) -> None:
    """Runs trials until its input ends."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from batchinfer.testing.fuzzing.trial import CANARY, Verdict, try_case

    os.environ["BATCHINFER_CANARY"] = CANARY
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    out.write("ready\n")
    for line in sys.stdin:
        command = json.loads(line)
        place = Path(tempfile.mkdtemp(dir=folder))
        try:
            if "file" in command:
                case = Case.from_json(Path(command["file"]).read_text())
            else:
                case = make_case(command["kind"], command["seed"], command["number"])
            verdict = try_case(case, place)
        except Exception as error:  # of the fuzzer itself: told, and counted as what it is
            verdict = Verdict(outcome="fault", detail=f"the trial itself failed: {type(error).__name__}: {error}")
            sys.excepthook(type(error), error, error.__traceback__)
        shutil.rmtree(place, ignore_errors=True)
        out.write(json.dumps({"outcome": verdict.outcome, "detail": verdict.detail, "seconds": verdict.seconds}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
