"""The preference losses that are tested, by TRL's settings and by ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastpack.trainers.preference_losses import PairLogProbs, PreferenceLoss, preference_loss

BETA = 0.3


@dataclass(frozen=True)
class Case:
    """One loss, by TRL's settings."""

    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    use_weighting: bool = False
    ld_alpha: float | None = None


CASES = {
    "sigmoid": Case(),
    "hinge": Case("hinge"),
    "ipo": Case("ipo"),
    "robust": Case("robust", label_smoothing=0.1),
    "wpo": Case(use_weighting=True),
    "ld": Case(ld_alpha=0.4),
    "ld, nothing of the rest": Case(ld_alpha=0.0),
    "wpo, ipo": Case("ipo", use_weighting=True),
    # no WPO with hinge: TRL 1.16 writes over the relu's result, and its backward raises
    "wpo, ld, robust": Case("robust", label_smoothing=0.2, use_weighting=True, ld_alpha=0.4),
}


def loss_of(policy: PairLogProbs, reference: PairLogProbs, case: Case, beta: float = BETA) -> PreferenceLoss:
    loss_type: Any = case.loss_type
    return preference_loss(
        policy.chosen,
        policy.rejected,
        reference.chosen,
        reference.rejected,
        beta=beta,
        loss_type=loss_type,
        label_smoothing=case.label_smoothing,
        chosen_tokens=policy.chosen_tokens,
        rejected_tokens=policy.rejected_tokens,
        weights=policy.weights,
    )
