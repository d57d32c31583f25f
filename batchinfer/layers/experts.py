"""A layer of experts: a router chooses a few gated MLPs for each token, and adds them up by their weights.

What is computed is said in `batchinfer_kernels.experts`; what a config says of it in `modelfiles.experts_config`.
"""

from __future__ import annotations

import torch
from batchinfer_kernels import experts
from batchinfer_kernels.experts import GroupedOps
from torch import Tensor, nn

from batchinfer.layers.maker import LayerMaker
from batchinfer.layers.mlp import GatedMLP
from batchinfer.modelfiles.experts_config import ExpertsConfig
from batchinfer.quant import Stack
from batchinfer.weights import Part

# A BLAS adds up products with so few outputs in other orders for few rows than for many, unless outputs are a multiple
# of this.
_MULTIPLE = 64


class Router(nn.Module):
    """Which experts a token takes, and their weights. Its weight is never quantized.

    weight  [>= E, H]: a row for each expert, then the shared expert's gate where there is one, then zeros; of the
            model's dtype, or float32 for logits that are multiplied in it where kernels take that
    bias    float32 [E] of `correction_bias`; zeros without
    """

    def __init__(self, config: ExpertsConfig, hidden_size: int, make: LayerMaker) -> None:
        super().__init__()
        self.config, self.ops = config, make.ops
        rows = -(-(config.num_experts + config.shared_gate) // _MULTIPLE) * _MULTIPLE
        is_wide = config.wide_logits and make.ops.experts.wide_weights
        dtype = torch.float32 if is_wide else make.dtype
        self.weight = _parameter(torch.zeros(rows, hidden_size, dtype=dtype, device=make.device))
        self.bias = _parameter(torch.zeros(config.num_experts, device=make.device))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(weights float32 [T, k], ids int32 [T, k], the shared expert's weight float32 [T, 1] where it has a gate) of
        x [T, H]."""
        config, table = self.config, self.ops.experts
        multiply = table.logits if config.wide_logits else self.ops.logits
        every = multiply(x, self.weight)
        logits = every[:, : config.num_experts]
        if not config.wide_logits:
            logits = logits.to(x.dtype)  # what they are already, or are rounded to
        logits = logits.contiguous()
        shared = None
        if config.shared_gate:
            shared = experts.sigmoid(every[:, config.num_experts : config.num_experts + 1])
        if config.scoring == "softmax":
            weights, ids = table.softmax_top_k(
                logits,
                config.top_k,
                num_groups=config.num_groups,
                top_groups=config.top_groups,
                renormalize=config.renormalize,
                scale=config.scale,
            )
        else:
            weights, ids = table.sigmoid_top_k(
                logits,
                self.bias,
                config.top_k,
                num_groups=config.num_groups,
                top_groups=config.top_groups,
                renormalize=config.renormalize,
                scale=config.scale,
            )
        return weights, ids, shared

    def parts(self) -> dict[Part, tuple[int, ...]]:
        config, width = self.config, self.weight.shape[1]
        shapes: dict[Part, tuple[int, ...]] = {("weight", ""): (config.num_experts, width)}
        if config.shared_gate:
            shapes["weight", "shared"] = (1, width)
        if config.correction_bias:
            shapes["bias", ""] = (config.num_experts,)
        return shapes

    def target(self, part: Part) -> Tensor:
        parameter, name = part
        if parameter == "bias":
            return self.bias.data
        split = self.config.num_experts
        return self.weight.data[split : split + 1] if name == "shared" else self.weight.data[:split]

    def loaded(self) -> None:
        pass


class SparseMLP(nn.Module):
    """Experts, and perhaps a shared one, in the place of a `GatedMLP`. `name`: its name in the model.

    Children, for rules of weights: `router`; `experts.N`, gated MLPs; `shared`, one as well (None without). Experts run
    one by one, or all together where the kernel table has products for that.
    """

    def __init__(self, config: ExpertsConfig, hidden_size: int, make: LayerMaker, *, name: str) -> None:
        super().__init__()
        self.config, self.ops = config, make.ops
        self.router = Router(config, hidden_size, make)
        self._stacks: tuple[Stack, Stack] | None = None
        grouped, at = make.ops.experts.grouped, f"{name}.experts"
        if grouped is not None:
            size = config.num_experts
            self._stacks = (
                Stack(size, make.ops, grouped, name=f"{at}.gate_up"),
                Stack(size, make.ops, grouped, name=f"{at}.down"),
            )
        self.experts = nn.ModuleList(
            GatedMLP(hidden_size, config.intermediate_size, make, name=f"{at}.{i}", places=self._places(i))
            for i in range(config.num_experts)
        )
        self.shared: GatedMLP | None = None
        if config.shared_size:
            self.shared = GatedMLP(hidden_size, config.shared_size, make, name=f"{name}.shared")

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual [T, H], which may be overwritten, + each token's experts of x [T, H]."""
        weights, ids, share = self.router.forward(x)
        if self.shared is not None:
            if share is None:
                residual = self.shared.forward(x, residual)
            else:
                residual = residual + (self.shared.forward(x) * share).to(residual.dtype)
        grouped, mix = self.ops.experts.grouped, self.ops.experts.mix
        if grouped is not None:
            return grouped.combine(self._grouped(x, ids, grouped), weights, ids, residual)
        assert mix is not None
        return mix(x, weights, ids, self._expert, residual)

    def _grouped(self, x: Tensor, ids: Tensor, grouped: GroupedOps) -> Tensor:
        """[A, H]: what each token's experts make of x [T, H]."""
        assert self._stacks is not None
        gate_up, down = self._stacks
        sizes = [grouped.block_size(stack.form) for stack in self._stacks]
        aligned = {size: grouped.align(ids, self.config.num_experts, size) for size in set(sizes)}
        inner = down.activated(gate_up.linear(x, aligned[sizes[0]]))
        return down.linear(inner, aligned[sizes[1]])

    def _expert(self, i: int, rows: Tensor) -> Tensor:
        expert = self.experts[i]
        assert isinstance(expert, GatedMLP)
        return expert.forward(rows)

    def _places(self, i: int) -> tuple[tuple[Stack, int], tuple[Stack, int]] | tuple[None, None]:
        if self._stacks is None:
            return None, None
        gate_up, down = self._stacks
        return (gate_up, i), (down, i)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
