"""What `scripts/bench_offline` measures: sharing, rounds, ratios, memory; and a whole contest with a tiny model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchinfer.errors import ConfigError
from batchinfer.testing.bench.memory import MemoryWatch
from batchinfer.testing.bench.rounds import Contest, turned
from batchinfer.testing.bench.runs import ENGINE, SUBMIT, Marks, Peer, Run, vllm_peer
from batchinfer.testing.bench.summary import overhead, per_round, ratio, ratio_to_best, summarize, table
from batchinfer.testing.bench.workloads import Sharing, Workload, make_workloads, read_workloads, sharing, tokens_of
from batchinfer.testing.tiny import make_tiny

ROOT = Path(__file__).parent.parent.parent
GIB = 1 << 30


def test_sharing_counts_what_the_prefix_tree_saves() -> None:
    draw = random.Random(0)
    for _ in range(50):
        prompts = [[draw.randrange(3) for _ in range(draw.randrange(12))] for _ in range(draw.randrange(20))]
        nodes = {tuple(prompt[: n + 1]) for prompt in prompts for n in range(len(prompt))}
        total = sum(map(len, prompts))
        assert sharing(prompts) == Sharing(total, total - len(nodes))


def test_own_workloads_have_the_shapes_that_they_stand_for() -> None:
    functions = pq.read_table(ROOT / "jobs/data/python-functions.parquet").to_pylist()
    made = {workload.name: workload.prompts for workload in make_workloads(functions)}
    assert made == {workload.name: workload.prompts for workload in make_workloads(functions)}

    def share(name: str) -> float:
        letters = sharing([[ord(letter) for letter in prompt] for prompt in made[name]])
        return letters.shareable_tokens / letters.prompt_tokens

    assert share("fewshot") > 0.9  # one prefix before all rows
    assert 0.6 < share("documents") < 0.8  # four questions about each document
    assert share("chats") < 0.6  # a short system prompt
    assert all(len(prompts) > 250 for prompts in made.values())


@pytest.mark.parametrize("with_amx", [True, False])
def test_vllm_can_be_kept_from_amx(with_amx: bool) -> None:
    """All its processes are: they are told by the environment."""
    peer = vllm_peer(Path(sys.executable), Path("model"), cores=[0], with_amx=with_amx)
    code = "import torch; print(torch.cpu._is_amx_tile_supported())"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], env={**os.environ, **peer.environment}, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(with_amx and torch.cpu._is_amx_tile_supported()), found.stderr
    assert ("ONEDNN_MAX_CPU_ISA" in peer.environment) == (not with_amx)


def test_workloads_are_read_by_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        pq.write_table(pa.table({"id": [0, 1], "prompt": [f"{name}0", f"{name}1"]}), tmp_path / f"{name}.parquet")
    assert [one.name for one in read_workloads(tmp_path)] == ["a", "b"]
    assert read_workloads(tmp_path, ["b"])[0].first(1) == Workload("b", ("b0",))
    with pytest.raises(ConfigError, match="no workload 'c'; there are: a, b"):
        read_workloads(tmp_path, ["c"])


@pytest.mark.parametrize("names", [[SUBMIT, ENGINE, "x", "y"], [SUBMIT, ENGINE], [SUBMIT, "x"], ["x"]])
def test_each_contender_leads_in_some_round_and_the_engine_follows_the_job(names: list[str]) -> None:
    orders = [turned(names, by) for by in range(len(names))]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders} == set(names) - ({ENGINE} if SUBMIT in names else set())
    if ENGINE in names:
        assert all(order[order.index(SUBMIT) + 1] == ENGINE for order in orders)


def run_of(name: str, rate: float, *, span: float = 10.0, cached: int | None = None) -> Run:
    return Run(
        contender=name,
        marks=Marks(ready=1.0, first_token=2.0, last=2.0 + span, ended=4.0 + span),
        out_tokens=int(rate * (span + 1.0)),
        prompt_tokens=100,
        cached_tokens=cached,
        peak_rss=GIB,
        peak_pss=None,
    )


def test_ratios_are_taken_within_a_round() -> None:
    # The machine is half as fast in the second round: the ratios must not show it.
    rounds = [
        {
            SUBMIT: run_of(SUBMIT, 400, span=10.8),
            ENGINE: run_of(ENGINE, 400),
            "x": run_of("x", 200),
            "y": run_of("y", 100),
        },
        {SUBMIT: run_of(SUBMIT, 200, span=21.2), ENGINE: run_of(ENGINE, 200, span=20), "y": run_of("y", 50)},
    ]
    of_x, of_y = per_round(rounds, ratio(SUBMIT, "x")), per_round(rounds, ratio(SUBMIT, "y"))
    assert of_x is not None
    assert of_y is not None
    assert of_x.least == of_x.most == pytest.approx(2.0, rel=0.01)
    assert of_y.least == pytest.approx(4.0, rel=0.01)
    assert of_y.most == pytest.approx(4.0, rel=0.01)
    best = per_round(rounds, ratio_to_best(SUBMIT))
    assert best is not None
    assert (best.least, best.most) == (pytest.approx(2.0, rel=0.01), pytest.approx(4.0, rel=0.01))
    more = per_round(rounds, overhead)
    assert more is not None
    assert (more.least, more.most) == (pytest.approx(0.06), pytest.approx(0.08))


def test_the_table_and_the_record_say_the_same() -> None:
    rounds = [{SUBMIT: run_of(SUBMIT, 300, cached=40), "x": run_of("x", 100)}]
    shown = table("w: 4 rows", rounds, Sharing(100, 50))
    record = summarize(rounds, Sharing(100, 50))
    row = next(line for line in shown.splitlines() if line.startswith(f"| {SUBMIT} "))
    assert row == f"| {SUBMIT} | 300 | 3.00 | 3.00 | 2.0 | 14.0 | 1024 |  | 60 | 80.0 % |"
    assert record["contenders"][SUBMIT]["ratio_to"]["x"]["median"] == pytest.approx(3.0)
    assert record["contenders"]["x"]["cached_prompt_tokens"] is None
    json.dumps(record)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_counts_what_a_process_starts() -> None:
    hold = "import sys; block = b'x' * (200 << 20); sys.stdin.read()"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    with MemoryWatch(process.pid) as watch:
        end = time.monotonic() + 60
        while (watch.peak_rss or 0) < 200 << 20 and time.monotonic() < end:
            time.sleep(0.05)
        process.communicate()  # closes its input
    assert process.returncode == 0
    assert watch.peak_rss is not None
    assert 200 << 20 < watch.peak_rss < 400 << 20


PEER = """
import json, sys, time
job = json.load(open(sys.argv[1]))
now = time.time()
json.dump({"ready_at": now, "first_token_at": None, "last_at": now + 1.0, "out_tokens": 4 * len(job["prompts"]),
           "prompt_tokens": 1, "cached_tokens": None, "completions": job["prompts"], "facts": {}, "versions": {}},
          open(sys.argv[2], "w"))
"""


def test_a_whole_contest(tmp_path: Path) -> None:
    """A job, the engine alone, a peer, and a peer that fails: what can be compared is."""
    model = str(make_tiny(tmp_path / "model"))
    prompts = tuple(f"the number of {word} is {n % 3}" for n, word in enumerate(["one", "two", "three", "four"] * 3))
    (tmp_path / "peer.py").write_text(PEER)
    (tmp_path / "broken.py").write_text("raise SystemExit('no such instruction')")
    peers = [
        Peer(name=name, python=Path(sys.executable), model=tmp_path, program=str(tmp_path / f"{name}.py"))
        for name in ("peer", "broken")
    ]
    tokens = tokens_of(prompts, model)
    said: list[str] = []
    contest = Contest(
        Workload("w", prompts),
        tokens,
        [SUBMIT, ENGINE, "peer", "broken"],
        model=model,
        settings={"engine.max_num_seqs": 4},
        peers=peers,
        max_tokens=4,
        folder=tmp_path / "runs",
        timeout_s=280,
    )
    contest.run(1, said.append)
    (done,) = contest.rounds
    assert set(done) == {SUBMIT, ENGINE, "peer"}
    assert len(contest.failures) == 1
    assert "broken: " in contest.failures[0]
    assert "no such instruction" in contest.failures[0]
    total = sum(map(len, tokens))
    for name in (SUBMIT, ENGINE):
        assert done[name].out_tokens == 4 * len(prompts)
        assert done[name].prompt_tokens == total
        marks = done[name].marks
        assert marks.first_token is not None
        assert 0 < marks.ready <= marks.first_token <= marks.last <= marks.ended
    assert list(done[SUBMIT].completions) == list(done[ENGINE].completions)
    assert done["peer"].completions == list(prompts)
    assert done["peer"].rate == pytest.approx(48, rel=0.01)
    assert overhead(done) is not None
