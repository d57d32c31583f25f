"""Test files by pytest in processes of their own: what passes, fails, breaks or does not end is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.testing.gpu.outcome import Clock, Line
from batchinfer.testing.gpu.suite import kernel_tests, run_tests

ROOT = Path(__file__).parent.parent.parent.parent
FILES = {
    "test_fine.py": """
import os, pytest, warnings
def test_device(): assert os.environ["BATCHINFER_TEST_DEVICE"] == "cuda" and "TRITON_INTERPRET" not in os.environ
def test_warning(): warnings.warn("of a library")
@pytest.mark.skip
def test_not_here(): pass
@pytest.mark.slow
def test_slow(): raise ValueError
""",
    "test_wrong.py": "def test_right(): pass\ndef test_sums(): assert 1 + 1 == 3, 'off by one'\n",
    "test_broken.py": "import no_such_module\n",
    "test_empty.py": "",
    "test_dies.py": "import os\ndef test_it(): os._exit(7)\n",
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Line]:
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    files = [folder / name for name in FILES]
    found = run_tests(files, folder, device="cuda", clock=Clock(120), jobs=2)
    assert [line.name for line in found] == list(FILES)
    return {line.name: line for line in found}


def test_what_passes(lines: dict[str, Line]) -> None:
    fine = lines["test_fine.py"]
    assert (fine.status, fine.text) == ("passed", "2 passed, 1 skipped")


def test_what_fails_is_named(lines: dict[str, Line]) -> None:
    wrong = lines["test_wrong.py"]
    assert wrong.status == "failed" and wrong.text.startswith("1 of 2 failed: test_sums: AssertionError: off by one")
    broken = lines["test_broken.py"]
    assert broken.status == "failed" and "no_such_module" in broken.numbers["output"]
    dies = lines["test_dies.py"]
    assert (dies.status, dies.text) == ("failed", "pytest ended with exit code 7 and no report")


def test_a_file_of_which_nothing_ran_did_not_pass(lines: dict[str, Line]) -> None:
    assert lines["test_empty.py"].status == "failed"


def test_time_ends(tmp_path: Path) -> None:
    file = tmp_path / "test_endless.py"
    file.write_text("import time\ndef test_it(): time.sleep(60)\n")
    found = run_tests([file], tmp_path, device="cpu", clock=Clock(1.0), jobs=1)
    found += run_tests([file], tmp_path, device="cpu", clock=Clock(-1.0), jobs=1)
    assert [line.text for line in found] == ["out of time: it was ended", "out of time: it was not begun"]
    assert {line.status for line in found} == {"not run"}


def test_files_of_kernels_and_of_the_runner_are_among_them() -> None:
    names = {path.name for path in kernel_tests(ROOT)}
    assert {"test_linear.py", "test_attention.py", "test_triton_runner.py"} <= names
    assert "test_compiles.py" not in names
