"""Metrics of trainers that average over padding, where a patched model's logits are zeros."""

from __future__ import annotations

_AVERAGE = (("trl", "CPOTrainer"), ("trl", "ORPOTrainer"), ("llamafactory", "CustomDPOTrainer"))
"""Packages and trainers that log the mean of logits over every slot of a padded batch (SimPO is CPO's). Others (TRL's
DPO and KTO) select the completions by a mask."""


def note_on_padding(trainer: object) -> str | None:
    """Return a line on the metrics of a trainer that depend on the logits of padding; None where none do."""
    names = {(base.__module__.partition(".")[0], base.__name__) for base in type(trainer).__mro__}
    if names.isdisjoint(_AVERAGE):
        return None
    return (
        f"logits/chosen and logits/rejected of {type(trainer).__name__} are means over every slot of a padded batch: "
        "those of padding are zeros here, so that these two differ from stock's; losses and all other metrics are the "
        "same"
    )
