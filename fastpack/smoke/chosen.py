"""Which families a run is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chosen:
    """Families to run, and those asked for that this release of transformers does not have, by name."""

    families: tuple[str, ...]
    absent: tuple[str, ...] = ()


def choose(named: Sequence[str], *, everyone: bool, tier: str | None = None) -> Chosen:
    """Those named, or everyone in transformers' causal-LM mapping (of one tier), or those that people use most.

    A name that nobody knows is run, and fails.
    """
    from fastpack.families import FAMILIES, REFUSED
    from fastpack.smoke.most_used import MOST_USED
    from fastpack.exactness.special import SPECIAL
    from fastpack.exactness.tiny import model_types

    here = model_types()
    known = {*FAMILIES, *REFUSED, *MOST_USED, *SPECIAL}
    if named:
        return Chosen(
            tuple(name for name in named if name in here or name not in known),
            tuple(name for name in named if name not in here and name in known),
        )
    if tier is not None:
        return Chosen(tuple(name for name in here if name in FAMILIES and FAMILIES[name].rung == tier))
    if everyone:
        return Chosen(tuple(here), tuple(sorted(known - set(here))))
    return Chosen(
        tuple(name for name in here if name in MOST_USED), tuple(name for name in MOST_USED if name not in here)
    )
