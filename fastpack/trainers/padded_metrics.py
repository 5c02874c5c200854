"""Metrics that trainers average over padding, where a patched model's logits are zeros."""

from __future__ import annotations

_AVERAGE = (("trl", "CPOTrainer"), ("trl", "ORPOTrainer"), ("llamafactory", "CustomDPOTrainer"))
"""The package and class of each trainer that logs the mean of logits over every slot of a padded batch (SimPO is a loss
of ``CPOTrainer``). Other trainers, such as TRL's for DPO and KTO, select the completions by a mask."""


def note_on_padding(trainer: object) -> str | None:
    """Return a line on a trainer's metrics that depend on the logits of padding, or None if there are none."""
    names = {(base.__module__.partition(".")[0], base.__name__) for base in type(trainer).__mro__}
    if names.isdisjoint(_AVERAGE):
        return None
    return (
        f"logits/chosen and logits/rejected of {type(trainer).__name__} are means over every slot of a padded batch. "
        "The logits of padding are zeros here, so these two metrics differ from stock's; losses and all other metrics "
        "are the same"
    )
