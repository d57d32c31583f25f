"""Tiny checkpoints stored quantized, as other programs write them: GPTQ, AWQ, FP8 and W8A8.

`quantize_folder` turns the linear layers of a tiny folder (`tiny.make_tiny`) into one of those, and says which weights
that stands for. Packed number by number, from the formats' descriptions; what reads them has other code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BLOCK = 128
E4M3_MOST = 448


def _compressed(kind: str, strategy: str, activations: str) -> dict[str, Any]:
    part = {"num_bits": 8, "type": kind, "symmetric": True}
    block = strategy == "block"
    weights = {**part, "strategy": strategy, "dynamic": False, "block_structure": [BLOCK, BLOCK] if block else None}
    inputs = {**part, "strategy": activations, "dynamic": True, "group_size": BLOCK if block else None}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "kv_cache_scheme": None,
    }


# quantization_config by name.
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "gptq-v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": -1,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq_v2",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "fp8-blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "fp8-tensor": _compressed("float", "tensor", "token"),
    "fp8-channel": _compressed("float", "channel", "token"),
    "fp8-group": _compressed("float", "block", "group"),
    "w8a8": _compressed("int", "channel", "token"),
}


def quantize_folder(
    folder: Path,
    name: str,
    *,
    leave: Callable[[str], bool] = lambda layer: False,
    head: bool = False,
    change: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Rewrites a tiny folder's layers in the way `name` of CONFIGS, but those (by their stored names) that `leave` says
    and, without `head`, the head. `change`: keys of quantization_config.

    Returns all tensors as a plain checkpoint of the same model would have them, float32.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = how = CONFIGS[name] | dict(change or {})
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    plain = {key: tensor.float() for key, tensor in tensors.items()}
    for key in list(tensors):
        layer, _, kind = key.rpartition(".")
        is_linear = "_proj" in layer or ".experts." in layer or (head and layer == "lm_head")
        if kind != "weight" or not is_linear or leave(layer):
            continue
        stored, meant = _WAYS[name.partition("-")[0]](tensors.pop(key).float(), how, layer)
        tensors |= {f"{layer}.{last}": tensor.contiguous() for last, tensor in stored.items()}
        plain[key] = meant
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


Way = Callable[[Tensor, Mapping[str, Any], str], tuple[dict[str, Tensor], Tensor]]


def _gptq(weight: Tensor, how: Mapping[str, Any], layer: str) -> tuple[dict[str, Tensor], Tensor]:
    depth = weight.shape[1]
    groups = torch.arange(depth) // (how["group_size"] if how["group_size"] > 0 else depth)
    if how["desc_act"]:
        # Layers of the same inputs have the same order of them, since that follows from those.
        seed = sum(layer.rpartition(".")[0].encode()) + depth
        groups = groups[torch.randperm(depth, generator=torch.Generator().manual_seed(seed))]
    codes, zeros, scales, meant = _four_bits(weight, groups, symmetric=how["sym"])
    offset = 0 if how.get("checkpoint_format") == "gptq_v2" else 1
    stored = {"qweight": _words(codes).T, "qzeros": _words(zeros.T - offset), "scales": scales.T}
    return {**stored, "g_idx": groups.int()}, meant


def _awq(weight: Tensor, how: Mapping[str, Any], layer: str) -> tuple[dict[str, Tensor], Tensor]:
    groups = torch.arange(weight.shape[1]) // how["group_size"]
    codes, zeros, scales, meant = _four_bits(weight, groups, symmetric=False)

    def ordered(numbers: Tensor) -> Tensor:
        return _words(torch.unflatten(numbers, -1, (-1, 8))[..., AWQ_ORDER].flatten(-2))

    return {"qweight": ordered(codes.T), "qzeros": ordered(zeros.T), "scales": scales.T}, meant


def _eight_bits(weight: Tensor, how: Mapping[str, Any], layer: str) -> tuple[dict[str, Tensor], Tensor]:
    """By tensor, by output feature or by blocks; e4m3 or int8."""
    compressed = "config_groups" in how
    group = how["config_groups"]["group_0"]["weights"] if compressed else {"strategy": "block"}
    blocks = group["strategy"] == "block"
    most, dtype = (127, torch.int8) if group.get("type") == "int" else (E4M3_MOST, torch.float8_e4m3fn)
    height, width = (BLOCK, BLOCK) if blocks else (1, weight.shape[1])
    if group["strategy"] == "tensor":
        height = len(weight)
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // height), -(-columns // width))
    codes, meant = torch.empty(rows, columns, dtype=dtype), torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            span = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = weight[span].abs().max() / most
            scaled = weight[span] / scales[i, j]
            codes[span] = (scaled.round() if dtype == torch.int8 else scaled).clamp(-most, most).to(dtype)
            meant[span] = codes[span].float() * scales[i, j]
    if group["strategy"] == "tensor":
        scales = scales[0, 0]
    return {"weight": codes, "weight_scale" if compressed else "weight_scale_inv": scales}, meant


def _four_bits(weight: Tensor, groups: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K], zeros [N, G], scales float16 [N, G] and the weights that they stand for."""
    num_groups = int(groups.max()) + 1
    zeros, scales = torch.empty(len(weight), num_groups, dtype=torch.long), torch.empty(len(weight), num_groups).half()
    for group in range(num_groups):
        some = weight[:, groups == group]
        if symmetric:
            zeros[:, group], scales[:, group] = 8, some.abs().amax(1) / 7
        else:
            scales[:, group] = (some.amax(1) - some.amin(1)) / 15
            zeros[:, group] = (-some.amin(1) / scales[:, group]).round().clamp(0, 15)
    wide, at = scales.float()[:, groups], zeros[:, groups]
    codes = ((weight / wide).round() + at).clamp(0, 15).long()
    return codes, zeros, scales, (codes - at) * wide


def _words(nibbles: Tensor) -> Tensor:
    """[A, 8 B] below 16 as int32 [A, B], the first lowest."""
    shifted = torch.unflatten(nibbles.long(), -1, (-1, 8)) << torch.arange(0, 32, 4)
    whole = shifted.sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


_WAYS: Mapping[str, Way] = {"gptq": _gptq, "awq": _awq, "fp8": _eight_bits, "w8a8": _eight_bits}
