"""The job's log file: what it does not do to the job."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from batchinfer.log import log_to_file


def test_a_full_disk_costs_log_lines_and_nothing_else(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.symlink_to("/dev/full")
    with log_to_file(log):
        for number in range(3):
            logging.getLogger("batchinfer.cluster").warning("line %d", number)
    assert capfd.readouterr() == ("", "")


def test_a_log_that_cannot_be_opened_costs_nothing_either(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "log.txt").mkdir()
    with log_to_file(tmp_path / "log.txt"):
        logging.getLogger("batchinfer.cluster").warning("a line")
    assert capfd.readouterr() == ("", "")


def test_what_is_no_trouble_of_the_disk_is_heard_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("batchinfer"), "propagate", False)  # pytest's own handler raises
    with log_to_file(tmp_path / "log.txt"):
        logging.getLogger("batchinfer.cluster").warning("%d", "no number")
    assert "Logging error" in capfd.readouterr().err
