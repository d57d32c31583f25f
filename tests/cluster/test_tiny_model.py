"""Whole jobs over a real (tiny) model: the same bytes for any number of workers and any shape of the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.testing.tiny import make_tiny
from tests.cluster.conftest import JobFolder

SHAPES = {
    "narrow": ["engine.max_num_seqs=1", "engine.max_num_batched_tokens=16"],
    "no_cache": ["engine.max_num_seqs=3", "engine.enable_prefix_caching=false"],
    "two_workers": ["cluster.workers=2", "engine.max_num_seqs=64"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama")


def test_batch_shape_and_workers_change_no_bytes(folder: JobFolder, model: Path) -> None:
    """Greedy rows and rows sampled at temperature 0.8 in one batch."""
    heads = ["Summarise this for me, please: ", "Translate into French: ", ""]
    texts = [f"{heads[i % 3]}{'word ' * (i % 7)}number {i}" for i in range(24)]
    folder.input({"text": texts, "heat": [0.8 * (i % 2) for i in range(24)]})
    columns = {"temperature": "heat"}
    folder.job(str(model), input={"sampling_columns": columns}, sampling={"max_tokens": 10, "ignore_eos": True})
    folder.run()
    expected = folder.table()
    assert len(set(expected["completion"].to_pylist())) > 1
    for name, settings in SHAPES.items():
        words = [word for setting in (*settings, f"output.path={name}") for word in ("--set", setting)]
        folder.run("submit", "job.yaml", *words)
        folder.out = folder.root / name
        assert folder.table().equals(expected), name
        folder.out = folder.root / "out"
