"""Names of the tensors of `layers.GatedMLP` and `layers.SparseMLP` in checkpoints of Hugging Face's form."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.modelfiles.experts_config import PROJECTIONS
from batchinfer.weights import Rule


def expert_rules(
    stored: str, ours: str, *, names: Mapping[str, str] = PROJECTIONS, shared: str | None = None
) -> tuple[Rule, ...]:
    """stored, ours: what names in the checkpoint and in the model begin with. names: of an expert's projections.
    shared: what the shared expert, or all of them as one, is called there."""
    rules = [
        Rule(stored=stored + "gate.weight", parameter=ours + "router.weight"),
        Rule(stored=stored + "gate.e_score_correction_bias", parameter=ours + "router.bias"),
        *mlp_rules(stored + "experts.{expert}.", ours + "experts.{expert}.", names),
    ]
    if shared is not None:
        rules += mlp_rules(f"{stored}{shared}.", ours + "shared.", names)
        rules.append(Rule(stored=f"{stored}{shared}_gate.weight", parameter=ours + "router.weight", part="shared"))
    return tuple(rules)


def mlp_rules(stored: str, ours: str, names: Mapping[str, str] = PROJECTIONS) -> list[Rule]:
    """See `expert_rules`."""
    return [
        *(
            Rule(stored=f"{stored}{names[part]}.{{kind}}", parameter=f"{ours}gate_up.{{kind}}", part=part)
            for part in ("gate", "up")
        ),
        Rule(stored=f"{stored}{names['down']}.{{kind}}", parameter=ours + "down.{kind}"),
    ]
