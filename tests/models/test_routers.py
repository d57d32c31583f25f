"""Routers in bfloat16 against those of transformers: which experts a token takes hangs on how logits are rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batchinfer_kernels.table import resolve
from torch import Tensor

from batchinfer.layers.experts import Router
from batchinfer.modelfiles import open_model
from batchinfer.models import load_model
from batchinfer.testing.oracle import Oracle
from batchinfer.testing.tiny import make_tiny

LAYER, TOP_K, NUM_EXPERTS = 1, 6, 64
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": NUM_EXPERTS},
    "qwen2-moe": {"num_experts": NUM_EXPERTS},
    "qwen3-moe": {"num_experts": NUM_EXPERTS, "mlp_only_layers": []},
    "deepseek-v2": {"n_routed_experts": NUM_EXPERTS},
    "deepseek-v3": {"n_routed_experts": NUM_EXPERTS},
}
WIDE = ("deepseek-v2", "deepseek-v3")


def both(folder: Path, family: str, backend: str) -> tuple[Router, Any]:
    """(ours, transformers') of one layer."""
    make_tiny(folder, family, dtype=torch.bfloat16, num_hidden_layers=2, num_experts_per_tok=TOP_K, **SIZES[family])
    ours: Any = load_model(open_model(str(folder)), ops=resolve(backend), dtype="bfloat16")
    theirs = Oracle(folder, dtype=torch.bfloat16).model.model.layers[LAYER].mlp.gate
    return ours.layers[LAYER].mlp.router, theirs


@torch.inference_mode()
def chosen(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """transformers' (logits, weights of all experts, zero for those not chosen, which are)."""
    logits, weights, ids = router(x)
    every = torch.zeros(logits.shape).scatter(1, ids, weights.float())
    return logits, every, torch.zeros(logits.shape, dtype=torch.bool).scatter(1, ids, True)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", SIZES)
def test_the_experts_of_each_token(tmp_path: Path, family: str, backend: str) -> None:
    """The same, but where transformers' logits are equal: its choice among them is anybody's guess."""
    ours, theirs = both(tmp_path / "model", family, backend)
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits, every, taken = chosen(theirs, x)
    weights, ids, _ = ours.forward(x)
    assert logits.dtype == (torch.float32 if family in WIDE else torch.bfloat16)
    mine = torch.zeros(taken.shape, dtype=torch.bool).scatter(1, ids.long(), True)
    same = (mine == taken).all(-1)
    assert int(same.sum()) >= (400 if family in WIDE else 300)
    for row in (~same).nonzero()[:, 0].tolist():
        assert logits[row][mine[row]].sort().values.tolist() == logits[row][taken[row]].sort().values.tolist()
    found = torch.zeros(every.shape).scatter(1, ids.long(), weights)
    most = 1e-5 if family in WIDE else 4e-3  # the others round weights to bfloat16
    torch.testing.assert_close(found[same], every[same], rtol=most, atol=1e-6)


@pytest.mark.parametrize("family", WIDE)
def test_rounded_logits_would_choose_others(tmp_path: Path, family: str) -> None:
    """So the test above tells the two apart."""
    ours, theirs = both(tmp_path / "model", family, "cpu")
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    _, _, taken = chosen(theirs, x)
    ours.config = replace(ours.config, wide_logits=False)
    ours.weight.data = ours.weight.data.bfloat16()
    _, ids, _ = ours.forward(x)
    mine = torch.zeros(taken.shape, dtype=torch.bool).scatter(1, ids.long(), True)
    assert not torch.equal(mine, taken)
