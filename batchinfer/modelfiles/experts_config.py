"""What a config says of layers of experts, resolved and checked: one form for every family that has them. No torch.

Readers of single families' configs are beside them; `layers.experts` builds what is said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinfer.errors import ModelError
from batchinfer.modelfiles.config_fields import flag, whole

MOST_EXPERTS = 4096
# What the parts of a gated MLP are called in checkpoints of Hugging Face's form, and those of Mixtral's experts.
PROJECTIONS: Mapping[str, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_PROJECTIONS: Mapping[str, str] = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Gated MLPs of which each token takes the `top_k` that its router scores highest.

    intermediate_size   of each expert
    wide_logits         logits are float32, of what is multiplied in float32; else of the model's dtype, as a product
                        of it gives them. Experts are chosen by them: each family's own program decides it
    scoring             weights of experts are their share of a softmax over all of them, or each logit's sigmoid
    correction_bias     sigmoid: a bias that is stored counts in choosing, and not in weights (DeepSeek-V3)
    renormalize         weights of those chosen are made to add up to 1
    scale               weights are multiplied by this in the end
    num_groups, top_groups   experts come in groups, of which only the best count: softmax by their best expert
                             (DeepSeek-V2), sigmoid by their two best together (DeepSeek-V3)
    shared_size         intermediate size of an MLP that every token takes as well; several shared experts are one such.
                        0: there is none
    shared_gate         the shared MLP's output is multiplied by the sigmoid of a product with the token (Qwen2-MoE)
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    wide_logits: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    shared_size: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise ModelError(f"num_experts_per_tok {self.top_k} is more than the {self.num_experts} experts there are")
        size, left = divmod(self.num_experts, self.num_groups)
        if left:
            raise ModelError(f"{self.num_experts} experts do not make {self.num_groups} groups (n_group) of equal size")
        if self.top_groups > self.num_groups or self.top_k > size * self.top_groups:
            raise ModelError(
                f"topk_group {self.top_groups} of n_group {self.num_groups} groups of {size} experts: "
                f"no token could take {self.top_k}"
            )
        if self.scoring == "sigmoid" and self.top_groups < self.num_groups and size < 2:
            raise ModelError(f"n_group {self.num_groups}: groups are scored by their two best experts, these have one")


def mixtral_experts(config: Mapping[str, Any], num_layers: int) -> tuple[ExpertsConfig | None, ...]:
    """Of each layer."""
    experts = ExpertsConfig(
        num_experts=_num_experts(config, "num_local_experts"),
        top_k=whole(config, "num_experts_per_tok", most=MOST_EXPERTS),
        intermediate_size=whole(config, "intermediate_size"),
    )
    return (experts,) * num_layers


def qwen_experts(config: Mapping[str, Any], num_layers: int, *, shared: bool) -> tuple[ExpertsConfig | None, ...]:
    """Of each layer, None for those with one MLP. shared: there is a shared expert with a gate (Qwen2-MoE)."""
    experts = ExpertsConfig(
        num_experts=_num_experts(config, "num_experts"),
        top_k=whole(config, "num_experts_per_tok", most=MOST_EXPERTS),
        intermediate_size=whole(config, "moe_intermediate_size"),
        renormalize=flag(config, "norm_topk_prob"),
        shared_size=whole(config, "shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )
    step = whole(config, "decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in dense):
        raise ModelError(f"mlp_only_layers in the model's config must be a list of layers' numbers, got {dense!r}")
    return tuple(experts if (i + 1) % step == 0 and i not in dense else None for i in range(num_layers))


def _num_experts(config: Mapping[str, Any], key: str) -> int:
    """transformers 5 writes one name for all families."""
    return whole(config, key if key in config else "num_local_experts", most=MOST_EXPERTS)
