"""What is set before torch is loaded, and what is measured about products."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from batchinfer_kernels import determinism, probe
from batchinfer_kernels.probe import RULES, AttentionTiles, RowRule, find_row_rule


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("fpu sse2 avx avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl", "avx512"),
        ("fpu sse2 avx avx2 fma avx512f", "avx2"),
        ("fpu sse2 avx", "sse"),
    ],
)
def test_instruction_level_from_cpu_flags(
    flags: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\nflags\t\t: {flags}\nbugs : none\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert determinism.instruction_level(info) == level
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert determinism.instruction_level(info) == "aarch64"


@pytest.mark.parametrize(
    ("more", "level"),
    [
        ("", "avx512"),
        ("avx512_bf16", "avx512"),
        ("avx512_vnni", "avx512_vnni"),
        ("avx512_vnni avx512_bf16", "avx512_bf16"),
        ("avx512_vnni avx512_bf16 amx_bf16", "amx"),
    ],
)
def test_product_level_from_cpu_flags(more: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags\t\t: avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl {more}\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert determinism.product_level(info) == level
    info.write_text(f"flags\t\t: avx2 fma {more}\n")
    assert determinism.product_level(info) == "avx2"


def test_prepare_imports_no_torch_and_keeps_the_users_mode() -> None:
    code = (
        "import sys; from batchinfer_kernels.determinism import prepare; import os; p = prepare();"
        "assert 'torch' not in sys.modules and p.in_time, p; print(os.environ.get('MKL_CBWR'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"} | {"MKL_CBWR": "COMPATIBLE"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "COMPATIBLE"


def test_probe_takes_the_first_rule_that_holds_and_leaves_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    tried: list[RowRule] = []

    def only_whole_sixteens(x, weight, bias, rule):  # type: ignore[no-untyped-def]
        """A BLAS whose rows depend on the number of rows, but for multiples of 16."""
        if not tried or tried[-1] != rule:
            tried.append(rule)
        rows = rule.padded(x.shape[0])
        return x[:, :8] + (0 if rows % 16 == 0 else 1e-3 * rows)

    monkeypatch.setattr(probe, "product", only_whole_sixteens)
    facts = find_row_rule([(8, 16)])
    assert facts.holds
    assert facts.rule == RowRule(min_rows=16, multiple=16)
    assert tried == list(RULES[:3])
    assert torch.get_num_threads() == before


def test_a_rule_holds_for_what_is_multiplied_in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BLAS whose rows depend on the number of rows in float32 alone, but for multiples of 16."""

    def other_in_float32(x, weight, bias, rule):  # type: ignore[no-untyped-def]
        rows = rule.padded(x.shape[0])
        return x[:, :8] + (1e-3 * rows if x.dtype == torch.float32 and rows % 16 else 0)

    monkeypatch.setattr(probe, "product", other_in_float32)
    for wide, expected in (([], RULES[0]), ([(8, 16)], RowRule(min_rows=16, multiple=16))):
        facts = find_row_rule([(8, 16)], wide=wide, dtype=torch.bfloat16)
        assert facts.holds and facts.rule == expected


def test_probe_says_when_no_rule_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = iter(range(100_000))
    monkeypatch.setattr(probe, "product", lambda x, weight, bias, rule: x[:, :8] + next(noise))
    facts = find_row_rule([(8, 16)])
    assert not facts.holds
    assert facts.rule == RULES[-1]


@pytest.mark.parametrize("single", [True, False])
def test_one_tile_is_tried_with_all_threads_where_it_may_be_alone(
    monkeypatch: pytest.MonkeyPatch, single: bool
) -> None:
    """A BLAS that adds up otherwise where several threads have one product of few rows."""
    bmm, before = torch.bmm, torch.get_num_threads()

    def other_alone(a, b):  # type: ignore[no-untyped-def]
        return bmm(a, b) + (1e-3 if len(a) == 1 and a.shape[1] < 16 and torch.get_num_threads() > 1 else 0)

    monkeypatch.setattr(torch, "bmm", other_alone)
    torch.set_num_threads(2)
    try:
        found = find_row_rule(
            [],
            attention=lambda rule: AttentionTiles(
                head_dim=64, row_counts=(rule.padded(1),), widths=(64,), single=single
            ),
        )
    finally:
        torch.set_num_threads(before)
    assert found.holds and found.rule.min_rows == (16 if single else 4)


@pytest.mark.parametrize("rule", RULES)
def test_padded_rows_follow_the_rule(rule: RowRule) -> None:
    for rows in range(1, 70):
        padded = rule.padded(rows)
        assert padded >= max(rows, rule.min_rows)
        assert padded % (rule.tile_rows or rule.multiple) == 0
