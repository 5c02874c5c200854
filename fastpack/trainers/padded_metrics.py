"""Metrics that trainers average over padding, where a patched model's logits are zeros."""

from __future__ import annotations

_OF_LOGITS = ("logits/chosen", "logits/rejected")
_OF_COMPLETIONS = ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward")
_METRICS = {
    ("trl", "CPOTrainer"): _OF_LOGITS,
    ("trl", "ORPOTrainer"): _OF_LOGITS,
    ("llamafactory", "CustomDPOTrainer"): _OF_LOGITS,
    ("trl", "OnlineDPOTrainer"): _OF_COMPLETIONS,
}
"""By package and class of a trainer: the metrics that are means over every slot of a padded batch (SimPO is a loss of
``CPOTrainer``). Other trainers, such as TRL's for DPO and KTO, select the completions by a mask."""


def padded_metrics(trainer: object) -> tuple[str, ...]:
    """Return the names of a trainer's metrics that depend on the logits of padding."""
    names = ((base.__module__.partition(".")[0], base.__name__) for base in type(trainer).__mro__)
    return next((_METRICS[name] for name in names if name in _METRICS), ())


def note_on_padding(trainer: object) -> str | None:
    """Return a line on a trainer's metrics that depend on the logits of padding, or None if there are none."""
    metrics = padded_metrics(trainer)
    if not metrics:
        return None
    return (
        f"{', '.join(metrics[:-1])} and {metrics[-1]} of {type(trainer).__name__} are means over every slot of a "
        "padded batch. The logits of padding are zeros here, so these metrics differ from stock's; losses and all "
        "other metrics are the same"
    )
