"""Models that can't run are refused from their files alone, before a job writes or starts anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.errors import ModelError
from batchinfer.job.resolve import resolve_job
from batchinfer.job.spec import JobSpec
from batchinfer.modelfiles import open_model
from batchinfer.modelfiles.supported import ARCHITECTURES, check_supported
from batchinfer.models.registry import ARCHITECTURES as BUILT
from batchinfer.testing.tiny import FAMILIES, make_tiny

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DeepseekV3ForCausalLM"]}, r"DeepseekV3ForCausalLM is not supported; supported are Llama"),
    ({"architectures": None}, "architecture none"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers .* positive integer, got '2'"),
    ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, "'ntk' is not supported"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantized .*'awq'.* use the original checkpoint"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
]


def test_what_is_called_supported_is_what_can_be_built() -> None:
    assert set(ARCHITECTURES) == set(BUILT)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tiny_member_is_supported(tmp_path: Path, family: str) -> None:
    check_supported(open_model(str(make_tiny(tmp_path / "tiny", family=family))))


def test_fake_models_are_supported() -> None:
    check_supported(open_model("fake://hash"))


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_job_refuses_before_anything_is_written(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = make_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "rows.parquet")
    spec = JobSpec.from_dict(
        {
            "model": {"path": str(folder)},
            "input": {"path": str(tmp_path / "rows.parquet"), "prompt": "{text}"},
            "output": {"path": str(tmp_path / "out")},
        }
    )
    with pytest.raises(ModelError, match=message) as caught:
        resolve_job(spec)
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "out").exists()
