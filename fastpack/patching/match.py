"""Settle the classes whose sources were not proved: fast where a twin matches, else their own forwards, aloud."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fastpack.errors import FastpackWarning, UntriedVersionWarning
from fastpack.families.lock import proved_spec
from fastpack.families.spec import Family, HeadSpec, Spec
from fastpack.model.unwrap import Parts
from fastpack.patching.recognise import Recognised, Skipped, own_class, with_specs
from fastpack.patching.support import covered_family
from fastpack.utils.classes import replaced_forward, stock_class
from fastpack.utils.versions import version_of

Match = Callable[[nn.Module, Family, Mapping[str, Spec]], Mapping[str, str]]
"""Say of each class of a backbone's family why a forward of this form does not compute what it does, or nothing."""


def settle(found: Recognised, match: Match, *, head: bool) -> Recognised:
    """Match the classes whose source was not proved.

    Args:
        head: whether it matters how the head makes logits.

    Warns:
        FastpackWarning: a class does not compute what its row says, and keeps its own forward.
        UntriedVersionWarning: a class mixes tokens in its stock forward, and has a source that was not tried.
    """
    if found.untried:
        warnings.warn(
            f"{', '.join(found.untried)} of transformers {version_of('transformers')} mix tokens, and have sources "
            "that fastpack was not tried with. fastpack.verify(model) tries yours.",
            UntriedVersionWarning,
            stacklevel=5,
        )
    names = [name for name in found.unknown if head or not isinstance(found.family.fast[name], HeadSpec)]
    forms, left = match_specs(found.backbone, found.family, names, match)
    return with_specs(found, {**found.specs, **forms}, matched=tuple(forms), skipped=found.skipped + left)


def match_specs(
    backbone: nn.Module, family: Family, names: Sequence[str], match: Match
) -> tuple[dict[str, Spec], Skipped]:
    """Return the forms of these classes that match, today's or an earlier one; and why the others don't.

    Warns:
        FastpackWarning: one of them does not match.
    """
    matched: dict[str, Spec] = {}
    reasons: dict[str, str] = {}
    for forms in (family.fast, family.earlier):
        candidates = {name: forms[name] for name in names if name in forms and name not in matched}
        found = match(backbone, family, candidates) if candidates else {}
        matched |= {name: candidates[name] for name, why in found.items() if not why}
        reasons = {name: why for name, why in {**found, **reasons}.items() if name not in matched}
    for name, why in reasons.items():
        warnings.warn(
            f"{name} of transformers {version_of('transformers')} is not as fastpack was proved on, and a twin of it "
            f"does not match: {why}. Its own forward runs: as exact, and slower.",
            FastpackWarning,
            stacklevel=6,
        )
    return matched, tuple(
        (name, f"its source was not proved, and {why}: stock forward") for name, why in reasons.items()
    )


def head_spec(parts: Parts, match: Match) -> HeadSpec | None:
    """Return how a model's head makes logits, where its class is the family's, and proved or matched; else None.

    Warns:
        FastpackWarning: it does not compute what its row says.
    """
    family, head = covered_family(parts), parts.head
    cls: Any = type(None) if head is None else stock_class(head)
    if head is None or own_class(head, family) not in family.fast or replaced_forward(head) is not None:
        return None
    spec = proved_spec(cls, family) or match_specs(parts.backbone, family, [cls.__name__], match)[0].get(cls.__name__)
    return spec if isinstance(spec, HeadSpec) else None
